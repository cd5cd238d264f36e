"""Stage convert: `model.LLM.checkpoint` -> data/init, Hugging Face weights as Flax params.

    params.safetensors   the params in float32, named by their paths joined with "/"
    hf/                  config.json and the tokenizer's files; for `Init` the fresh weights too
    source.json          the source: SHA-256 of each file and of all, the hub's commit or the
                         bucket's generations

For a run that extends an earlier one (`Run`), data/init also holds that run's final state.
"""

import logging
import math
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.files import sha256_file, write_json
from lockstep.machine import memory
from lockstep.machine.progress import Progress
from lockstep.tables.validation import choices
from pipeline import runfile
from pipeline.net.limits import FetchLimit
from pipeline.stage import artifacts, devices, pins
from pipeline.stage.artifacts import Paths
from pipeline.stage.untrusted_files import check_file, check_inside, expand, unchanged
from pipeline.subject import subject_of
from pipeline.tokens.tokenizer_files import MOST_BYTES, convert_older
from pipeline.weights import bucket, earlier_run, hf, hub_model
from pipeline.weights.fresh import fresh_params

log = logging.getLogger(__name__)

INIT = "model.LLM.checkpoint.Init.config"
TEMPLATES = "additional_chat_templates"  # a folder of a tokenizer, beside chat_template.jinja


def run(run: runfile.Run, paths: Paths) -> None:
    """Convert: create or read the model that the run starts from.

    Raises:
      LockstepError: The checkpoint is of an unsupported kind or of another architecture than the
        run file names, a file of it is missing or damaged, or it differs from `[pins] checkpoint`.
    """
    devices.keep_compiled(paths.store / "compiled")
    check_readable(run)
    architecture, checkpoint, subject = run.llm.architecture, run.llm.checkpoint, subject_of(run)
    name = runfile.variant_name(checkpoint)
    if checkpoint.tag().startswith("P2P"):
        log.info("convert: no peer trains before the first round, so none has params to give")
    with paths.building() as folder:
        match checkpoint:
            case runfile.CheckpointInit():
                source = _init(run, checkpoint, folder)
            case runfile.CheckpointHub() | runfile.CheckpointP2P():
                source = _hub(run, checkpoint, paths, folder)
            case runfile.CheckpointGcs() | runfile.CheckpointP2PGcs():
                fetched, generations = bucket.download(checkpoint, paths.store, run.runtime)
                read = _read(fetched, architecture, folder)
                source = dict(checkpoint) | generations | read
            case runfile.CheckpointRun(key=key):
                earlier = earlier_run.copy(key, paths, folder)
                subject.extend(run, earlier.model, f"{name}: run {key}", folder)
                source = {"key": key, "sha256": earlier.sha256}
            case _:
                source = subject.begins.first_params(run, folder)
        pinned = pins.check("checkpoint", run.pins.checkpoint, source["sha256"], name)
        write_json(folder / "source.json", {"checkpoint": checkpoint.tag()} | source)
    log.info(f"convert: read {name} (sha256 {source['sha256'][:12]}, {pinned})")


def check_readable(run: runfile.Run) -> None:
    """Check that the run's starting point can be read to be converted.

    Raises:
      LockstepError: There is none for its architecture, or for its kind of checkpoint.
    """
    architecture, checkpoint = run.llm.architecture, run.llm.checkpoint
    if architecture not in hf.ARCHITECTURES:
        raise LockstepError(
            f"model.LLM.architecture is {architecture}: this release cannot train it, "
            f"expected {', '.join(hf.ARCHITECTURES)}"
        )
    readable = subject_of(run).checkpoints
    if checkpoint.tag() not in readable:
        raise LockstepError(
            f"{runfile.variant_name(checkpoint)}: this release cannot read it, "
            f"expected {' or '.join(readable)}"
        )


# ---- Fresh weights ----


def fresh_config(run: runfile.Run, checkpoint: runfile.CheckpointInit) -> dict[str, Any]:
    """Return the config.json of a run's fresh weights, of which each key has a meaning."""
    where, architecture = INIT, run.llm.architecture
    hf_config = {"model_type": (hf.ARCHITECTURES[architecture] or [None])[0]} | checkpoint.config
    hf.check_architecture(architecture, hf_config, where)
    written = hf.model_of(hf_config, where)[1].to_hf()
    for key, value in hf_config.items():  # unlike a config of the hub, ours has no unused keys
        if key not in written:
            known = choices(sorted(written), key)
            raise LockstepError(f"{where}.{key}: unknown key, expected one of {known}")
        if value != written[key]:
            raise LockstepError(f"{where}.{key} is {value!r}, expected {written[key]!r}")
    return hf_config


def _init(run: runfile.Run, checkpoint: runfile.CheckpointInit, folder: Path) -> dict[str, Any]:
    """Write a Hugging Face folder of fresh weights, and read it like any other.

    All fresh weights are in memory while they are drawn; afterwards, a tensor at a time.
    """
    hf_config = fresh_config(run, checkpoint)
    model, model_config = hf.model_of(hf_config, INIT)
    memory.check(model.shapes(model_config), INIT, run.runtime.memory_gb)
    FetchLimit.count({INIT: 4 * sum(map(math.prod, hf.param_shapes(model, model_config).values()))})
    params = fresh_params(model, model_config, checkpoint.seed)
    (folder / "hf").mkdir()
    hf.write_folder(folder / "hf", hf_config, params, "float32")
    return {"seed": checkpoint.seed} | write_params(folder / "hf", folder)


# ---- A folder, the hub, a bucket ----


def _hub(
    run: runfile.Run,
    checkpoint: runfile.CheckpointHub | runfile.CheckpointP2P,
    paths: Paths,
    folder: Path,
) -> dict[str, Any]:
    """Read the local folder `repo_id` if it exists and no revision is given, else the hub."""
    source = expand(checkpoint.repo_id, "model.LLM.checkpoint.Hub.repo_id")
    commit = None
    if checkpoint.revision is not None or not source.is_dir():
        source = hub_model.download(
            checkpoint.repo_id, checkpoint.revision, paths.store, run.runtime
        )
        commit = source.name
    return dict(checkpoint) | {"commit": commit} | _read(source, run.llm.architecture, folder)


def _read(source: Path, architecture: str, folder: Path) -> dict[str, Any]:
    """Convert a model's folder, copy its other files, and return what source.json says of it."""
    small = [source / name for name in hf.SMALL if os.path.lexists(source / name)]
    for file in small:
        check_file(file, source, most=MOST_BYTES)
    hf.check_architecture(architecture, hf.read_config(source), source / hf.CONFIG)
    if (source / TEMPLATES).is_dir():
        log.warning(f"convert: warning: {source / TEMPLATES}: ignored; no export has them")
    weights = hf.weight_files(source)
    for file in weights:
        check_inside(file, source)
    with unchanged([*small, *weights]):
        companions = [file for file in small if file.name in hf.COMPANIONS]
        (folder / "hf").mkdir()
        for file in (source / hf.CONFIG, *companions):
            shutil.copyfile(file, folder / "hf" / file.name)
        convert_older(folder / "hf", str(source))
        described = write_params(source, folder, companions)
        hf.write_config(folder / "hf", hf.read_config(source), described["dtype"])
    return described


# ---- All of them ----


def write_params(source: Path, folder: Path, companions: Sequence[Path] = ()) -> dict[str, Any]:
    """Convert the model in `source` to params in `folder`; return its part of source.json."""
    model = hf.HfFolder(source)
    files = [source / hf.CONFIG, *hf.weight_files(source), *companions]
    if (source / hf.INDEX).is_file():
        files.append(source / hf.INDEX)
    hashing = ThreadPoolExecutor(1)  # takes about as long as the rest
    try:
        sha256 = hashing.map(sha256_file, files)
        with Progress("convert", total=model.nbytes, unit="byte") as bar:
            model.save(folder / "params.safetensors", bar.advance)
        hashes = {file.name: digest for file, digest in zip(files, sha256, strict=True)}
    finally:
        hashing.shutdown(cancel_futures=True)
    parameters = sum(math.prod(spec.shape) for spec in model.specs.values())
    log.info(f"convert: {model.hf_config['model_type']}, {parameters:,} parameters")
    return {
        "model_type": model.hf_config["model_type"],
        "parameters": parameters,
        "dtype": model.hf_config["dtype"],
        "files": hashes,
        "sha256": artifacts.listing_sha256(hashes.items()),
    }
