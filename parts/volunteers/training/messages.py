"""The messages of a round: what the store shows, the volunteer's own, and what they come to."""

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lockstep.optim.optimizer import Tree
from lockstep.protocol.attestation import Hash
from lockstep.protocol.driver import RunProgress
from lockstep.swarm.delivery import Delivered
from lockstep.swarm.peers import StepResult
from lockstep.swarm.swarm import (
    Exchanged,
    FinishedRound,
    RoundStart,
    RoundWork,
    Swarm,
    evidence_of,
    mean_loss,
)
from lockstep.transcript.trees import tree_hash
from lockstep.wire import bound
from parts.volunteers import layout
from parts.volunteers.bodies import LeaveNotice, MessageRecord
from parts.volunteers.chain import links
from parts.volunteers.chain.chain import Chain
from parts.volunteers.chain.links import RoundLink
from parts.volunteers.chain.payloads import Expected, MessageInTime, Refused, judge
from parts.volunteers.store.verbs import StoredObject
from parts.volunteers.training.process import Process
from parts.volunteers.training.states import States
from pipeline.stage import signals
from pipeline.stage.devices import environment_hash


class RoundMessages:
    """What the store shows of a round's messages.

    Attributes:
      shown: What everybody makes of the records that count, by peer.
      own: The payload of the volunteer here, once its message is in the store.
    """

    def __init__(self, chain: Chain, expected: Expected):
        self.chain, self.expected, self.round = chain, expected, expected.round
        self.shown: dict[int, MessageInTime | Refused] = {}
        self.own: tuple[int, bytes] | None = None

    @property
    def whole(self) -> bool:
        """Whether no message of the round can still come."""
        return links.is_whole(self.round, self.shown)

    def read(self, names: Collection[str] | None = None) -> None:
        """Look at the records and payloads of messages that are new.

        `names` are the names of the round. If they are None, it looks at one peer after the other,
        up to the first whose message is not there.
        """
        for peer in self.round.assignment:
            before = self.shown.get(peer)
            if before is not None and not links.may_change(before):
                continue
            name = layout.of_peer(self.round.step, peer, "record")
            record = None
            if names is None or name in names:
                record = self.chain.look(name, layout.RECORD_BYTES)
            if record is not None and self.expected.is_in_time(record.seconds):
                key = self.chain.admissions.key(peer, self.expected.began)
                verdict = judge(peer, record, self._payload(peer, record), key, self.expected)
                if verdict is not None:
                    self.shown[peer] = verdict
            if names is None and peer not in self.shown:
                return

    def read_all(self, list_names: Callable[[], Collection[str]]) -> None:
        """Look at all records and payloads of messages; list them where one is missing."""
        self.read()
        if not self.whole:
            self.read(list_names())

    def senders(self, names: Mapping[str, int]) -> set[int]:
        """Return whose message has a record among the names of the round that is in time."""
        records = layout.names_by_peer(names, "record")
        senders = {peer for peer, name in records.items() if self.expected.is_in_time(names[name])}
        return senders.intersection(self.round.assignment)

    def _payload(self, peer: int, record: StoredObject) -> StoredObject | None:
        if self.own is not None and self.own[0] == peer:
            return StoredObject(self.own[1], record.seconds)  # which was put before it
        name = layout.of_peer(self.round.step, peer, "payload")
        return self.chain.look(name, self.expected.payload_bytes)


class OwnPart:
    """The message of a process's volunteer in a round; nothing where nobody trains.

    Attributes:
      worked: Whether it has taken its step.
    """

    def __init__(self, process: Process, swarm: Swarm, messages: RoundMessages):
        self.process, self.swarm, self.messages = process, swarm, messages
        self.round = messages.round
        self.worked = self.left = False

    def work(
        self, progress: RunProgress, closed_without: Callable[[int], bool], *, commits_own: bool
    ) -> None:
        """Take the volunteer's step and put its message, unless the round was `closed_without` it.

        Where it `commits_own`, its record has the hash of what it owns after the step.
        """
        me, process, round_ = self.process.volunteer, self.process, self.round
        if me is None or me.peer in progress.state.ejected:
            return
        if me.peer in round_.joined:
            process.sits_out = False  # it begins with a new state
        if me.peer not in round_.peers:
            process.ask(progress)
            return
        if process.sits_out or closed_without(me.peer):
            return
        done = self.swarm.work(round_, progress.unready).results
        self.worked = True
        if me.peer not in done:  # nothing was assigned
            return
        sent = self.swarm.delivery.encoded(done, round_)[0][me.peer]
        expected = self.messages.expected
        payload = bytes(sent.payload).ljust(expected.payload_bytes, b"\0")
        record = MessageRecord(
            run=expected.run,
            round=round_.step,
            peer=me.peer,
            span=round_.assignment[me.peer],
            base=expected.base,
            commitment=sent.commitment.hex(),
            bytes=len(sent.payload),
            sha256=hashlib.sha256(payload).hexdigest(),
            loss=done[me.peer].loss,
            environment=environment_hash(me.environment),
            own=tree_hash(self.swarm.peers.own(me.peer)) if commits_own else None,
        )
        name = layout.of_peer(round_.step, me.peer, "payload")
        is_there = process.chain.store.put(name, payload)
        if is_there and process.put(record):
            self.messages.own = me.peer, payload

    @property
    def is_sent(self) -> bool:
        """Whether the volunteer's message is in the store."""
        return self.messages.own is not None

    def leave_if_asked(self) -> None:
        """Leave after its message, once this process is asked to stop; the round is taken."""
        me, step = self.process.volunteer, self.round.step
        if me is None or not self.is_sent or self.left or not signals.is_asked():
            return
        notice = LeaveNotice(run=self.process.chain.run, round=step, peer=me.peer)
        self.left = self.process.put(notice)

    def account(self, link: RoundLink, undo: Callable[[], None]) -> None:
        """Begin anew where the round counts the volunteer's message otherwise than it does."""
        me = self.process.volunteer
        if me is None or me.peer not in self.round.assignment:
            return
        is_in = me.peer in link.messages
        self.process.sits_out |= is_in and not self.worked
        if not (is_in and self.worked):  # at the params before the round, as others take it
            peers = self.swarm.peers
            after = peers.params_and_shared()
            undo()
            peers.restart(me.peer)
            peers.agree(*after)


class RoundResult(NamedTuple):
    """What a round came to by some senders' messages."""

    progress: RunProgress
    finished: FinishedRound
    hashes: tuple[Hash, Hash, Hash | None]  # of params, of the shared state, of a file of both


class Settling:
    """A round that may be settled by messages more than once, each time from the same state."""

    def __init__(self, swarm: Swarm, states: States, progress: RunProgress, start: RoundStart):
        self.swarm, self.states, self.progress, self.start = swarm, states, progress, start
        self.round = start.round
        self.before: tuple[Tree, Tree] = swarm.peers.params_and_shared()

    def undo(self) -> None:
        """Return all peers to what they agreed on before the round's messages."""
        params, shared = self.before
        peers = self.swarm.peers
        if peers.programs.merges_in_parts(peers.count):  # which takes the memory of what is shared
            shared = jax.tree.map(jnp.copy, shared)
        peers.agree(params, shared)

    def settle(
        self,
        shown: Mapping[int, MessageInTime | Refused],
        senders: Collection[int],
        left: tuple[int, ...],
        false_links: tuple[int, ...],
    ) -> RoundResult:
        """Settle the round by the messages of some senders, which the store shows."""
        self.undo()
        counted: dict[int, MessageInTime] = {p: shown[p] for p in sorted(senders)}
        sent = {peer: item.sent for peer, item in counted.items()}
        intact = {p: item.sent for p, item in counted.items() if not item.broken}
        beyond = bound.beyond({peer: item.largest for peer, item in intact.items()})
        received = {p: item.message for p, item in intact.items() if p not in beyond}
        arrivals = {peer: float(item.seconds) for peer, item in counted.items()}
        delivered = Delivered(sent, {}, {}, received, arrivals)
        worked = self._claimed_work(counted)
        evidence = replace(evidence_of(worked, delivered), false_links=false_links)
        payloads = self.swarm.kept_payloads(delivered)
        own = {p: item.body.own for p, item in counted.items() if item.body.own is not None}
        if self.states.document.run["peers"].get("bits") != "everywhere":
            messages = {
                p: replace(item, environment=counted[p].body.environment)
                for p, item in evidence.messages.items()
            }
            evidence = replace(evidence, messages=messages)
        exchanged = Exchanged(evidence, received, worked.loss, left, *payloads, own)
        progress, finished = self.swarm.settle(self.progress, self.start, exchanged)
        params, shared = self.swarm.peers.params_and_shared()
        state = self.states.write(self.round.step, params, shared)
        hashes = self.swarm.peers.params_hash(), tree_hash(jax.device_get(shared)), state
        return RoundResult(progress, finished, hashes)

    def _claimed_work(self, counted: Mapping[int, MessageInTime]) -> RoundWork:
        """Return what the senders of messages say that they did."""
        done = {p: StepResult(item.sent, item.body.loss) for p, item in counted.items()}
        losses = {p: item.loss for p, item in done.items() if item.loss is not None}
        silent = tuple(sorted(self.round.assignment.keys() - counted.keys()))
        return RoundWork({}, done, mean_loss(losses, self.swarm.weights(self.round)), silent)
