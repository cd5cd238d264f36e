"""A run's rounds as they are taken, one line each; a resumed run cuts them to its checkpoint."""

import os
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.files import write_text, writes
from lockstep.tables.explain import validate_json
from lockstep.transcript.entry import Entry


class RoundsFile:
    """A file rounds.jsonl that is being written; the first round makes it.

    `remedy` is what a user can do where it is damaged.
    """

    def __init__(self, path: Path, remedy: str = "start over after `lockstep clean`"):
        self.path, self.remedy = path, remedy

    def takes(self, step: int) -> bool:
        """Return whether a snapshot is taken after a step: never, in rounds alone."""
        del step
        return False

    def round(self, entry: Entry, *sent: dict[int, bytes]) -> None:
        """Append a round; the bytes that were sent in it are not kept here."""
        del sent
        self._append(entry)

    def _append(self, entry: Entry) -> None:
        with writes(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(entry.model_dump_json() + "\n")

    def flush(self) -> None:
        """Wait until all rounds so far are on disk."""
        with writes(self.path), open(self.path, "ab") as file:
            os.fsync(file.fileno())

    def cut(self, step: int) -> list[Entry]:
        """Forget all rounds after `step`, counted from 0, and return those before.

        Raises:
          LockstepError: There are fewer, or a line is no round.
        """
        lines = self._lines() if step else []
        if len(lines) < step:
            raise LockstepError(
                f"{self.path}: {len(lines)} rounds, expected the {step} before the checkpoint; "
                f"{self.remedy}"
            )
        kept = lines[:step]
        entries = [
            validate_json(Entry, line, f"{self.path}:{number}")
            for number, line in enumerate(kept, start=1)
        ]
        write_text(self.path, "".join(kept))
        return entries

    def _lines(self) -> list[str]:
        try:
            return self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise LockstepError(
                f"{self.path}: expected one JSON object per line: {error}"
            ) from error
