"""Stage export: the accepted params as a Hugging Face folder -> data/export; or a refusal."""

import logging
import shutil

from pipeline import artifacts, config, hf
from pipeline.artifacts import Paths
from pipeline.checkpoint import load_nested
from pipeline.swarm.entry import Header
from pipeline.swarm.transcript import Transcript

log = logging.getLogger(__name__)


def run(run: config.Run, paths: Paths) -> None:
    """Writes config.json, safetensors and tokenizer files; or refused.json, and no weights."""
    shards, trained = paths.need("download"), paths.need("train")
    verdict = artifacts.read_json(paths.need("witness") / "verdict.json")
    with paths.building() as folder:
        if not verdict["accepted"]:
            artifacts.write_json(folder / hf.REFUSED, {"findings": verdict["findings"]})
            log.info(f"export: refused: the witness has {len(verdict['findings'])} findings")
            return
        transcript = Transcript(trained / "transcript")
        last = transcript.snapshots[-1]
        params = load_nested(transcript.folder / "snapshots" / f"{last:05}" / "params.safetensors")
        hf.write_folder(folder, _model(transcript.header), params, run.export.dtype)
        # the tokenizer that made the tokens; else the one that came with the checkpoint
        tokenizer = shards / "tokenizer"
        for file in (tokenizer if tokenizer.is_dir() else trained / "hf").iterdir():
            if file.name != "config.json":
                shutil.copyfile(file, folder / file.name)


def _model(header: Header) -> dict:
    """The model's config.json; by now it was trained on sequences of max_seq_len."""
    _, model = hf.model_of(header.model, "the transcript's header")
    context = max(model.max_position_embeddings, header.run["model"]["LLM"]["max_seq_len"])
    return header.model | {"max_position_embeddings": context}
