"""`lockstep compare`: what it trains and what not; a table that says what was shown."""

import contextlib
import csv
import json
import os
import shutil
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.files import read_json
from parts.comparison import commands, output_files, plan_file
from parts.comparison import training_process as process
from pipeline import runfile
from pipeline.stage.artifacts import write_sealed
from tests import tiny
from tests.errors import refused
from tests.parts.comparison.examples import BASE, PLAIN, compared, made, row

pytestmark = pytest.mark.long

RESULTS = plan_file.result_path("any").parent


@pytest.fixture(scope="module")
def compared_once(tmp_path_factory) -> tuple[Path, str]:
    """A comparison of two methods on tiny runs, once; its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("compare")
    compiled = folder / plan_file.FOLDER / "compiled"
    compiled.parent.mkdir(parents=True)
    compiled.symlink_to(os.environ["JAX_COMPILATION_CACHE_DIR"], target_is_directory=True)
    document = tiny.run_document(tiny.write_data(folder / "tokens"))
    tiny.write_run(folder / "base.toml", document)
    (folder / "two.toml").write_text(
        'base = "base.toml"\ntokens = 384\nseeds = [0, 1]\n'
        "tuning = { seed = 9 }\n"
        '[methods.distro]\nrecipe = "distro"\nsearch.rate = 1e-2\n'
        "settings = { compression_chunk = 8, compression_topk = 4 }\n"
        '[methods.diloco]\nlabel = "DiLoCo"\nrecipe = "diloco"\nsearch.rate = 1e-3\n'
        "settings = { inner_steps = 2 }\n"
    )
    return folder, compare(folder, "two.toml")


def compare(folder: Path, *arguments: str) -> str:
    with contextlib.chdir(folder):
        return tiny.invoked("compare", *arguments).output


def test_a_comparison_says_how_many_trainings_and_leaves_the_table_in_each_form(compared_once):
    folder, said = compared_once
    assert said.startswith("compare: 4 trainings of 384 tokens, 4 of them to do\ncompare: about ")
    written = folder / plan_file.FOLDER / "two"
    whole = json.loads(written.with_suffix(".json").read_text())
    table = whole["rows"]
    by_name = {found["method"]: found for found in table}
    assert {found["tokens"] for found in table} == {384}
    assert (by_name["distro"]["outer_steps"], by_name["diloco"]["outer_steps"]) == (6, 3)
    assert by_name["distro"]["bytes_up"] < by_name["diloco"]["bytes_up"]
    assert by_name["diloco"]["bits_per_parameter_and_step_up"] == pytest.approx(16, rel=0.2)
    for found in table:
        assert found["lowest"] < found["highest"] < 4.3  # nats; chance is 4.16
        assert found["train_seconds"] + found["coordinator_seconds"] == pytest.approx(
            next(one for one in whole["seeds"] if one["method"] == found["method"])[
                "simulated_seconds"
            ]
        )
        assert found["coordinator_seconds"] >= found["outer_steps"]  # of [config], not of links
    assert len({one["params"] for one in whole["seeds"]}) == len(whole["seeds"]) == 4
    (pair,) = whole["pairs"]
    assert {pair["better"], pair["worse"]} == {"distro", "diloco"}
    markdown = written.with_suffix(".md").read_text()
    assert markdown in said
    assert "| distro | – | rate " in markdown and "for each parameter" in markdown
    page = written.with_suffix(".html").read_text()
    assert "data:image/png;base64," in page and "DiLoCo" in page
    with open(written.with_suffix(".csv")) as lines:
        assert [line["method"] for line in csv.DictReader(lines)] == list(by_name)
    of_seeds, curves = (
        list(csv.DictReader(written.with_suffix(f".{name}.csv").open()))
        for name in ("seeds", "curves")
    )
    assert [line["seed"] for line in of_seeds] == ["0", "1"] * 2
    assert {line["method"] for line in curves} == {"distro", "diloco"} and len(curves) > 8
    assert written.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_what_is_done_is_not_done_again_also_in_another_comparison(compared_once):
    folder, _ = compared_once
    text = (folder / "two.toml").read_text().replace("seed = 9", "seed = 9, trainings = 2")
    (folder / "three.toml").write_text(text.partition("[methods.diloco]")[0])
    done = folder / plan_file.FOLDER / "done"
    before = {path: path.stat().st_mtime_ns for path in done.iterdir()}
    said = compare(folder, "three.toml", "--plan")
    assert "4 trainings of 384 tokens" in said
    name, *_ = plan_file.planned(folder_plan(folder, "three.toml"))
    compare(folder, "three.toml", "--training", name)
    (new,) = {*done.iterdir()} - {*before}
    new.unlink()
    with refused(2, 4):
        compare(folder, "three.toml", "--plan", "--table")
    assert {path: path.stat().st_mtime_ns for path in done.iterdir()} == before


def test_a_training_after_the_end_of_its_search_is_not_done(compared_once, monkeypatch):
    folder, _ = compared_once
    text = (folder / "two.toml").read_text().replace("seed = 9", "seed = 9, trainings = 5")
    (folder / "five.toml").write_text(text.partition("[methods.diloco]")[0])
    assert "at most 7 trainings of 384 tokens" in compare(folder, "five.toml", "--plan")
    *trials, fourth, _, _, _ = plan_file.planned(folder_plan(folder, "five.toml"))
    for name, loss in zip(trials, (4.0, 4.1, 4.2), strict=True):
        write_sealed(folder / plan_file.result_path(name), made(loss)[0])
    monkeypatch.setattr(process, "trained", lambda tables: pytest.fail("it trains"))
    compare(folder, "five.toml", "--training", fourth)
    ended = read_json(folder / plan_file.result_path(fourth))
    assert (ended["status"], ended["loss"]) == ("not needed", None)
    for name in (*trials, fourth):
        (folder / plan_file.result_path(name)).unlink()


def test_a_table_leaves_out_methods_whose_trainings_are_not_done_and_names_them(compared_once):
    folder, _ = compared_once
    *_, missing = plan_file.planned(folder_plan(folder, "two.toml"))
    path = folder / plan_file.result_path(missing)
    before = path.read_bytes()
    path.unlink()
    said = compare(folder, "two.toml", "--table")
    path.write_bytes(before)
    assert "left out, since they wait for trainings: diloco" in said and "| distro |" in said
    whole = json.loads((folder / plan_file.FOLDER / "two.json").read_text())
    assert [one["method"] for one in whole["rows"]] == ["distro"] and not whole["pairs"]
    compare(folder, "two.toml", "--table")


def test_another_comparison_runs_under_snakemake_what_is_missing_and_its_table(compared_once):
    """A training has one result whichever file asks for it: another file is no reason to repeat it,
    after which Snakemake forgot the rest and said that all was done."""
    folder, _ = compared_once
    rules = plan_file.PROJECT / "parts/comparison/rules.smk"
    (folder / "Snakefile").write_text(f"from pathlib import Path\ninclude: {str(rules)!r}\n")
    shutil.rmtree(folder / RESULTS)  # or Snakemake would not know how they were made
    snakemake(folder, "two.toml")
    text = (folder / "two.toml").read_text()
    (folder / "again.toml").write_text(text.replace("DiLoCo", "The same"))
    *_, missing = plan_file.planned(folder_plan(folder, "two.toml"))
    (folder / plan_file.result_path(missing)).unlink()
    said = snakemake(folder, "again.toml")
    assert said.count("--training") == 1 and f"--training {missing}" in said
    assert "The same" in (folder / plan_file.FOLDER / "again.md").read_text()


def snakemake(folder: Path, compare_file: str) -> str:
    profile = "--workflow-profile", plan_file.PROJECT / "profiles/default"
    named = "--config", f"compare={compare_file}"
    done = tiny.python("-m", "snakemake", "compare", *profile, *named, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stderr


def folder_plan(folder: Path, name: str) -> Path:
    with contextlib.chdir(folder):
        return folder / plan_file.plan_path(Path(name))


def test_a_training_that_is_no_longer_what_was_planned_is_refused(
    compared_once, tmp_path, monkeypatch
):
    folder, _ = compared_once
    shutil.copy(folder / "two.toml", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "trained", lambda tables: pytest.fail("it trains"))
    tiny.write_run(Path("base.toml"), tiny.run_document(folder / "tokens"))
    compare(tmp_path, "two.toml", "--plan")
    plan = plan_file.plan_path(Path("two.toml"))
    name, *_ = plan_file.planned(plan)
    with refused(plan, f"mean {name}?"):
        compare(tmp_path, "two.toml", "--training", name[:-1])
    changed_base = tiny.run_document(folder / "tokens", peers__micro_batch=1)
    tiny.write_run(Path("base.toml"), changed_base)
    for name in plan_file.planned(plan):
        with refused(plan, name):
            commands._train(Path("two.toml"), plan, name)


def forge(folder: Path, path: Path, content: dict) -> None:
    """Make the table with another content in a file, which a forger has sealed anew."""
    before = path.read_text()
    write_sealed(path, {name: one for name, one in content.items() if name != "sha256"})
    try:
        compare(folder, "two.toml", "--table")
    finally:
        path.write_text(before)


def test_a_result_that_is_not_as_it_was_written_is_one_line_that_names_its_file(compared_once):
    folder, _ = compared_once
    path = min((folder / RESULTS).iterdir())
    before = path.read_text()
    path.write_text(before.replace('"status": "trained"', '"status": "diverged"'))
    with refused(f"{path.name}: "):
        compare(folder, "two.toml", "--table")
    path.write_text(before)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("loss", odd) for odd in (..., None, "3.5", True, [], 1e300)),
        *(("curve", odd) for odd in (..., [], None, 3, [{}], [{}, {}])),
        *(
            (key, odd)
            for key in ("bytes_up", "parameters", "tokens")
            for odd in (..., "1", -1, 1e300)
        ),
        *((key, odd) for key in ("held_out_rows", "train_seconds") for odd in (..., None, [1], {})),
        *(("peak_bytes", odd) for odd in (..., "1", 10**30)),
    ],
)
def test_a_result_of_other_numbers_is_one_line_that_names_its_key(
    key, value, compared_once, tmp_path
):
    folder, _ = compared_once
    path = min((folder / RESULTS).iterdir())
    result = {name: one for name, one in read_json(path).items() if name != key}
    with refused(path.name.removesuffix(".json"), key):
        forge(folder, path, result | ({} if value is ... else {key: value}))


def first_of(plan: dict) -> dict:
    return next(iter(plan["trainings"].values()))


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan.pop("trainings"),
        lambda plan: plan.update(trainings=[]),
        lambda plan: plan["trainings"].update(other=3),
        lambda plan: plan["trainings"].popitem(),
        lambda plan: first_of(plan).pop("needs"),
        lambda plan: first_of(plan).update(needs=None),
        lambda plan: first_of(plan).pop("seed"),
        lambda plan: first_of(plan).update(method="mine"),
        lambda plan: first_of(plan).update(seed=[]),
    ],
)
def test_a_plan_of_other_trainings_is_one_line_that_names_it(change, compared_once):
    folder, _ = compared_once
    path = folder_plan(folder, "two.toml")
    plan = read_json(path)
    change(plan)
    with refused(path.name):
        forge(folder, path, plan)


def test_curves_that_no_training_has_make_one_line_or_a_table(compared_once):
    folder, _ = compared_once
    path = min((folder / RESULTS).iterdir())
    result = read_json(path)
    first, *_, last = result["curve"]
    for curve in ([last, first], [first, first], [first, last], [last, last, last]):
        with contextlib.suppress(LockstepError):
            forge(folder, path, result | {"curve": curve})


def test_a_table_replaces_none_of_another_file_and_its_name_keeps_its_dots(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    method = PLAIN | {"label": "a|b \x1b[31m $\\x$ \u4e00"}
    one = compared(seeds=[3], methods={"a": method, "b": PLAIN, "c": PLAIN})
    table = [row("a", 4.0)._replace(label=one.methods["a"].label), row("b", 5.0), row("c", None)]
    files = output_files.write(Path("params/compare.v2.toml"), one, table, "code", BASE)
    assert {path.name for path in files} == {
        f"compare.v2{ending}" for ending in output_files.ENDINGS
    }
    heads, line = (files[0].read_text().splitlines()[i] for i in (2, 4))
    assert line.replace(r"\|", "").count("|") == heads.count("|") and "\x1b" not in line
    (pair,) = json.loads(files[2].read_text())["pairs"]
    alone = dict.fromkeys(("low", "high", "p", "holm"))  # one seed
    assert pair == dict(better="a", worse="b", mean=1.0, **alone, told_apart=False)
    plan_file.check_tables_are_of(Path("params/../params/compare.v2.toml"))
    said = r"compare\.v2\.json: .*params/compare\.v2\.toml.*mine/compare\.v2\.toml"
    with pytest.raises(LockstepError, match=said):
        plan_file.check_tables_are_of(Path("mine/compare.v2.toml"))


def test_run_files_are_written_of_the_trainings_whose_rate_is_known(compared_once):
    folder, _ = compared_once
    said = compare(folder, "two.toml", "--run-files", "queue")
    assert said.endswith("compare: queue: 4 run files of 4\n")
    other = folder / "other" / "mine.toml"  # who trains all files of a folder would train it too
    other.parent.mkdir()
    other.touch()
    with refused("other/mine.toml"):
        compare(folder, "two.toml", "--run-files", "other")
    assert [*other.parent.iterdir()] == [other]
    runs = [runfile.load(path) for path in sorted((folder / "queue").iterdir())]
    assert [run.llm.optimizer.tag() for run in runs] == ["DiLoCo"] * 2 + ["Distro"] * 2
    assert sorted(run.peers.seed for run in runs) == [0, 0, 1, 1]


def test_a_result_is_the_run_files_own_to_the_bit(compared_once):
    """The key that the table names is that of a plain `lockstep train` of the same run file."""
    folder, _ = compared_once
    seeds = json.loads((folder / plan_file.FOLDER / "two.json").read_text())["seeds"]
    keys = {one["key"] for one in seeds}
    assert keys == {path.stem for path in (folder / plan_file.FOLDER / "done").iterdir()}
    assert not list((folder / plan_file.FOLDER / "runs").iterdir())  # nothing is left
