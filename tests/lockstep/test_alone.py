"""The library stands alone: it imports nothing but itself and its libraries."""

import ast
import re
import shutil
import sys
from pathlib import Path

import pytest

from pipeline.stage.keys import PROJECT
from tests import tiny

LIBRARY = PROJECT / "lockstep"
LIBRARIES = {
    "flax": "trees of params by path, and states of nnx as simulate's params",
    "jax": "programs",
    "lockstep": "itself",
    "matplotlib": "Result.plot, as it is called",
    "ml_dtypes": "bfloat16 in NumPy: on the wire and in files",
    "numpy": "arrays on the host",
    "optax": "what optimizers are composed of",
    "orbax": "checkpoints, as the first is saved",
    "pydantic": "tables that are checked",
    "pydantic_core": "the errors of these",
    "rich": "a bar in a terminal, as it is shown",
    "safetensors": "checks files of tensors",
    "torch": "the gradient of a torch module, where there is one",
}
PRODUCTS = {"stored", "volunteer", "workload", "carrier"}  # the pipeline's and its parts' words
NEEDS_TORCH = "lockstep.python.lockstep_torch.bound_model"
GIVEN = f"NEEDS_TORCH, CHECKOUT = {NEEDS_TORCH!r}, {str(PROJECT)!r}\n"
ALONE = """
import importlib, importlib.util, pkgutil, sys

# an editable install of the checkout finds the other wings
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in one.__module__]
sys.path[:] = [place for place in sys.path if place != CHECKOUT]
assert not any(map(importlib.util.find_spec, ("models", "parts", "pipeline")))
import lockstep

names = [found.name for found in pkgutil.walk_packages(lockstep.__path__, "lockstep.")]
for name in names:
    if name != NEEDS_TORCH:
        importlib.import_module(name)
import jax.numpy as jnp
import numpy as np

rng = np.random.default_rng(0)
x = rng.normal(size=(64, 3)).astype(np.float32)
result = lockstep.simulate(
    lambda params, batch, rng: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2),
    {"w": jnp.zeros(3)},
    {"x": x, "y": x @ np.float32([1, 2, 3])},
    {"x": x, "y": x @ np.float32([1, 2, 3])},
    optimizer="sgd",
    peers=2,
    steps=5,
    batch_size=8,
    show_progress=False,
)
first, *_, last = result.validation["loss"]
print(lockstep.__file__, len(names), last < first)
"""


@pytest.fixture
def alone(tmp_path) -> Path:
    """A folder with nothing but the library."""
    shutil.copytree(LIBRARY, tmp_path / "lockstep", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.long
def test_a_bare_copy_imports_every_module_and_simulates(alone):
    done = tiny.python("-c", f"{GIVEN}{ALONE}", cwd=alone, PYTHONPATH=str(alone))
    assert done.returncode == 0, done.stderr
    place, count, learned = done.stdout.split()
    assert Path(place) == alone / "lockstep" / "__init__.py"
    assert int(count) > 100
    assert learned == "True"


def test_without_a_pipeline_its_command_says_so_in_one_line(alone):
    program = (
        GIVEN + ALONE.partition("import lockstep\n")[0] + "import lockstep.__main__ as m; m.main()"
    )
    done = tiny.python("-c", program, cwd=alone, PYTHONPATH="")
    assert done.returncode == 1
    assert done.stderr.startswith("lockstep: pipeline is missing") and done.stderr.count("\n") == 1


def test_the_library_imports_nothing_but_itself_and_its_libraries():
    found = {}
    for path in LIBRARY.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            else:
                continue
            found |= {name.partition(".")[0]: path for name in names}
    others = found.keys() - sys.stdlib_module_names - LIBRARIES.keys()
    assert {name: found[name] for name in others} == {}
    assert found.keys() >= LIBRARIES.keys()


def test_no_name_of_the_library_is_a_word_of_what_is_built_on_it():
    found = set()
    for path in LIBRARY.rglob("*.py"):
        found |= {(path.name, name) for name in (path.stem, *names_in(ast.parse(path.read_text())))}
    words = {name: re.findall("[A-Z]?[a-z]+", name) for _, name in found}
    singular = {name: {word.lower().removesuffix("s") for word in words[name]} for name in words}
    assert {(file, name) for file, name in found if singular[name] & PRODUCTS} == set()
    assert {"SharedStore", "restored", "from_anybody"} <= words.keys()  # so names are read


def names_in(tree: ast.AST) -> set[str]:
    """What functions, classes, attributes, variables, parameters and keywords are called."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name):
                names.add(name)
            case ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names |= {name, other or name}
    return names
