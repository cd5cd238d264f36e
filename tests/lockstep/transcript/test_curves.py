"""The curves and numbers of a training, read off its transcript."""

from pathlib import Path

import numpy as np

from lockstep.protocol.attestation import Check, Claim, Ruling
from lockstep.protocol.round import Decision, Message, Round
from lockstep.transcript import curves
from lockstep.transcript.entry import Entry, Header
from lockstep.transcript.transcript import Transcript, Writer
from lockstep.transcript.windows import Snapshots
from tests.lockstep.protocol import records


def entry(
    step: int,
    sizes: dict[int, int],
    batch: int,
    held_out: float | None,
    *,
    checked: int = 0,
    discarded: int = 0,
) -> Entry:
    """A round of 4 peers, of whom those in `sizes` sent as many bytes; the messages of the first
    were taken again by peer 3, and by 2 others, or not applied."""
    peers, each = tuple(sizes), batch // len(sizes)
    spans = {peer: (place * each, place * each + each - 1) for place, peer in enumerate(peers)}
    found = Claim("00" * 32, "00" * 32)
    return records.entry(
        Round(step, 0, 1, 10 * step, batch, (0, 1, 2, 3), spans, (), (0,), ()),
        records.evidence(
            {peer: Message("00" * 32, size) for peer, size in sizes.items()},
            arrivals=dict.fromkeys(peers, 0.5),
            checks=tuple(Check(3, peer, found, 1.0, 60) for peer in peers[:checked]),
            rulings=(Ruling(3, 0, dict.fromkeys((1, 2), found)),) if checked else (),
        ),
        Decision(peers[discarded:], (), (), {}, 1, 0.5, 2.0 * step),
        loss=8.0 - step,
        held_out_loss=held_out,
        held_out_stderr=None if held_out is None else 0.25,
    )


def written(folder: Path, **of_both: int) -> Transcript:
    peers, links = {"count": 4}, {"topology": "broadcast"}
    run = {"model": {"LLM": {"max_seq_len": 16}}, "peers": peers, "links": links}
    writer = Writer(folder, Snapshots(0, 2, every=10))
    known = {"key": "k", "run": run, "model": {}, "environment": {}, "bitwise": True}
    writer.header(Header(**known, held_out_loss=9.0, held_out_rows=(64, 640)))
    writer.round(entry(1, dict.fromkeys(range(4), 100), 8, None, **of_both), {})
    writer.round(entry(2, {0: 200, 1: 200}, 2, 7.5, **of_both), {})  # two peers had no work
    return Transcript(folder)


def test_bytes_and_tokens_add_up_over_peers_and_rounds(tmp_path):
    first, second = curves.rows(written(tmp_path))
    assert (first["tokens"], second["tokens"]) == (8 * 16, 10 * 16)
    # sent by a peer in the mean of all 4; each receives what the 3 others send
    assert (first["bytes_up"], second["bytes_up"]) == (100, 200)
    assert (first["bytes_down"], second["bytes_down"]) == (300, 600)
    assert (first["seconds"], second["seconds"]) == (2.0, 4.0)


def test_metrics_are_per_peer_and_round(tmp_path):
    transcript = written(tmp_path)
    params = {"a": np.zeros((4, 5)), "b": np.zeros(5)}
    found = curves.metrics(curves.rows(transcript), transcript, params, local_steps=10)
    assert found == {
        "rounds": 2,
        "tokens": 160,
        "parameters": 25,
        "loss": 6.0,
        "held_out_loss_before": 9.0,
        "held_out_loss": 7.5,
        "held_out_stderr": 0.25,
        "held_out_rows": (64, 640),
        "bytes_up": 100.0,
        "bytes_down": 300.0,
        "bytes_up_of_data_parallel": 10 * 100,  # a gradient in each local step
        "bytes_to_verify": 0.0,
        "bits_per_parameter_and_round": 32.0,
        "simulated_seconds": 4.0,
    }


def test_messages_that_nobody_applied_count_as_bytes_and_not_as_tokens(tmp_path):
    transcript = written(tmp_path, discarded=1)
    first, second = curves.rows(transcript)
    assert (first["tokens"], second["tokens"]) == (6 * 16, 7 * 16)
    assert second["bytes_up"] == 200


def test_states_that_verifiers_and_tie_breakers_fetched_are_bytes_to_verify(tmp_path):
    transcript = written(tmp_path, checked=2)
    params = {"a": np.zeros(5)}
    found = curves.metrics(curves.rows(transcript), transcript, params)
    # in each of two rounds: peer 0's state to one verifier and two others, peer 1's to one; 4 peers
    assert found["bytes_to_verify"] == 2 * (3 * 60 + 60) / 2 / 4


def by_thousandths(step):
    """A schedule that no float64 is equal to, by step."""
    return np.float32(step) / np.float32(1000)


def test_a_round_in_which_nobody_trained_has_no_loss_and_no_line(tmp_path):
    transcript = written(tmp_path / "transcript")
    rows = curves.rows(transcript)
    rows[-1]["loss"] = None
    curves.write(rows, None, by_thousandths, tmp_path)
    assert len((tmp_path / "loss.tsv").read_text().splitlines()) == 2
    assert curves.metrics(rows, transcript, {"a": np.zeros(5)})["loss"] == 7.0


def test_tables_have_a_line_per_round_and_a_line_per_measure(tmp_path):
    transcript = written(tmp_path / "transcript")
    curves.write(curves.rows(transcript), transcript.header, by_thousandths, tmp_path)
    loss = (tmp_path / "loss.tsv").read_text().splitlines()
    assert loss[0].split("\t") == list(curves.COLUMNS["loss"])
    lines = [line.split("\t") for line in loss[1:]]
    assert [(line[0], line[1], line[-1]) for line in lines] == [
        ("1", "7.0", "0.001"), ("2", "6.0", "0.002"),
    ]  # fmt: skip
    lines = (tmp_path / "held_out.tsv").read_text().splitlines()[1:]
    assert lines == ["0\t9.0\t\t0\t0\t0.0", "2\t7.5\t0.25\t160\t200\t4.0"]


def test_the_held_out_curve_begins_before_the_first_round(tmp_path):
    transcript = written(tmp_path / "transcript")
    rows = curves.rows(transcript)
    extended = [row | {"step": row["step"] + 40} for row in rows]
    assert curves.held_out(extended, transcript.header)[0]["step"] == 40


def test_an_extended_run_goes_on_after_the_last_sequence(tmp_path):
    assert curves.final(written(tmp_path)) == {"step": 2, "data_index": 22, "peers": 4}


def test_a_transcript_cut_back_and_written_again_is_the_same(tmp_path):
    folder = tmp_path / "transcript"
    writer = Writer(folder, Snapshots(0, 5, every=2))
    entries = [entry(step, {0: 3, 1: 3}, 2, None) for step in range(1, 6)]
    for e in entries:
        writer.round(e, {0: bytes([e.round.step] * 3), 1: bytes([e.round.step + 100] * 3)})
    whole = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for step in (3, 0, 5):
        writer.cut(step)
        for e in entries[step:]:
            writer.round(e, {0: bytes([e.round.step] * 3), 1: bytes([e.round.step + 100] * 3)})
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == whole
    assert {p.stem for p in (folder / "payloads").iterdir()} == {"00001", "00003", "00005"}
    last = Transcript(folder).rounds[-1].evidence.messages[1]
    assert Transcript(folder).payload(last) == bytes([105] * 3)
