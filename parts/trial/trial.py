"""`lockstep try`: preset.toml with the values of Psyche's flags, and the stages that train it.

Each optimizer has a folder in --out, `adamw` or `distro`; what was downloaded is in `store`.
"""

import argparse
import os
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any, NoReturn

import models
from lockstep.errors import LockstepError
from lockstep.files import write_named
from pipeline import runfile
from pipeline.command_options import whole
from pipeline.run_stage import run_stage
from pipeline.runfile.as_text import run_file, toml
from pipeline.sources.token_files.listing import EXTENSIONS
from pipeline.stage.artifacts import Paths
from pipeline.toml_file import read_toml
from pipeline.weights import hf

FLAGS = read_toml(Path(__file__).with_name("flags.toml"))
PRESET = Path(__file__).with_name("preset.toml").read_text(encoding="utf-8")
Flags = dict[str, Any]  # each flag's value, by its name


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LockstepError(f"lockstep try: {message}; `lockstep try --help` lists the flags")


def parse(arguments: list[str]) -> Flags:
    """Return the value of every flag of a trial that a command line has, or by default."""
    parser = _Parser(prog="lockstep try", usage="lockstep try [FLAG ...]", allow_abbrev=False)
    for name, flag in FLAGS.items():
        kind, default = type(flag["default"]), flag["default"]
        text = f"{flag['goes_to']} (default {default})" if default else flag["goes_to"]
        how: Flags = {"type": whole if kind is int else kind, "metavar": "X"}
        how = {"action": "store_true"} if kind is bool else how
        parser.add_argument(f"--{name}", dest=name, default=argparse.SUPPRESS, help=text, **how)
    given = vars(parser.parse_args(arguments))
    flags = {name: flag["default"] for name, flag in FLAGS.items()} | given
    cases = {  # what holds of this command line; a flag is `idle` in one of them
        f"with --data-provider {flags['data-provider']}": True,
        "with --distro": flags["distro"],
        "without --distro": not flags["distro"],
        "with Parquet files": _is_parquet(flags),
        "with a model of transformers": _is_of_transformers(flags),
    }
    for name in given:
        flag = FLAGS[name]
        if flags[name] not in flag.get("only", [flags[name]]):
            expected = " or ".join(str(value) for value in flag["only"] if value != "")
            raise LockstepError(f"--{name} {flags[name]}: expected {expected}; {flag['why']}")
        if cases.get(flag.get("idle")):
            raise LockstepError(f"--{name} {flags[name]}: expected none {flag['idle']}")
    return flags


def take(arguments: list[str]) -> None:
    """Train what a trial's flags say; with --save-path, audit it and copy the export."""
    flags = parse(arguments)
    if flags["cpu"] or flags["device"] == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    if flags["save-path"] and os.path.lexists(flags["save-path"]):
        raise LockstepError(f"--save-path {flags['save-path']}: exists, expected a new folder")
    root = Path(flags["out"]) / ("distro" if flags["distro"] else "adamw")
    file, store = root / "run.toml", root / "data" / "store"
    write_named(file, run_file(run_of(flags), f"Made by `lockstep try` for {root.name}."))
    (root.parent / "store").mkdir(exist_ok=True)
    store.parent.mkdir(exist_ok=True)
    if not store.exists():
        store.symlink_to(Path("..", "..", "store"), target_is_directory=True)
    saved = ("witness", "export") if flags["save-path"] else ()
    for stage in ("download", "convert", "train", *saved):
        run_stage(stage, file, root)
    print(f"try: {root / 'metrics' / 'loss.tsv'} has the loss and the bytes of every round")
    if saved:
        _copy(Paths("export", file, root), Path(flags["save-path"]))


def _copy(paths: Paths, target: Path) -> None:
    if (paths.out("export") / hf.REFUSED).exists():
        raise LockstepError(f"--save-path {target}: the audit refused {paths.out('export')}")
    part = target.with_name(f".{target.name}.part")  # what a kill leaves
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(paths.out("export"), part, ignore=shutil.ignore_patterns("made-*.json"))
    part.rename(target)


def run_of(flags: Flags) -> runfile.Run:
    """Return the run that a trial's flags describe."""
    text = re.sub(r'"--([a-z0-9-]+)"', lambda flag: toml(flags[flag[1]]), PRESET)
    document = tomllib.loads(text)
    llm, peers = document["model"]["LLM"], document["peers"]
    if (folder := Path(flags["model"])).is_dir():  # its path may be longer than a hub's name
        llm["checkpoint"]["Hub"]["repo_id"] = str(folder.absolute())
    if flags["python"]:
        document["runtime"]["carrier"] = "processes"
        if _is_of_transformers(flags):
            config = {"model": str(folder.absolute())}  # any that AutoModelForCausalLM takes
            document["workload"] = {"factory": "hf_causal_lm:CausalLM", "config": config}
            llm["checkpoint"] = "Ephemeral"
    llm["data_location"] = _location(flags)
    # token files stay where they are; Parquet files are made into some
    document["download"] = {"stream": "Preprocessed" not in llm["data_location"]}
    del llm["optimizer"]["AdamW" if flags["distro"] else "Distro"]
    peers["overlap"] = int(flags["distro"])  # the order of Psyche's example
    decays = flags["total-steps"] > flags["warmup-steps"]  # else it ends within the warm-up
    llm["lr_schedule"]["Cosine"]["final_lr"] = flags["learning-rate"] / 10
    del llm["lr_schedule"]["Constant" if decays else "Cosine"]
    devices = max(1, flags["data-parallelism"])
    peers["micro_batch"] = devices * min(flags["micro-batch"], -(-flags["total-batch"] // devices))
    if flags["attn-implementation"] == "flash-attention2":
        peers |= {"attention": "cudnn", "precision": "bfloat16", "scan_layers": True}
    return runfile.parse(document, "lockstep try")


def _location(flags: Flags) -> Flags:
    path, url, seed = flags["data-path"], flags["data-url"], flags["seed"]
    if flags["data-provider"] == "http" and not url:
        raise LockstepError("--data-url '': expected an address with --data-provider http")
    if seed and not (seed.isdecimal() and int(seed) < 2**32):
        raise LockstepError(f"--seed {seed}: expected a number from 0 to {2**32 - 1}")
    order = {"Seeded": [*bytes(28), *int(seed).to_bytes(4, "big")]} if seed else "DontShuffle"
    size = {2: "TwoBytes", 4: "FourBytes"}[flags["token-size"]]
    files = {"token_size_in_bytes": size, "shuffle": order}
    if re.match("https?://", url):
        return {"Http": {**files, "location": {"SingleUrl": url}}}
    if "://" in url:
        return {"Url": {**files, "url": url}}
    if url:
        return {"Hub": {**files, "repo_id": url}}
    return {"Preprocessed": path} if _is_parquet(flags) else {"Local": {**files, "path": path}}


def _is_parquet(flags: Flags) -> bool:
    """Return whether a trial's data are Parquet files: its folder has some, and no token files."""
    path, is_local = Path(flags["data-path"]), flags["data-provider"] == "local"
    is_tokens = any(file.name.endswith(EXTENSIONS) for file in path.glob("*"))
    return is_local and not is_tokens and any(path.rglob("*.parquet"))


def _is_of_transformers(flags: Flags) -> bool:
    """Return whether models/ lacks a trial's model, which is then trained in its own Python."""
    folder = Path(flags["model"])
    is_own = flags["python"] and (folder / hf.CONFIG).is_file()
    return is_own and hf.read_config(folder).get("model_type") not in models.MODELS
