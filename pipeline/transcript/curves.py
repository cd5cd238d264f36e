"""What a training came to, read off its transcript: rows by round, and a few numbers to compare."""

from pathlib import Path

import jax
import numpy as np

from pipeline.stage.artifacts import write_text
from pipeline.transcript.transcript import Transcript

LOSS = ("step", "loss", "tokens", "bytes_up", "bytes_down", "seconds")
HELD_OUT = ("step", "held_out_loss", "tokens", "bytes_up", "seconds")


def rows(transcript: Transcript) -> list[dict]:
    """One row per round.

    step; loss: mean over peers, before the round's update, None where nobody trained; tokens: of
    all messages that were applied, from the start; bytes_up and bytes_down: sent and received by a
    peer, mean over peers, from the start; seconds: on the simulated clock; held_out_loss: None
    where it was not measured.
    """
    length = transcript.header.run["model"]["LLM"]["max_seq_len"]
    peers = transcript.header.run["peers"]["count"]
    found, tokens, up = [], 0, 0
    for entry in transcript.rounds:
        spans = [entry.round.assignment[peer] for peer in entry.decision.applied]
        tokens += sum(last - first + 1 for first, last in spans) * length
        up += sum(message.bytes for message in entry.evidence.messages.values())
        found.append(
            {
                "step": entry.round.step,
                "loss": entry.loss,
                "tokens": tokens,
                "bytes_up": round(up / peers),
                "bytes_down": round(up * (peers - 1) / peers),
                "seconds": entry.decision.now,
                "held_out_loss": entry.held_out_loss,
            }
        )
    return found


def write(rows: list[dict], folder: Path) -> None:
    """Writes loss.tsv, a line per round, and held_out.tsv, a line per measure."""
    for name, columns in (("loss", LOSS), ("held_out_loss", HELD_OUT)):
        lines = [row for row in rows if row[name] is not None]
        text = ["\t".join(columns)]
        text += ["\t".join(str(line[column]) for column in columns) for line in lines]
        write_text(folder / f"{name.removesuffix('_loss')}.tsv", "\n".join(text) + "\n")


def metrics(rows: list[dict], transcript: Transcript, params: dict) -> dict:
    """The numbers of metrics/train.json; bytes are per peer and round, measured on the wire."""
    parameters = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(params))
    last, rounds = rows[-1], len(rows)
    sent = last["bytes_up"] / rounds
    fetched = sum(
        check.bytes
        * (1 + sum(len(r.found) for r in entry.evidence.rulings if r.peer == check.peer))
        for entry in transcript.rounds
        for check in entry.evidence.checks
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
    """Where a run that extends this one goes on."""
    last = transcript.rounds[-1].round
    return {
        "step": last.step,
        "data_index": last.data_index + last.batch_size,
        "peers": transcript.header.run["peers"]["count"],
    }
