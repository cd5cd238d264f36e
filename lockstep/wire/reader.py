"""Arrays from a stranger's bytes, and the bytes of an array."""

import numpy as np

from lockstep.wire.spool import Buffer


class WireError(ValueError):
    """A stranger's bytes are not a message of the expected form; one line, with both values."""


class NotFiniteValueError(WireError):
    """A stranger's bytes are a message with an infinity or a NaN in it."""


class ByteReader:
    """Takes a stranger's bytes from the front, never beyond the end."""

    def __init__(self, data: Buffer):
        self.data, self.at = memoryview(data), 0

    @property
    def remaining(self) -> int:
        """Number of a stranger's bytes that are left to read."""
        return len(self.data) - self.at

    def take(self, size: int, name: str) -> memoryview:
        """Take so many of a stranger's bytes; errors call them `name`."""
        if size > self.remaining:
            raise WireError(f"{name}: {self.remaining} bytes left, expected {size}")
        self.at += size
        return self.data[self.at - size : self.at]

    def array(self, dtype: np.dtype | type, count: int, name: str) -> np.ndarray:
        """Take `count` little-endian numbers from a stranger's bytes, in this machine's order."""
        dtype = np.dtype(dtype)
        values = np.frombuffer(self.take(count * dtype.itemsize, name), dtype.newbyteorder("<"))
        return values.astype(dtype, copy=False)

    def finite(self, dtype: np.dtype | type, count: int, name: str) -> np.ndarray:
        """Take `count` floats from a stranger's bytes, none an infinity or a NaN."""
        values = self.array(dtype, count, name)
        with np.errstate(invalid="ignore"):  # NumPy warns of a signalling NaN; we refuse it
            finite = np.isfinite(values).all()
        if not finite:
            raise NotFiniteValueError(f"{name}: a value is not finite")
        return values


def little(array: np.ndarray) -> Buffer:
    """Return an array's bytes in the order that readers expect, not copied where they lie so."""
    array = np.asarray(array)
    array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    return array.reshape(-1).view(np.uint8).data
