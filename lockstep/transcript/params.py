"""The params that all peers agree on, folded over the rounds of a run.

    params, shared = receive(the messages that a round decided on, params, shared)

Whoever trains, replays a window or only follows a run takes those messages from one place here.
Whoever has a transcript recomputes the params by them, and compares each hash that it has of what
all agree on, bit for bit.
"""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax

from lockstep.optim.optimizer import Tree
from lockstep.programs.replica import Replica, RoundMerge
from lockstep.protocol.attestation import Hash
from lockstep.protocol.round import Decision, Round
from lockstep.transcript.entry import Entry
from lockstep.transcript.state import StateHashes
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.trees import tree_hash
from lockstep.wire import message as wire


class TravellingMessages:
    """Late messages that wait until a later round merges them.

    By peer and round; the record of rounds has what becomes of them.
    """

    def __init__(self) -> None:
        self._messages: dict[tuple[int, int], Tree] = {}

    def take(
        self, received: Mapping[int, Tree], round_: Round, decision: Decision
    ) -> dict[int, Tree]:
        """Return the messages that a round merges into the params, by slot; keep those that travel.

        `received` are the round's own messages.
        """
        older = {slot: self._messages.pop(round_.origin(slot)) for slot in round_.travelling}
        messages = older | dict(received)
        for slot in decision.travelling:
            self._messages[round_.origin(slot)] = messages[slot]
        return {slot: messages[slot] for slot in decision.applied}

    def to_json(self, form: wire.Form) -> list:
        """Return travelling messages as JSON: (peer, round, bytes in base64)."""
        return [
            [*key, base64.b64encode(wire.encode(message, form)).decode()]
            for key, message in sorted(self._messages.items(), key=lambda item: item[0])
        ]

    def restore(self, saved: list, form: wire.Form) -> None:
        """Restore the travelling messages that `to_json` returned."""
        self._messages = {
            (peer, step): wire.decode(base64.b64decode(text), form) for peer, step, text in saved
        }


@dataclass
class FollowedParams:
    """The params and the shared state, recomputed round by round from a transcript's messages.

    It begins at a snapshot, where no message travels. `differs` is called with a step and a line
    about each recorded hash of something else than follows.
    """

    transcript: Transcript  # it has passed the audit
    peers: int  # of the run
    replica: Replica  # what all agree on after the rounds so far
    differs: Callable[[int, str], None]
    travelling: TravellingMessages = field(default_factory=TravellingMessages)

    def begin(self, entry: Entry) -> None:
        """Compare the followed params with those given to the peers that joined before a round."""
        if entry.joined_params is not None:
            self._compare(entry, "were given to peers", entry.joined_params)

    def follow(self, entry: Entry, recomputed: Mapping[int, Tree] | None = None) -> None:
        """Apply a round's messages to the params, as kept or, if none is, as `recomputed`.

        Raises:
          WireError: A message that is kept does not decode.
        """
        plan, decision, sent = entry.round, entry.decision, entry.evidence.messages
        if recomputed is None:
            form = self.replica.programs.form
            needed = sent.keys() & {*decision.applied, *decision.travelling}
            recomputed = {peer: self.transcript.message(sent[peer], form) for peer in needed}
        messages = self.travelling.take(recomputed, plan, decision)
        merge = RoundMerge(messages, plan.sequences, plan.step, plan.sequences)
        self.replica = self.replica.receive(merge, self.peers)
        if entry.checkpointed is not None:
            self._compare(entry, "ended the epoch", entry.checkpointed.params)

    def compare(self, recorded: StateHashes) -> tuple[Tree, Tree]:
        """Compare followed params with a snapshot; return them and the shared state on the host."""
        params, shared = jax.device_get((self.replica.params, self.replica.shared))
        for name, tree in (("params", params), ("shared", shared)):
            found, actual = getattr(recorded, name), tree_hash(tree)
            if actual != found:
                text = f"the {name} at the snapshot are {found[:12]}, expected {actual[:12]}"
                self.differs(recorded.step, text)
                break
        return params, shared

    def _compare(self, entry: Entry, what: str, recorded: Hash) -> None:
        if (actual := tree_hash(jax.device_get(self.replica.params))) != recorded:
            text = f"the params that {what} are {recorded[:12]}, expected {actual[:12]}"
            self.differs(entry.round.step, text)
