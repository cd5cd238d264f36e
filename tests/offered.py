"""What the tests of parts add to tables of tests that cross rooms, as parts do to the pipeline."""

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from pipeline.stage.keys import PROJECT

PARTS = sorted(path.parent.name for path in (PROJECT / "parts").glob("*/__init__.py"))


def offered(name: str) -> Iterator[ModuleType]:
    """Import and yield tests/parts/PART/NAME.py of each part that is here and has one."""
    for part in PARTS:
        if (PROJECT / "tests" / "parts" / part / f"{name}.py").is_file():
            yield import_module(f"tests.parts.{part}.{name}")
