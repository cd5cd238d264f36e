"""With `bits = "everywhere"` other CPUs give the same bits: of steps, and of whole runs."""

import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from lockstep.files import read_json
from lockstep.transcript.transcript import Transcript
from pipeline.stage.artifacts import Paths
from pipeline.stage.devices import FLAGS
from pipeline.stage.keys import PROJECT
from tests import tiny
from tests.everywhere import steps

UNOPTIMIZED = "--xla_backend_optimization_level=0"  # compiles in half the time, to other code
SEVERAL = ["llama in 8 bits"]  # of seconds; `make soak` has all
CPU_INFO = Path("/proc/cpuinfo")


@pytest.fixture(scope="session")
def other_cpu(tmp_path_factory) -> Path:
    """The library that, preloaded, answers as the CPU named by OTHERCPU."""
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler")
    if not CPU_INFO.exists() or "cpuid_fault" not in CPU_INFO.read_text():
        pytest.skip("CPUID cannot be made to fault on this machine")
    library = tmp_path_factory.mktemp("cpu") / "othercpu.so"
    source = Path(__file__).with_name("othercpu.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@cache
def here() -> dict[str, str]:
    """The hashes of all cases on this machine as it is, with two threads."""
    return hashes([], NPROC="2", XLA_FLAGS=FLAGS)


def hashes(names: list[str], **settings: str) -> dict[str, str]:
    """What a process of these settings prints of some cases."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.everywhere.steps", *names],
        capture_output=True, text=True, env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"} | settings,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())


def as_cpu(library: Path, name: str, threads: int, flags: str = "") -> dict[str, str]:
    """The settings of a process that sees this CPU."""
    found = {"LD_PRELOAD": str(library), "OTHERCPU": name, "NPROC": str(threads)}
    return found | {"XLA_FLAGS": f"{FLAGS} {flags}".strip()}


@pytest.mark.release
def test_a_step_has_the_same_bits_with_other_instructions_threads_and_caches(other_cpu):
    here = hashes(SEVERAL, NPROC="4", XLA_FLAGS=FLAGS)
    assert list(here) == SEVERAL
    assert hashes(SEVERAL, **as_cpu(other_cpu, "haswell", 1, UNOPTIMIZED)) == here


@pytest.mark.soak
@pytest.mark.parametrize(
    "name, threads, flags",
    [
        ("haswell", 1, ""),
        ("zen3", 2, "--xla_cpu_max_isa=AVX"),  # no fused multiply-add
        ("zen4", 4, UNOPTIMIZED),
        ("skylake", 2, UNOPTIMIZED),
        ("icelake", 1, "--xla_cpu_max_isa=SSE4_2"),
    ],
)
def test_steps_of_every_model_and_optimizer_have_the_same_bits(other_cpu, name, threads, flags):
    assert list(here()) == steps.cases()
    assert hashes([], **as_cpu(other_cpu, name, threads, flags)) == here()
    assert here()["llama"] == here()["llama scanned"]


@pytest.fixture
def trained(tmp_path) -> tuple[Path, Path]:
    """A run by rules in a layout that no lone peer's program has; peer 1 lies once, by 2^-23."""
    lie = {"kind": "scale_up", "peer": 1, "rounds": [4, 4], "size": 1 + 2.0**-23}
    run_file, root = tiny.start(
        tmp_path,
        peers__bits="everywhere",
        peers__product_bits=8,
        peers__layout="vmap",
        model__LLM__optimizer=tiny.ADAMW,
        faults__schedule=[lie],
    )
    tiny.make(run_file, root, "download", "convert", "train")
    return run_file, root


@pytest.mark.release
def test_another_cpu_audits_a_run_bit_for_bit_and_finds_the_smallest_lie(
    other_cpu, trained, monkeypatch
):
    run_file, root = trained
    for name, value in as_cpu(other_cpu, "haswell", 1).items():
        monkeypatch.setenv(name, value)
    tiny.by_hand(run_file, root, "witness")
    verdict = read_json(root / "data/verdict/verdict.json")
    assert verdict["not_comparable"] is None
    assert len(verdict["replayed_windows"]) == verdict["windows"]
    assert [(found["peer"], found["round"]) for found in verdict["findings"]] == [(1, 4)]


@pytest.mark.long
def test_peers_on_unlike_machines_verify_each_other_bit_for_bit(tmp_path):
    changes = {"peers__bits": "everywhere", "peers__product_bits": 8, "peers__count": 3}
    changes["config__verification_percent"] = 34
    run_file, root = tiny.start(tmp_path, **changes)
    tiny.make(run_file, root, "download", "convert")
    alone = shutil.copytree(root, tmp_path / "alone")
    tiny.make(run_file, alone, "train")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    by_hand = {"runtime__carrier": "processes", "runtime__by_hand": [0, 1]}
    tiny.start(tmp_path, **changes, **by_hand, runtime__listen=address)
    trainer = tiny.lockstep("train", run_file, root)
    with ExitStack() as stack:
        stack.callback(trainer.kill)
        secrets = Paths("train", run_file, root).scratch / "secrets"
        while not (secrets / "trainer.json").exists() and trainer.poll() is None:
            time.sleep(0.1)
        for peer, most in enumerate(("SSE4_2", "AVX2")):
            command = f"-m pipeline sidecar --connect {address} --peer {peer} --secret".split()
            secret, settings = secrets / f"peer-{peer}.json", tiny.environment(PROJECT)
            settings["XLA_FLAGS"] += f" --xla_cpu_max_isa={most}"
            sidecar = subprocess.Popen([sys.executable, *command, secret], env=settings)
            stack.callback(sidecar.kill)
        said = trainer.communicate()[0]
    assert trainer.returncode == 0, said
    rounds = Transcript(root / "data/trained/transcript").rounds
    assert all(len(entry.evidence.checks) == 1 for entry in rounds)
    assert tiny.contents(root / "data/trained") == tiny.contents(alone / "data/trained")
