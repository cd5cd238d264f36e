"""Whether a run has the same bits again, and what audits find of it: here, and on a CPU.

Runs as compiled have this device's bits; runs by rules have the same bits everywhere.
"""

import argparse
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import jax

from benchmarks import distro, sizes
from benchmarks.accelerator.extent import Extent, attempt, judged
from benchmarks.simulated import Lab
from lockstep.errors import LockstepError
from lockstep.files import read_json, write_json
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.trees import tree_hash
from pipeline.audit.verdict import Finding
from pipeline.runfile import Run

# SHA-256 of the params of section default_run, by size and rounds, as one CPU had them, with JAX
# 0.10 and AVX-512 instructions.
ON_A_CPU = {
    ("toy", 2): "3b47fed4ca94897d3808c513f12c18b1089500d608d81424a73fef16fc1a2a29",
    ("2M", 200): "29c3fc9d764856af6cb34b2c8e999629231bc0205e259a1439765aa3d9889484",
}


def bits(extent: Extent, work: Path) -> Iterator[dict]:
    """Two runs in one process; the first is left for the audits."""
    for precision in extent.precisions:
        attention = extent.attention(precision)
        names = {"precision": precision, "attention": attention}
        yield attempt(names, partial(_twice, extent, precision, attention, work))


def _twice(extent: Extent, precision: str, attention: str, work: Path) -> dict:
    lab = lab_of(extent, precision, attention)
    folder = work / "proof" / precision
    started = perf_counter()
    runs = [_train(lab, folder / name) for name in ("first", "second")]
    took = perf_counter() - started
    write_json(folder / "trained.json", runs[0] | {"attention": attention})
    return {
        "size": extent.run,
        "peers": extent.peers,
        "rounds": extent.rounds,
        "equal": runs[0] == runs[1],
        "seconds": round(took, 2),
    }


def audit(extent: Extent, work: Path) -> Iterator[dict]:
    """An audit, bit for bit, in a process of its own; and a third run there."""
    for precision in extent.precisions:
        yield attempt({"precision": precision}, partial(_audit, extent, precision, work))


def _audit(extent: Extent, precision: str, work: Path) -> dict:
    folder = work / "proof" / precision
    trained = _read(folder)
    lab = lab_of(extent, precision, trained.pop("attention"))
    started = perf_counter()
    findings = lab.audit(lab.run, Transcript(folder / "first"))
    took = perf_counter() - started
    return {
        "device": jax.devices()[0].device_kind,
        "windows": len(lab.run.snapshots().windows) * extent.peers,
        **said_of(findings),
        "seconds": round(took, 2),
        "third_run_equal": _train(lab, folder / "third") == trained,
    }


def said_of(findings: list[Finding]) -> dict:
    """How many findings an audit has, and the first of them."""
    return {"findings": len(findings), "first_finding": str(findings[0]) if findings else None}


def by_rules(extent: Extent, work: Path) -> Iterator[dict]:
    """Runs in which every step goes by rules; they are left for a CPU to audit."""
    for bits in extent.product_bits:
        yield attempt({"product_bits": bits}, partial(_by_rules, extent, bits, work))


def _by_rules(extent: Extent, bits: int, work: Path) -> dict:
    folder, started = work / "by_rules" / str(bits), perf_counter()
    trained = _train(lab_by_rules(extent, bits), folder / "first")
    write_json(folder / "trained.json", trained | {"device": jax.devices()[0].device_kind})
    return {
        "size": extent.by_rules,
        "peers": extent.peers,
        "rounds": extent.rounds,
        "params": trained["params"],
        "seconds": round(perf_counter() - started, 2),
    }


def by_rules_on_cpu(extent: Extent, work: Path) -> Iterator[dict]:
    """The same runs, audited bit for bit and taken again on a CPU."""
    for bits in extent.product_bits:
        yield attempt({"product_bits": bits}, partial(_by_rules_on_cpu, extent, bits, work))


def _by_rules_on_cpu(extent: Extent, bits: int, work: Path) -> dict:
    folder = work / "by_rules" / str(bits)
    trained = _read(folder)
    lab, transcript = lab_by_rules(extent, bits), Transcript(folder / "first")
    lab.begin_as(transcript)
    findings = lab.audit(lab.run, transcript)
    return {
        "trained_on": trained["device"],
        "device": jax.devices()[0].device_kind,
        "windows": len(lab.run.snapshots().windows) * extent.peers,
        **said_of(findings),
        "params_equal": _train(lab, folder / "again")["params"] == trained["params"],
    }


def default_run(extent: Extent, work: Path) -> Iterator[dict]:
    """Rounds of params/run.toml by rules, on made data: the params are the same on every machine.

    It begins from params that are exact on every machine, too: multiples of a power of 2.
    """
    yield attempt({}, partial(_default_run, extent, work))


def _default_run(extent: Extent, work: Path) -> dict:
    rounds, document = extent.default_rounds, sizes.document(sizes.SIZES[extent.by_rules])
    document["peers"] |= {"bits": "everywhere", "product_bits": 8}  # as the default run has
    run = sizes.load(document)
    run = run.model_copy(update={"config": run.config.model_copy(update={"total_steps": rounds})})
    lab = Lab(run, run.llm.checkpoint.config)
    lab.begin_exactly()
    started = perf_counter()
    with TemporaryDirectory(dir=work) as folder:
        found = _train(lab, Path(folder) / "transcript")["params"]
    took = perf_counter() - started
    expected = ON_A_CPU.get((extent.by_rules, rounds))
    what = f"{rounds} rounds of the default run by rules: the params of a CPU's run"
    line = {"rounds": rounds, "params": found, "expected": expected, "seconds": round(took, 2)}
    return line | judged(what, found == expected, True, found == expected)


@cache
def lab_by_rules(extent: Extent, bits: int) -> Lab:
    """Programs of a run by rules, with products in so many bits."""
    run = _short(extent, extent.by_rules, "float32", "matmul")
    rules = {"bits": "everywhere", "product_bits": bits, "scan_layers": True}
    run = run.model_copy(update={"peers": run.peers.model_copy(update=rules)})
    return Lab(run, run.llm.checkpoint.config)


@cache
def lab_of(extent: Extent, precision: str, attention: str) -> Lab:
    """Programs of the run that is audited."""
    run = _short(extent, extent.run, precision, attention)
    return Lab(run, run.llm.checkpoint.config)


def _short(extent: Extent, size: str, precision: str, attention: str) -> Run:
    """A run of few rounds, with snapshots."""
    chosen = argparse.Namespace(topk=extent.topk[0], precision=precision, attention=attention)
    run = distro.make_run(size, extent.peers, chosen)
    config = run.config.model_copy(update={"total_steps": extent.rounds})
    witness = run.witness.model_copy(update={"snapshot_every": extent.window})
    return run.model_copy(update={"config": config, "witness": witness})


def _train(lab: Lab, folder: Path) -> dict:
    """The hashes of a run's transcript and last params."""
    trained = lab.train(lab.run, folder)
    return {"transcript": trained.transcript.hash, "params": tree_hash(trained.params)}


def _read(folder: Path) -> dict:
    if not (folder / "trained.json").is_file():
        raise LockstepError(f"{folder}: holds no run, expected that of section bits")
    return read_json(folder / "trained.json")
