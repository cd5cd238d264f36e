"""Stage report: one page that opens without a network, and its plots -> data/report."""

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline import runfile
from pipeline.audit import verdict_text
from pipeline.pages import plots, summary
from pipeline.pages.summary import Results, size, times
from pipeline.stage import artifacts
from pipeline.stage.artifacts import METRICS, Paths
from pipeline.stage.keys import STAGES

TEMPLATE = Path(__file__).parent / "pages" / "report.html.jinja"
FOUND, REPLAYED, NOT_REPLAYED = "found", "replayed", "not replayed"


def run(run: runfile.Run, paths: Paths) -> None:
    """Writes report.html, and beside it each plot as it looks on a light page."""
    trained, verdict = paths.need("train"), paths.need("witness")
    evaluated = paths.need("evaluate")
    paths.need("export")  # only its list of files is shown
    results = summary.read(trained, verdict, evaluated)
    rows = read_tsv(trained / METRICS / "loss.tsv")
    measured = read_tsv(trained / METRICS / "held_out.tsv")
    pictures = plots.loss_pictures(results, rows, measured)
    traffic = plots.traffic_picture(results)
    rounds = [json.loads(line) for line in _lines(trained / "transcript" / "rounds.jsonl")]
    windows = run.snapshots(rounds[0]["round"]["step"] - 1).windows
    page = _render(
        run=run,
        results=results,
        blame=verdict_text.blame(results.verdict["findings"]),
        absences=verdict_text.absences(results.verdict),
        subtitle=_subtitle(run, results),
        tiles=_tiles(results, run.peers.count),
        pictures=pictures,
        traffic=traffic,
        peers=[_peer(peer, rounds) for peer in range(run.peers.count)],
        windows=windows,
        grid=_grid(results.verdict, windows, run.peers.count),
        chances=_chances(
            results.verdict,
            windows,
            run.peers.count,
            dense=_is_dense(rounds),
            percent=run.witness.replay_percent,
        ),
        prompt_and_rest=_split_text(results.evaluated),
        parameters=_parameters(run),
        environment=_made(paths, "train")["environment"] | results.header["environment"],
        files=_made(paths, "export")["files"],
        keys={stage: paths.keys.key(stage) for stage in STAGES},
    )
    with paths.building() as folder:
        for picture in (*pictures, traffic):
            artifacts.write_bytes(folder / f"{picture.name}.png", picture.light)
        artifacts.write_text(folder / summary.PAGE, page)
    print(f"report: {paths.out('report') / summary.PAGE}")
    print(f"report: {verdict_text.summarize(results.verdict)}")


def _render(**shown: object) -> str:
    """The page; every value is escaped, and one that is missing is an error."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "caught": verdict_text.caught,
        "peers": verdict_text.peers,
        "size": size,
        "times": times,
        "who": verdict_text.who,
        "seed_origin": verdict_text.seed_origin,
    }
    return environment.get_template(TEMPLATE.name).render(shown) + "\n"


# ---- Numbers at the top ----


def _subtitle(run: runfile.Run, results: Results) -> str:
    """What was trained by whom, in one line."""
    model, trained = results.header["model"]["model_type"], results.trained
    return (
        f"{model} of {trained['parameters']:,} parameters, {run.llm.optimizer.tag()}, "
        f"{run.peers.count} peers, layout {run.peers.layout}"
    )


def _tiles(results: Results, peers: int) -> list[tuple[str, str, str]]:
    """Name, value and remark of the numbers that a reader looks for first."""
    trained, evaluated = results.trained, results.evaluated
    before, after = trained["held_out_loss_before"], results.held_out_loss
    loss = None if before is None or after is None else f"{before:.3f} → {after:.3f}"
    where = "in training" if evaluated["held_out_loss"] is None else "of the exported weights"
    measured = f"nats per token, {where}; a model that knows nothing has {results.chance:.3f}"
    tokens = evaluated["tokens"]
    of_tokens = "" if tokens is None else f"over {tokens:,} held-out tokens"
    parallel = size(trained["bytes_up_of_data_parallel"])
    return [
        ("Held-out loss", loss or "not measured", measured if loss else ""),
        ("Bits per byte", _or_not(evaluated["bits_per_byte"], ".3f"), of_tokens),
        ("Perplexity", _or_not(evaluated["perplexity"], ",.1f"), of_tokens and "per token"),
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
        ("Tokens", f"{trained['tokens']:,}", f"{trained['rounds']:,} rounds of {peers} peers"),
    ]


def _or_not(value: float | None, form: str) -> str:
    return "not measured" if value is None else format(value, form)


# ---- Witness ----


def _grid(
    verdict: dict, windows: list[runfile.Window], peers: int
) -> list[tuple[str, list[tuple[runfile.Window, str]]]]:
    """For each peer, what was done with each of its windows; findings about nobody come last."""
    replayed = {(window["first"], window["peer"]) for window in verdict["replayed_windows"]}
    found = {
        (window.first, finding["peer"])
        for finding in verdict["findings"]
        # a finding about the first snapshot counts for the window that it opens
        for window in [next(w for w in windows if finding["round"] <= w.last)]
    }

    def state(window: runfile.Window, peer: int | None) -> str:
        if (window.first, peer) in found:
            return FOUND
        return REPLAYED if (window.first, peer) in replayed else NOT_REPLAYED

    whom: list[int | None] = [*range(peers)]
    if any(peer is None for _, peer in found):
        whom.append(None)
    return [(verdict_text.who(p), [(window, state(window, p)) for window in windows]) for p in whom]


def _chances(
    verdict: dict, windows: list[runfile.Window], peers: int, *, dense: bool, percent: float
) -> list[tuple[int, float]]:
    """How many windows a peer lies in, and the chance that one of them is in the sample.

    1 - C(N - k, n) / C(N, n): n of N windows are drawn, and k are false. Where messages are dense
    all peers' windows are drawn together. Windows that the run file names are no part of it.
    """
    together = peers if dense else 1
    N = len(windows) * peers // together
    drawn = -int(-N * percent // 100)
    n = min(drawn, len(verdict["replayed_windows"]) // together)  # none where the audit refused
    counts = sorted({1, 2, len(windows)} & set(range(1, len(windows) + 1)))
    return [(k, 1 - math.comb(N - k, n) / math.comb(N, n)) for k in counts]


def _is_dense(rounds: list[dict]) -> bool:
    """Whether messages were too large to be kept."""
    return not any(
        message["payload"] for r in rounds for message in r["evidence"]["messages"].values()
    )


def _peer(peer: int, rounds: list[dict]) -> dict:
    """What one peer did, over all rounds."""
    name = str(peer)
    sent = [
        r["evidence"]["messages"][name]["bytes"]
        for r in rounds
        if name in r["evidence"]["messages"]
    ]
    arrived = [r["evidence"]["arrivals"][name] for r in rounds if name in r["evidence"]["arrivals"]]
    return {
        "peer": peer,
        "rounds": len(sent),
        "applied": sum(peer in r["decision"]["applied"] for r in rounds),
        "late": sum(peer in r["decision"]["late"] for r in rounds),
        "bytes": sum(sent) / len(sent) if sent else 0,
        "seconds": sum(arrived) / len(arrived) if arrived else 0,
    }


# ---- What was run ----


def _split_text(evaluated: dict) -> tuple[str, str] | None:
    """The text sample as its prompt and what the model made of it."""
    text, prompt = evaluated["text"], evaluated["prompt"]
    if text is None:
        return None
    place = len(prompt) if text.startswith(prompt) else 0
    return verdict_text.printable(text[:place]), verdict_text.printable(text[place:])


def _parameters(run: runfile.Run) -> dict[str, list[tuple[str, str]]]:
    """The run file by top-level table, each value by its dotted name; [runtime] changes nothing."""
    dumped = run.model_dump(mode="json", exclude={"runtime"})
    return {table: list(_flat(dumped[table], "")) for table in dumped}


def _flat(value: object, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else key)
    elif value is not None:
        yield name, json.dumps(value, ensure_ascii=False)


def _made(paths: Paths, stage: str) -> dict:
    return artifacts.read_json(paths.root / paths.keys.made(stage))


def read_tsv(path: Path) -> list[dict[str, float]]:
    """The lines of a table of numbers, by column."""
    lines = csv.DictReader(_lines(path), delimiter="\t")
    return [{name: float(value) for name, value in line.items()} for line in lines]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()
