"""A page that shows trainings side by side: losses, bytes, and where their run files differ."""

from collections.abc import Sequence
from typing import NamedTuple

from parts.tasks.scores import main_scores
from pipeline.audit import verdict_text
from pipeline.monitor.profile import RoundTimes
from pipeline.pages import plots
from pipeline.pages.known_settings import UNKNOWN, KnownSettings, differences
from pipeline.pages.templates import fill
from pipeline.stage.progress import size

TEMPLATE = "comparison.html.jinja"
LAST = 10  # the mean over a tenth of the rounds is a run's loss: one batch's is noise


class ComparedRun(NamedTuple):
    """A training, finished or in progress.

    Attributes:
      name: What the page calls it.
      settings: What is known of its run file.
      rows: Its loss.tsv.
      held_out: Its held_out.tsv.
      trained: Its train.json; of a training in progress, only rounds, tokens and bytes_up.
      times: Where the time of its rounds went, if it was profiled.
      verdict: Its verdict.json, if it was audited.
      evaluated: Its evaluate.json, if it was evaluated.
    """

    name: str
    settings: KnownSettings
    rows: list[dict[str, float]]
    held_out: list[dict[str, float]]
    trained: dict
    times: RoundTimes | None = None
    verdict: dict | None = None
    evaluated: dict | None = None

    @property
    def loss(self) -> float:
        """Mean training loss of the last tenth of the rounds, nats per token."""
        last = self.rows[-max(1, len(self.rows) // LAST) :]
        return sum(row["loss"] for row in last) / len(last)

    @property
    def numbers(self) -> dict[str, str]:
        """What the table at the top says of it."""
        trained, up = self.trained, self.trained["bytes_up"]
        numbers = {"Loss, mean over the last tenth of the rounds": f"{self.loss:.3f}"}
        if self.held_out:
            numbers["Held-out loss, last measured"] = f"{self.held_out[-1]['held_out_loss']:.3f}"
        for score in main_scores(self.evaluated["tasks"]) if self.evaluated else []:
            numbers[f"Score of the export, {score.task} {score.metric}"] = score.text
        if self.verdict:
            numbers["Verdict"] = verdict_text.summarize(self.verdict)
        numbers |= {"Rounds": f"{trained['rounds']:,}", "Tokens": f"{trained['tokens']:,}"}
        if "parameters" in trained:
            bits = trained["bits_per_parameter_and_round"]
            numbers["Parameters"] = f"{trained['parameters']:,}"
            numbers["Bits per parameter and round"] = f"{bits:.3g}"
        sent = {"Sent per peer and round": up, "Sent per peer, all rounds": up * trained["rounds"]}
        return numbers | {name: size(count) for name, count in sent.items()}


def render(runs: Sequence[ComparedRun]) -> str:
    """Return the page."""
    found = differences([run.settings for run in runs])
    return fill(
        TEMPLATE,
        title=" against ".join(run.name for run in runs),
        names=[run.name for run in runs],
        numbers=_side_by_side([run.numbers for run in runs]),
        pictures=plots.comparison_pictures(
            {run.name: run.rows for run in runs}, {run.name: run.held_out for run in runs}
        ),
        times=_side_by_side([_times(run) for run in runs]),
        differences=found,
        unknown=any(UNKNOWN in values for _, values in found),
    )


def _times(run: ComparedRun) -> dict[str, str]:
    """What was done in a round that was profiled, and how long it took."""
    if run.times is None:
        return {}
    return {name: f"{ms:,.1f} ms, {share:.1%}" for name, ms, share in run.times.rows()}


def _side_by_side(columns: Sequence[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """Rows of a table: a name, and each column's value."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, "") for column in columns]) for name in names]
