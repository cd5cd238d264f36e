"""Stage export: the accepted params as a Hugging Face folder, or a refusal -> data/export."""

import logging
import shutil
from typing import Any

from pipeline import runfile
from pipeline.pages import card
from pipeline.stage import artifacts
from pipeline.stage.artifacts import Paths
from pipeline.stage.progress import Progress
from pipeline.transcript.entry import Header
from pipeline.transcript.transcript import Transcript
from pipeline.weights import generation_config, hf
from pipeline.weights.tensorfile import TensorFile

log = logging.getLogger(__name__)

# Kinds of RoPE for which max_position_embeddings is more than a limit: "dynamic" computes its
# angles from it; for "yarn", transformers expects `factor` times the original length, or warns.
FIXED_CONTEXT = ("dynamic", "yarn")


def run(run: runfile.Run, paths: Paths) -> None:
    """Write a Hugging Face folder and its model card or, if the run is refused, refused.json."""
    for stage in ("download", "convert", "train", "witness"):
        paths.need(stage)
    trained = paths.out("train")
    verdict = artifacts.read_json(paths.out("witness") / "verdict.json")
    with paths.building() as folder:
        if not verdict["accepted"]:
            artifacts.write_json(folder / hf.REFUSED, {"findings": verdict["findings"]})
            log.info(f"export: refused: the audit has {len(verdict['findings'])} findings")
            return
        transcript = Transcript(trained / "transcript")
        last = transcript.snapshots[-1]
        params = TensorFile(transcript.folder / "snapshots" / f"{last:05}" / "params.safetensors")
        model = _model(transcript.header)
        with Progress("export", total=params.nbytes, unit="byte") as bar:
            hf.write_folder(folder, model, params, run.export.dtype, advance=bar.advance)
        # the tokenizer that made the tokens; else the one that came with the checkpoint
        tokenizer = paths.out("download") / "tokenizer"
        for file in (tokenizer if tokenizer.is_dir() else trained / "hf").iterdir():
            if file.name != hf.CONFIG:
                shutil.copyfile(file, folder / file.name)
        settings = generation_config.make(trained / "hf", model, folder)
        artifacts.write_json(folder / generation_config.NAME, settings)
        text = card.render(card.read(paths, transcript, verdict, folder))
        artifacts.write_text(folder / card.NAME, text)


def _model(header: Header) -> dict[str, Any]:
    """The model's config.json, with the context that it was trained on.

    If RoPE is computed from max_position_embeddings, another number would be another model.
    """
    _, model = hf.model_of(header.model, "the transcript's header")
    context = model.max_position_embeddings
    if model.rope.rope_type not in FIXED_CONTEXT:
        context = max(context, header.run["model"]["LLM"]["max_seq_len"])
    return header.model | {"max_position_embeddings": context}
