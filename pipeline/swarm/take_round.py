"""One round of all peers, from their batches to the params they agree on next."""

from typing import NamedTuple

import numpy as np

from pipeline import config
from pipeline.swarm import exchange, links, rounds, wire
from pipeline.swarm.entry import Entry, Message
from pipeline.swarm.exchange import Sent
from pipeline.swarm.faults import Faults
from pipeline.swarm.peers import Peers, assigned
from pipeline.tokens import Sequences


class Taken(NamedTuple):
    """What a round came to; `sent` by peer, `arrivals` in simulated seconds by peer."""

    round: rounds.Round
    loss: float
    tokens: int
    sent: dict[int, Sent]
    arrivals: dict[int, float]
    decision: rounds.Decision

    @property
    def bytes_sent(self) -> dict[int, int]:
        """Size of each peer's message on the wire."""
        return {peer: len(sent.payload) for peer, sent in self.sent.items()}

    def entry(self, held_out_loss: float | None) -> Entry:
        """The round as the transcript tells it; the writer adds where the payloads lie."""
        return Entry(
            round=self.round,
            messages={
                peer: Message(commitment=sent.commitment.hex(), bytes=len(sent.payload))
                for peer, sent in self.sent.items()
            },
            arrivals=self.arrivals,
            decision=self.decision,
            loss=self.loss,
            held_out_loss=held_out_loss,
        )


class NotFinite(Exception):
    """The peers' mean loss is no number; nothing of the round was sent."""


def take_round(
    run: config.Run,
    progress: rounds.Progress,
    peers: Peers,
    data: Sequences,
    form: wire.Form,
    faults: Faults,
) -> tuple[rounds.Progress, Taken | None]:
    """Takes the next round, or returns None where the run has finished.

    Raises:
      NotFinite: the loss is no number.
    """
    progress, round = rounds.next_round(progress)
    if round is None:
        return progress, None
    work = {peer: assigned(data, span, run) for peer, span in round.assignment.items()}
    done = peers.step(work, round.step)
    loss = float(np.mean([d.loss for d in done.values()]))
    if not np.isfinite(loss):
        raise NotFinite(f"loss is {loss} at round {round.step}")

    sent = {p: exchange.send(d.message, p, round, form, faults) for p, d in done.items()}
    tokens = {peer: w.count * run.llm.max_seq_len for peer, w in work.items()}
    sizes = {peer: len(s.payload) for peer, s in sent.items()}
    arrivals = links.arrivals(run.links, range(run.peers.count), tokens, sizes)
    commitments = {peer: s.commitment for peer, s in sent.items()}
    progress, decision = rounds.finish_round(progress, round, arrivals, commitments)

    # the sender too applies what decoding the bytes gives, nothing better
    received = {p: wire.decode(sent[p].payload, form) for p in decision.applied}
    peers.receive(received, form.like, round.step)
    return progress, Taken(round, loss, sum(tokens.values()), sent, arrivals, decision)
