"""Stage report: one page that opens without a network, and its plots -> data/report."""

from pipeline import runfile
from pipeline.audit import verdict_text
from pipeline.pages import report, summary
from pipeline.stage import artifacts
from pipeline.stage.artifacts import Paths
from pipeline.stage.keys import needs


def run(run: runfile.Run, paths: Paths) -> None:
    """Write report.html, and beside it each plot as drawn for a light page."""
    for stage in needs("report"):
        paths.need(stage)
    results = summary.read(*(paths.out(stage) for stage in ("train", "witness", "evaluate")))
    page, pictures = report.render(run, paths, results)
    with paths.building() as folder:
        for picture in pictures:
            artifacts.write_bytes(folder / f"{picture.name}.png", picture.light)
        artifacts.write_text(folder / summary.PAGE, page)
    print(f"report: {paths.out('report') / summary.PAGE}")
    print(f"report: {verdict_text.summarize(results.verdict)}")
