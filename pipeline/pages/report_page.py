"""The report: one HTML page of what a run did."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from lockstep.machine.progress import size
from lockstep.transcript.windows import Window
from pipeline import runfile
from pipeline.audit import verdict_text
from pipeline.pages import plots
from pipeline.pages.stage_results import Results, times
from pipeline.pages.templates import fill, without_secrets
from pipeline.scores import scores

TEMPLATE = "report.html.jinja"
FOUND, REPLAYED, NOT_REPLAYED = "found", "replayed", "not replayed"


class ReportFacts(NamedTuple):
    """What the report of a run is made of."""

    results: Results  #: Header, numbers, verdict and evaluation.
    losses: list[dict[str, float]]  #: Rows of loss.tsv.
    held_out: list[dict[str, float]]  #: Rows of held_out.tsv.
    rounds: list[dict[str, Any]]  #: The transcript's rounds.
    shards: dict[str, Any]  #: shards.json.
    environment: dict[str, str]  #: Environment of the stage train.
    files: dict[str, Any]  #: The files of the export, as its made file lists them.
    rounds_sha256: str  #: SHA-256 of the transcript's rounds.
    keys: dict[str, str]  #: Key of each stage.


def render(run: runfile.Run, facts: ReportFacts) -> tuple[str, list[plots.Picture]]:
    """Return the report, a page of HTML, and its plots."""
    results, rounds = facts.results, facts.rounds
    pictures = plots.loss_pictures(results, facts.losses, facts.held_out, run.llm.counted)
    learning_rate = plots.learning_rate_picture(facts.losses)
    traffic = plots.traffic_picture(results)
    windows = run.snapshots(rounds[0]["round"]["step"] - 1).windows
    verdict, count = results.verdict, run.peers.count
    tables = run.model_dump(mode="json", exclude={"runtime"})  # which cannot change a result
    page = fill(
        TEMPLATE,
        **facts._asdict(),
        run=run,
        blame=verdict_text.why_refused(verdict),
        absences=verdict_text.absences(verdict),
        compared=verdict_text.compared(verdict),
        stated=verdict_text.stated(verdict),
        subtitle=f"{results.model_name} of {results.trained['parameters']:,} "
        f"parameters, {run.llm.optimizer.tag()}, {count} peers, layout {run.peers.named_layout}",
        tiles=_tiles(results, run),
        pictures=pictures,
        learning_rate=learning_rate,
        data=list(_data(run, facts.shards, rounds)),
        traffic=traffic,
        scores=scores(results.evaluated["tasks"]),
        peers=[_peer(peer, rounds) for peer in range(count)],
        windows=windows,
        grid=_grid(verdict, windows, count),
        chances=chances(verdict, len(windows)),
        prompt_and_rest=_split_text(results.evaluated),
        parameters={table: list(_flat(rows, "")) for table, rows in tables.items()},
    )
    return page, [*pictures, learning_rate, traffic]


# ---- Numbers at the top ----


def _tiles(results: Results, run: runfile.Run) -> list[tuple[str, str, str]]:
    """Return name, value and remark of each number that a report's reader looks for first."""
    trained, evaluated = results.trained, results.evaluated
    before, after = trained["held_out_loss_before"], results.held_out_loss
    loss = None if before is None or after is None else f"{before:.3f} → {after:.3f}"
    when = "at the end of training" if evaluated["held_out_loss"] is None else "exported weights"
    chance = "" if results.chance is None else f"; chance is {results.chance:.3f}"
    seen = verdict_text.seen_in_train(evaluated["held_out_seen"])
    measured = f"{results.unit}, {when}, on {results.measured_on}{chance}; {seen}"
    tokens = evaluated["tokens"]
    over_tokens = "" if tokens is None else f"over {tokens:,} held-out tokens"
    parallel = size(trained["bytes_up_of_data_parallel"])
    unit, words = run.llm.counted
    rounds = f"{trained['rounds']:,} rounds of {run.peers.count} peers"
    return [
        ("Held-out loss", loss or "not measured", measured if loss else ""),
        ("Bits per byte", _or_not(evaluated["bits_per_byte"], ".3f"), over_tokens),
        ("Perplexity", _or_not(evaluated["perplexity"], ",.1f"), over_tokens and "per token"),
        (
            "Sent per peer and round",
            size(trained["bytes_up"]),
            f"plain data parallelism sends {parallel}, {times(results.times_less)} as much",
        ),
        (
            "Bits per parameter and round",
            f"{trained['bits_per_parameter_and_round']:.3g}",
            f"{trained['parameters']:,} parameters; measured on the wire",
        ),
        (unit.capitalize(), f"{trained['tokens'] // words:,}", rounds),
    ]


def _or_not(value: float | None, form: str) -> str:
    return "not measured" if value is None else format(value, form)


# ---- Data ----


def _data(run: runfile.Run, shards: dict, rounds: list[dict]) -> Iterator[tuple[str, str]]:
    """Yield, for the report, where the tokens come from, and how many of them were used."""
    source, length, columns = shards["source"], run.llm.max_seq_len, len(shards["columns"])
    # a run that measures nothing trains on what is held out only by default
    of_all = shards["held_out_by_default"] and not run.held_out.sequences
    tokens = {"train": 0, "held_out": 0}
    for file in shards["files"]:
        tokens["train" if of_all else file["split"]] += file["tokens"] // columns
    first, last = rounds[0]["round"], rounds[-1]["round"]
    sequences = last["data_index"] + last["batch_size"] - first["data_index"]
    used = sequences * length
    yield "Source", without_secrets(str(source["read"]))
    yield "SHA-256 of the source", str(source["sha256"])
    share = f"{100 * used / tokens['train']:.3g} %"
    unit, words = run.llm.counted
    amounts = {split: f"{count // words:,} {unit}" for split, count in tokens.items()}
    begins_again = run.peers.passes > 1 or any(part["weight"] for part in shards["parts"])
    once = "some maybe more than once" if begins_again else "none twice"
    taken = f"{used:,} tokens, {share}: {sequences:,} sequences of {length:,}, {once}"
    if "rows" in shards:  # that are not tokens
        taken = f"{sequences:,} rows of {length:,} words of 4 bytes, {share}, {once}"
    yield "To train on", amounts["train"]
    yield "Used", taken
    if tokens["held_out"]:
        yield "Held out", f"{amounts['held_out']}, never trained on"
    if shards["vocab_size"] is not None:
        yield "Vocabulary", f"{shards['vocab_size']:,} tokens"


# ---- Audit ----


def _grid(
    verdict: dict, windows: list[Window], peers: int
) -> list[tuple[str, list[tuple[Window, str]]]]:
    """Return the report's windows by peer and their states; findings about no peer come last."""
    replayed = {(window["first"], window["peer"]) for window in verdict["replayed_windows"]}
    flagged = {
        (window.first, finding["peer"])
        for finding in verdict["findings"]
        # a finding about the first snapshot counts for the window that it opens
        for window in [next(w for w in windows if finding["round"] <= w.last)]
    }

    def state(window: Window, peer: int | None) -> str:
        if (window.first, peer) in flagged:
            return FOUND
        return REPLAYED if (window.first, peer) in replayed else NOT_REPLAYED

    whom: list[int | None] = [*range(peers)]
    if any(peer is None for _, peer in flagged):
        whom.append(None)
    return [(verdict_text.who(p), [(window, state(window, p)) for window in windows]) for p in whom]


def chances(verdict: dict, windows: int) -> list[tuple[int, float]]:
    """Return the report's pairs of n and the least chance to draw one of n false windows.

    `windows` is the number for each peer.
    """
    s = verdict_text.share(verdict)
    return [(n, verdict_text.chance(s, n)) for n in sorted({1, 2, windows}) if n <= windows]


def _peer(peer: int, rounds: list[dict]) -> dict:
    """Return what the report says of one peer, over all rounds: counts, and means."""
    name = str(peer)
    evidence = [entry["evidence"] for entry in rounds]
    sent = [e["messages"][name]["bytes"] for e in evidence if name in e["messages"]]
    arrived = [e["arrivals"][name] for e in evidence if name in e["arrivals"]]
    return {
        "peer": peer,
        "rounds": len(sent),
        "applied": sum(peer in r["decision"]["applied"] for r in rounds),
        "late": sum(peer in r["decision"]["late"] for r in rounds),
        "bytes": sum(sent) / len(sent) if sent else 0,
        "seconds": sum(arrived) / len(arrived) if arrived else 0,
    }


# ---- Run file and files ----


def _split_text(evaluated: dict) -> tuple[str, str] | None:
    """Return the report's text sample, as its prompt and the model's continuation."""
    text, prompt = evaluated["text"], evaluated["prompt"]
    if text is None:
        return None
    end = len(prompt) if text.startswith(prompt) else 0
    return verdict_text.printable(text[:end]), verdict_text.printable(text[end:])


def _flat(value: object, name: str) -> Iterator[tuple[str, str]]:
    """Yield for the report the dotted name and JSON of each value in a table that is not null."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else key)
    elif value is not None:
        yield name, json.dumps(value, ensure_ascii=False)
