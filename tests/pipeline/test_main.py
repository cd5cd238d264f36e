"""The `lockstep` command: quick to answer, one line for a mistake, one process per stage."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import pytest
import typer
from typer.testing import CliRunner

from lockstep.errors import PANIC
from pipeline import version
from pipeline.__main__ import app, main
from pipeline.command_options import IN_PROGRESS, RESULTS, RUN_FILES, STAGES_IN_ORDER
from pipeline.stage.keys import PROJECT, STAGES
from pipeline.stage.lock import hold
from tests import tiny

HEAVY = ("jax", "numpy", "pydantic", "orbax", "flax", "matplotlib", "snakemake", "dvc")


def each_command() -> Iterator[tuple[list[str], list]]:
    """Yield the words of each command, and its options."""
    todo = [([], typer.main.get_command(app))]
    while todo:
        words, command = todo.pop()
        yield words, command.params
        todo += [([*words, name], one) for name, one in getattr(command, "commands", {}).items()]


def test_no_help_names_a_type_for_a_flag_and_each_number_is_finite_and_in_its_range(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "")  # else `try` starts this process anew
    for words, options in each_command():
        done = CliRunner().invoke(app, [*words, "--help"])
        assert done.exit_code == 0 and "--help" in done.output, words
        assert "bool" not in done.output, words  # a flag takes no value
        for name in (o.opts[0] for o in options if o.type_descriptor.annotation is float):
            for value in ("-1", "nan", "inf"):
                done = CliRunner().invoke(app, [*words, name, value])
                assert done.exit_code == 2 and name in done.output, (words, value)


def test_help_names_every_stage_and_imports_nothing_heavy():
    program = (
        "import sys; from pipeline.__main__ import app\n"
        "try: app(['--help'])\n"
        f"finally: print([name for name in {HEAVY} if name in sys.modules])"
    )
    *said, imported = tiny.python("-c", program).stdout.splitlines()
    assert imported == "[]"
    for stage, entry in STAGES.items():
        assert any(stage in line and entry["desc"][:20] in line for line in said), stage
    panels = STAGES_IN_ORDER, IN_PROGRESS, RESULTS, RUN_FILES
    titles = [match[1] for line in said if (match := re.match(r"╭─ (.*?) ─", line))]
    assert tuple(titles) == ("Options", *panels)
    listed = [match[1] for line in said if (match := re.match(r"│ ([a-z]+)  ", line))]
    assert listed[: len(STAGES)] == list(STAGES)


def test_the_version_is_that_of_the_source(capsys):
    with pytest.raises(SystemExit) as caught:
        app(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"lockstep {version.with_commit()}\n"


def test_a_copied_checkout_is_not_run_with_the_code_of_the_first(tmp_path):
    copy = tmp_path / "a copy"
    for name in ("dvc.yaml", "pipeline/stage/keys.py"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).touch()
    (tmp_path / "link").symlink_to(PROJECT)

    def said(folder, *arguments):
        """As its entry point does, whose own folder comes first, not the current one."""
        program = "import sys; from lockstep.__main__ import main; main()"
        done = tiny.python("-P", "-c", program, *arguments, cwd=folder)
        return done.returncode, done.stdout, done.stderr

    code, out, error = said(copy, "status")
    assert (code, out, error.count("\n")) == (1, "", 1)
    assert error.startswith(f"error: {copy}: ") and str(PROJECT) in error and "make clean" in error
    assert said(copy, "--version")[0] == 0
    for folder in (PROJECT, tmp_path / "link", tmp_path):
        assert said(folder, "schema")[0] == 0


def test_the_tab_key_completes_commands_and_options(capsys, monkeypatch):
    monkeypatch.setenv("_LOCKSTEP_COMPLETE", "complete_bash")
    for typed, ends in (("lockstep gen", ["generate"]), ("lockstep generate --see", ["--seed"])):
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
        with pytest.raises(SystemExit) as caught:
            app([], prog_name="lockstep")
        assert (caught.value.code, capsys.readouterr().out.split()) == (0, ends)


def test_a_stage_waits_for_the_same_stage_that_is_running(tmp_path):
    run_file, root = tiny.start(tmp_path)
    with hold(root / "data" / ".download.lock"):
        process = tiny.lockstep("download", run_file, root)
        assert f"held by process {os.getpid()} " in process.stdout.readline()
        assert not (root / "data" / "shards").exists()
    process.communicate()
    assert process.returncode == 0 and (root / "data" / "shards").exists()


def test_clean_removes_the_work_of_killed_runs_but_not_of_running_ones(tmp_path):
    runs = tmp_path / "data" / "runs"
    for key in ("aaaa", "bbbb"):
        (runs / key / "checkpoints").mkdir(parents=True)
    left = [tmp_path / "data" / f".trained.{end}" for end in ("building", "old")]
    for folder in left:
        folder.mkdir()
    clean = ("-m", "pipeline", "clean", "--root", tmp_path)
    with hold(runs / "bbbb.lock"):
        done = tiny.python(*clean)
    assert done.returncode == 1
    assert "bbbb.lock: held by process" in done.stderr
    assert [path.name for path in runs.iterdir() if path.is_dir()] == ["bbbb"]
    assert tiny.python(*clean).returncode == 0
    assert not [path for path in runs.iterdir() if path.is_dir()]
    assert not any(folder.exists() for folder in left)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["import"], "error: Missing argument 'source'; see `{name} import --help`"),
        (["nosuch"], "error: No such command 'nosuch'; see `{name} --help`"),
        (["trian"], "error: No such command 'trian'. Did you mean 'train'? see `{name} --help`"),
        (
            ["generate", "x", "--top-k", "0"],
            "error: Invalid value for '--top-k': Input should be greater than or equal to 1; see "
            "`{name} generate --help`",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr("pipeline.__main__.signals", Mock())
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(sys, "argv", ["lockstep", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    shown = re.sub("`.*lockstep", "`{name}", capsys.readouterr().err)
    assert (caught.value.code, shown) == (2, f"{said}\n")


@pytest.mark.parametrize(
    "error, said",
    [
        (MemoryError(), "error: out of memory: Python had none left; a smaller"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: allocating 9 bytes.\nstack"),
            "error: out of memory: RESOURCE_EXHAUSTED: allocating 9 bytes.; a smaller",
        ),
    ],
)
def test_too_little_memory_and_a_panic_of_rust_are_one_line(monkeypatch, error, said):
    app = Mock(side_effect=error)
    monkeypatch.setattr("pipeline.__main__.app", app)
    monkeypatch.setattr("pipeline.__main__.signals", Mock())
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code.startswith(said) and "\n" not in caught.value.code
    app.side_effect = type(PANIC, (BaseException,), {})("capacity overflow\nstack")
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code.startswith("error: a library gave up: capacity overflow")
    app.side_effect = RuntimeError("another one")
    with pytest.raises(RuntimeError, match="another one"):
        main()


@pytest.mark.parametrize(
    ("variable", "value"),
    [("JAX_DEFAULT_MATMUL_PRECISION", "bogus"), ("JAX_ENABLE_COMPILATION_CACHE", "maybe")],
)
def test_a_value_that_jax_refuses_at_its_import_is_one_line(variable, value):
    program = (
        "import sys; from pipeline import __main__ as it\n"
        "sys.argv = ['lockstep', 'needs-jax']\n"
        "it.app.command('needs-jax')(lambda: __import__('jax'))\n"
        "it.main()"
    )
    done = tiny.python("-c", program, **{variable: value})
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith(f"error: {variable}: ") and value in done.stderr


def test_standard_streams_may_be_closed_or_of_another_encoding(tmp_path):
    root, run_file = tmp_path / "корень", tmp_path / "файл.toml"
    (root / "data" / "runs" / "aaaa").mkdir(parents=True)

    def said(arguments: str, **variables: str) -> subprocess.CompletedProcess:
        command = ["sh", "-c", f"exec {sys.executable} -m pipeline {arguments}"]
        environment = tiny.environment(PROJECT) | variables
        return subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True)

    assert said("schema >&-").returncode == 0
    done = said("check --run nothing.toml 2>&-")
    assert (done.returncode, done.stdout) == (1, b"")
    done = said(f"clean --root '{root}'", PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (0, b"") and b"\\u043a" in done.stdout
    run_file.write_text("a = 'файл, é'\n")
    done = said(f"whole '{run_file}'", PYTHONIOENCODING="latin-1")
    assert done.stdout == run_file.read_bytes()


def test_what_a_thread_of_tensorstore_loses_after_a_failed_save_is_not_printed(monkeypatch):
    printed = []
    monkeypatch.setattr("pipeline.__main__.app", Mock(return_value=None))
    monkeypatch.setattr("pipeline.__main__.signals", Mock())
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(sys, "__unraisablehook__", printed.append)
    with pytest.raises(SystemExit):
        main()
    lost, ours = (
        SimpleNamespace(exc_value=RuntimeError("Event loop is closed"), object=whose)
        for whose in (None, main)
    )
    with ThreadPoolExecutor() as pool:
        list(pool.map(sys.unraisablehook, (lost, ours)))
    assert printed == [ours]
