"""What a peer answers is checked before anything is done with it: who lies is lost, with one line.

The processes are a few arrays here, and the answers go through the bytes of the channel;
test_lies_and_audits.py has ones that train.
"""

import json
import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest

from lockstep.programs.local_training import Work
from lockstep.swarm.peers import RoundMerge, RoundSteps
from lockstep.transcript.state import State
from lockstep.transcript.trees import tree_hash
from parts.carrier.carrier import Carrier, PeerAnswer
from parts.carrier.remote_peers import RemotePeers
from parts.carrier.requests import (
    OPERATIONS,
    AnswerHeader,
    Buffer,
    FrameError,
    PeerRequest,
    decode,
    encode,
)
from pipeline import runfile
from pipeline.stage import devices
from tests.lockstep.swarm import simulated

PEERS, LIAR = 4, 0
ROWS = np.zeros((2, 3), np.int32)
PARAMS, SHARED, OWN = {"w": np.arange(3.0)}, {"m": np.ones(2)}, {"d": np.zeros(3)}
MESSAGE = {"w": np.zeros(3)}
Sent = tuple[dict, list[np.ndarray]]  # header, arrays


class Peer:
    """A process: what it owns grows by 1 in a step and is its message, and params by their sum."""

    def __init__(self):
        self.trees = {"params": PARAMS, "shared": SHARED, "own": OWN, "new": OWN, "before": OWN}
        self.run: dict = {}

    def answer(self, one: PeerRequest) -> Sent:
        asked, arrays, trees = one.values, [], self.trees
        if one.operation == "create":
            self.run = asked.run
            return {"environment": devices.describe()}, []
        if one.operation == "restore":
            trees["own"] = {"d": one.arrays[0] if one.arrays else OWN["d"]}
        elif one.operation in ("train", "recompute"):
            own = trees["own"] if one.operation == "train" else {"d": one.arrays[0]}
            own = {"d": own["d"] + 1}
            if one.operation == "train":
                trees["before"], trees["own"], arrays = trees["own"], own, [np.float32(2.5)]
            kept = [own["d"]] if one.operation == "train" and asked.keep else []
            return {"hash": tree_hash(own)}, [*arrays, own["d"], *kept]
        elif one.operation == "optimize":
            trees["params"] = {"w": PARAMS["w"] + sum(one.arrays)}
            return {"params": tree_hash(trees["params"])}, []
        elif one.operation == "extract":
            tree = trees[asked.what]
            if asked.hash:
                return {"hash": tree_hash(tree)}, []
            return {"hash": None}, [*tree.values()]
        elif one.operation == "forward":
            return {}, [np.ones(len(ROWS), np.float32)]
        return {}, []


class Lie(NamedTuple):
    """operation: at which the liar lies. change: (values, arrays) -> others, or raw buffers.

    says: the line about it; empty where nobody can tell.
    """

    operation: str
    change: Callable[[dict, list], Sent | list[Buffer]]
    says: str
    what: str = ""  # of `extract`


class Told(Carrier):
    """A carrier to such processes, one of which lies."""

    def __init__(self, lie: Lie | None):
        super().__init__()
        self.told, self.processes = lie, [Peer() for _ in range(PEERS)]

    def _is_there(self, peer: int) -> bool:
        return True

    def _send(self, peer: int, one: PeerRequest) -> None:
        try:
            header, arrays = decode(AnswerHeader, self.buffers(peer, one))
            self._answers[peer] = PeerAnswer(header, arrays, 0.1)
        except FrameError as error:
            self.lose(peer, f"nonsense: {error}")

    def buffers(self, peer: int, one: PeerRequest) -> list[Buffer]:
        values, arrays = self.processes[peer].answer(one)
        lie = self.told if peer == LIAR else None
        what = getattr(one.values, "what", "")
        if lie and (one.operation, what) == (lie.operation, lie.what):
            changed = lie.change(values, arrays)
            if isinstance(changed, list):
                return changed
            values, arrays = changed
        header = AnswerHeader(number=1, process="0" * 16, values={"later": 0})
        (text, *frames) = encode(header, arrays)
        return [text.replace(b'{"later":0}', json.dumps(values).encode()), *frames]

    def wait(self, peers: frozenset[int], seconds: float) -> frozenset[int]:
        return peers

    def arrived(self) -> frozenset[int]:
        return frozenset()

    def nothing(self, *_: object) -> None:
        pass

    _listen = _forget = dismiss = close = nothing


def a_round(lie: Lie | None) -> tuple[RemotePeers, State, list[np.ndarray]]:
    """All that a round asks of peers, once: the state after it, and what is measured."""
    setup = SimpleNamespace(
        run=simulated.run_of(verified=True),
        programs=SimpleNamespace(
            form=SimpleNamespace(like=MESSAGE),
            task=SimpleNamespace(columns=("text",)),
            steps=SimpleNamespace(by=SimpleNamespace(rows_to_count=None)),
        ),
        start=SimpleNamespace(state=State(PARAMS, SHARED, (OWN,) * PEERS), step=0),
        model={},
        environment=devices.describe,
    )
    carrier = Told(lie)
    keeps = iter([False, True]).__next__
    peers = RemotePeers(setup, setup.start.state, carrier, lambda _: keeps())
    for step in (1, 2):
        for peer in sorted(peers.present):
            peers.own(peer)
        work = {peer: Work(ROWS[None], 2) for peer in sorted(peers.present)}
        owned = {peer: peers.own(peer) for peer in work}
        done = peers.step(RoundSteps(work, step, hashed=True))
        before = {peer: peers.before(peer) for peer in done}
        shown = {peer: tree_hash(own) for peer, own in before.items() if own is not None}
        assert shown == {peer: tree_hash(owned[peer]) for peer in done if peer in peers.present}
        cases = [(peer, OWN, Work(ROWS[None], 2)) for peer in sorted(peers.present)]
        again = peers.recompute(cases, step)
        assert all(type(state) is str and len(state) == 64 for _, state in again)
        messages = {peer: done[peer].message for peer in sorted(done)}
        peers.receive(RoundMerge(messages, dict.fromkeys(messages, 1), step, {}))
        state = peers.state()
        assert [tree_hash(state.own[p]) for p in done if p in peers.present] == [
            done[p].state for p in done if p in peers.present
        ]
    peers.restart(3)
    peers.own(3)
    return peers, peers.state(), peers.measure([ROWS] * 6)


def values(**changed: object) -> Callable[[dict, list], Sent]:
    return lambda values, arrays: (values | changed, arrays)


def arrays(*changed: np.ndarray) -> Callable[[dict, list], Sent]:
    return lambda values, arrays: (values, [*changed])


def scaled(values: dict, arrays: list) -> Sent:
    return values, [array * 1.5 + 1 for array in arrays]


def nan(values: dict, arrays: list) -> Sent:
    return values, [np.full_like(array, np.nan) for array in arrays]


def false_state(values: dict, arrays: list) -> Sent:
    return values, [*arrays[:2], *(array * 2 for array in arrays[2:])]


def nan_state(values: dict, arrays: list) -> Sent:
    """Where the state is asked for, with its true hash."""
    if len(arrays) == 2:
        return values, arrays
    nan = np.full_like(OWN["d"], np.nan)
    return {"hash": tree_hash({"d": nan})}, [*arrays[:2], nan]


def header(**changed: object) -> Callable[[dict, list], list[Buffer]]:
    return lambda values, arrays: [
        json.dumps({"version": 2, "number": 1, "process": "0" * 16, **changed}).encode()
    ]


def many_frames(values: dict, arrays: list) -> list[Buffer]:
    return [*header()(values, arrays), *([b"0" * 1000] * 5000)]


EMPTY = {"dtype": "float32", "shape": [0]}
VAST = {"dtype": "float32", "shape": [0, 2**62, 2**62]}

LIES = {
    "loss-as-value": Lie("train", values(loss=10**400), "nonsense: loss: Extra inputs"),
    "loss-wide": Lie("train", arrays(np.zeros(2, "f4"), np.zeros(3)), "nonsense: loss: float32[2]"),
    "hash-dict": Lie("train", values(hash={}), "nonsense: hash: "),
    "hash-none": Lie("train", values(hash=None), "nonsense: hash: None, expected one"),
    "kept-own": Lie("train", false_state, "it gave its own state "),
    "kept-nan": Lie("train", nan_state, "its own state is not finite, others' are"),
    "recompute-none": Lie("recompute", values(hash=None), "nonsense: hash: None, expected one"),
    "environment-list": Lie("create", values(environment=[]), "nonsense: environment: "),
    "environment-long": Lie("create", values(environment={"jax": "9" * 9999}), "nonsense: environ"),
    "environment-many": Lie(
        "create", values(environment={str(n): "" for n in range(999)}), "nonsense: environment: "
    ),
    "environment-other": Lie(
        "create", values(environment={"platform": "x" * 900}), "platform is 'xxx"
    ),

    "more": Lie("restore", values(more=1), "nonsense: more: Extra inputs"),
    "params-dict": Lie("optimize", values(params={}), "nonsense: params: "),
    "params-other": Lie("optimize", values(params="0" * 64), "its params are 000000000000, the"),
    "params-poison": Lie("extract", scaled, "it gave params ", "params"),
    "shared-poison": Lie("extract", scaled, "it gave shared ", "shared"),
    "x-own": Lie("extract", scaled, "it gave its own state ", "own"),
    "own-twice": Lie("extract", lambda v, a: (v, a * 2), "nonsense: 2 arrays, expected 1", "own"),
    "before": Lie("extract", scaled, "it gave its own state before the step ", "before"),
    "new-hash": Lie("extract", values(hash="0" * 64), "its hashes of new are 0000", "new"),
    "forward-shape": Lie("forward", arrays(np.ones(9, "f4")), "nonsense: losses: float32[9]"),
    "forward-int": Lie("forward", arrays(np.ones(2, "i4")), "nonsense: losses: int32[2], expected"),
    "forward-none": Lie("forward", arrays(), "nonsense: losses: nothing, expected float32[2]"),
    "shape-zero": Lie("train", header(arrays=[VAST]), "nonsense: arrays.0.shape: "),
    "many-arrays": Lie("train", header(arrays=[EMPTY] * 30_000), "nonsense: "),
    "more-arrays": Lie("train", header(arrays=[EMPTY] * 5000), "nonsense: arrays: "),
    "flood-frames": Lie("train", many_frames, "nonsense: 5000 arrays, expected 0"),
    "version": Lie("train", header(version=1), "nonsense: version: "),
    "number-huge": Lie("train", header(number=10**400), "nonsense: number: "),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_what_no_honest_peer_answers_loses_the_peer_in_one_line_and_changes_nothing(name, caplog):
    with caplog.at_level(logging.INFO):
        peers, state, measured = a_round(LIES[name])
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"train: peer {LIAR} is lost: {LIES[name].says}")
    assert len(said) < 400 and "\n" not in said
    assert peers.absent == {LIAR}
    honest = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    assert honest and tree_hash(state.params) == peers.params_hash()
    np.testing.assert_array_equal(measured, np.ones((6, 2)))


def test_an_honest_round_loses_nobody_and_gives_what_peers_have(caplog):
    with caplog.at_level(logging.INFO):
        peers, state, _ = a_round(None)
    assert not caplog.records and not peers.absent
    np.testing.assert_array_equal(state.params["w"], PARAMS["w"] + 2 * PEERS)


def test_a_process_gets_what_it_computes_by_and_no_seed_that_draws_against_it():
    peers = a_round(None)[0]
    for process in peers.carrier.processes:
        given, run = runfile.parse(process.run, "create"), peers.setup.run
        assert not process.run.keys() & {"witness", "faults", "pins", "download"}
        assert "seed" not in process.run["peers"]
        assert (given.config, given.model, given.links) == (run.config, run.model, run.links)
        assert given.peers == run.peers.model_copy(update={"seed": given.peers.seed})


def test_the_arrays_that_travel_are_those_of_the_tables_in_their_order(monkeypatch):
    """Each tree has one leaf here."""
    ask, seen = RemotePeers.ask, set()

    def spied(
        self: RemotePeers, asked: Mapping[int, PeerRequest], like: Mapping = {}, *rest: float
    ) -> dict:
        for one in asked.values():
            seen.add((one.operation, len(one.arrays), tuple(like)))
        return ask(self, asked, like, *rest)

    monkeypatch.setattr(RemotePeers, "ask", spied)
    a_round(None)
    seen = {one for one in seen if one[0] not in ("optimize", "restore", "extract")}
    assert {name for name, *_ in seen} == {"create", "train", "recompute", "forward"}
    for name, arrays, like in seen:
        assert arrays == len([one for one in OPERATIONS[name].arrays if "where losses" not in one])
        told = OPERATIONS[name].answered[: len(like)]
        assert [text.split()[0] for text in told] == [*like], name


def test_held_out_losses_that_only_one_peer_finds_not_finite_do_not_count(caplog):
    with caplog.at_level(logging.INFO):
        peers, _, measured = a_round(Lie("forward", nan, ""))
    assert not peers.absent and np.isfinite(measured).all()
    expected = f"train: peer {LIAR}'s held-out losses are not finite, others' are"
    assert {record.getMessage() for record in caplog.records} == {expected}


def test_a_loss_that_is_nan_travels_as_it_is():
    peers = a_round(None)[0]
    peers.carrier.told = Lie("train", lambda v, a: (v, [np.float32("nan"), *a[1:]]), "")
    peers.keeps = lambda _: False
    done = peers.step(RoundSteps({LIAR: Work(ROWS[None], 2), 1: Work(ROWS[None], 2)}, 3))
    assert np.isnan(done[LIAR].loss) and done[1].loss == 2.5 and not peers.absent


def test_a_process_of_a_peer_that_the_run_does_not_have_never_asks_to_join(caplog):
    peers = a_round(None)[0]
    peers.carrier._lost = {PEERS: "its process was started again"}
    peers.carrier.arrived = lambda: frozenset({PEERS})
    with caplog.at_level(logging.INFO):
        assert peers.returned() == ()
    assert not peers.absent and not caplog.records
