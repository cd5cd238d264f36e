"""What is said of a package that is missing can be followed, in a checkout and without one."""

import sys
import tomllib

from pipeline import extras


def test_every_extra_that_an_error_names_is_one_of_the_package():
    project = tomllib.loads((extras.PROJECT / "pyproject.toml").read_text())["project"]
    assert project["name"] == extras.PACKAGE
    for module, extra in extras.EXTRAS.items():
        listed = " ".join(project["optional-dependencies"][extra]).replace("-", ".")
        assert module in listed


def test_the_command_is_one_of_the_checkout_or_of_the_installed_package(tmp_path, monkeypatch):
    assert extras.install("s3") == "pip install -c constraints.txt -e '.[s3]'"
    monkeypatch.setattr(extras, "PROJECT", tmp_path)
    pins = tmp_path / "constraints.txt"
    assert extras.install("s3") == f"pip install -c {pins} 'lockstep-train[s3]'"


def test_a_module_that_is_missing_or_whose_parent_is_is_not_installed(monkeypatch):
    assert extras.is_installed("numpy")
    assert not extras.is_installed("nowhere_at_all.inside")
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert not extras.is_installed("wandb")
    assert "[sinks]" in str(extras.lacking("[runtime] sinks", "wandb"))
