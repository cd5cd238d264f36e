"""Peers in processes of their own, as a round sees them."""

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import cycle

import jax
import numpy as np

from pipeline.carrier.carrier import Answered, Asked, Carrier
from pipeline.carrier.frames import FrameError
from pipeline.carrier.operations import leaves, tree_of
from pipeline.errors import LockstepError
from pipeline.optim.optimizer import Tree, no_align
from pipeline.programs.replica import Work
from pipeline.stage import devices
from pipeline.swarm.begin import Setup
from pipeline.swarm.peers import Done, RoundSteps
from pipeline.transcript.state import State

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """How long a peer may take, in seconds.

    Attributes:
      start: Until its process is there.
      answer: Until it answers a request.
      step: Until it answers to a step.
    """

    start: float
    answer: float
    step: float


class RemotePeers:
    """The peers of a run, each in its process behind a carrier.

    A peer is absent from when its process is lost until it has joined again: it is silent in the
    round, the coordinator's rules drop it, and it asks to join once its process is there. What
    peers agree on is nowhere but with them: a joining peer takes it over from another one.

    Args:
      setup: What the run computes with.
      state: State to begin with.
      carrier: The way to the processes.
      patience: How long they may take.
      keeps: Whether the whole state is asked for after a step.
      absent: Peers that were absent when `state` was saved.
    """

    def __init__(  # noqa: PLR0913
        self,
        setup: Setup,
        state: State,
        carrier: Carrier,
        patience: Patience,
        keeps: Callable[[int], bool],
        absent: Sequence[int] = (),
    ):
        self.setup, self.programs, self.carrier = setup, setup.programs, carrier
        self.patience, self.keeps = patience, keeps
        self.count = len(state.own)
        self.absent = frozenset(range(self.count))
        self._like = setup.start.state
        self._own = {peer: state.own[peer] for peer in absent}  # what the absent ones have
        self._renewed: set[int] = set()  # absent ones that were silent, and so have a new state
        self._compiled: dict[int, set[tuple]] = {}  # the steps that each process has compiled
        present = frozenset(range(self.count)).difference(absent)
        arrived = carrier.wait(present, patience.start)
        self._take_losses()
        self._admit(arrived & present, state.params, state.shared)
        here = self._here
        self._ask({p: Asked("restore", {}, leaves(state.own[p])) for p in here})
        for peer in present - here:
            self._own[peer] = state.own[peer]

    # ---- Who is there ----

    def where(self, peer: int) -> str:
        """Return where a peer runs, for the log."""
        return "no process yet" if peer in self.absent else "a process of its own"

    def returned(self) -> tuple[int, ...]:
        """Return the absent peers whose processes are there again and can join."""
        self._take_losses()
        return tuple(sorted(self.absent & self.carrier.arrived()))

    def await_return(self) -> tuple[int, ...]:
        """Wait until an absent peer's process is there again, at most `Patience.start`."""
        until = time.monotonic() + self.patience.start
        while not (back := self.returned()) and time.monotonic() < until:
            self.carrier.wait(self.absent, 0.2)
        return back

    def part(self, members: Set[int]) -> tuple[int, ...]:
        """Let go of the members that asked to leave, and return them: what they own stays here."""
        leaving = sorted(self.carrier.leaving() & self._here & members)
        own = {peer: self.own(peer) for peer in leaving}
        left = tuple(peer for peer in leaving if peer in self._here)  # the others are lost instead
        self._own |= {peer: own[peer] for peer in left}
        self.absent |= {*left}
        self._renewed -= {*left}
        for peer in left:
            self.carrier.dismiss(peer)
        return left

    # ---- A round ----

    def step(self, asked: RoundSteps) -> dict[int, Done]:
        """Take the step of every peer that has work; who is lost meanwhile is absent."""
        if self.setup.run.links.clock == "wall":
            self._compile(asked)
        keep = self.keeps(asked.number)
        requests = {
            peer: Asked(
                "train",
                {
                    "step": asked.number,
                    "count": given.count,
                    "imprecise": peer in asked.programs,
                    "keep": keep,
                    "hash": asked.hashed,
                },
                leaves(given.rows_MB),
            )
            for peer, given in asked.work.items()
        }
        like, own = self.programs.form.like, self._like.own[0]
        size, done = len(jax.tree.leaves(like)), {}
        for peer, answer in self._ask(requests, self.patience.step).items():
            with self._losing(peer):
                message = tree_of(answer.arrays[:size], like, "message")
                loss = float(answer.header.values["loss"])
                if keep:
                    self._own[peer] = tree_of(answer.arrays[size:], own, "own state")
                state = answer.header.values["hash"]
                done[peer] = Done(message, loss, state, answer.seconds)
        return {peer: done[peer] for peer in sorted(done) if peer in self._here}

    def sit_out(self, idle: Set[int], step: int) -> None:
        """Have present peers that take no step in a round take up the last round's commit."""
        if self.programs.optimizer.align is not no_align:
            idle = sorted(self._here & idle)
            self._ask(dict.fromkeys(idle, Asked("align", {"step": step})))
        if self.keeps(step):  # while they are there
            self._own |= {peer: self.own(peer) for peer in self._here.difference(self._own)}

    def _compile(self, asked: RoundSteps) -> None:
        """Have peers compile what a round's clock must not wait for: steps of a new shape.

        That is a run's first one, and one in which another number of peers train. Verifiers too.
        """
        arrays, requests = leaves(next(iter(asked.work.values())).rows_MB), {}
        for peer in sorted(self._here):
            imprecise = peer in asked.programs
            step = (imprecise, *(array.shape for array in arrays))
            if step not in self._compiled.setdefault(peer, set()):
                self._compiled[peer].add(step)
                requests[peer] = Asked("compile", {"imprecise": imprecise}, arrays)
        if requests:
            self._ask(requests)

    def receive(
        self, messages: Mapping[int, Tree], sequences: Mapping[int, int], like: Tree, step: int
    ) -> None:
        """Apply, at every peer, the messages that the round decided on.

        Raises:
          LockstepError: No peer is left.
        """
        del like
        values = {
            "step": step,
            "peers": [*messages],
            "sequences": [sequences[peer] for peer in messages],
        }
        arrays = [leaf for message in messages.values() for leaf in leaves(message)]
        answers = self._ask(dict.fromkeys(self._here, Asked("optimize", values, arrays)))
        self._expect_any()
        found = {p: str(a.header.values.get("params")) for p, a in answers.items()}
        (most, _), *_ = Counter(found[p] for p in sorted(found)).most_common(1)
        for peer, params in found.items():
            if params != most:
                self._distrust(peer, f"its params are {params[:12]}, the others' {most[:12]}")

    def recompute(
        self, cases: Sequence[tuple[int, Tree, Work]], step: int
    ) -> list[tuple[Tree, str]]:
        """Return message and state's hash of each recomputed step: (who, from what state, work).

        A step gives the same wherever it is taken: for a peer that is gone, another one takes it.
        """
        results: dict[int, tuple[Tree, str]] = {}
        like = self.programs.form.like
        while missing := [n for n in range(len(cases)) if n not in results]:
            self._expect_any()
            turns = cycle(sorted(self._here))
            turn: dict[int, int] = {}
            for n in missing:  # one case of each peer at a time
                who = cases[n][0] if cases[n][0] in self._here else next(turns)
                turn.setdefault(who, n)
            asked = {
                who: Asked(
                    "recompute",
                    {"step": step, "count": cases[n][2].count},
                    [*leaves(cases[n][1]), *leaves(cases[n][2].rows_MB)],
                )
                for who, n in turn.items()
            }
            for who, answer in self._ask(asked, self.patience.step).items():
                with self._losing(who):
                    message = tree_of(answer.arrays, like, "message")
                    results[turn[who]] = message, answer.header.values["hash"]
        return [results[n] for n in range(len(cases))]

    def join(self, peer: int) -> None:
        """Have a peer take over what the others agree on, if its process is still there."""
        if peer in self.absent and peer in self.carrier.arrived():
            self._admit({peer}, self._tree("params"), self._tree("shared"))
        self.restart(peer)

    def take_back(self, members: Set[int]) -> None:
        """Have members that were silent go on from their new state, if their processes are there.

        So a peer that nobody dropped, for want of a quorum, need not wait until somebody does.
        """
        back = self.absent & self._renewed & members & self.carrier.arrived()
        if back and self._here:
            own = {peer: leaves(self._own[peer]) for peer in back}
            self._admit(back, self._tree("params"), self._tree("shared"))
            self._ask({p: Asked("restore", {}, own[p]) for p in sorted(back & self._here)})

    def restart(self, peer: int) -> None:
        """Give a peer a new state of its own, at the params that the others have."""
        if peer in self._here:
            self._ask({peer: Asked("restore", {})})
        if peer in self.absent:
            self._own[peer] = self._tree("own", what="new")
            self._renewed.add(peer)

    # ---- State ----

    def own(self, peer: int) -> Tree:
        """Return a copy of what a peer owns; of an absent one, what it will begin with."""
        if peer in self._here:
            answers = self._ask({peer: Asked("extract", {"what": "own", "hash": False})})
            for answer in answers.values():
                with self._losing(peer):
                    return tree_of(answer.arrays, self._like.own[0], "own state")
        if peer not in self._own:
            self._own[peer] = self._tree("own", what="new")
        return self._own[peer]

    def measure(self, lots: Sequence[Tree]) -> list[np.ndarray]:
        """Return each row's loss of each lot of rows, peers side by side."""
        results: dict[int, np.ndarray] = {}
        while missing := [n for n in range(len(lots)) if n not in results]:
            self._expect_any()
            turn = dict(zip(sorted(self._here), missing, strict=False))
            asked = {peer: Asked("forward", {}, [lots[n]]) for peer, n in turn.items()}
            for peer, answer in self._ask(asked).items():
                with self._losing(peer):
                    (results[turn[peer]],) = answer.arrays
        return [results[n] for n in range(len(lots))]

    def params_hash(self) -> str:
        """Return the hash of the params that all agree on."""
        while True:
            self._expect_any()
            asked = {min(self._here): Asked("extract", {"what": "params", "hash": True})}
            for answer in self._ask(asked).values():
                return str(answer.header.values.get("hash"))

    def params(self) -> Tree:
        """Return a copy of the params that all agree on."""
        return self._tree("params")

    def state(self) -> State:
        """Return a copy of the whole state."""
        params, shared = self._tree("params"), self._tree("shared")
        missing = [peer for peer in range(self.count) if peer not in self._own]
        own = {peer: self.own(peer) for peer in missing} | self._own
        self._own = {peer: tree for peer, tree in own.items() if peer in self.absent}
        return State(params, shared, tuple(own[peer] for peer in range(self.count)))

    def close(self) -> None:
        """End the peers' processes, or let go of those that were started by hand."""
        self.carrier.close()

    # ---- Requests ----

    @property
    def _here(self) -> frozenset[int]:
        return frozenset(range(self.count)) - self.absent

    def _ask(self, asked: Mapping[int, Asked], seconds: float | None = None) -> dict[int, Answered]:
        answers = self.carrier.ask(asked, self.patience.answer if seconds is None else seconds)
        self._take_losses()
        return {peer: answer for peer, answer in answers.items() if peer not in self.absent}

    def _take_losses(self) -> None:
        for peer, why in self.carrier.lost().items():
            self._lose(peer, why)

    def _lose(self, peer: int, why: str) -> None:
        if peer not in self.absent:
            log.info(f"train: peer {peer} is lost: {why}")
            self.absent |= {peer}
            self._renewed.discard(peer)

    def _losing(self, peer: int) -> "_Losing":
        return _Losing(functools.partial(self._distrust, peer))

    def _distrust(self, peer: int, why: str) -> None:
        """Lose a peer for what it answered; its process may join again."""
        self.carrier.lose(peer, why)
        self._take_losses()

    def _expect_any(self) -> None:
        if not self._here:
            raise LockstepError(
                "train: no peer's process is left, expected at least one to go on with; their "
                "logs are beside the checkpoints, and the same command goes on"
            )

    def _admit(self, peers: frozenset[int] | set[int], params: Tree, shared: Tree) -> None:
        """Create the state that peers agree on, at processes that have arrived."""
        programs, run = self.programs, self.setup.run
        values = {
            "run": run.model_dump(mode="json"),
            "model": self.setup.hf_config,
            "first_step": self.setup.start.step,
            "columns": list(programs.task.columns),
        }
        arrays = [*leaves(params), *leaves(shared)]
        self.absent -= peers
        created = self._ask(dict.fromkeys(sorted(peers), Asked("create", values, arrays)))
        here = devices.describe(run.peers.processes)
        for peer, answer in created.items():
            found = answer.header.values.get("environment", {})
            for name in here:
                if found.get(name) != here[name]:
                    expected = f"expected {here[name]!r} as here: bits would differ"
                    self._lose(peer, f"{name} is {found.get(name)!r} there, {expected}")
        self._ask(dict.fromkeys(self._here & peers, Asked("hyperparameters", {})))
        for peer in self._here & peers:
            self._own.pop(peer, None)
            self._compiled.pop(peer, None)

    def _tree(self, part: str, what: str | None = None) -> Tree:
        """A tree that all peers have alike, from one that is there."""
        like = self._like.own[0] if part == "own" else getattr(self._like, part)
        while True:
            self._expect_any()
            peer = min(self._here)
            asked = {peer: Asked("extract", {"what": what or part, "hash": False})}
            for answer in self._ask(asked).values():
                with self._losing(peer):
                    return tree_of(answer.arrays, like, part)


class _Losing:
    """A block in which nonsense in an answer loses the peer that gave it."""

    def __init__(self, lose: Callable[[str], None]):
        self.lose = lose

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        if kind is not None and issubclass(kind, (FrameError, KeyError, TypeError, ValueError)):
            self.lose(f"nonsense: {error}")
            return True
        return False
