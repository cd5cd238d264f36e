"""Stage convert: `model.LLM.checkpoint` -> data/init, Hugging Face weights as Flax params.

    params.safetensors   the params in float32, named by their paths joined with "/"
    hf/                  config.json and the tokenizer's files; for `Init` the fresh weights too
    source.json          what was read: the SHA-256 of each file and of all, the hub's commit
                         or the bucket's generations

Training that goes on from an earlier run (`Run`) finds that run's state here as well.
"""

import logging
import math
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.stage import artifacts, devices, pins
from pipeline.stage.artifacts import Paths
from pipeline.stage.progress import Progress
from pipeline.weights import bucket, earlier_run, hf, hub

log = logging.getLogger(__name__)

# The model_types that an architecture of Psyche's stands for; HfAuto takes any that is known.
ARCHITECTURES = {
    "HfLlama": ("llama",),
    "HfDeepseek": ("deepseek_v2", "deepseek_v3"),
    "HfAuto": None,
}
CHECKPOINTS = (
    runfile.CheckpointHub,
    runfile.CheckpointGcs,
    runfile.CheckpointInit,
    runfile.CheckpointRun,
)


def run(run: runfile.Run, paths: Paths) -> None:
    """Makes or reads the model that the run starts from.

    Raises:
      LockstepError: there is no reader for the checkpoint, it is not the architecture that the run
        file names, a file of it is missing or damaged, or it is not what `[pins] checkpoint` holds.
    """
    devices.keep_compiled(paths.store / "compiled")
    architecture, checkpoint = run.llm.architecture, run.llm.checkpoint
    if architecture not in ARCHITECTURES:
        raise LockstepError(
            f"model.LLM.architecture is {architecture}: this release cannot train it, "
            f"expected {', '.join(ARCHITECTURES)}"
        )
    if not isinstance(checkpoint, CHECKPOINTS):
        raise LockstepError(
            f"{runfile.variant_name(checkpoint)}: this release cannot read it, "
            f"expected {' or '.join(known.tag() for known in CHECKPOINTS)}"
        )
    with paths.building() as folder:
        match checkpoint:
            case runfile.CheckpointInit():
                source = _init(checkpoint, architecture, folder)
            case runfile.CheckpointHub():
                source = _hub(checkpoint, architecture, paths, folder)
            case runfile.CheckpointGcs():
                source = _gcs(checkpoint, architecture, paths, folder)
            case runfile.CheckpointRun(key=key):
                sha256 = earlier_run.copy(key, paths, folder)
                _check_architecture(architecture, hf.read_config(folder / "hf"), f"run {key}")
                source = {"key": key, "sha256": sha256}
        what = f"model.LLM.checkpoint.{checkpoint.tag()}"
        pinned = pins.check("checkpoint", run.pins.checkpoint, source["sha256"], what)
        artifacts.write_json(folder / "source.json", {"checkpoint": checkpoint.tag()} | source)
    log.info(f"convert: read {what} (sha256 {source['sha256'][:12]}, {pinned})")


# ---- Fresh weights ----


def _init(checkpoint: runfile.CheckpointInit, architecture: str, folder: Path) -> dict[str, Any]:
    """Writes a real Hugging Face folder of fresh weights, and reads it like any other.

    They are drawn by the model's own init, all in memory; what follows holds a tensor at a time.
    """
    where = "model.LLM.checkpoint.Init.config"
    hf_config = {"model_type": (ARCHITECTURES[architecture] or [None])[0]} | checkpoint.config
    _check_architecture(architecture, hf_config, where)
    model, model_config = hf.model_of(hf_config, where)
    written = model_config.to_hf()
    for key, value in hf_config.items():  # hub configs hold much that nobody reads; ours may not
        if key not in written:
            known = ", ".join(sorted(written))
            raise LockstepError(f"{where}.{key}: unknown key, expected one of {known}")
        if value != written[key]:
            raise LockstepError(f"{where}.{key} is {value!r}, expected {written[key]!r}")
    with jax.default_device(_cpu()):
        params = model.init(model_config, checkpoint.seed)
    (folder / "hf").mkdir()
    hf.write_folder(folder / "hf", hf_config, params, "float32")
    return {"seed": checkpoint.seed} | write_params(folder / "hf", folder)


def _cpu() -> jax.Device:
    """Where fresh weights are drawn, on every machine: other devices differ in the last bit."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise LockstepError(
            f"JAX_PLATFORMS is {jax.config.jax_platforms!r}, expected cpu in it too: fresh "
            "weights are drawn there"
        ) from error


# ---- A folder, the hub, a bucket ----


def _hub(
    checkpoint: runfile.CheckpointHub, architecture: str, paths: Paths, folder: Path
) -> dict[str, Any]:
    """Reads a local folder where `repo_id` is one and no revision is given, else the hub's."""
    source = Path(checkpoint.repo_id).expanduser()
    commit = None
    if checkpoint.revision is not None or not source.is_dir():
        source = hub.download(checkpoint.repo_id, checkpoint.revision, paths.store / "hub")
        commit = source.name
    asked = {"repo_id": checkpoint.repo_id, "revision": checkpoint.revision, "commit": commit}
    return asked | _read(source, architecture, folder)


def _gcs(
    checkpoint: runfile.CheckpointGcs, architecture: str, paths: Paths, folder: Path
) -> dict[str, Any]:
    """Reads a bucket, by the generations that its manifest names."""
    read = bucket.download(checkpoint, paths.store / "gcs")
    asked = {
        "bucket": checkpoint.bucket,
        "prefix": checkpoint.prefix,
        "generation": checkpoint.generation,
    }
    return asked | read.source | _read(read.folder, architecture, folder)


def _read(source: Path, architecture: str, folder: Path) -> dict[str, Any]:
    """Reads a model's folder, and copies what stands beside the weights; describes what it was."""
    _check_architecture(architecture, hf.read_config(source), source / hf.CONFIG)
    companions = [source / name for name in hf.COMPANIONS if (source / name).is_file()]
    described = write_params(source, folder, companions)
    (folder / "hf").mkdir()
    for file in companions:
        shutil.copyfile(file, folder / "hf" / file.name)
    hf.write_config(folder / "hf", hf.read_config(source), described["dtype"])
    return described


# ---- Both ----


def _check_architecture(architecture: str, hf_config: dict[str, Any], where: object) -> None:
    found, expected = hf_config.get("model_type"), ARCHITECTURES[architecture]
    if expected is not None and found not in expected:
        names = " or ".join(map(repr, expected))
        raise LockstepError(
            f"{where}: model_type is {found!r}, expected {names} as "
            f"model.LLM.architecture = {architecture}; HfAuto takes any that is known"
        )


def write_params(source: Path, folder: Path, companions: Sequence[Path] = ()) -> dict[str, Any]:
    """Reads the model in `source`, writes its params into `folder`; describes what was read.

    Args:
      source: a Hugging Face folder.
      folder: where to; it exists.
      companions: files that were copied from `source`.

    Raises:
      LockstepError: a file is missing or damaged, or a tensor is missing, extra or of a wrong form.
    """
    model = hf.Folder(source)
    files = [source / hf.CONFIG, *hf.weight_files(source), *companions]
    if (source / hf.INDEX).is_file():
        files.append(source / hf.INDEX)
    beside = ThreadPoolExecutor(1)  # hashing takes about as long as the rest
    try:
        sha256 = beside.map(artifacts.sha256_file, files)
        with Progress("convert", total=model.nbytes, unit="byte") as bar:
            model.save(folder / "params.safetensors", bar.advance)
        hashes = {file.name: found for file, found in zip(files, sha256, strict=True)}
    finally:
        beside.shutdown(cancel_futures=True)
    parameters = sum(math.prod(form.shape) for form in model.forms.values())
    log.info(f"convert: {model.hf_config['model_type']}, {parameters:,} parameters")
    return {
        "model_type": model.hf_config["model_type"],
        "parameters": parameters,
        "dtype": model.hf_config["dtype"],
        "files": hashes,
        "sha256": artifacts.listing_sha256(hashes.items()),
    }
