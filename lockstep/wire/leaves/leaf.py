"""One leaf of a message: what all kinds can do, and how those of a message travel together."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.optim.optimizer import Tree
from lockstep.wire.reader import ByteReader, little
from lockstep.wire.spool import Buffer, drop_pages


class Packing:
    """How the leaves of one kind travel: here one after the other, as a commitment hashes them.

    Attributes:
      number: The wire's kind.
    """

    def __init__(self, number: int):
        self.number = number

    def encode(self, leaves: Sequence[Any]) -> list[Buffer]:
        """Return the packed leaves of a message as bytes."""
        return [field for leaf in leaves for field in leaf.fields()]

    def decode(self, reader: ByteReader, forms: Sequence[Any]) -> list[Tree]:
        """Return the packed nodes in a stranger's bytes, of leaves of these shapes and dtypes.

        Raises:
          WireError: The bytes are not what `encode` would give.
        """
        return [form.read(reader, f"{form.word} {n}") for n, form in enumerate(forms)]

    def sizes(self, forms: Sequence[Any]) -> tuple[float, int]:
        """Return how many bytes the packed leaves take, about and at most."""
        size = sum(form.length for form in forms)
        return size, size

    def saved(self, leaves: Sequence[Any]) -> jax.Array | int:
        """Return how many bytes fewer than the most the packed leaves take; may be jitted."""
        return 0


class Leaf(ABC):
    """What a message holds of one parameter, or the shapes and dtypes of that.

    Its values are floats, which it sends for all elements of an array, unless its kind says
    otherwise.

    Attributes:
      node: The node of a message's tree, as an optimizer sends it.
      area: Positions in a block of the parameter, which do not follow from a message; 0 for an
        array that is sent whole.
    """

    packings: ClassVar[dict[str, Packing]]
    """How such leaves travel, by the wire's layout."""
    word: ClassVar[str] = "parameter"
    """What errors call it."""
    sized: ClassVar[bool] = True
    """Whether its values have a size; signs and codes have none."""
    signs: ClassVar[bool] = False
    """Whether its values are signs, of which a liar can flip some."""

    def __init__(self, node: Any, area: int = 0):
        self.node, self.area = node, area

    @classmethod
    @abstractmethod
    def holds(cls, node: Any) -> bool:
        """Return whether a node of a message's tree is a leaf of this kind."""

    # ---- On the wire ----

    @property
    @abstractmethod
    def row(self) -> tuple[int, int, int]:
        """Three numbers that tell the leaf's shapes and dtypes from others, for a form's digest."""

    @property
    def length(self) -> int:
        """Bytes of all the leaf's `fields`; here its values are all of them."""
        return self.bytes_of(self.raw.size)

    @abstractmethod
    def fields(self) -> Iterator[Buffer]:
        """Yield the leaf's raw bytes: what a commitment hashes."""

    @abstractmethod
    def read(self, reader: ByteReader, name: str) -> Tree:
        """Return the leaf's node, in these shapes, from the `fields` in a stranger's bytes."""

    @property
    def misfit(self) -> str | None:
        """What no message can hold of the leaf, and what was expected; None if it can be sent."""
        return None

    # ---- Values ----

    @property
    @abstractmethod
    def raw(self) -> Any:
        """The array that holds the leaf's values."""

    @abstractmethod
    def with_raw(self, raw: Any) -> "Leaf":
        """Return the leaf with another array of values."""

    @property
    def values(self) -> Any:
        """The leaf's values, float64; a sign, and each bit of a code, is -1 or 1."""
        return np.asarray(self.raw).astype(np.float64)

    def with_values(self, values: Any) -> "Leaf":
        """Return the leaf with other values, rounded and clipped to its dtype."""
        limit = float(jnp.finfo(self.raw.dtype).max)  # type: ignore[no-untyped-call]
        return self.with_raw(np.clip(values, -limit, limit).astype(self.raw.dtype))

    @property
    def largest(self) -> float:
        """The largest magnitude of the leaf's values; 0 if they have no size."""
        if not self.sized or not self.raw.size:
            return 0.0
        raw = np.asarray(self.raw)
        if raw.dtype.itemsize == 2:  # a hundred times as fast: magnitudes are in the order of bits
            return float((raw.view(np.uint16) & 0x7FFF).max().view(raw.dtype))
        largest = float(max(raw.max(), -raw.min()))
        drop_pages([raw])
        return largest

    def bytes_of(self, count: int) -> int:
        """Return how many bytes so many values of the leaf take."""
        return count * int(self.raw.dtype.itemsize)

    def to_bytes(self, raw: Any) -> Buffer:
        """Return values, those of one or several leaves of this kind, as bytes."""
        return little(raw)

    def read_raw(self, reader: ByteReader, count: int, name: str) -> Any:
        """Return `count` values of the leaf in a stranger's bytes."""
        return reader.finite(self.raw.dtype, count, name)

    # ---- What a liar does with it ----

    @property
    def kept(self) -> int:
        """How many positions of each of the leaf's blocks its peer chose; 0 if nobody chooses."""
        return 0

    def put(self, values: Any) -> Any:
        """Return the whole array of the leaf's values; zero where nothing is sent."""
        return values

    def take(self, whole: Any) -> Any:
        """Return the leaf's values of a whole array where it is sent; the inverse of `put`."""
        return whole

    def moved(self, order: Any) -> "Leaf":
        """Return the leaf at the positions of each block that come first in an order."""
        return self
