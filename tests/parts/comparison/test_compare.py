"""`lockstep compare`: equal tokens, seeds and faults for all; a table that says what was shown."""

import contextlib
import csv
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.errors import LockstepError
from lockstep.files import read_json
from parts.comparison import commands, compare_file, output_files, plan_file, search
from parts.comparison import training_process as process
from parts.comparison.training_result import TRAINED
from parts.comparison.trainings import (
    Decided,
    PlannedTraining,
    changed,
    decided,
    document,
    needed,
    trainings,
)
from pipeline import __main__ as command_line
from pipeline import runfile
from pipeline.runfile.tables import Peers
from pipeline.stage.artifacts import write_sealed
from pipeline.stage.keys import PROJECT
from tests import tiny
from tests.errors import refused
from tests.parts.comparison.examples import BASE, LIAR, PLAIN, compared, made, row

pytestmark = pytest.mark.long

READY = sorted(path.name for path in (PROJECT / "params").glob("compare*.toml"))
RESULTS = plan_file.result_path("any").parent


@pytest.mark.parametrize("file", READY)
def test_every_training_of_a_ready_comparison_is_a_run_of_the_same_tokens(file):
    """But for what a whole number of rounds leaves; each with the seed and rate it is named for."""
    compare = compare_file.load(PROJECT / "params" / file)
    base = runfile.load(PROJECT / compare.base)
    alike = {one[:1] + (one.trial is None,) + one[2:]: one for one in trainings(compare)}
    for one in alike.values():  # trainings of a search begin as one
        method = compare.methods[one.method]
        found = Decided(method.search, 2.2 if one.failure != "none" else None)
        run = runfile.parse(document(compare, base, one, found), one.label)
        if one.failure != "none":
            assert run.config.max_round_train_time == 5  # twice as long, in whole seconds
            if method.grace is not None:
                assert run.llm.optimizer.grace_seconds == method.grace * 2.2
        scored = one.trial is None
        assert run.held_out.rows == ("scoring" if scored else "tuning")
        assert run.held_out.stop_above > 1000  # or only one with a curve would be stopped early
        has_curve = scored and one.failure == "none"
        assert (run.held_out.every == run.config.total_steps) == (not has_curve)
        length = run.llm.max_seq_len
        a_round = run.config.last_index(length) * length / run.config.total_steps
        assert abs(run.config.last_index(length) * length - compare.tokens) <= a_round / 2, one
        assert run.llm.lr_schedule.base_lr == method.search["rate"]
        assert (run.llm.checkpoint.seed, run.peers.seed) == (one.seed, one.seed)
        assert run.llm.data_location.shuffle.seed[0] == one.seed
        peers = base.peers.model_dump() | compare.peers | method.peers | {"seed": one.seed}
        assert run.peers == Peers.model_validate(peers)
        assert run.config.init_min_clients == run.peers.count


def test_each_training_comes_after_those_that_decide_it():
    compare = compared(failures={"liar": {"faults": [LIAR]}})
    planned = list(trainings(compare))
    assert planned == [
        PlannedTraining("a", 0, 9),
        PlannedTraining("a", 1, 9),
        PlannedTraining("a", None, 3),
        PlannedTraining("a", None, 4),
        PlannedTraining("a", None, 3, "liar"),
        PlannedTraining("a", None, 4, "liar"),
    ]
    assert [len(needed(compare, one)) for one in planned] == [0, 1, 2, 2, 3, 3]
    result = made(4.0)[0] | {TRAINED: 30.0, "rounds": 10}
    found = decided(compare, planned[-1], [result, made(5.0)[0], result])
    assert found == Decided({"rate": 1e-3}, 3.0)  # the second is worse
    assert decided(compare, planned[1], [result]).values == {"rate": 2e-3}
    longer = compared(tuning={"seed": 9, "trainings": 4})
    bracketed = [result, made(5.0)[0], made(None)[0]]
    assert decided(longer, PlannedTraining("a", 3, 9), bracketed) is None
    skipped = [*bracketed, {"loss": None}]
    assert decided(longer, PlannedTraining("a", None, 3), skipped).values == {"rate": 1e-3}
    stated = compared(tuning={"seed": 9})
    assert [one.trial for one in trainings(stated)] == [None, None]
    assert decided(stated, PlannedTraining("a", None, 3), []) == Decided({"rate": 1e-3})


def losses_of_a_search(start: dict, loss, most: int) -> list:
    """The losses of a search of at most so many trainings; None: one diverged."""
    losses: list = []
    while len(losses) < most:
        if (point := search.next_point(start, search.searched(start, losses))) is None:
            break
        losses.append(loss(search.values(start, point)))
    return losses


def test_a_search_ends_where_twice_and_half_of_each_value_are_no_better():
    """By hand: the rate goes 1, 2, 4, 8 (worse); layers 0.2 (worse), 0.05, 0.025 (worse); the
    momentum 0.75 and 0 lacking 1 (no value); the rate again at the new layers, 8 and 2."""
    start = {"rate": 1.0, "step_scale.layers": 0.1, "outer_momentum": 0.5}

    def loss(at):
        far = abs(math.log2(at["rate"] / 4)) + abs(math.log2(at["step_scale.layers"] / 0.05))
        return None if at["rate"] > 6 else far + at["outer_momentum"]

    losses = losses_of_a_search(start, loss, 99)
    tried = search.searched(
        start, [*losses, None, None]
    )  # what was not needed is no training of it
    got = search.found(start, tried)
    assert got.values == start | {"rate": 4.0, "step_scale.layers": 0.05}
    assert (got.tuned, got.edges) == ([*start], []) and len(tried) == len(losses) == 10
    assert [one["rate"] for one in got.tried] == [1, 2, 4, 8, 4, 4, 4, 4, 8, 2]
    assert [one["best"] for one in got.tried].index(True) == 5
    for key in start:
        for factor in (0.5, 2.0):
            if key != "outer_momentum":
                assert (loss(got.values | {key: got.values[key] * factor}) or math.inf) > 0.5


@pytest.mark.parametrize(("most", "edges"), [(1, []), (2, ["rate"]), (3, ["rate"]), (4, [])])
def test_a_best_that_has_nothing_beyond_it_is_at_an_edge_and_what_was_not_moved_is_stated(
    most, edges
):
    start = {"rate": 1.0, "step_scale.layers": 0.1}
    losses = losses_of_a_search(start, lambda at: abs(math.log2(at["rate"] / 0.5)), most)
    got = search.found(start, search.searched(start, losses))
    assert (len(losses), got.edges) == (most, edges)
    assert got.tuned == ([] if most == 1 else ["rate"])


@pytest.mark.parametrize(
    ("recipe", "key", "start"),
    [
        ("sparseloco", "error_feedback", 0.95),
        ("distro", "compression_decay", 0.999),
        ("ada-distro", "second_moment_decay", 0.95),
        ("streaming-diloco", "mixing", 0.5),
        ("sparta", "share", 0.3),
        ("adamw", "weight_decay", 0.75),
    ],
)
def test_what_is_below_1_stays_so_in_a_search_that_goes_up(recipe, key, start):
    method = {"recipe": recipe, "search": {"rate": 1e-3, key: start}}
    compare = compared(methods={"a": method})
    tried: dict = {}
    for _ in range(30):
        if (point := search.next_point(method["search"], tried)) is None:
            break
        found = Decided(search.values(method["search"], point))
        document(compare, BASE, PlannedTraining("a", 0, 9), found)  # it is a run
        tried[point] = -found.values[key]
    assert (max(-loss for loss in tried.values()) > 1) == (key == "weight_decay")


def test_values_that_are_searched_are_keys_of_the_settings():
    inner = "inner.AdamW.step_scale.layers"
    method = {"recipe": "diloco", "search": {"rate": 1e-3, inner: 0.5, "outer_momentum": 0.5}}
    compare = compared(methods={"a": method})
    found = Decided({"rate": 2e-3, inner: 0.25, "outer_momentum": 0.75})
    run = runfile.parse(document(compare, BASE, PlannedTraining("a", None, 3), found), "a")
    optimizer = run.llm.optimizer
    assert (optimizer.inner.step_scale, optimizer.outer_momentum) == ({"layers": 0.25}, 0.75)
    assert run.llm.lr_schedule.base_lr == 2e-3


def test_a_failure_is_of_the_same_share_of_the_rounds_whatever_their_number():
    failure = {"faults": [LIAR], "slower": {"2": 2.0}}
    method = {"recipe": "diloco", "search": {"rate": 1e-3}}
    compare = compared(methods={"a": PLAIN, "b": method}, failures={"bad": failure})
    start = Decided({"rate": 1e-3})
    for name, first, last in (("a", 101, 200), ("b", 11, 20)):
        tables = document(compare, BASE, PlannedTraining(name, None, 3, "bad"), start)
        (fault,) = runfile.parse(tables, "bad").faults.schedule
        assert (fault.kind, fault.peer, fault.size) == ("scale_up", 1, 4.0)
        assert fault.rounds == (first, last)
        speeds = tables["links"]["tokens_per_second"]
        assert speeds[2] * 2 == speeds[0] == speeds[1] == speeds[3]
    with refused("slower.9", 3):
        nine = compared(failures={"bad": {"slower": {"9": 2.0}}})
        document(nine, BASE, PlannedTraining("a", None, 3, "bad"), start)


@pytest.mark.parametrize(
    ("key", "start"),
    [("rate", 0.0), ("weight_decay", 0.0), ("outer_momentum", 0.0), ("error_feedback", 1.0)],
)
def test_a_search_begins_where_there_is_more_and_less(key, start):
    with refused(f"methods.a.search.{key}", start, 0):
        compared(methods={"a": {"recipe": "diloco", "search": {"rate": 1e-3, key: start}}})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"methods": {"a": PLAIN | {"search": {"outer_momentum": 0.5}}}}, "methods.a.search"),
        ({"methods": {"a": PLAIN | {"peers": {"count": 8}}}}, "methods.a.peers.count"),
        ({"peers": {"seed": 1}}, "peers.seed"),
        ({"tuning": {"seed": 4}}, "tuning.seed"),
        ({"failures": {"none": {}}}, "failures.none"),
        ({"seeds": [256]}, "seeds[0] is 256"),
        ({"pairs": [["a", "b"]]}, "pairs"),
        ({"pairs": [["a", "a"]]}, "pairs[0]"),
        ({"failures": {"x": {"faults": [LIAR | {"kind": "sleep"}]}}}, "kind"),
        ({"failures": {"x": {"faults": [LIAR | {"end": 0.5}]}}}, "more than start"),
    ],
)
def test_a_wrong_key_is_one_line_that_names_it(changes, expected):
    with refused(expected):
        compared(**changes)


def test_settings_that_make_no_run_are_one_line_that_names_the_method():
    method = PLAIN | {"settings": {"momentum": 2.0}}
    compare = compared(methods={"wrong": method})
    with refused("methods.wrong", "momentum"):
        document(compare, BASE, PlannedTraining("wrong", None, 3), Decided({"rate": 1e-3}))


@pytest.mark.parametrize(
    ("recipe", "changes", "named"),
    [
        ("diloco", {"settings": {"inner_steps": 0}}, ("inner_steps", 0)),
        ("diloco", {"settings": {"inner_steps": "10"}}, ("inner_steps", "10")),
        ("diloco", {"search": {"rate": 1e-3, "inner_steps": 10}}, ("inner_steps", 10.0)),
        ("streaming-diloco", {"settings": {"fragments": 0}}, ("fragments", 0)),
        ("adamw", {"search": {"rate": 1e-3, "betas.1": 0.5}}, ("search.betas.1",)),
        ("muon", {"search": {"rate": 1e-3, "momentum.x": 0.5}}, ("search.momentum.x",)),
    ],
)
def test_settings_are_checked_before_anything_is_counted_by_them(recipe, changes, named):
    compare = compared(methods={"wrong": PLAIN | {"recipe": recipe} | changes})
    start = Decided(compare.methods["wrong"].search)
    with refused("methods.wrong", *named):
        document(compare, BASE, PlannedTraining("wrong", None, 3), start)


def test_a_method_may_lack_a_key_of_its_card():
    ada = {"recipe": "ada-distro", "search": {"rate": 1e-3, "step_scale.lm_head": 2.0}}
    ablated = {"settings": {"update": "sign"}, "without": ["second_moment_decay"]}
    compare = compared(methods={"a": ada, "b": ada | ablated, "c": ada | {"recipe": "distro"}})
    start = Decided({"rate": 2e-3, "step_scale.lm_head": 4.0})
    a, b, c = (
        runfile.parse(document(compare, BASE, PlannedTraining(name, None, 3), start), name)
        for name in "abc"
    )
    made = (a.llm.optimizer, b.llm.optimizer)
    assert [x.second_moment_decay for x in made] == [0.95, None]
    assert [x.update for x in made] == ["orthogonal", "sign"]
    assert c.llm.optimizer.step_scale["lm_head"] == 4.0
    with refused("methods.b.without[0]", "second_moment_decy", "did you mean second_moment_decay?"):
        compared(methods={"b": ada | {"without": ["second_moment_decy"]}})


def test_a_pin_of_fresh_weights_is_no_pin_of_another_seeds():
    tables = BASE.model_dump(mode="json", exclude_none=True)
    tables["pins"] = {"checkpoint": "a" * 64, "data": "b" * 64}
    base, start = runfile.parse(tables, "x"), Decided({"rate": 1e-3})
    made = document(compared(), base, PlannedTraining("a", None, 3), start)
    assert made["pins"] == {"checkpoint": "", "data": "b" * 64, "tasks": ""}


def test_a_base_that_holds_no_text_out_has_nothing_to_compare_by():
    tables = BASE.model_dump(mode="json", exclude_none=True)
    tables["held_out"]["sequences"] = 0
    with refused("params/run.toml", "held_out.sequences", 0):
        changed(runfile.parse(tables, "x"), compared())


def test_a_key_that_the_bases_config_lacks_is_refused_since_it_would_change_nothing():
    with refused("config.hidden_sizes", "params/run.toml", "hidden_size,"):
        changed(BASE, compared(config={"hidden_sizes": 256}))
    assert changed(BASE, compared(config={"hidden_size": 256})) != BASE
    tables = BASE.model_dump(mode="json", exclude_none=True)
    tables["model"]["LLM"]["checkpoint"] = {"Hub": {"repo_id": "a/b"}}
    with refused("config.hidden_size", "params/run.toml", "none"):
        changed(runfile.parse(tables, "x"), compared(config={"hidden_size": 256}))


def test_a_base_that_learns_nothing_has_no_rates_to_follow():
    tables = BASE.model_dump(mode="json", exclude_none=True)
    tables["model"]["LLM"]["lr_schedule"]["Cosine"]["base_lr"] = 0.0
    with refused("base_lr", 0):
        start = Decided({"rate": 1e-3})
        document(compared(), runfile.parse(tables, "x"), PlannedTraining("a", None, 3), start)


def test_a_wrong_value_of_the_comparison_is_not_blamed_on_its_base():
    with refused("comparison's", "peers.threads", "0"):
        changed(BASE, compared(peers={"threads": 0}))


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
        '[methods.distro]\nrecipe = "distro"\nours = true\nsearch.rate = 1e-2\n'
        "settings = { compression_chunk = 8, compression_topk = 4 }\n"
        '[methods.diloco]\nlabel = "DiLoCo"\nrecipe = "diloco"\nsearch.rate = 1e-3\n'
        "settings = { inner_steps = 2 }\n"
    )
    return folder, compare(folder, "two.toml")


def compare(folder: Path, *arguments: str) -> str:
    with contextlib.chdir(folder), tiny.like_a_process():  # trainings are processes of one device
        done = CliRunner().invoke(command_line.app, ["compare", *arguments])
    if done.exception:
        raise done.exception
    return done.output


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
    assert (
        markdown in said
        and "| distro* | – | rate " in markdown
        and "for each parameter" in markdown
    )
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
    assert "left out, since they wait for trainings: diloco" in said and "| distro* |" in said
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
    command = [sys.executable, "-m", "snakemake", "compare"]
    command += ["--workflow-profile", str(plan_file.PROJECT / "profiles/default")]
    done = subprocess.run(
        [*command, "--config", f"compare={compare_file}"],
        cwd=folder, env=tiny.environment(plan_file.PROJECT), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
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
