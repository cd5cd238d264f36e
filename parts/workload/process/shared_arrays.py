"""Arrays shared with a worker, which maps the same bytes."""

from pathlib import Path

from parts.workload.process.shared_memory import SharedMemory


class SharedArrays:
    """Params, gradients and rows, shared with a worker.

    Attributes:
      params: float32 [parameters], what the worker computes at.
      gradients: float32 [parameters], what it writes.
      rows: int32, one row after the other.

    Args:
      folder: Where they are if there is no room in memory.
      parameters: How many numbers the params have.
      row_bytes: Room for rows.
    """

    def __init__(self, folder: Path, parameters: int, row_bytes: int):
        self._folder, self._parameters = folder, parameters
        self.make_room(row_bytes)

    def make_room(self, row_bytes: int) -> None:
        """Take room to share so many bytes of rows, elsewhere; what was in the arrays is lost."""
        row_words = max(1, -(-row_bytes // 4))
        memory = SharedMemory(4 * (2 * self._parameters + row_words), self._folder)
        values = memory.words[: 2 * self._parameters].view("<f4")
        self.params, self.gradients = values[: self._parameters], values[self._parameters :]
        self.rows = memory.words[2 * self._parameters :]
        self.path, self.forget = memory.path, memory.forget

    def request(self) -> dict:
        """Return the arguments of a worker's `open_arrays`: the path, and where each array is."""
        size = 4 * self._parameters
        return {
            "path": str(self.path),
            "params": [0, self._parameters],
            "gradients": [size, self._parameters],
            "rows": [2 * size, self.rows.nbytes],
        }
