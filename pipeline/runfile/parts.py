"""What the parts that are there add to a run file: tables, keys of `[runtime]`, rules, answers.

A part offers the joint "tables": its file `tables.py`, which imports the core's tables and no whole
run. `run.py` makes the run file's classes of them, once.
"""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from inspect import getdoc
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import Field, create_model

from lockstep.errors import LockstepError
from lockstep.tables.table import Table
from pipeline.joints import Joint
from pipeline.runfile.strangers_values import AnswerRow
from pipeline.runfile.tables import CoreRuntime

if TYPE_CHECKING:
    from pipeline.runfile.run import Run

AnyTable = TypeVar("AnyTable", bound=Table)

# Tables, keys, and kinds of an enum -> the part that has them, for errors where it is not there.
PART_OF = {
    "model.LLM.data_location.Arrays": "workload",
    "model.LLM.data_location.Files": "workload",
    "model.LLM.data_location.Workload": "workload",
    "model.LLM.optimizer.*Workload": "workload",
    "runtime.by_hand": "carrier",
    "runtime.carrier": "carrier",
    "runtime.from_state": "volunteers",
    "runtime.listen": "carrier",
    "runtime.store": "volunteers",
    "runtime.volunteer_key": "volunteers",
    "runtime.worker_env": "workload",
    "runtime.worker_module": "workload",
    "runtime.worker_path": "workload",
    "runtime.worker_python": "workload",
    "runtime.worker_start_seconds": "workload",
    "volunteers": "volunteers",
    "workload": "workload",
}


class OffersTables(Protocol):
    """What a part adds to a run file."""

    TABLES: Mapping[str, type[Table]]  # its tables, by name
    RUNTIME: type[CoreRuntime]  # its keys of [runtime]
    ANSWERS: Sequence[AnswerRow]  # to its keys in a stranger's file

    def rules(self, run: "Run") -> None:
        """Check what its keys and the rest of a run must agree on, by raising `wrong`."""


TABLES = Joint[OffersTables]("tables")


def with_tables(core: type[AnyTable]) -> type[AnyTable]:
    """Return a whole run's tables: the core's, and those of the parts."""
    fields: dict[str, Any] = {
        name: (table, Field(default=table(), description=getdoc(table)))
        for part in TABLES
        for name, table in part.TABLES.items()
    }
    return create_model("TablesWithParts", __base__=core, **fields)


def with_keys(core: type[CoreRuntime]) -> type[CoreRuntime]:
    """Return the table `[runtime]`: the core's keys, and those of the parts."""
    return create_model("KeysWithParts", __base__=(*(p.RUNTIME for p in TABLES), core))


def check_parts(document: dict[str, Any], name: str) -> None:
    """Check that no part knows a key of a run file that is not there; errors call the file `name`.

    Without this they would call it an unknown key.
    """
    here = TABLES.parts()
    for key in _dotted(document, ()):
        for pattern, part in PART_OF.items():
            if part not in here and fnmatchcase(key, pattern):
                raise LockstepError(
                    f"{name}: {key}: expected none, since the part {part}, which knows it, is not "
                    "installed"
                )


def _dotted(value: Any, path: tuple[str, ...]) -> Iterator[str]:
    """Yield the dotted names of tables, keys, and kinds of enums in a document."""
    if path:
        yield ".".join(path)
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from _dotted(inner, (*path, str(key)))
    if isinstance(value, str):  # a kind without a table
        yield ".".join((*path, value))
