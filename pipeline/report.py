"""Stage report: one page that opens without a network, its plots, the model card -> data/report."""

import json

from lockstep.files import read_json, write_bytes, write_text
from pipeline import runfile
from pipeline.audit import verdict_text
from pipeline.pages import report_page, results_card, stage_results
from pipeline.pages.report_page import ReportFacts
from pipeline.pages.stage_results import CARD, PAGE, read_tsv
from pipeline.stage import artifacts, logs
from pipeline.stage.artifacts import METRICS, Paths
from pipeline.stage.keys import STAGES, needs


def run(run: runfile.Run, paths: Paths) -> None:
    """Write report.html, each plot, and the model card with results."""
    for stage in needs("report"):
        paths.need(stage)
    facts = _facts(paths)
    results = facts.results
    page, pictures = report_page.render(run, facts)
    with paths.building() as folder:
        for picture in pictures:
            write_bytes(folder / f"{picture.name}.png", picture.png)
        write_text(folder / PAGE, page)
        if results.verdict["accepted"]:
            exported = (paths.out("export") / CARD).read_text(encoding="utf-8")
            name, data = f"lockstep-{paths.keys.key('train')}", paths.keys.key("download")
            card = results_card.with_results(exported, results.evaluated, name, data)
            write_text(folder / CARD, card)
    print(f"report: {paths.out('report') / PAGE}")
    logs.say(f"report: {verdict_text.summarize(results.verdict)}")


def _facts(paths: Paths) -> ReportFacts:
    """Return what the stages left; it was checked against its hashes."""
    trained = paths.out("train")
    results = stage_results.read(trained, paths.out("witness"), paths.out("evaluate"))
    made = artifacts.read_made(paths.made("train"))
    rounds = (trained / "transcript" / "rounds.jsonl").read_text(encoding="utf-8")
    return ReportFacts(
        results=results,
        losses=read_tsv(trained / METRICS / "loss.tsv"),
        held_out=read_tsv(trained / METRICS / "held_out.tsv"),
        rounds=[json.loads(line) for line in rounds.splitlines()],
        shards=read_json(paths.out("download") / "shards.json"),
        environment=made["environment"] | results.header["environment"],
        files=artifacts.read_made(paths.made("export"))["files"],
        rounds_sha256=made["files"]["transcript/rounds.jsonl"]["sha256"],
        keys={stage: paths.keys.key(stage) for stage in STAGES},
    )
