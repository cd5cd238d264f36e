"""Two claims of a computation that part at one operation, and what a forger makes of them."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.optim.compressed.distro import CompressedMomentum, Compressor, distro
from lockstep.programs.train_step import Programs
from lockstep.same_bits.evaluation import same_bits
from lockstep.same_bits.products import in_blocks
from lockstep.simulation.loss_task import LossTask, Nesting, PeerRows
from lockstep.swarm.faults import FaultSchedule
from lockstep.tables.faults import KINDS, Fault
from lockstep.transcript import tensorfile
from lockstep.transcript.trees import flatten
from parts.bits import by_operation as by_operation_module
from parts.bits import statement
from parts.bits.by_operation import TakenOperation, by_operation
from parts.bits.comparison import first_difference
from parts.bits.opened import on_host
from parts.bits.operation import INPUT, RecordedOperation, hash_of, recomputed
from parts.bits.record import BitsRecord
from parts.bits.statement import NOT_TOLD, RIGHT, WRONG
from parts.bits.tree import first_parting, path_of, top_of, tree_over
from tests.errors import refused

ANY = "0" * 64
Taken = list[TakenOperation]


def record_of(operations: list[RecordedOperation]) -> BitsRecord:
    fields = {"key": ANY, "of": "step", "round": 1, "peer": 0, "machine": {}}
    return BitsRecord(**fields, operations=tuple(operations))


def claimed(taken: Taken, lies: dict[int, Any]) -> BitsRecord:
    """A claim in which some operations give something else."""
    said = [one.said for one in taken]
    for at, lie in lies.items():
        said[at] = said[at].model_copy(update={"results": tuple(map(hash_of, lie))})
    return record_of(said)


def dispute(path: Path, taken: Taken, false: BitsRecord) -> int:
    """Write the statement of a liar's claim and of what was taken; return which operation it is."""
    honest = record_of([one.said for one in taken])
    number = first_difference(false, honest)
    arrays = (list(map(on_host, found)) for found in taken[number][1:])
    statement.write(path, (false, honest), number, tuple(arrays))
    return number


def last(taken: Taken, primitive: str) -> int:
    return max(at for at, one in enumerate(taken) if one.said.primitive == primitive)


@pytest.fixture(scope="module")
def taken() -> Taken:
    """A small computation with a loop, by its operations."""

    def computed(weights: jax.Array, rows: jax.Array) -> jax.Array:
        def add(state: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            return jnp.maximum(state @ weights + row, 0.0), None

        return jnp.log(jax.lax.scan(add, rows[0], rows)[0])

    found: Taken = []
    draw = np.random.default_rng(0)
    arrays = [draw.standard_normal(shape).astype(np.float32) for shape in ((4, 4), (3, 4))]
    by_operation(same_bits(computed, in_blocks), found.append, ("weights", "rows"))(*arrays)
    return found


@pytest.mark.parametrize("primitive", ["dot_general", "max", "row", "output"])
def test_a_liar_is_named_by_a_judge_who_has_the_statement_alone(taken, primitive, tmp_path):
    number, path = last(taken, primitive), tmp_path / "link"
    path.symlink_to("it")
    assert dispute(path, taken, claimed(taken, {number: [np.float32(7)]})) == number
    verdict = statement.judge(path)
    assert verdict.says == (WRONG, RIGHT) and not verdict.first and path.is_symlink()
    assert f"operation {number}" in next(statement.lines(verdict))


def test_neither_is_right_and_of_what_is_no_number_a_hash_does_not_tell(taken, tmp_path):
    number = last(taken, "add")
    arrays = [on_host(x) for x in taken[number].operands]
    (right,) = recomputed(taken[number].said, arrays)
    one, other = (claimed(taken, {number: [right + lie]}) for lie in (1, 2))
    statement.write(tmp_path / "it", (one, other), number, (arrays, [right + 2]))
    verdict = statement.judge(tmp_path / "it")
    assert verdict.says == (WRONG, WRONG) and "element [0]" in verdict.first
    number = last(taken, "log")
    ((source, _),) = taken[number].said.operands
    x = np.full(4, np.nan, np.float32)
    spelt = (x.view(np.uint32) ^ 1).view(np.float32)  # as another machine may
    one, other = (claimed(taken, {source: [x], number: [found]}) for found in (right, spelt))
    statement.write(tmp_path / "it", (one, other), number, ([x], [spelt]))
    assert statement.judge(tmp_path / "it").says == (NOT_TOLD, RIGHT)


# ---- Forgers ----

OF_TOP, OF_LATER = "claims[0].top", "claims[1].top"
FORGERIES = {  # of a list in the statement or among its arrays: a place, and what is there then
    "operations/-1/settings": ("{}", OF_TOP),
    "operations/-1/place": ("scan[9]", OF_TOP),
    "operations/-1/operands": ([ANY, ANY], OF_TOP),
    "operations/-1/types": ([], OF_TOP),
    "operations/0/results": ([ANY], OF_TOP),
    "operations/-1/results": ([ANY], OF_LATER),
    "results": ([ANY], OF_TOP),
    "numbers/-1": (0, OF_TOP),
    "numbers/0": (2**70, OF_TOP),
    "numbers": ([], "lists"),
    "paths/0/-1": (lambda path: [*path, ANY], OF_TOP),
    "paths/1/-1": (lambda path: path[:-1], OF_LATER),
    "paths": (lambda paths: paths[::-1], OF_TOP),
    "described/1": (lambda path: [*path, ANY], "claims[1].program"),
    "claims/0/program": (ANY, "claims[0].program"),
    "claims/0/count": (1, OF_TOP),
    "claims/0/round": (2, "round"),
    "claims": (lambda claims: claims[::-1], OF_TOP),
    "arrays/0": (lambda array: array + 1, "arrays"),
    "arrays/-1": (lambda array: array + 1, "arrays"),
    "arrays": (lambda arrays: [*arrays, arrays[0]], "arrays"),
}


def placed(tree: Any, keys: list[str], value: Any) -> None:
    """Put a value, or what is made of the one there, into nested lists and tables."""
    key = int(keys[0]) if isinstance(tree, list) else keys[0]
    if keys[1:]:
        placed(tree[key], keys[1:], value)
    else:
        tree[key] = value(tree[key]) if callable(value) else value


def rewritten(path: Path, said: dict[str, Any], arrays: list[np.ndarray]) -> None:
    named = {str(at): array for at, array in enumerate(arrays)}
    specs = {name: tensorfile.spec_of(x.dtype, x.shape) for name, x in named.items()}
    tensorfile.write(path, specs, lambda at: [named[at]], {"statement": json.dumps(said)})


@pytest.mark.parametrize("place", FORGERIES)
def test_a_forged_statement_proves_nothing(taken, place, tmp_path):
    path, (value, named) = tmp_path / "it", FORGERIES[place]
    dispute(path, taken, claimed(taken, {last(taken, "dot_general"): [np.float32(7)]}))
    file = tensorfile.TensorFile(path)
    said = json.loads(file.metadata["statement"])
    said["arrays"] = [np.array(file[str(at)]) for at in range(len(file))]
    placed(said, place.split("/"), value)
    rewritten(path, said, said.pop("arrays"))
    with refused(path, named):
        statement.judge(path)


SMALL, HUGE = ("float32", (4,)), ("float32", (2**30, 4))
SPREAD = {"shape": [2**30, 4], "broadcast_dimensions": [1], "sharding": None}
ALONE = {  # of the one operation of two claims, which are the forger's own
    "a later operand": ({"operands": ((1, 0),)}, "arrays"),
    "no primitive": ({"primitive": "eval"}, "'eval'"),
    "a primitive that needs a device": ({"primitive": "device_put"}, "'device_put'"),
    "an input": ({"primitive": INPUT}, "'input'"),
    "settings of a kind that is none": ({"settings": '{"axes": {"eval": "1"}}'}, "'eval'"),
    "settings that are none": ({"settings": None}, "alone"),
    "an axis that is none": ({"primitive": "reduce_max", "settings": '{"axes": [7]}'}, "7"),
    "other types": ({"types": (SMALL, HUGE)}, "types"),
    "a type that is none": ({"types": (SMALL, ("object", (4,)))}, "types"),
    "a bomb": ({"primitive": "broadcast_in_dim", "settings": json.dumps(SPREAD)}, "elements"),
}


@pytest.mark.parametrize("forgery", ALONE)
def test_claims_of_a_forgers_own_prove_nothing_either(forgery, tmp_path):
    path, x, (fields, named) = tmp_path / "it", np.ones(4, np.float32), ALONE[forgery]
    form = {"what": "", "place": "", "primitive": "neg", "settings": "{}", "types": (SMALL, SMALL)}
    form |= {"operands": (hash_of(x),), "results": (hash_of(x),)}
    later = RecordedOperation(**form)
    claims = ({**form, **fields, "results": (y,)} for y in (ANY, hash_of(x)))
    one, other = (record_of([RecordedOperation(**claim), later]) for claim in claims)
    statement.write(path, (one, other), 0, ([x], [x]))
    with refused(path, named):
        statement.judge(path)


def test_claims_that_do_not_part_are_no_dispute(taken, tmp_path):
    honest, number = record_of([one.said for one in taken]), last(taken, "max")
    arrays = [list(map(on_host, found)) for found in taken[number][1:]]
    statement.write(tmp_path / "it", (honest, honest), number, (arrays[0], arrays[1]))
    with refused("it", "equal results"):
        statement.judge(tmp_path / "it")
    rewritten(tmp_path / "it", {}, [])
    with refused("it", "claims"):
        statement.judge(tmp_path / "it")


@pytest.mark.parametrize("count", [1, 2, 5, 13])
def test_two_trees_part_at_a_leaf_that_few_questions_find_and_its_path_proves(count):
    leaves = [bytes([at]) * 32 for at in range(count)]
    tree = tree_over(leaves)
    for number, leaf in enumerate(leaves):
        other, asked = tree_over([*leaves[:number], b"x" * 32, *leaves[number + 1 :]]), []

        def ask(height: int, at: int, other=other, asked=asked) -> bytes:
            asked.append(at)
            return other[height][at]

        assert first_parting(tree, ask) == number and len(asked) == (count - 1).bit_length()
        tops = [top_of(leaf, at, count, path_of(tree, number)) for at in range(2 * count)]
        assert [at for at, top in enumerate(tops) if top == tree[-1][0].hex()] == [number]


# ---- Lies that are wrong computations, which a liar claims to be the run's ----


@pytest.fixture(scope="module")
def peers() -> tuple[Programs, tuple, Taken, dict[int, Any]]:
    """Programs, peer 1's arguments and operations, and the messages of three peers."""

    def loss(params: Any, batch: jax.Array, _: jax.Array | None) -> jax.Array:
        return jnp.mean((batch @ params["w"]) ** 2)

    draw = np.random.default_rng(0)
    params = {"w": draw.standard_normal((8, 4)).astype(np.float32)}
    shapes = jax.eval_shape(lambda: params)
    task = LossTask(loss, Nesting(params), shapes, np.dtype(np.float32), 0, 4)
    momentum = CompressedMomentum(0.1, Compressor(2, 4, False), 0.9)
    programs = Programs(task, distro(momentum), product=in_blocks)
    given, messages, found = {}, {}, []
    for peer in range(3):
        own, shared = jax.device_get(programs.init(params))
        rows = PeerRows(draw.standard_normal((4, 8)).astype(np.float32), np.full(4, peer, np.int32))
        work = programs.work(rows, 4, 1)
        given[peer] = (params, own, shared, work.rows_MB, np.int32(4), np.int32(9))
        messages[peer] = jax.device_get(jax.jit(programs.step_of_a_peer)(*given[peer]).message)
    by_operation(programs.step_of_a_peer, found.append, NAMES)(*given[1])
    return programs, given, found, messages


NAMES = ("params", "own", "shared", "rows", "count", "step")
LIES = [kind for kind, fault in KINDS.items() if fault.wraps == "message"]


@pytest.mark.long
@pytest.mark.parametrize("kind", LIES)
def test_a_lie_about_a_message_is_named_by_what_gives_the_message(peers, kind, tmp_path):
    programs, _, taken, messages = peers
    fault = Fault(kind=kind, peer=(2, 1) if kind == "collude" else 1, rounds=(9, 9))
    faults = FaultSchedule([fault], 0, programs.form)
    faults.messages({1: messages[0], 2: messages[0]}, 5)  # an older one, for who is stale
    sent, lies = flatten(faults.messages(messages, 9)[1]), {}
    for at, one in enumerate(taken):
        said, path = one.said, one.said.what.removeprefix("output message/")
        if said.primitive == "output" and path in sent and hash_of(sent[path]) != said.results[0]:
            giver, place = said.operands[0]
            arrays = list(map(on_host, taken[giver].results))
            arrays[place] = sent[path]
            lies |= {at: [sent[path]], giver: arrays}
    assert lies and dispute(tmp_path / "it", taken, claimed(taken, lies)) == min(lies)
    assert statement.judge(tmp_path / "it").says == (WRONG, RIGHT)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, named",
    [
        ("lazy", "add of int32 at programs/local_training.py"),  # how many micro-batches there are
        ("wrong_data", "slice of int32 at simulation/loss_task.py"),  # the first of the rows
        ("wrong_precision", "dot_general of float32 at bits/test_dispute.py"),
    ],
)
def test_other_work_is_named_by_the_first_operation_that_it_changes(
    peers, kind, named, tmp_path, monkeypatch
):
    programs, given, taken, _ = peers
    arguments, found, results_of = list(given[1]), [], by_operation_module._results
    if kind == "lazy":
        arguments[4] = np.int32(2)
    elif kind == "wrong_data":
        arguments[3] = given[2][3]
    else:

        def cut(rule: Any, inputs: list[Any], compiled: Any) -> list[Any]:
            if "dot_general" in str(rule):
                inputs = [x.astype(jnp.bfloat16).astype(x.dtype) for x in inputs]
            return results_of(rule, inputs, compiled)

        monkeypatch.setattr(by_operation_module, "_results", cut)
    by_operation(programs.step_of_a_peer, found.append, NAMES)(*arguments)
    inputs = [one for one in taken if one.said.primitive == INPUT]  # which he claims as they are
    false = record_of([one.said for one in [*inputs, *found[len(inputs) :]]])
    number = dispute(tmp_path / "it", taken, false)
    assert taken[number].said.what.startswith(named)
    assert statement.judge(tmp_path / "it").says == (WRONG, RIGHT)
