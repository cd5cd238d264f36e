"""Stage report: one page that opens without a network, its plots, the model card -> data/report."""

from pipeline import runfile
from pipeline.audit import verdict_text
from pipeline.pages import report_page, results_card, summary
from pipeline.stage import artifacts
from pipeline.stage.artifacts import Paths
from pipeline.stage.keys import needs


def run(run: runfile.Run, paths: Paths) -> None:
    """Write report.html, each plot as drawn for a light page, and the model card with results."""
    for stage in needs("report"):
        paths.need(stage)
    results = summary.read(*(paths.out(stage) for stage in ("train", "witness", "evaluate")))
    page, pictures = report_page.render(run, paths, results)
    with paths.building() as folder:
        for picture in pictures:
            artifacts.write_bytes(folder / f"{picture.name}.png", picture.light)
        artifacts.write_text(folder / summary.PAGE, page)
        if results.verdict["accepted"]:
            own = (paths.out("export") / summary.CARD).read_text(encoding="utf-8")
            name, data = f"lockstep-{paths.keys.key('train')}", paths.keys.key("download")
            whole = results_card.with_results(own, results.evaluated, name, data)
            artifacts.write_text(folder / summary.CARD, whole)
    print(f"report: {paths.out('report') / summary.PAGE}")
    print(f"report: {verdict_text.summarize(results.verdict)}")
