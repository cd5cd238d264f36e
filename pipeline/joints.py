"""What parts add to the pipeline. A part is a folder of `parts/`, and comes off by deleting it.

A part offers a joint by having a file of its name: `parts/tasks/commands.py` offers "commands".
The pipeline asks which parts offer a joint, so it imports none by name. What the file of each joint
holds is said where the joint is asked for.
"""

from importlib import import_module
from pathlib import Path
from types import ModuleType

PACKAGE = f"{__package__.removesuffix('pipeline')}parts"  # `lockstep.parts` once installed
FOLDER = Path(__file__).parents[1] / "parts"


def offered(joint: str) -> list[ModuleType]:
    """Import and return the modules that offer a joint, in the order of their parts' names.

    tests/test_dag.py reads the argument: a stage depends on each part that offers what it asks for.
    """
    parts = sorted(path.parent.name for path in FOLDER.glob(f"*/{joint}.py"))
    return [import_module(f"{PACKAGE}.{part}.{joint}") for part in parts]
