"""`pip install .`, by way of a source distribution: everything comes under the name `lockstep`."""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from runpy import run_path

import pytest
import yaml

import lockstep
from tests.tiny import PROJECT

pytestmark = pytest.mark.long

CITATION = yaml.safe_load((PROJECT / "CITATION.cff").read_text())
SOURCE = ("lockstep", "models", "parts", "pipeline")
FILES = ("LICENSE", "README.md", "pyproject.toml", "setup.py")
READ = ("constraints-gpu.txt", "constraints.txt", "dvc.yaml")
BUILD = "from setuptools import build_meta; build_meta.build_sdist('.')"
# setuptools is there: PyTorch, of the extra test, needs it
INSTALL = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
NEEDS_MORE = {"digits"}  # examples that import what Lockstep does not bring
IMPORT_ALL = """
import sys
import lockstep
assert "jax" not in sys.modules and "numpy" not in sys.modules
from importlib import import_module
from pkgutil import walk_packages
from runpy import run_path
sys.path.append(f"{lockstep.__path__[0]}/python")  # as in the process of a workload
for module in walk_packages(lockstep.__path__, "lockstep."):
    import_module(module.name)
assert not {"models", "parts", "pipeline"} & sys.modules.keys()
for name in lockstep.__all__:
    getattr(lockstep, name)
for example in sys.argv[1:]:
    run_path(example, run_name="example")
assert not {"models", "parts", "pipeline"} & sys.modules.keys()
print(lockstep.__file__)
"""


def run(folder: Path, *command: str, **variables: str) -> str:
    """Run Python in a folder, where the checkout is not on its path; what it printed."""
    environment = {**os.environ, "PYTHONPATH": "", **variables}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder of installed packages with Lockstep alone."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in SOURCE:
        shutil.copytree(PROJECT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*FILES, *READ):
        shutil.copy(PROJECT / name, source)
    run(source, "-c", BUILD)
    (archive,) = source.glob("lockstep_train-*.tar.gz")
    run(source, "-m", "pip", "install", "-q", *INSTALL, "--target", str(site), str(archive))
    return site


def test_modules_and_examples_import_under_the_one_name_without_the_checkout(site, tmp_path):
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {
        "bin",
        "lockstep",
    }
    examples = (str(path) for path in PROJECT.glob("examples/*.py") if path.stem not in NEEDS_MORE)
    printed = run(tmp_path, "-c", IMPORT_ALL, *examples, PYTHONPATH=str(site))
    assert printed.strip() == str(site / "lockstep" / "__init__.py")


def test_nothing_of_the_source_is_missing(site):
    def files(folder: Path) -> set[str]:
        return {
            path.relative_to(folder).as_posix()
            for path in folder.rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }

    source = {f"{name}/{file}" for name in SOURCE[1:] for file in files(PROJECT / name)}
    assert files(site / "lockstep") == source | files(PROJECT / "lockstep") | set(READ)


def test_the_package_says_what_an_index_shows(site):
    (installed,) = distributions(path=[str(site)])
    said = installed.metadata
    assert (said["Name"], installed.version) == ("lockstep-train", lockstep.__version__)
    assert "Typing :: Typed" in said.get_all("Classifier")
    assert said["Author"] == CITATION["authors"][0]["name"]
    assert set(CITATION["keywords"]) <= set(said["Keywords"].split(","))
    assert said["Description-Content-Type"] == "text/markdown"
    assert "# Lockstep" in said.get_payload()
    assert not re.findall(r"\]\((?!http)[^)]*\)", said.get_payload())


def test_links_of_the_readme_lead_to_the_repository_from_anywhere():
    for_an_index = run_path(str(PROJECT / "setup.py"), run_name="read")["for_an_index"]
    text = "[a\nb](docs/a.md) [x](http://x) [y](#y) ![p](b/c.png)"
    assert for_an_index(text, None) == "a\nb [x](http://x) [y](#y) "
    there = "https://host/owner/name"
    assert for_an_index(text, there) == (
        f"[a\nb]({there}/blob/HEAD/docs/a.md) [x](http://x) [y](#y) ![p]({there}/raw/HEAD/b/c.png)"
    )


def test_type_checkers_see_the_installed_names_under_the_one_name(site):
    stub = (site / "lockstep" / "__init__.pyi").read_text()
    assert "\nfrom pipeline" not in stub
    assert "\nfrom lockstep import models as models\n" in stub
    assert "\nfrom lockstep.optim.dense import adamw as adamw\n" in stub
    assert (site / "lockstep" / "py.typed").exists()


def test_an_installed_copy_runs_the_example_of_the_readme(site, tmp_path):
    readme = (PROJECT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    more = "from lockstep import models; print(models.get('llama').Config.__module__)"
    printed = run(tmp_path, "-c", f"{example}\n{more}", PYTHONPATH=str(site))
    assert printed.splitlines()[-1] == "lockstep.models.llama"


def test_the_installed_command_checks_a_run_file(site, tmp_path):
    run_file = str(PROJECT / "params" / "run.toml")
    run(tmp_path, "-m", "lockstep", "check", "--run", run_file, PYTHONPATH=str(site))
