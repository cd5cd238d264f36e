"""The curves and numbers of a training, from its transcript."""

from pathlib import Path

import jax
import numpy as np

from lockstep.files import write_text
from lockstep.optim.schedules import LearningRate
from lockstep.protocol import links
from lockstep.tables.links import Topology
from lockstep.transcript.entry import Entry, Header
from lockstep.transcript.transcript import Transcript

COLUMNS = {
    "loss": ("step", "loss", "tokens", "bytes_up", "bytes_down", "seconds", "learning_rate"),
    "held_out": ("step", "held_out_loss", "held_out_stderr", "tokens", "bytes_up", "seconds"),
}
"""Columns of loss.tsv and held_out.tsv."""


class Totals:
    """What a run has trained on and sent so far, and so the curves' row of each round in turn.

    step: The round, from 1.
    loss: Mean over peers, at the params before the round, nats per token; None if nobody trained.
    tokens: Tokens of all messages applied since the start.
    bytes_up, bytes_down: Bytes sent and received by a peer since the start, mean over peers.
    seconds: Simulated clock at the round's end.
    held_out_loss: Nats per token after the round; None if it was not measured.
    held_out_stderr: Its standard error; None of a single row.

    A sequence has `length` tokens.
    """

    def __init__(self, length: int, peers: int, topology: Topology = "broadcast"):
        self._length, self._peers, self._topology = length, peers, topology
        self._tokens, self._up, self._down = 0, 0.0, 0.0

    def row(self, entry: Entry) -> dict:
        """Return the curves' row of the round after those that were given before."""
        spans = [entry.round.spans[peer] for peer in entry.decision.applied]
        self._tokens += sum(last - first + 1 for first, last in spans) * self._length
        sizes = [message.bytes for message in entry.evidence.messages.values()]
        up, down = links.traffic(self._topology, sizes, self._peers)
        self._up += up
        self._down += down
        return {
            "step": entry.round.step,
            "loss": entry.loss,
            "tokens": self._tokens,
            "bytes_up": round(self._up / self._peers),
            "bytes_down": round(self._down / self._peers),
            "seconds": entry.decision.now,
            "held_out_loss": entry.held_out_loss,
            "held_out_stderr": entry.held_out_stderr,
        }


def rows(transcript: Transcript) -> list[dict]:
    """Return one row of the curves for each round, as `Totals` has them."""
    run = transcript.header.run
    length, topology = run["model"]["LLM"]["max_seq_len"], run["links"]["topology"]
    totals = Totals(length, run["peers"]["count"], topology)
    return [totals.row(entry) for entry in transcript.rounds]


def trained(rows: list[dict]) -> list[dict]:
    """Return the curves' rows of rounds in which anybody trained, the lines of loss.tsv."""
    return [row for row in rows if row["loss"] is not None]


def held_out(rows: list[dict], before: Header | None) -> list[dict]:
    """Return the rows with a held-out loss, the lines of held_out.tsv.

    The loss before the first round, which the header `before` has, is a row too.
    """
    if before is None or not rows:
        return []
    first = {
        "step": rows[0]["step"] - 1,
        "held_out_loss": before.held_out_loss,
        "held_out_stderr": before.held_out_stderr,
        "tokens": 0,
        "bytes_up": 0,
        "seconds": 0.0,
    }
    return [row for row in (first, *rows) if row["held_out_loss"] is not None]


def write(rows: list[dict], before: Header, learning_rate: LearningRate, folder: Path) -> None:
    """Write loss.tsv, a line for each round, and held_out.tsv, a line for each measurement.

    `rows` are those of `Totals`, and `before` is the transcript's header.
    """
    lines = trained(rows)
    rates = np.asarray(learning_rate(np.array([row["step"] for row in lines])), np.float32)
    # as a float32 is written, which is shorter than the float64 that is equal to it
    lines = [row | {"learning_rate": rate} for row, rate in zip(lines, rates, strict=True)]
    for name, table in {"loss": lines, "held_out": held_out(rows, before)}.items():
        values = [["" if row[c] is None else row[c] for c in COLUMNS[name]] for row in table]
        text = "".join("\t".join(map(str, line)) + "\n" for line in (COLUMNS[name], *values))
        write_text(folder / f"{name}.tsv", text)


def metrics(rows: list[dict], transcript: Transcript, params: dict, local_steps: int = 1) -> dict:
    """Return the curves' numbers of metrics/train.json; bytes are per peer and round.

    Plain data parallelism sends the whole gradient in float32 after each of the round's
    `local_steps`.
    """
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
        "held_out_stderr": last["held_out_stderr"],
        "held_out_rows": transcript.header.held_out_rows,
        "bytes_up": sent,
        "bytes_down": last["bytes_down"] / rounds,
        "bytes_up_of_data_parallel": 4 * parameters * local_steps,
        "bytes_to_verify": fetched / rounds / transcript.header.run["peers"]["count"],
        "bits_per_parameter_and_round": 8 * sent / parameters,
        "simulated_seconds": last["seconds"],
    }


def final(transcript: Transcript) -> dict:
    """Return where the curves of a run that extends this one go on."""
    last = transcript.rounds[-1].round
    return {
        "step": last.step,
        "data_index": last.data_index + last.batch_size,
        "peers": transcript.header.run["peers"]["count"],
    }
