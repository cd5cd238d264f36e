"""Peers in processes of their own, as a round sees them, and how they are started.

What a peer answers is checked before anything is done with it: a peer whose answer is not what its
operation gives is lost, and one line says why. Where peers should have the same tree, the hash that
most of them give counts.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from lockstep.errors import LockstepError, brief
from lockstep.optim.optimizer import Tree
from lockstep.programs.local_training import Work
from lockstep.programs.replica import RoundMerge
from lockstep.swarm.peers import M, RoundSteps, StepResult
from lockstep.transcript.state import State
from lockstep.transcript.trees import tree_hash
from lockstep.wire.facts import MessageFacts
from parts.carrier import requests
from parts.carrier.carrier import Carrier, Processes
from parts.carrier.channel import Hub, Place, Secrets
from parts.carrier.handlers import SHARDS_VARIABLE, leaves, tables_for_a_process, trees_of
from parts.carrier.requests import OPERATIONS, FrameError, Hashed, PeerRequest, checked
from parts.carrier.tables import runtime_of
from pipeline.stage import signals
from pipeline.stage.devices import describe_programs
from pipeline.start.set_up import Setup

LOSS_LIKE = np.zeros((), np.float32)  # a loss's dtype and shape
SMALL_BYTES = 2**26  # of a message beside states: headers, losses of rows

log = logging.getLogger(__name__)
CaseResult = TypeVar("CaseResult")


class CheckedAnswer(NamedTuple):
    """A remote peer's answer, checked."""

    values: Any  # the table that the operation gives
    trees: dict[str, Tree]  # by the names in the request's `like`
    seconds: float  # since the request was sent


class RemotePeers:
    """The peers of a run, each in its process behind a carrier.

    A peer is absent from when its process is lost until it has joined again: it is silent in the
    round, the coordinator's rules drop it, and it asks to join once its process is there. What
    peers agree on is nowhere but with them: a joining peer takes it over from another one. No tree
    that a process gives is believed where its hash is known: of what peers have alike it is that
    of most of them, of what a peer owns the one that it committed to.

    `keeps` tells of a round whether the whole state is asked for after it; `absent` are the peers
    that were absent when `state`, with which training begins, was saved.
    """

    def __init__(
        self,
        setup: Setup,
        state: State,
        carrier: Carrier,
        keeps: Callable[[int], bool],
        absent: Sequence[int] = (),
    ):
        self.setup, self.programs, self.carrier = setup, setup.programs, carrier
        self.run, self.keeps = setup.run, keeps
        self.seconds = self.run.runtime.answer_seconds  # that a start or an answer may take
        self.on_wall_clock = self.run.links.clock == "wall"
        limit = self.run.config.max_round_train_time
        self.step_seconds = limit if self.on_wall_clock else self.seconds
        self.count = len(state.own)
        self.absent = frozenset(range(self.count))  # until their processes have arrived
        self._like = setup.start.state
        self._own = {peer: state.own[peer] for peer in absent}  # what the absent ones have
        self._renewed: set[int] = set()  # absent ones that were silent, and so have a new state
        self._compiled: dict[int, set[tuple]] = {}  # the steps that each process has compiled
        self._verifies = self.run.config.verification_percent > 0
        self._committed: dict[int, str] = {}  # hash of what a peer owns, where it is known
        self._committed_before: dict[int, str] = {}  # the same before the last step
        # hashes of what all have alike: "params", "shared", and "new", a new state of a peer's own
        self._alike = {"params": tree_hash(state.params), "shared": tree_hash(state.shared)}
        expected = frozenset(range(self.count)).difference(absent)
        arrived = carrier.wait(expected, self.seconds)
        self.take_losses()
        self._admit(arrived & expected, state.params, state.shared)
        self._restore({peer: state.own[peer] for peer in self.present})
        for peer in expected - self.present:
            self._own[peer] = state.own[peer]

    # ---- Who is there ----

    @property
    def present(self) -> frozenset[int]:
        """The remote peers that are present."""
        return frozenset(range(self.count)) - self.absent

    @property
    def living(self) -> frozenset[int]:
        return frozenset(range(self.count))

    def where(self, peer: int) -> str:
        return "no process yet" if peer in self.absent else "a process of its own"

    def returned(self) -> tuple[int, ...]:
        self.take_losses()
        return tuple(sorted(self.absent & self.carrier.arrived()))

    def await_return(self) -> tuple[int, ...]:
        until = time.monotonic() + self.seconds
        with signals.at_once():
            if not (back := self.returned()):
                log.warning(f"train: too few peers; waits {self.seconds:g} s for one more")
            while not back and time.monotonic() < until:
                self.carrier.wait(self.absent, 0.2)
                back = self.returned()
        return back

    def part(self, members: Set[int]) -> tuple[int, ...]:
        leaving = sorted(self.carrier.leaving() & self.present & members)
        own = {peer: self.own(peer) for peer in leaving}
        left = tuple(peer for peer in leaving if peer in self.present)  # the others are lost
        self._own |= {peer: own[peer] for peer in left}
        self.absent |= {*left}
        self._renewed -= {*left}
        for peer in left:
            self.carrier.dismiss(peer)
        return left

    # ---- Requests and answers ----

    def ask(
        self,
        by_peer: Mapping[int, PeerRequest],
        like: Mapping[str, Tree] | None = None,
        seconds: float | None = None,
    ) -> dict[int, CheckedAnswer]:
        """Send each remote peer its request at once; return the answers that fit their requests.

        The requests are of one operation. The arrays of each answer are the leaves of the trees in
        `like`, one tree after the other. By default, answers may take `self.seconds`.
        """
        answers = self.carrier.ask(by_peer, self.seconds if seconds is None else seconds)
        self.take_losses()
        results = {}
        for peer, answer in answers.items():
            if peer in self.absent:
                continue
            name, wanted = by_peer[peer].operation, getattr(by_peer[peer].values, "hash", True)
            try:
                values = checked(OPERATIONS[name].gives, answer.header.values, f"what {name} gives")
                if isinstance(values, Hashed) and (values.hash is not None) != wanted:
                    raise FrameError(f"hash: {values.hash}, expected {'one' if wanted else 'none'}")
                results[peer] = CheckedAnswer(
                    values, trees_of(answer.arrays, like or {}), answer.seconds
                )
            except FrameError as error:
                self.distrust(peer, f"nonsense: {error}")
        return results

    def ask_for_all(
        self, count: int, ask: Callable[[list[int]], Mapping[int, CaseResult]]
    ) -> list[CaseResult]:
        """Ask present remote peers until each of `count` cases has a result; return the results.

        `ask` takes the cases without a result, asks peers about some, and returns results by case.
        """
        results: dict[int, CaseResult] = {}
        while missing := [n for n in range(count) if n not in results]:
            self.expect_any()
            results |= ask(missing)
        return [results[n] for n in range(count)]

    def take_losses(self) -> None:
        """Count peers that the carrier lost as absent; it may know peers that the run has not."""
        for peer, why in self.carrier.lost().items():
            if peer in self.present:
                self.lose(peer, why)

    def lose(self, peer: int, why: str) -> None:
        """Count a remote peer as absent."""
        log.info(f"train: peer {peer} is lost: {why}")
        self.absent |= {peer}
        self._renewed.discard(peer)

    def distrust(self, peer: int, why: str) -> None:
        """Lose a remote peer for what it answered; its process may join again."""
        self.carrier.lose(peer, why)
        self.take_losses()

    def agreed(self, hashes: Mapping[int, str], name: str) -> str:
        """Return the hash that most remote peers give, in a tie the first, and lose the others."""
        (most, _), *_ = Counter(hashes[peer] for peer in sorted(hashes)).most_common(1)
        for peer, digest in hashes.items():
            if digest != most:
                self.distrust(peer, f"its {name} are {digest[:12]}, the others' {most[:12]}")
        return most

    def is_true(self, peer: int, tree: Tree, expected: str | None, name: str) -> bool:
        """Return whether a remote peer's tree has the expected hash, if any; lose it if not."""
        if expected is None or (digest := tree_hash(tree)) == expected:
            return True
        self.distrust(peer, f"it gave {name} {digest[:12]}, expected {expected[:12]}")
        return False

    def expect_any(self) -> None:
        """Raise LockstepError if all remote peers are absent."""
        if not self.present:
            raise LockstepError(
                "train: all processes of peers have ended, expected at least one; their logs are "
                "beside the checkpoints; run the same command to continue"
            )

    # ---- A round ----

    def step(self, steps: RoundSteps[M]) -> dict[int, StepResult[M]]:
        if self.on_wall_clock:
            self._compile(steps)
        keep = self.keeps(steps.number)
        by_peer = {
            peer: PeerRequest(
                requests.Train(
                    step=steps.number,
                    count=work.count,
                    broken=steps.broken.get(peer),
                    keep=keep,
                    hash=steps.hashed or self._verifies,
                ),
                leaves(work.rows_MB),
            )
            for peer, work in steps.work.items()
        }
        like = {"loss": LOSS_LIKE, "message": self.programs.form.like}
        like |= {"own": self._like.own[0]} if keep else {}
        done, self._committed_before = {}, dict(self._committed)
        for peer, answer in self.ask(by_peer, like, self.step_seconds).items():
            state, trees = answer.values.hash, answer.trees
            self._committed[peer] = state
            if keep and not self.is_true(peer, trees["own"], state, "its own state"):
                continue
            if keep:
                self._own[peer] = trees["own"]
            loss, committed = float(trees["loss"]), state if steps.hashed else None
            message = steps.pack(trees["message"], peer)
            done[peer] = StepResult(message, loss, committed, answer.seconds)
        if keep:  # a state is kept; one that no training goes on with would stop all
            bad = [p for p in done if not all(np.isfinite(x).all() for x in leaves(self._own[p]))]
            for peer in bad if len(bad) < len(done) else ():
                self.distrust(peer, "its own state is not finite, others' are")
                del self._own[peer]
        return {peer: done[peer] for peer in sorted(done) if peer in self.present}

    def sit_out(self, idle: Set[int], step: int) -> None:
        if self.programs.optimizer.aligns:
            request = PeerRequest(requests.Align(step=step, hash=self._verifies))
            answers = self.ask(dict.fromkeys(sorted(self.present & idle), request))
            self._committed |= {peer: answer.values.hash for peer, answer in answers.items()}
        if self.keeps(step):  # while they are there
            self._own |= {peer: self.own(peer) for peer in self.present.difference(self._own)}

    def _compile(self, round_steps: RoundSteps) -> None:
        """Have peers compile steps of a new shape, for which a round's clock must not wait.

        A run's first round has one, and each with another number of peers. Verifiers compile too.
        """
        arrays, compiles = leaves(next(iter(round_steps.work.values())).rows_MB), {}
        for peer in sorted(self.present):
            broken = round_steps.broken.get(peer)
            step = (broken, *(array.shape for array in arrays))
            if step not in self._compiled.setdefault(peer, set()):
                self._compiled[peer].add(step)
                compiles[peer] = PeerRequest(requests.Compile(broken=broken), arrays)
        if compiles:
            self.ask(compiles)

    def receive(self, merge: RoundMerge) -> None:
        messages = merge.messages
        optimize = requests.Optimize(
            step=merge.step,
            peers=[*messages],
            sequences=[merge.sequences[peer] for peer in messages],
        )
        arrays = [leaf for message in messages.values() for leaf in leaves(message)]
        answers = self.ask(dict.fromkeys(self.present, PeerRequest(optimize, arrays)))
        self.expect_any()
        hashes = {peer: answer.values.params for peer, answer in answers.items()}
        self._alike = {"params": self.agreed(hashes, "params")}

    def facts(
        self, results: Mapping[int, StepResult[Tree]], ahead: RoundMerge | None
    ) -> dict[int, MessageFacts]:
        return {}  # what comes of peers elsewhere is read as bytes

    def recompute(
        self, cases: Sequence[tuple[int, Tree, Work]], step: int
    ) -> list[tuple[Tree, str]]:
        # a step gives the same wherever it is taken: for a peer that is gone, another one takes it
        like = {"message": self.programs.form.like}

        def recomputed(missing: list[int]) -> dict[int, tuple[Tree, str]]:
            turns = cycle(sorted(self.present))
            turn: dict[int, int] = {}
            for n in missing:  # one case of each peer at a time
                peer = cases[n][0] if cases[n][0] in self.present else next(turns)
                turn.setdefault(peer, n)
            by_peer = {}
            for peer, n in turn.items():
                _, own, work = cases[n]
                recompute = requests.Recompute(step=step, count=work.count)
                by_peer[peer] = PeerRequest(recompute, [*leaves(own), *leaves(work.rows_MB)])
            answers = self.ask(by_peer, like, self.step_seconds)
            return {turn[p]: (a.trees["message"], a.values.hash) for p, a in answers.items()}

        return self.ask_for_all(len(cases), recomputed)

    def join(self, peer: int) -> None:
        if peer in self.absent and peer in self.carrier.arrived():
            self._admit({peer}, self._tree("params"), self._tree("shared"))
        self.restart(peer)

    def take_back(self, members: Set[int]) -> None:
        # a peer that nobody dropped, for want of a quorum, need not wait until somebody does
        back = self.absent & self._renewed & members & self.carrier.arrived()
        if back and self.present:
            own = {peer: self._own[peer] for peer in back}
            self._admit(back, self._tree("params"), self._tree("shared"))
            self._restore({peer: own[peer] for peer in sorted(back & self.present)})

    def restart(self, peer: int) -> None:
        if peer in self.present:
            self.ask({peer: PeerRequest(requests.Restore())})
            self._committed.pop(peer, None)
            self._own.pop(peer, None)  # what it was asked for in this round
            if self._verifies and peer in self.present:
                self._committed[peer] = self._hash("new")
        if peer in self.absent:
            self._own[peer] = self._tree("new")
            self._renewed.add(peer)

    # ---- State ----

    def own(self, peer: int) -> Tree:
        """Return what a remote peer owns or, if it is absent, what it will begin with."""
        like, committed = self._like.own[0], self._committed.get(peer)
        if (tree := self._extract(peer, "own", like, committed, "its own state")) is not None:
            return tree
        if peer not in self._own:
            self._own[peer] = self._tree("new")
        return self._own[peer]

    def before(self, peer: int) -> Tree | None:
        like, committed = self._like.own[0], self._committed_before.get(peer)
        return self._extract(peer, "before", like, committed, "its own state before the step")

    def measure(self, lots: Sequence[Tree]) -> list[np.ndarray]:
        # losses that are not finite count only if those of a second peer are not either
        doubted: dict[int, int] = {}  # by lot, the peer whose losses were not finite
        like = {"losses": np.zeros(len(lots[0]), np.float32)} if lots else {}

        def measured(missing: list[int]) -> dict[int, np.ndarray]:
            turn: dict[int, int] = {}
            for n in missing:
                candidates = self.present - {doubted.get(n)} or self.present
                turn |= {peer: n for peer in sorted(candidates - turn.keys())[:1]}
            by_peer = {peer: PeerRequest(requests.Forward(), [lots[n]]) for peer, n in turn.items()}
            results = {}
            for peer, answer in self.ask(by_peer, like).items():
                n, losses = turn[peer], answer.trees["losses"]
                finite = np.isfinite(losses).all()
                if finite and n in doubted:
                    log.info(
                        f"train: peer {doubted[n]}'s held-out losses are not finite, others' are"
                    )
                if finite or n in doubted or len(self.present) == 1:
                    results[n] = losses
                else:
                    doubted[n] = peer
            return results

        return self.ask_for_all(len(lots), measured)

    def params_hash(self) -> str:
        self.expect_any()
        return self._hash("params")

    def params(self) -> Tree:
        return self._tree("params")

    def state(self) -> State:
        params, shared = self._tree("params"), self._tree("shared")
        missing = [peer for peer in range(self.count) if peer not in self._own]
        own = {peer: self.own(peer) for peer in missing} | self._own
        self._own = {peer: tree for peer, tree in own.items() if peer in self.absent}
        return State(params, shared, tuple(own[peer] for peer in range(self.count)))

    def close(self) -> None:
        self.carrier.close()

    # ---- What they need ----

    def _admit(self, peers: frozenset[int] | set[int], params: Tree, shared: Tree) -> None:
        """Create the state that remote peers agree on, at processes that have arrived."""
        create = requests.Create(
            run=tables_for_a_process(self.run),
            model=self.setup.model,
            first_step=self.setup.start.step,
            columns=self.programs.task.columns,
        )
        to_count = self.programs.steps.by.rows_to_count  # their hosts may have no data
        more = [] if to_count is None else [to_count]
        request = PeerRequest(create, [*leaves(params), *leaves(shared), *more])
        self.absent -= peers
        created = self.ask(dict.fromkeys(sorted(peers), request))
        by_rules = self.run.peers.bits == "everywhere"
        ours = describe_programs() if by_rules else self.setup.environment(self.run.peers.processes)
        for peer, answer in created.items():
            theirs = answer.values.environment
            differs = [name for name in ours if theirs.get(name) != ours[name]]
            if differs:
                actual = brief(repr(theirs.get(differs[0])), 200)
                expected = f"expected {ours[differs[0]]!r} as here: bits would differ"
                self.lose(peer, f"{differs[0]} is {actual} there, {expected}")
        for peer in self.present & peers:
            self._own.pop(peer, None)
            self._compiled.pop(peer, None)

    def _restore(self, own: Mapping[int, Tree]) -> None:
        self.ask(
            {peer: PeerRequest(requests.Restore(), leaves(tree)) for peer, tree in own.items()}
        )
        if self._verifies:
            distinct = {id(tree): tree for tree in own.values()}  # at a run's start all are one
            hashes = {key: tree_hash(tree) for key, tree in distinct.items()}
            self._committed |= {peer: hashes[id(tree)] for peer, tree in own.items()}

    def _extract(
        self, peer: int, what: str, like: Tree, expected: str | None, name: str
    ) -> Tree | None:
        """Return a tree of a remote peer's, called `name` in errors; None if it gives no such."""
        if peer in self.present:
            request = PeerRequest(requests.Extract(what=what, hash=False))
            for answer in self.ask({peer: request}, {name: like}).values():
                if self.is_true(peer, answer.trees[name], expected, name):
                    return answer.trees[name]
        return None

    def _hash(self, what: str) -> str:
        """The hash of a tree that all remote peers have alike."""
        if what not in self._alike:
            request = PeerRequest(requests.Extract(what=what, hash=True))
            answers = self.ask(dict.fromkeys(sorted(self.present), request))
            self.expect_any()
            hashes = {peer: answer.values.hash for peer, answer in answers.items()}
            self._alike[what] = self.agreed(hashes, f"hashes of {what}")
        return self._alike[what]

    def _tree(self, what: str) -> Tree:
        """Return a tree that all remote peers have alike, from a present one."""
        like = self._like.own[0] if what == "new" else getattr(self._like, what)
        if not jax.tree.leaves(like):
            return like
        while True:
            self.expect_any()
            expected = self._hash(what)
            tree = self._extract(min(self.present), what, like, expected, what)
            if tree is not None:
                return tree


# ---- Their start ----


def start_peers(
    setup: Setup,
    state: State,
    scratch: Path,
    keeps: Callable[[int], bool],
    absent: Sequence[int] = (),
) -> RemotePeers:
    """Start the peers' processes, and give them the state to begin with, as `RemotePeers` takes it.

    `scratch`, the folder of the training in progress, gets the keys and the peers' logs.
    """
    carrier = _carrier(setup, state, scratch)
    try:
        return RemotePeers(setup, state, carrier, keeps, absent)
    except BaseException:
        carrier.close()
        raise


def _carrier(setup: Setup, state: State, scratch: Path) -> Processes:
    run, runtime = setup.run, runtime_of(setup.run)
    shards = setup.programs.steps.by.shards.absolute()
    environment = {"PYTHONUNBUFFERED": "1", SHARDS_VARIABLE: os.fspath(shards)}
    if folder := jax.config.jax_compilation_cache_dir:
        environment["JAX_COMPILATION_CACHE_DIR"] = os.fspath(folder)
    backend = "cuda" if jax.default_backend() == "gpu" else "cpu"
    peers, ranks = run.peers.count, run.peers.processes
    states = jax.tree.leaves((state.params, state.shared, setup.start.state.own[0]))
    message_bytes = SMALL_BYTES + 4 * sum(leaf.nbytes for leaf in states)
    hub = Hub(f"tcp://{runtime.listen}", Secrets(scratch / "secrets", peers, ranks), message_bytes)
    count, parts = jax.local_device_count(), run.peers.fsdp // ranks

    def environment_of(place: Place) -> dict[str, str]:
        """Give one of a peer's processes its devices of this host."""
        peer, rank = place
        if backend == "cpu":
            return environment | {"JAX_NUM_CPU_DEVICES": str(parts)}
        return environment | {"CUDA_VISIBLE_DEVICES": gpus_of(peer * ranks + rank, count, parts)}

    spawned = frozenset(range(peers)).difference(runtime.by_hand)
    return Processes(hub, scratch, spawned, environment_of, backend, ranks)


def gpus_of(number: int, count: int, parts: int) -> str:
    """Return the GPUs of a remote peer's process, as CUDA names them; surplus processes share.

    Processes of all peers are numbered, the host has `count` GPUs and a process has `parts`.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(gpu) for gpu in range(count)]
    first = number % max(1, len(gpus) // parts) * parts
    return ",".join(gpus[first : first + parts])
