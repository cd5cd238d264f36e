"""Faults happen when, and only when, the schedule says so, and a kill changes nothing of them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from ml_dtypes import bfloat16

from lockstep.optim.compressed.compressor import Coefficients
from lockstep.programs.local_training import Work
from lockstep.protocol import consensus
from lockstep.protocol.attestation import Check, Claim
from lockstep.protocol.round import Message, Round
from lockstep.swarm.faults import FALSE_CLAIM, FaultSchedule
from lockstep.tables.faults import KINDS, Fault
from lockstep.wire import exchange
from lockstep.wire import message as wire
from tests.errors import refused
from tests.lockstep.protocol import records
from tests.lockstep.swarm.simulated import BY_TIME, entries, run_of

ROUND = Round(
    step=4,
    epoch=0,
    seed=7,
    data_index=12,
    batch_size=12,
    peers=(0, 1, 2, 3),
    assignment={0: (12, 15), 1: (16, 19), 2: (20, 23)},
    verifiers=(3,),
    witnesses=(1, 2),
    joined=(),
)
CHECK = Check(3, 1, Claim("a" * 64, "a" * 64), 1.0, 8)


def message(peer: int) -> dict:
    rng = np.random.default_rng(peer)
    index_NK = np.sort([rng.permutation(8)[:3] for _ in range(4)]).astype(np.uint8)
    return {"w": Coefficients(index_NK, rng.normal(size=(4, 3)).astype(bfloat16))}


MESSAGES = {peer: message(peer) for peer in ROUND.assignment}
FORM = wire.Form(MESSAGES[0], {"w": 8}, "psyche", 8)
WORK = {peer: Work(np.full((1, 4), peer), 4) for peer in ROUND.assignment}


def read(peer, span: tuple[int, int]) -> Work:
    return Work(np.array([[*range(span[0], span[1] + 1)]]), span[1] - span[0] + 1)


def schedule(kind: str, *rounds_: int, peer: int = 1) -> list[Fault]:
    also = [peer, 3] if kind in ("collude", "false_verifier") else peer
    if kind == "join":
        rounds_ = (1, rounds_[1])
    return [Fault(kind=kind, peer=also, rounds=rounds_)]


def outcome(faults: FaultSchedule, round: Round = ROUND) -> dict[str, object]:
    """What becomes of a round by all that faults take the place of."""
    step = round.step
    messages = faults.messages(MESSAGES, step)
    honest = {p: exchange.send(m, p, round, FORM) for p, m in messages.items()}
    sent, others, to = faults.tamper(honest, messages, round)
    evidence = records.evidence(
        {p: Message(s.commitment.hex(), len(s.payload)) for p, s in honest.items()},
        arrivals={0: 1.0, 1: 1.0},  # that of 2 was lost
    )
    words = consensus.witnessed(round, evidence, 30)
    judges = [faults.rule(j, CHECK, Claim("b", "b"), CHECK.found, step) for j in (0, 2)]
    return {
        "messages": {p: wire.encode(m, FORM) for p, m in messages.items()},
        "sent": (sent, others, to),
        "work": {
            p: (w.rows_MB.tolist(), w.count) for p, w in faults.work(WORK, round, read).items()
        },
        "broken": faults.broken(WORK, step),
        "arrivals": faults.delay({0: 1.0, 1: 2.0, 2: 3.0}, step),
        "silent": faults.silence(round),
        "away": faults.away(step),
        "attested": faults.attest(words, round, evidence),
        "found": faults.verify(CHECK, Claim("b", "b"), step),
        "ruled": judges,
    }


HONEST = outcome(FaultSchedule([], 0, FORM))
WHERE = {  # the part of the outcome that is another, by what a kind takes the place of
    "message": "messages",
    "bytes": "sent",
    "work": "work",
    "program": "broken",
    "attestation": "attested",
    "check": "found",
}
PART = {kind: WHERE.get(row.wraps) for kind, row in KINDS.items()}
PART |= {"dropped": "arrivals", "late": "arrivals", "crash": "silent", "join": "away"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_changes_nothing_before_its_rounds_nor_after_them(kind):
    for first, last in ((1, 3), (5, 6)):
        faults = FaultSchedule(schedule(kind, first, last), 0, FORM)
        if kind == "join" and first == 5:
            continue  # there is no such thing: who joins is away from the first round on
        assert outcome(faults) == HONEST
        assert not faults.fired.total()


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_changes_what_it_should_of_its_own_peer_and_is_counted(kind):
    first = 5 if kind == "stale" else 4
    round = replace(ROUND, step=first)
    faults = FaultSchedule(schedule(kind, first, 6), 0, FORM)
    if kind == "stale":  # the message it repeats
        older = {p: {"w": m["w"]._replace(value_NK=-m["w"].value_NK)} for p, m in MESSAGES.items()}
        assert faults.messages(older, 4) == older
    if kind == "join":
        faults = FaultSchedule(schedule(kind, 1, 6), 0, FORM)
    honest = outcome(FaultSchedule([], 0, FORM), round)
    found = outcome(faults, round)
    changed = {name for name in honest if found[name] != honest[name]}
    assert PART[kind] in changed
    follows = {"messages": {"sent", "attested"}, "silent": {"away"}, "away": {"silent"}}
    friend = {"found", "ruled"} if kind == "collude" else set()  # finds what the liar claims
    assert changed <= {PART[kind]} | follows.get(PART[kind], set()) | friend
    if kind != "join":  # which has happened when the peer is there
        assert faults.fired == {kind: 1}
    for peer in (0, 2):
        assert found["messages"][peer] == honest["messages"][peer]
        assert found["sent"][0][peer] == honest["sent"][0][peer]
        assert found["work"][peer] == honest["work"][peer]


def test_a_fault_of_a_peer_that_is_not_there_does_not_happen():
    for kind in KINDS:
        if kind in ("collude", "false_verifier", "crash", "join"):
            continue
        faults = FaultSchedule(schedule(kind, 4, 4, peer=9), 0, FORM)
        assert outcome(faults) == HONEST
        assert not faults.fired.total()


def test_lies_are_the_same_in_every_run_and_others_with_another_seed():
    def forged(seed: int) -> dict:
        return outcome(FaultSchedule(schedule("forged", 4, 4), seed, FORM))["messages"]

    assert forged(1) == forged(1) != forged(2)


def test_a_lazy_peer_trains_on_some_of_its_sequences_and_a_wrong_one_on_those_before_them():
    lazy = Fault(kind="lazy", peer=1, rounds=(4, 4), size=0.3)
    assert FaultSchedule([lazy], 0, FORM).work(WORK, ROUND, read)[1].count == 1
    wrong = FaultSchedule(schedule("wrong_data", 4, 4), 0, FORM).work(WORK, ROUND, read)
    assert wrong[1].rows_MB.tolist() == [[12, 13, 14, 15]]
    start = replace(ROUND, assignment={1: (0, 3)})
    wrong = FaultSchedule(schedule("wrong_data", 4, 4), 0, FORM).work({1: WORK[1]}, start, read)
    assert wrong[1].rows_MB.tolist() == [[4, 5, 6, 7]]


def test_stale_peers_send_each_its_own_message_of_so_many_rounds_before_after_a_kill_too():
    def told(step: int) -> dict:  # messages by which one tells rounds and peers
        return {
            peer: {"w": m["w"]._replace(value_NK=m["w"].value_NK * 0 + (10 * step + peer))}
            for peer, m in MESSAGES.items()
        }

    faults = [Fault(kind="stale", peer=[0, 1], rounds=(3, 6), size=2)]
    schedule, sent = FaultSchedule(faults, 0, FORM), {}
    for step in range(1, 8):
        sent[step] = schedule.messages(told(step), step)
        kept = json.dumps(schedule.to_json())
        schedule = FaultSchedule(faults, 0, FORM)
        schedule.restore(json.loads(kept))
    older = {step: step - 2 if 3 <= step <= 6 else step for step in sent}
    for step, messages in sent.items():
        true = told(step) | {peer: told(older[step])[peer] for peer in (0, 1)}
        assert str(messages) == str(true)


def test_a_late_message_comes_later_by_the_size_and_a_dropped_one_never():
    late = Fault(kind="late", peer=1, rounds=(4, 4), size=2.5)
    assert FaultSchedule([late], 0, FORM).delay({0: 1.0, 1: 2.0}, 4) == {0: 1.0, 1: 4.5}
    assert FaultSchedule(schedule("dropped", 4, 4), 0, FORM).delay({0: 1.0, 1: 2.0}, 4) == {0: 1.0}


def test_colluders_confirm_each_other_as_verifiers_and_as_tie_breakers():
    faults = FaultSchedule([Fault(kind="collude", peer=[1, 2, 3], rounds=(4, 4))], 0, FORM)
    claimed, honest = Claim("b", "b"), CHECK.found
    assert faults.verify(CHECK, claimed, 4) == claimed  # 3 checks 1
    assert faults.verify(CHECK, claimed, 5) == honest
    assert faults.rule(2, CHECK, claimed, honest, 4) == claimed
    assert faults.rule(0, CHECK, claimed, honest, 4) == honest
    by_friend = replace(CHECK, verifier=2, peer=0, found=FALSE_CLAIM)
    assert faults.rule(3, by_friend, claimed, honest, 4) == FALSE_CLAIM


# ---- Whole runs ----

STALE = {"kind": "stale", "peer": 1, "rounds": [3, 6]}
CRASH = {"kind": "crash", "peer": 1, "rounds": [3, 5]}
AWAY = {"kind": "crash", "peer": [1, 2], "rounds": [3, 8]}
ALL_THERE = {**BY_TIME, "witness_nodes": 0, "min_clients": 5, "init_min_clients": 6}
KILLED = {
    "stale": run_of("signs", STALE),
    "crash": run_of("signs", CRASH, **BY_TIME),
    "comes back early": run_of("signs", AWAY, **ALL_THERE),
    "ejected": run_of(
        "signs", STALE, {"kind": "malformed", "peer": 2, "rounds": [5, 8]}, verified=True
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.soak] if n in ("stale", "crash") else []) for n in KILLED],
)
def test_a_run_killed_after_every_round_has_the_same_faults_bit_for_bit(name):
    run = KILLED[name]
    whole, fired = entries("signs", run, killed=False)
    again, fired_again = entries("signs", run, killed=True)
    assert again == whole
    assert fired_again == fired
    assert fired.total() > 0


@pytest.mark.long
def test_a_run_that_waits_for_members_has_those_that_are_away_back_early():
    told, fired = entries("signs", KILLED["comes back early"], killed=False)
    assert len(told) == 8
    assert fired["crash"] == 2  # each was silent for a round
    steps = [line for line in told if '"joined":[1,2]' in line or '"joined":[2,1]' in line]
    assert len(steps) == 1


CLASH = {
    "ejected, then away": ({"kind": "malformed", "peer": 1, "rounds": [1, 8]}, CRASH),
    "away twice": (CRASH, {"kind": "crash", "peer": 1, "rounds": [6, 7]}),
    "away from the start": (
        {"kind": "join", "peer": 1, "rounds": [1, 2]},
        {"kind": "crash", "peer": 1, "rounds": [2, 4]},
    ),
}


@pytest.mark.parametrize("name", CLASH)
def test_faults_of_one_peer_that_get_in_each_others_way_do_not_stop_the_run(name):
    told, _ = entries("signs", run_of("signs", *CLASH[name], **BY_TIME), killed=False)
    assert len(told) == 8


@pytest.mark.parametrize(
    "run",
    [
        run_of(
            "signs", {"kind": "malformed", "peer": [0, 1, 2, 3], "rounds": [2, 2]}, min_clients=3
        ),
        run_of(
            "signs",
            {"kind": "malformed", "peer": [0, 2, 3, 4], "rounds": [2, 8]},
            {"kind": "crash", "peer": 1, "rounds": [1, 8]},
        ),
    ],
    ids=["without anybody away", "with those that come back"],
)
def test_a_run_whose_peers_are_ejected_until_too_few_are_left_says_so_in_one_line(run):
    with refused("init_min_clients = 3: fewer peers are left"):
        entries("signs", run, killed=False)


@pytest.mark.long
def test_a_lone_witness_that_crashes_takes_nobody_along():
    hit = 0
    for peer in range(6):
        crash = {"kind": "crash", "peer": peer, "rounds": [2, 6]}
        run = run_of("signs", crash, witness_nodes=1)
        told, _ = entries("signs", run, killed=False)
        assert len(told) == 8
        hit += any('"attestations":[]' in line for line in told)
    assert hit, "no witness was hit"
