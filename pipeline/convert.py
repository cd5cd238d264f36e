"""Stage convert: `model.LLM.checkpoint` -> data/init, Hugging Face weights as Flax params.

    params.safetensors   the params in float32, named by their paths joined with "/"
    hf/                  config.json and the tokenizer's files; for `Init` the fresh weights too
    source.json          what was read: the SHA-256 of each file and of all, the hub's commit

Training that goes on from an earlier run (`Run`) finds that run's state here as well.
"""

import hashlib
import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from pipeline import artifacts, config, devices, earlier, hf, pins
from pipeline.artifacts import Paths
from pipeline.checkpoint import save_tree
from pipeline.errors import LockstepError

log = logging.getLogger(__name__)

# The model_types that an architecture of Psyche's stands for; HfAuto takes any that is known.
ARCHITECTURES = {
    "HfLlama": ("llama",),
    "HfDeepseek": ("deepseek_v2", "deepseek_v3"),
    "HfAuto": None,
}
CHECKPOINTS = (config.CheckpointHub, config.CheckpointInit, config.CheckpointRun)
# What may stand beside the weights; nothing else is fetched or copied: no code, no pickle.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
)


def run(run: config.Run, paths: Paths) -> None:
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
            f"{config.variant_name(checkpoint)}: this release cannot read it, "
            f"expected {' or '.join(known.tag() for known in CHECKPOINTS)}"
        )
    with paths.building() as folder:
        match checkpoint:
            case config.CheckpointInit():
                source = _init(checkpoint, architecture, folder)
            case config.CheckpointHub():
                source = _hub(checkpoint, architecture, paths, folder)
            case config.CheckpointRun(key=key):
                sha256 = earlier.copy(key, paths, folder)
                _check_architecture(architecture, hf.read_config(folder / "hf"), f"run {key}")
                source = {"key": key, "sha256": sha256}
        what = f"model.LLM.checkpoint.{checkpoint.tag()}"
        pinned = pins.check("checkpoint", run.pins.checkpoint, source["sha256"], what)
        artifacts.write_json(folder / "source.json", {"checkpoint": checkpoint.tag()} | source)
    log.info(f"convert: read {what} (sha256 {source['sha256'][:12]}, {pinned})")


# ---- Fresh weights ----


def _init(checkpoint: config.CheckpointInit, architecture: str, folder: Path) -> dict[str, Any]:
    """Writes a real Hugging Face folder of fresh weights, and reads it like any other."""
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
    return {"seed": checkpoint.seed} | _write(folder / "hf", folder)


def _cpu() -> jax.Device:
    """Where fresh weights are drawn, on every machine: other devices differ in the last bit."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise LockstepError(
            f"JAX_PLATFORMS is {jax.config.jax_platforms!r}, expected cpu in it too: fresh "
            "weights are drawn there"
        ) from error


# ---- A folder, or the hub ----


def _hub(
    checkpoint: config.CheckpointHub, architecture: str, paths: Paths, folder: Path
) -> dict[str, Any]:
    """Reads a local folder where `repo_id` is one and no revision is given, else the hub's."""
    source = Path(checkpoint.repo_id).expanduser()
    commit = None
    if checkpoint.revision is not None or not source.is_dir():
        source = _download(checkpoint, paths.store / "hub")
        commit = source.name
    _check_architecture(architecture, hf.read_config(source), source / hf.CONFIG)
    companions = [source / name for name in COMPANIONS if (source / name).is_file()]
    described = _write(source, folder, companions)
    (folder / "hf").mkdir()
    for file in companions:
        shutil.copyfile(file, folder / "hf" / file.name)
    hf.write_config(folder / "hf", hf.read_config(source), described["dtype"])
    asked = {"repo_id": checkpoint.repo_id, "revision": checkpoint.revision, "commit": commit}
    return asked | described


def _download(checkpoint: config.CheckpointHub, cache: Path) -> Path:
    """Fetches a model from the hub ($HF_ENDPOINT, where set) into `cache`, what is new of it."""
    from huggingface_hub import snapshot_download

    name = f"model.LLM.checkpoint.Hub: {checkpoint.repo_id}"
    if checkpoint.revision is not None:
        name += f" at {checkpoint.revision}"
    try:
        folder = snapshot_download(
            checkpoint.repo_id,
            revision=checkpoint.revision,
            cache_dir=cache,
            allow_patterns=[hf.CONFIG, hf.INDEX, "model*.safetensors", *COMPANIONS],
        )
    except Exception as error:  # the client's, the network's and the file system's: dozens of kinds
        lines = [line.strip(" .") for line in str(error).splitlines() if line.strip()]
        said = ": ".join(lines[:2])  # what follows is advice
        raise LockstepError(f"{name}: {said}, expected a folder or a model on the hub") from error
    folder = Path(folder)
    for file in sorted(folder.iterdir()):
        _check_download(name, file)
    if checkpoint.revision != folder.name:
        log.warning(
            f"convert: warning: {name} is commit {folder.name} today; "
            "set revision to that, so that the run stays the same"
        )
    return folder


def _check_download(name: str, file: Path) -> None:
    """Compares a file with the hash that the hub gave, which its client does not do.

    The cache names a blob after it: the SHA-256 of a large file, the SHA-1 that git gives others.
    """
    blob = file.resolve()
    expected = blob.name
    if not re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", expected):
        return  # a file system without symbolic links, or another server's kind of tag
    if len(expected) == 64:
        found = artifacts.sha256_file(blob)
    else:
        content = blob.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if found != expected:
        blob.unlink()
        file.unlink()
        raise LockstepError(
            f"{name}: {file.name} has hash {found}, expected {expected}; "
            "the damaged copy is removed: run again"
        )


# ---- Both ----


def _check_architecture(architecture: str, hf_config: dict[str, Any], where: object) -> None:
    found, expected = hf_config.get("model_type"), ARCHITECTURES[architecture]
    if expected is not None and found not in expected:
        names = " or ".join(map(repr, expected))
        raise LockstepError(
            f"{where}: model_type is {found!r}, expected {names} as "
            f"model.LLM.architecture = {architecture}; HfAuto takes any that is known"
        )


def _write(source: Path, folder: Path, companions: Sequence[Path] = ()) -> dict[str, Any]:
    """Reads the model in `source`, writes its params into `folder`, describes what was read."""
    hf_config, params = hf.read_folder(source)
    save_tree(folder / "params.safetensors", params)
    files = [source / hf.CONFIG, *hf.weight_files(source), *companions]
    if (source / hf.INDEX).is_file():
        files.append(source / hf.INDEX)
    hashes = {file.name: artifacts.sha256_file(file) for file in files}
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    log.info(f"convert: {hf_config['model_type']}, {parameters:,} parameters")
    return {
        "model_type": hf_config["model_type"],
        "parameters": parameters,
        "dtype": hf_config["dtype"],
        "files": hashes,
        "sha256": artifacts.listing_sha256(hashes.items()),
    }
