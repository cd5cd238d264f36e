"""Stage export: the accepted params in a format of others, or a refusal -> data/export."""

import logging
from pathlib import Path
from typing import Any

from lockstep.files import read_json, sha256_file, write_json, write_text
from lockstep.transcript.tensorfile import TensorFile
from lockstep.transcript.transcript import Transcript
from pipeline import runfile
from pipeline.audit import verdict_text
from pipeline.pages import card
from pipeline.pages.card import Facts
from pipeline.pages.stage_results import CARD, Results
from pipeline.stage import artifacts
from pipeline.stage.artifacts import METRICS, Paths
from pipeline.stage.keys import STAGES, upstream
from pipeline.subject import subject_of
from pipeline.weights import hf
from pipeline.weights.model_folder import TrainedModel

log = logging.getLogger(__name__)


def run(run: runfile.Run, paths: Paths) -> None:
    """Export what was trained and its model card or, if the run is refused, refused.json."""
    for stage in ("download", "convert", "train", "witness"):
        paths.need(stage)
    trained = paths.out("train")
    verdict = read_json(paths.out("witness") / "verdict.json")
    with paths.building() as folder:
        if not verdict["accepted"]:
            why = verdict_text.why_refused(verdict)
            write_json(folder / hf.REFUSED, {"why": why, "findings": verdict["findings"]})
            log.info(f"export: refused: {why}")
            return
        transcript = Transcript(trained / "transcript")
        model, last = transcript.header.model, transcript.snapshots[-1]
        params = TensorFile(transcript.folder / "snapshots" / f"{last:05}" / "params.safetensors")
        what = TrainedModel(model, params, paths.out("download"), checkpoint=trained / "hf")
        subject_of(run).exports.export(run, what, folder)
        text = card.render(_facts(paths, transcript, verdict, folder))
        write_text(folder / CARD, text)


# ---- What the model card is made of ----


def _facts(paths: Paths, transcript: Transcript, verdict: dict[str, Any], folder: Path) -> Facts:
    """Return the facts of an export in `folder`; its inputs were checked against their hashes."""
    shards_file, trained = paths.out("download") / "shards.json", paths.out("train")
    shards, start = read_json(shards_file), read_json(paths.out("convert") / "source.json")
    header = read_json(transcript.folder / "header.json")
    numbers = read_json(trained / METRICS / "train.json")
    # beside a workload's params is what its own code wrote, which readers of a card may not have
    params = folder / "params.safetensors"
    files = [*([params] if params.is_file() else sorted(folder.glob("*.safetensors"))), shards_file]
    return Facts(
        keys={stage: paths.keys.key(stage) for stage in STAGES if stage in upstream("export")},
        run_file=card.run_file(lambda _, name: paths.keys.table(name), shards, start),
        results=Results(header, numbers, verdict),
        transcript=transcript,
        shards=shards,
        start=start,
        packages=artifacts.read_made(paths.made("train"))["environment"],
        folder=folder,
        has_tokenizer=any(folder.glob("tokenizer*")),
        sha256={file.name: sha256_file(file) for file in files},
    )
