"""The results of a run, printed as a short table."""

import sys

from lockstep.files import read_json
from lockstep.machine.progress import size
from pipeline.audit import verdict_text
from pipeline.pages import stage_results
from pipeline.pages.stage_results import PAGE, Results, times
from pipeline.scores import main_scores
from pipeline.stage import logs
from pipeline.stage.artifacts import Paths, verify

SHOWN_STAGES = ("train", "witness", "export", "evaluate", "report")
LINES_OF_TEXT = 6


def show(paths: Paths) -> int:
    """Print the results as a table, and return the exit status: 1 if the export was refused."""
    for stage in SHOWN_STAGES:
        verify(paths.made(stage))
    results = stage_results.read(paths.out("train"), paths.out("witness"), paths.out("evaluate"))
    _print_table(_rows(results, paths), verdict_text.printable(results.evaluated["text"] or ""))
    if results.verdict["accepted"]:
        logs.say(f"The export is ready: {paths.out('export')}")
        return 0
    logs.say(f"REFUSED, no weights were exported: {verdict_text.why_refused(results.verdict)}")
    return 1


def _rows(results: Results, paths: Paths) -> list[tuple[str, str]]:
    trained, evaluated = results.trained, results.evaluated
    before, after = trained["held_out_loss_before"], results.held_out_loss
    loss = "not measured: nothing is held out, or the workload measures nothing"
    if results.chance is not None:
        loss = "not measured, since nothing is held out"
    if before is not None and after is not None:
        chance = "" if results.chance is None else f" (chance: {results.chance:.3f})"
        loss = f"{before:.3f} -> {after:.3f} {results.unit}{chance}"
    seen = verdict_text.seen_in_train(evaluated["held_out_seen"])
    bits, main = evaluated["bits_per_byte"], main_scores(evaluated["tasks"])
    fetched = trained["bytes_to_verify"]
    checked = f"{size(fetched)} of state fetched per peer and round, to recompute others' steps"
    unit, words = "tokens", 1
    if "rows" in read_json(paths.out("download") / "shards.json"):
        unit, words = "rows", results.header["run"]["model"]["LLM"]["max_seq_len"]
    up, data_parallel = trained["bytes_up"], trained["bytes_up_of_data_parallel"]
    return [
        ("held-out loss", loss),
        *([("measured on", on), ("held out", seen)] if (on := results.measured_on) else []),
        ("bits per byte", "not measured" if bits is None else f"{bits:.3f}"),
        *([("tasks", "; ".join(f"{score.task} {score.text}" for score in main))] if main else []),
        (unit, f"{trained['tokens'] // words:,} in {trained['rounds']:,} rounds"),
        (
            "sent",
            f"{size(up)} per peer and round; plain data parallelism sends {size(data_parallel)}, "
            f"{times(results.times_less)} as much",
        ),
        *([("verification", checked)] if fetched else []),
        ("verdict", verdict_text.summarize(results.verdict)),
        ("export", str(paths.out("export")) if results.verdict["accepted"] else "refused"),
        ("report", str(paths.out("report") / PAGE)),
    ]


def _print_table(rows: list[tuple[str, str]], text: str) -> None:
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    if generated := [line for line in text.splitlines() if line.strip()]:
        lines += ["generated text:", *(f"    {line}" for line in generated[:LINES_OF_TEXT])]
    for line in lines:
        if not sys.stdout.isatty():  # who reads it there may not expect UTF-8
            line = line.replace(verdict_text.UNPRINTABLE, "?")
            line = line.encode("ascii", "backslashreplace").decode()
        logs.say(line)
