"""The curves and numbers of a training, read off its transcript."""

from pathlib import Path

import jax
import numpy as np

from pipeline.stage.artifacts import write_text
from pipeline.transcript.entry import Entry
from pipeline.transcript.transcript import Transcript

COLUMNS = {
    "loss": ("step", "loss", "tokens", "bytes_up", "bytes_down", "seconds"),
    "held_out": ("step", "held_out_loss", "tokens", "bytes_up", "seconds"),
}
"""Columns of loss.tsv and held_out.tsv; the second is what a line must have."""


class Totals:
    """What a run has trained on and sent so far, and so the row of each round in turn.

    step: The round, from 1.
    loss: Mean over peers, at the params before the round, nats per token; None if nobody trained.
    tokens: Tokens of all messages applied since the start.
    bytes_up, bytes_down: Bytes sent and received by a peer since the start, mean over peers.
    seconds: Simulated clock at the round's end.
    held_out_loss: Nats per token after the round; None if it was not measured.

    Args:
      length: Tokens of a sequence.
      peers: Number of peers.
    """

    def __init__(self, length: int, peers: int):
        self._length, self._peers = length, peers
        self._tokens, self._up = 0, 0

    def row(self, entry: Entry) -> dict:
        """Return the row of the round after those that were given before."""
        spans = [entry.round.assignment[peer] for peer in entry.decision.applied]
        self._tokens += sum(last - first + 1 for first, last in spans) * self._length
        self._up += sum(message.bytes for message in entry.evidence.messages.values())
        return {
            "step": entry.round.step,
            "loss": entry.loss,
            "tokens": self._tokens,
            "bytes_up": round(self._up / self._peers),
            "bytes_down": round(self._up * (self._peers - 1) / self._peers),
            "seconds": entry.decision.now,
            "held_out_loss": entry.held_out_loss,
        }


def rows(transcript: Transcript) -> list[dict]:
    """Return one row for each round, as `Totals` has them."""
    run = transcript.header.run
    totals = Totals(run["model"]["LLM"]["max_seq_len"], run["peers"]["count"])
    return [totals.row(entry) for entry in transcript.rounds]


def measured(rows: list[dict], name: str) -> list[dict]:
    """Return the rows that are a line of one of the two files."""
    return [row for row in rows if row[COLUMNS[name][1]] is not None]


def write(rows: list[dict], folder: Path) -> None:
    """Write loss.tsv, a line for each round, and held_out.tsv, a line for each measurement."""
    for name, columns in COLUMNS.items():
        values = [[row[c] for c in columns] for row in measured(rows, name)]
        text = "".join("\t".join(map(str, line)) + "\n" for line in (columns, *values))
        write_text(folder / f"{name}.tsv", text)


def metrics(rows: list[dict], transcript: Transcript, params: dict) -> dict:
    """Return the numbers of metrics/train.json; bytes are per peer and round, as on the wire."""
    parameters = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(params))
    last, rounds = rows[-1], len(rows)
    sent = last["bytes_up"] / rounds
    fetched = sum(
        check.bytes * (1 + sum(len(r.found) for r in evidence.rulings if r.peer == check.peer))
        for evidence in (entry.evidence for entry in transcript.rounds)
        for check in evidence.checks
    )
    return {
        "rounds": rounds,
        "tokens": last["tokens"],
        "parameters": parameters,
        "loss": next(row["loss"] for row in reversed(rows) if row["loss"] is not None),
        "held_out_loss_before": transcript.header.held_out_loss,
        "held_out_loss": last["held_out_loss"],
        "bytes_up": sent,
        "bytes_down": last["bytes_down"] / rounds,
        "bytes_up_of_data_parallel": 4 * parameters,  # the whole gradient in float32
        "bytes_to_verify": fetched / rounds / transcript.header.run["peers"]["count"],
        "bits_per_parameter_and_round": 8 * sent / parameters,
        "simulated_seconds": last["seconds"],
    }


def final(transcript: Transcript) -> dict:
    """Return where a run that extends this one continues."""
    last = transcript.rounds[-1].round
    return {
        "step": last.step,
        "data_index": last.data_index + last.batch_size,
        "peers": transcript.header.run["peers"]["count"],
    }
