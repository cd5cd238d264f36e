"""A message that nobody reads is neither coded nor hashed; its bytes are counted all the same."""

import weakref

import jax
import pytest

from lockstep.programs.train_step import Programs
from lockstep.tables.faults import KINDS
from lockstep.wire import exchange
from lockstep.wire import message as wire
from tests.lockstep.simulation.least_squares import DILOCO, DISTRO, SGD, same, short
from tests.lockstep.swarm import simulated

VALUES = {"Distro": DISTRO["Distro"] | {"quantize_1bit": False}}

pytestmark = pytest.mark.usefixtures("one_device")


def refuse(*arguments):
    raise AssertionError("somebody asked for what nobody reads")


@pytest.mark.parametrize("optimizer", [SGD, DISTRO], ids=["whole", "by indices"])
def test_nothing_is_made_that_nobody_reads_and_all_else_is_as_with_bytes(
    tmp_path, monkeypatch, optimizer
):
    lie = {"kind": "wrong_hash", "peer": 1, "rounds": [4, 4]}  # read as a stranger's
    coded = short(optimizer=optimizer, faults=[lie]).train["bytes_up"]
    kept = short(optimizer=optimizer, checkpoint_dir=tmp_path)  # with commitments
    monkeypatch.setattr(wire, "encode", refuse)
    monkeypatch.setattr(exchange, "data_hash", refuse)
    result = short(optimizer=optimizer)
    assert same(result, kept)
    assert result.train["bytes_up"][:3].tolist() == coded[:3].tolist()
    with pytest.raises(AssertionError, match="somebody asked"):
        short(optimizer=optimizer, faults=[lie])


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.wraps == "message"])
def test_a_lie_among_messages_that_nobody_reads_is_merged_as_where_they_are_kept(tmp_path, kind):
    lie = {"kind": kind, "peer": [1, 2], "rounds": [2, 4]}
    given = {"optimizer": VALUES, "peers": 4, "batch_size": 2, "micro_batch": 2, "faults": [lie]}
    assert same(short(**given), short(checkpoint_dir=tmp_path, **given))


def test_whole_arrays_are_hashed_for_a_transcript_and_not_coded(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "encode", refuse)
    run = simulated.run_of("dense")
    transcript = simulated.lab("dense").train(run, tmp_path).transcript
    assert simulated.lab("dense").audit(run, transcript) == []  # it hashes what it repeats


def test_messages_of_several_devices_are_merged_on_the_first(monkeypatch):
    result = short(optimizer=DILOCO, micro_batch=4)
    two = jax.local_devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda *_: two)
    assert len(two) == 2 and same(short(optimizer=DILOCO, micro_batch=4), result)


@pytest.mark.parametrize("layout", ["each", "vmap"])
def test_a_merge_is_begun_before_the_decision_and_done_again_where_that_is_another(
    monkeypatch, layout
):
    merged, held, after, receive = [], [], [], Programs.receive.func

    def counted(programs: Programs):
        def merge(messages, peers, params, shared, step):
            merged.append((int(step), int((peers.weight > 0).sum())))
            held.append(sum(ref() is not None for ref in after))
            result = program(messages, peers, params, shared, step)
            after.append(weakref.ref(result[0]["w"]))
            return result

        program = receive(programs)
        return merge

    monkeypatch.setattr(Programs, "receive", property(counted))
    short(optimizer=DILOCO, layout=layout, micro_batch=4)
    assert merged == [(step, 2) for step in (1, 2, 3, 4)]
    for seen in (merged, held, after):
        seen.clear()
    dropped = {"kind": "dropped", "peer": 1, "rounds": [2, 2]}
    short(optimizer=DILOCO, layout=layout, micro_batch=4, faults=[dropped])
    assert merged == [(1, 2), (2, 2), (2, 1), (3, 2), (4, 2)]
    assert held == [0, 1, 1, 1, 1], "what was merged in vain takes memory beside what is merged"


def test_who_is_absent_and_whose_message_was_decoded_compiles_nothing_anew(monkeypatch):
    stacks, stack_on = [], Programs.stack_on

    def seen(*arguments):
        stacks.append(stack_on(*arguments))
        return stacks[-1]

    monkeypatch.setattr(Programs, "stack_on", seen)
    faults = [
        {"kind": "dropped", "peer": 1, "rounds": [2, 2]},
        {"kind": "sign_flip", "peer": 1, "rounds": [3, 3]},
        {"kind": "sign_flip", "peer": 0, "rounds": [4, 4]},
    ]
    short(optimizer=SGD, micro_batch=4, faults=faults)
    assert len(stacks) == 4 + 3  # merged again where the decision is another
    assert {stack._cache_size() for stack, _ in stacks} == {1}
