"""Packages that a run needs besides those always installed, by key of the run file.

To add a need, add a row to NEEDS, here or in a part's preflight.py; `pipeline/extras.py` knows
what installs a module.
"""

from collections.abc import Collection, Iterator

from pipeline import extras, joints
from pipeline.monitor.sinks.tracker import SINKS
from pipeline.net.fsspec_files import MODULES
from pipeline.preflight.row import CheckRow, Mark, Need
from pipeline.runfile import Run, data

BUCKET = "gs://"


def _data_packages(run: Run) -> Iterator[str]:
    location = run.llm.data_location
    if isinstance(location, data.DataPreprocessed):
        yield "pyarrow"
    sources = getattr(location, "sources", (location,))
    for source in sources:
        address = getattr(source, "url", None) or getattr(source, "source", None) or ""
        if module := MODULES.get(address.partition("://")[0]):
            yield module


def _push_packages(run: Run) -> Iterator[str]:
    if run.export.every_epoch and any(to.startswith(BUCKET) for to in run.config.checkpointers):
        yield "google.auth"


NEEDS = (
    Need("download", "model.LLM.data_location", _data_packages),
    Need("train", "[runtime] sinks", lambda run: [SINKS[s].module for s in run.runtime.sinks]),
    Need("train", "[config] checkpointers", _push_packages),
    Need(
        "witness",
        "[witness] beacon",
        lambda run: ["py_ecc"] * run.witness.beacon.startswith("drand"),
    ),
)


def rows(run: Run, todo: Collection[str]) -> Iterator[CheckRow]:
    """Yield a row for each package that a stage of `todo` lacks, or one where it has them all."""
    needs = [*NEEDS, *(need for part in joints.offered("preflight") for need in part.NEEDS)]
    needed = {module: need for need in needs if need.stage in todo for module in need.modules(run)}
    for module, need in needed.items():
        if not extras.is_installed(module):
            yield CheckRow(Mark.FAILS, "packages", str(extras.lacking(need.key, module)))
    here = [module for module in needed if extras.is_installed(module)]
    if here:
        yield CheckRow(Mark.FINE, "packages", ", ".join(here))
