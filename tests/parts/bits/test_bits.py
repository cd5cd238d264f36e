"""A step by its operations: the compiled one's bits, and the first operation that differs."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from lockstep.files import read_json
from parts.bits.by_operation import TakenOperation, by_operation
from parts.bits.opened import on_host
from parts.bits.operation import INPUT, recomputed
from parts.bits.statement import RIGHT, WRONG, judge
from pipeline.language_model.language_model import programs_of
from pipeline.stage.keys import Keys
from tests import tiny
from tests.errors import refused
from tests.everywhere import steps

BROKEN = "llama in 8 bits, broken"
OTHERS = ["qwen3", "deepseek_v3", "adamw", "muon", "diloco", "llama scanned"]


def bits(*arguments: object) -> tuple[int, str]:
    """Run `lockstep bits` in this process; return its exit status and what it prints."""
    done = tiny.invoked("bits", *arguments)
    return done.exit_code, done.stdout


def leaves(tree: object) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


CASES = [
    pytest.param("llama in 8 bits", marks=pytest.mark.long),
    *(pytest.param(case, marks=pytest.mark.soak) for case in [*OTHERS, BROKEN]),
]


@pytest.mark.parametrize("case", CASES)
def test_operations_taken_one_by_one_have_the_bits_of_the_compiled_step_and_of_numpy(case):
    """By rules a step is a number: it does not matter what computes it, nor in which pieces."""
    run = steps.run_of(case.removesuffix(", broken"))
    programs = programs_of(run, run.llm.checkpoint.config).broken(3 if case == BROKEN else None)
    draw = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: (0.05 * draw.standard_normal(x.shape)).astype(x.dtype), programs.task.shapes
    )
    own, shared = jax.device_get(programs.init(params))
    count = (run.rows_of_a_step or 4) * programs.optimizer.inner_steps
    rows = draw.integers(64, size=(count, 16), dtype=np.int32)
    work = programs.work(rows, count, run.peers.micro_batch)
    arguments = params, own, shared, work.rows_MB, np.int32(count), np.int32(1)
    taken: list[TakenOperation] = []
    found = by_operation(programs.step_of_a_peer, taken.append)(*arguments)
    assert leaves(found) == leaves(jax.jit(programs.step_of_a_peer)(*arguments))
    others = [
        said.what
        for said, operands, results in taken
        if said.primitive != INPUT
        and leaves(recomputed(said, [on_host(x) for x in operands]))
        != leaves([on_host(x) for x in results])
    ]
    # one product of a micro-batch, of which there are two
    assert [name.split()[0] for name in others] == ["dot_general"] * 2 * (case == BROKEN)
    assert len({*others}) == (case == BROKEN)


# ---- The commands ----

OPTIONS = {"peers__bits": "everywhere", "peers__product_bits": 8}
OPTIONS["faults__schedule"] = [{"kind": "bit_flip", "peer": 1, "rounds": [2, 2], "size": 3}]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[str, ...]:
    """The options that name a tiny run by rules, which is trained."""

    def make(folder: Path) -> None:
        run_file, root = tiny.start(folder, **OPTIONS, config__total_steps=2)
        tiny.make(run_file, root, "download", "convert", "train")

    folder = tiny.in_common(tmp_path_factory, "bits", make)
    return "--run", str(folder / "run.toml"), "--root", str(folder / "root")


@pytest.fixture(scope="module")
def right(run, tmp_path_factory) -> Path:
    """A record of peer 1's step in round 2."""
    file = tmp_path_factory.mktemp("records") / "right.json"
    bits("record", file, "--round", 2, "--peer", 1, *run)
    return file


def test_the_owner_of_a_broken_chip_and_an_auditor_find_the_product_and_who_is_right(
    run, right, tmp_path
):
    wrong = tmp_path / "wrong.json"
    arguments = ("--round", 2, "--peer", 1, *run)
    status, printed = bits("record", wrong, *arguments, "--as-peer", "--against", right)
    assert status == 1
    assert re.search(r"operation \d+\ndot_general of float32 at \w+/\w+\.py:\d+", printed)
    found, rule = re.findall(r"\(bits (\w+)\)", printed)
    assert int(found, 16) ^ int(rule, 16) == 2**22
    statement = tmp_path / "wrong.json.dispute"
    assert judge(statement).says == (RIGHT, WRONG)
    assert bits("judge", statement)[1] in printed
    assert bits("compare", right, right)[0] == 0
    status, compared = bits("compare", right, wrong)
    assert status == 1 and re.findall(r"operation \d+", compared)[0] in printed
    assert wrong.stat().st_size < 5e6


def test_a_peer_has_its_fault_in_the_rounds_of_its_fault_alone(run, tmp_path):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    for file, asked in ((one, []), (two, ["--as-peer"])):
        bits("record", file, "--round", 1, "--peer", 1, *run, *asked)
    assert two.read_bytes() == one.read_bytes()
    for of, *idle in (("loss", "--as-peer"), ("merge", "--peer", 0), ("weights", "--round", 1)):
        with refused(idle[0], of):
            bits("record", one, *run, *idle, "--of", of)


def test_records_of_one_machine_are_equal_and_a_third_says_who_is_right(run, right, tmp_path):
    again = tmp_path / "again.json"
    assert bits("record", again, "--round", 2, "--peer", 1, *run, "--against", right)[0] == 0
    assert again.read_bytes() == right.read_bytes()
    forged = read_json(right)
    forged["operations"][99]["results"] = ["0" * 64]
    (tmp_path / "forged.json").write_text(json.dumps(forged))
    arguments = ("--round", 2, "--peer", 1, *run, "--against", tmp_path / "forged.json")
    assert bits("record", again, *arguments)[0] == 1
    verdict = judge(tmp_path / "again.json.dispute")
    assert verdict.says == (WRONG, RIGHT) and verdict.statement.numbers[-1] == 99


@pytest.mark.parametrize("of", ["merge", "loss", "weights"])
def test_a_merge_a_loss_and_fresh_weights_are_recorded_too(run, of, tmp_path):
    assert bits("record", tmp_path / "one", "--of", of, *run)[0] == 0
    assert len(read_json(tmp_path / "one")["operations"]) > 10


# ---- Strangers' files, and wrong requests ----


RECORDS = {  # what is another in a record, by its operations, and what the error names
    "none": (lambda _: {"operations": []}, "other.json", "operations"),
    "no operation": (
        lambda _: {"operations": [["mul", "", "0" * 64]]}, "other.json", "operations[0]"),
    "another format": (lambda _: {"format": 1}, "other.json", "format", "1"),
    "a key more": (lambda _: {"more": 1}, "other.json", "more"),
    "another round": (lambda _: {"round": 1}, "round"),
    "one too few": (lambda found: {"operations": found[:-1]}, "operations"),
    "another place": (
        lambda found: {"operations": [found[0] | {"place": "x"}, *found[1:]]}, "place", "'x'"),
    "another input": (
        lambda found: {"operations": [found[0] | {"results": []}, *found[1:]]}, "input"),
}  # fmt: skip


@pytest.mark.parametrize("case", RECORDS)
def test_what_is_no_record_or_of_another_thing_is_not_compared(right, case, tmp_path):
    change, *named = RECORDS[case]
    content, other = read_json(right), tmp_path / "other.json"
    other.write_text(json.dumps(content | change(content["operations"])))
    with refused(*named):
        bits("compare", right, other)


@pytest.mark.parametrize("option, value", [("--round", 9), ("--peer", 9)])
def test_a_round_and_a_peer_that_the_run_does_not_have_are_refused(run, option, value, tmp_path):
    with refused(option, str(value)):
        bits("record", tmp_path / "none", *run, option, value)


# ---- The params after each round ----


def test_params_are_checked_round_by_round_against_a_list_and_a_list_of_another_run_is_refused(
    run, tmp_path
):
    listed = tmp_path / "list.json"
    assert bits("check", "--write", "--file", listed, *run)[0] == 0
    recorded = read_json(Path(run[3]) / "data/trained/transcript/snapshots/00002/state.json")
    content = read_json(listed)
    assert content["params"][-1] == recorded["params"] and len(content["params"]) == 2
    assert bits("check", "--file", listed, *run, "--rounds", 1)[0] == 0
    false = content | {"params": [content["params"][0], "0" * 64]}
    listed.write_text(json.dumps(false))
    with refused("list.json", "round 2", content["params"][1][:12]):
        bits("check", "--file", listed, *run)
    listed.write_text(json.dumps(content | {"key": "0" * 64}))
    with refused("list.json", "key", "0" * 12):
        bits("check", "--file", listed, *run)
    extends = {"Run": Keys(Path(run[1])).key("train")}  # and is checked from its own first round
    tiny.start(tmp_path, **OPTIONS, config__total_steps=3, model__LLM__checkpoint=extends)
    root = shutil.copytree(run[3], tmp_path / "root")
    options = ("--file", listed, "--run", tmp_path / "run.toml", "--root", root)
    assert bits("check", "--write", *options)[0] == 0
    listed.write_text(json.dumps(read_json(listed) | {"params": ["0" * 64]}))
    with refused("list.json", "round 3"):
        bits("check", *options)
