"""Stage export: the accepted params as a Hugging Face folder, or a refusal -> data/export."""

import logging

from pipeline import runfile
from pipeline.audit import verdict_text
from pipeline.pages import card, summary
from pipeline.stage import artifacts
from pipeline.stage.artifacts import Paths
from pipeline.stage.progress import Progress
from pipeline.transcript.transcript import Transcript
from pipeline.weights import hf, model_folder
from pipeline.weights.tensorfile import TensorFile

log = logging.getLogger(__name__)


def run(run: runfile.Run, paths: Paths) -> None:
    """Write a Hugging Face folder and its model card or, if the run is refused, refused.json."""
    for stage in ("download", "convert", "train", "witness"):
        paths.need(stage)
    trained = paths.out("train")
    verdict = artifacts.read_json(paths.out("witness") / "verdict.json")
    with paths.building() as folder:
        if not verdict["accepted"]:
            why = verdict_text.why_refused(verdict)
            artifacts.write_json(folder / hf.REFUSED, {"why": why, "findings": verdict["findings"]})
            log.info(f"export: refused: {why}")
            return
        transcript = Transcript(trained / "transcript")
        last = transcript.snapshots[-1]
        params = TensorFile(transcript.folder / "snapshots" / f"{last:05}" / "params.safetensors")
        header = transcript.header
        with Progress("export", total=params.nbytes, unit="byte") as bar:
            model_folder.write(
                folder,
                header.model,
                header.run["model"]["LLM"]["max_seq_len"],
                params,
                run.export.dtype,
                tokenizer=paths.out("download") / "tokenizer",
                checkpoint=trained / "hf",
                advance=bar.advance,
            )
        text = card.render(card.read(paths, transcript, verdict, folder))
        artifacts.write_text(folder / summary.CARD, text)
