"""What a person names stays what it is: no command makes a file of a link, a device or a pipe.

Each option of each command that is a path stands in one of these tables.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lockstep.errors import LockstepError
from lockstep.files import write_named
from pipeline.__main__ import app
from tests.errors import check_names

READ = {"source", "file", "--checkpoint", "--shards", "--secret", "--sign", "--like", "--key"}
READ |= {"first", "second", "--against", "seal", "--seal"}
FOLDERS = {"--root", "folder", "--run-files"}  # new files are put into them
WRITTEN = {
    "new file": "new PATH --model init:2m --data corpus --optimizer sgd --tokens 1e6 --force",
    "verify --attest": "verify /nowhere --attest PATH",
    "pin --run": "pin --run PATH",
    "volunteer key --key": "volunteer key --key PATH",
    "publish folder": "publish PATH",
    "bits record file": "bits record PATH",
    "bits check --file": "bits check --write --file PATH",
}


def path_options() -> Iterator[tuple[str, str]]:
    """Yield each option that is a path, after its command."""
    todo = [("", typer.main.get_command(app))]
    while todo:
        name, command = todo.pop()
        todo += [(f"{name} {n}".strip(), c) for n, c in getattr(command, "commands", {}).items()]
        for option in command.params:
            if option.type_descriptor.is_path:
                yield name, option.opts[0]


def test_every_option_that_is_a_path_has_its_row():
    options = {*path_options()}
    assert {" ".join(option) for option in options} >= WRITTEN.keys() - {"volunteer key --key"}
    rest = {option for command, option in options if f"{command} {option}" not in WRITTEN}
    assert rest <= READ | FOLDERS | {"--run"}


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def link_to_device(path: Path) -> None:
    path.symlink_to(os.devnull)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def folder_with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "mine").touch()


@pytest.mark.parametrize("kind", [pipe, link_to_pipe, link_to_device, loop, folder_with_a_file])
@pytest.mark.parametrize("option", WRITTEN)
def test_what_is_no_file_is_refused_in_a_line_that_names_it(option, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "")  # else `verify` starts this process anew
    path = tmp_path / "named"
    kind(path)

    def found() -> tuple:
        status = path.lstat()  # but for when it was last read
        return status[:7], status.st_mtime_ns, os.path.realpath(path), sorted(tmp_path.rglob("*"))

    before = found()
    done = CliRunner().invoke(app, WRITTEN[option].replace("PATH", str(path)).split())
    assert isinstance(done.exception, LockstepError), done.exception
    check_names(
        done.exception, "expected", os.path.realpath(path) if option == "publish folder" else path
    )
    assert found() == before


def test_a_link_stays_and_the_file_that_it_leads_to_keeps_its_mode(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "mine").write_text("before")
    (tmp_path / "far" / "mine").chmod(0o640)
    (tmp_path / "link").symlink_to("far/mine")
    (tmp_path / "new").symlink_to("far/not yet")
    for name, target in (("link", "mine"), ("new", "not yet")):
        write_named(tmp_path / name, "after")
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "far" / target).read_text() == "after"
    assert stat.S_IMODE((tmp_path / "far" / "mine").stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path / "far")) == ["mine", "not yet"]
