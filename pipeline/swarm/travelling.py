"""Messages that are merged in a later round than their own, until they are."""

import base64
from collections.abc import Mapping

from pipeline.optim.optimizer import Tree
from pipeline.protocol.round import Decision, Round
from pipeline.wire import message as wire


class TravellingMessages:
    """The messages themselves, by peer and round; the record of rounds has what becomes of them."""

    def __init__(self) -> None:
        self._messages: dict[tuple[int, int], Tree] = {}

    def take(
        self, received: Mapping[int, Tree], round_: Round, decision: Decision
    ) -> dict[int, Tree]:
        """Return the messages that a round merges, by peer, and keep those that travel on.

        Args:
          received: Those of the round's own.
          round_: The round.
          decision: What it came to.
        """
        older = {p: (p, one.step) for p, one in round_.travelling.items()}
        there = {p: self._messages.pop(key) for p, key in older.items()} | dict(received)
        for peer in decision.travelling:
            self._messages[older.get(peer, (peer, round_.step))] = there[peer]
        return {peer: there[peer] for peer in decision.applied}

    def to_json(self, form: wire.Form) -> list:
        """Return them as `json.dumps` takes them: (peer, round, bytes in base64)."""
        return [
            [*key, base64.b64encode(wire.encode(message, form)).decode()]
            for key, message in sorted(self._messages.items(), key=lambda item: item[0])
        ]

    def restore(self, saved: list, form: wire.Form) -> None:
        """Restore what `to_json` returned."""
        self._messages = {
            (peer, step): wire.decode(base64.b64decode(text), form) for peer, step, text in saved
        }
