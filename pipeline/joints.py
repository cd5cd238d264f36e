"""What parts add to the pipeline. A part is a folder of `parts/`, and comes off by deleting it.

A part offers a joint by having a file of its name: `parts/tasks/commands.py` offers "commands".
The pipeline asks which parts offer a joint, so it imports none by name. Who asks says what it takes
of the file of each part, by a Protocol.
"""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Generic, TypeVar, cast

PACKAGE = f"{__package__.removesuffix('pipeline')}parts"  # `lockstep.parts` once installed
FOLDER = Path(__file__).parents[1] / "parts"

Offered = TypeVar("Offered")


class Joint(Generic[Offered]):
    """What parts offer in a file of one name: `Joint[Protocol]("NAME")`.

    tests/test_dag.py reads the name: a stage depends on each part that offers what it asks for.
    """

    def __init__(self, name: str):
        self.name = name

    def parts(self) -> list[str]:
        """Return the names of the parts that offer the joint, in order."""
        return sorted(path.parent.name for path in FOLDER.glob(f"*/{self.name}.py"))

    def __iter__(self) -> Iterator[Offered]:
        """Import and yield the joint's file of each part."""
        for part in self.parts():
            yield cast("Offered", import_module(f"{PACKAGE}.{part}.{self.name}"))
