"""What a run will take is what it took."""

import jax
import pytest

from lockstep.files import read_json
from lockstep.machine import memory
from lockstep.optim.optimizer import Tree
from lockstep.wire import message as wire
from pipeline import runfile
from pipeline.language_model.language_model import programs_of
from pipeline.preflight.plan import plan, plan_of, run_memory
from tests import tiny
from tests.errors import refused


@pytest.mark.long
def test_a_run_takes_what_was_planned(tmp_path):
    run_file, root = tiny.start(tmp_path)
    tiny.make(run_file, root, "download", "convert", "train")
    planned, taken = plan(runfile.load(run_file), root), root / "data/trained/transcript"

    def on_disk(name: str) -> int:
        paths = [taken / name, *(taken / name).rglob("*")]
        files = [path.stat() for path in paths if path.is_file()]
        return sum({file.st_ino: file.st_size for file in files}.values())  # each link once

    assert planned.payloads == pytest.approx(on_disk("payloads"), rel=0.15)
    assert planned.rounds == pytest.approx(on_disk("rounds.jsonl"), rel=0.3)
    headers = on_disk("snapshots") - planned.snapshots  # of files, and of each tensor in them
    assert 0 < headers < 3000 * len(list((taken / "snapshots").rglob("*.safetensors")))
    simulated = read_json(root / "metrics" / "train.json")["simulated_seconds"]
    assert planned.seconds == pytest.approx(simulated, rel=0.05)
    check_memory(runfile.load(run_file))


def test_messages_too_large_for_memory_are_on_disk_until_their_round_is_over(monkeypatch):
    dense = tiny.parsed(model__LLM__optimizer=tiny.ADAMW)
    messages = dense.peers.count * programs_of(dense, tiny.MODEL).form.bytes_about
    for here, spooled in ((wire.SHARE * messages, 0), (wire.SHARE * messages - 1, messages)):
        monkeypatch.setattr(memory, "total", lambda here=here: here)
        assert plan_of(dense, tiny.MODEL).spooled == spooled


def test_less_memory_holds_messages_that_lie_on_disk(monkeypatch):
    dense = tiny.parsed(model__LLM__optimizer=tiny.ADAMW)
    programs = programs_of(dense, tiny.MODEL)
    whole = run_memory(dense, programs)
    monkeypatch.setattr(memory, "room", lambda devices: 1)
    spooled = run_memory(dense, programs)
    assert (whole.large, spooled.large) == (False, True)
    fewer = dense.peers.count - 1  # all are stacked, or there is one that they were merged to
    assert spooled.receive.arguments <= whole.receive.arguments - fewer * whole.message
    assert spooled.on_all_devices < whole.on_all_devices


def test_a_round_has_32_witnesses_at_most():
    def rounds(witness_nodes: int) -> int:
        run = tiny.parsed(
            peers__count=40,
            config__global_batch_size_start=80,
            config__global_batch_size_end=80,
            config__min_clients=40,
            config__init_min_clients=40,
            config__witness_nodes=witness_nodes,
        )
        return plan_of(run, tiny.MODEL).rounds

    assert rounds(witness_nodes=0) == rounds(witness_nodes=32) > rounds(witness_nodes=31)


def check_memory(run: runfile.Run) -> None:
    """The memory of a training that has just compiled these programs, on its one device."""
    programs = programs_of(run, dict(run.llm.checkpoint.config))
    with tiny.like_a_process():
        found = run_memory(run, programs)
    own, shared = jax.eval_shape(programs.optimizer.init, programs.task.shapes)
    assert (found.groups, found.parts, found.peers) == (1, 1, run.peers.count)
    assert found.agreed == nbytes(programs.task.shapes) + nbytes(shared)
    assert found.own == nbytes(own)
    rows = run.config.global_batch_size_end // run.peers.count * run.llm.max_seq_len * 4
    assert found.step.arguments == pytest.approx(found.agreed + found.own + rows, abs=256)
    assert found.step.donated == found.own  # a peer's state is written where it lay
    assert found.step.outputs == pytest.approx(found.own + found.message, abs=1024)
    assert found.receive.outputs == pytest.approx(found.agreed, abs=1024)
    assert found.step.temporary > nbytes(programs.task.shapes)  # the gradient, at the least
    held = found.agreed + 2 * found.own
    assert found.on_each_device == found.on_all_devices >= held + found.step.beyond + found.message
    began, saved = found.agreed + found.own, found.agreed + 2 * found.own
    messages = 2 * found.message  # as bytes
    host = began + saved + messages + found.step.beyond  # and the pool
    assert found.whole_process == found.process + found.on_all_devices + host
    apart = found._replace(groups=2, peers=3)  # two peers in turns on the first device
    assert apart.on_each_device == found.on_each_device
    assert (
        found._replace(parts=2).on_all_devices == 2 * found.on_all_devices
    )  # each device has half
    assert (
        apart.on_all_devices
        >= 2 * found.agreed + 3 * found.own + 2 * found.step.beyond + found.message
    )


def nbytes(tree: Tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("optimizer", "copies", "kept"),
    [
        (tiny.ADAMW, 3, False),
        (tiny.DILOCO, 2 + 2 * 3, False),  # drift and two moments, of each of 2 peers
        (tiny.SPARSELOCO, 1 + 2 * 4, True),
        (tiny.DILOCO_IN_4_BITS, 2 + 2 * 4, False),
    ],
)
def test_state_and_messages_are_those_of_the_optimizer(optimizer, copies, kept):
    run = tiny.parsed(model__LLM__optimizer=optimizer)
    planned = plan_of(run, tiny.MODEL)
    assert planned.state == pytest.approx(copies * planned.params, rel=0.01)  # and counts
    assert planned.kept == kept
    sent = run.config.total_steps * run.peers.count * planned.message
    assert planned.payloads == (sent if kept else 0)


@pytest.mark.parametrize("layout", ["lockstep", "psyche"])
@pytest.mark.parametrize("quantize_1bit", [True, False])
def test_a_message_is_as_long_as_said(layout, quantize_1bit):
    """With plain positions exactly; coded ones are drawn unevenly here, and take less."""
    signs = {"model__LLM__optimizer__Distro__quantize_1bit": quantize_1bit}
    programs = programs_of(tiny.parsed(peers__wire=layout, **signs), tiny.MODEL)
    shapes = programs.task.shapes
    params = jax.tree.map(
        lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), shapes
    )

    @jax.jit
    def message(params):
        own, shared = programs.optimizer.init(params)
        own = programs.optimizer.accumulate(params, own, params, 1)
        return programs.optimizer.send(own, params, shared, 1)[0]

    length = len(wire.encode(jax.device_get(message(params)), programs.form))
    if layout == "psyche":
        assert length == programs.form.bytes_about
    else:
        assert length == pytest.approx(programs.form.bytes_about, rel=0.15)


def test_without_a_model_it_says_what_makes_one(tmp_path):
    run = tiny.parsed(model__LLM__checkpoint={"Hub": {"repo_id": "some/model"}})
    with refused("hf/config.json", "lockstep convert"):
        plan(run, tmp_path)
