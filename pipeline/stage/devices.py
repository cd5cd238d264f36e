"""The devices a stage computes on, set up before JAX is imported, and how they affect bits.

JAX reads two settings only once, at its import:

- the size of the thread pool (`NPROC`), which changes the order of sums and so their bits. It is
  the run file's `[peers] threads`, the same on every machine, whatever its number of cores;
- the number of CPU devices, which changes no bit. There is one per core, so that peers run side by
  side, but no fewer than `[peers] fsdp`, and with fsdp no more than half the threads: a device
  holds a thread while it waits for the others, and the work they wait for needs another.

What else it reads there may change a result: whether there are 64 bits, how random bits are drawn.
So of the user's own variables only those stay that are listed here, because they change none or
are recorded.
"""

import hashlib
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from lockstep.errors import LockstepError, RequestError, brief
from lockstep.machine import cores
from lockstep.machine.jax_settings import other_settings
from pipeline.stage import compiled

if TYPE_CHECKING:
    from pipeline.runfile import Run

# Results stay in float32 or bfloat16 as written, so scanned and unrolled programs round alike.
FLAGS = "--xla_allow_excess_precision=false"
DUMPS = "--xla_dump_"  # how flags begin that leave results alone
# Subnormal numbers are 0, as on CPUs.
FLAGS_GPU = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0 --xla_gpu_ftz=true"
# In XLA's flags that leave bits open; the last two name what another program tuned.
INEXACT = ("enable_fast_m", "allow_excess_precision", "autotune_cache", "load_autotune_results")
BY_RULES = '[peers] bits = "everywhere"'  # steps have the same bits on every machine
READ_AT_IMPORT = (
    *("JAX_", "JAX2TF_", "FLAX_", "CHECK_VMA", "EAGER_CONSTANT_"),
    "PJRT_NPROC",  # has precedence over NPROC
    # Of XLA and NVIDIA's libraries on a GPU: how kernels are compiled, what products round to.
    *("NVIDIA_TF32_", "CUBLAS_EMULAT", "TF_FP16_", "TF_ENABLE_WINOGRAD_", "TF_USE_CUDNN_"),
    *("TRITON_", "DISABLE_LLVM_OPT", "DISABLE_PTXAS_OPT"),
)
STAY = (
    *("JAX_PLATFORM", "JAX_NUM_CPU_DEVICES", "JAX_CUDA_VISIBLE_", "JAX_ROCM_VISIBLE_"),
    *("JAX_COMPILATION_CACHE_", "JAX_ENABLE_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE_"),
    *("JAX_CPU_ENABLE_ASYNC_DISPATCH", "JAX_CPU_GET_", "JAX_ENABLE_PREEMPTION_SERVICE"),
    *("JAX_LOG", "JAX_DEBUG_LOG_", "JAX_EXPLAIN_", "JAX_DUMP_IR_", "JAX_TRACEBACK_"),
    "JAX_DEFAULT_MATMUL_PRECISION",  # recorded
)


def prepare(run: "Run") -> None:
    """Set the environment that JAX reads of devices at its import; call this before.

    Values that the user has set stay, such as `JAX_PLATFORMS=cpu` or `JAX_NUM_CPU_DEVICES=1`, if
    `STAY` lists them.
    """
    threads, fsdp = run.peers.threads, run.peers.fsdp
    together = fsdp > 1 or run.peers.layout == "shard_map"  # devices that wait for each other
    most = max(1, threads // 2) if together else threads
    if fsdp > most and not _has_gpu_plugin():
        raise LockstepError(
            f"[peers] fsdp = {fsdp}, expected at most {most}, half of threads = {threads}: on a "
            "CPU a device holds a thread while it waits for the others"
        )
    os.environ["NPROC"] = str(threads)
    groups = max(1, min(max(cores.count(), fsdp), most, run.peers.count * fsdp) // fsdp)
    if not run.runtime.in_one_process:  # the devices of one peer, as in each process
        groups = 1
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a GPU for several
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(min(groups * fsdp, threads)))
    asked = os.environ["JAX_NUM_CPU_DEVICES"]
    if not (asked.isdecimal() and int(asked)):
        raise LockstepError(
            f"JAX_NUM_CPU_DEVICES: found {brief(repr(asked))}, expected a number from 1 on"
        )
    count = int(asked)
    if count > threads:
        raise LockstepError(
            f"JAX_NUM_CPU_DEVICES: {count}, expected at most [peers] threads = {threads}: more "
            "devices enlarge the thread pool, and change bits"
        )
    if together and count > most and not _has_gpu_plugin():
        raise LockstepError(
            f"JAX_NUM_CPU_DEVICES: {count}, expected at most {most}, half of [peers] threads, with "
            "fsdp or layout shard_map: a device holds a thread while it waits for the others"
        )
    prepare_alone()


def prepare_alone() -> None:
    """Make JAX round as a run's programs do, where no run file sets the number of threads."""
    leave_out_settings()
    flags = os.environ.get("XLA_FLAGS", "")  # the user's own flags come last, and win
    ours = f"{FLAGS} {FLAGS_GPU}" if _has_gpu_plugin() else FLAGS
    for flag in flags.split():
        if any(word in flag for word in INEXACT) and flag.partition("=")[2] not in ("false", "0"):
            raise LockstepError(
                f"XLA_FLAGS: found {brief(flag)}, expected none that leaves the bits of a result "
                "open"
            )
    if os.environ.get("JAX_PLATFORMS") == "cuda" and not _has_gpu_plugin():
        raise LockstepError(
            "JAX_PLATFORMS: found cuda, expected cpu, or JAX for CUDA installed, as by "
            "`make repro GPU=1`"
        )
    if not flags.startswith(ours):  # a process of a peer inherits them from the trainer
        os.environ["XLA_FLAGS"] = f"{ours} {flags}".strip()
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")  # never TF32
    if jax := sys.modules.get("jax"):  # a part that had it imported may have been asked before
        for name in ("jax_default_matmul_precision", "jax_num_cpu_devices", "jax_platforms"):
            if value := os.environ.get(name.upper()):
                with suppress(RuntimeError):  # of devices in use, which stay
                    jax.config.update(name, int(value) if value.isdecimal() else value)


def leave_out_settings() -> None:
    """Remove from the environment what JAX reads at its import, except what may `STAY`.

    Beside compiled programs JAX would keep what XLA tuned for a GPU: what any program of the user
    left there would decide how a product is summed.
    """
    for name in [name for name in os.environ if name.startswith(READ_AT_IMPORT)]:
        if not name.startswith(STAY):
            del os.environ[name]
    os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = ""


def keep_compiled(folder: os.PathLike) -> None:
    """Keep compiled programs in `folder`, so that a second run starts at once.

    `JAX_COMPILATION_CACHE_DIR`, if the user has set it, takes precedence. A JAX whose programs
    cannot be checked keeps none.
    """
    import jax

    # an entry that cannot be read or did not fit is simply compiled again
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    if not compiled.check_programs():
        jax.config.update("jax_enable_compilation_cache", False)
    elif not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def describe(processes: int = 1) -> dict[str, str]:
    """Return what of the devices, machine and process can change the bits of a result.

    Several `processes` of a peer sum over their devices in an order of their own.
    """
    import jax
    import jaxlib

    of_several = {"processes": str(processes)} if processes > 1 else {}
    machine = {
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "instruction_set": _instruction_set(),
        "threads": os.environ["NPROC"],
        "xla_flags": os.environ["XLA_FLAGS"],
        "matmul_precision": os.environ["JAX_DEFAULT_MATMUL_PRECISION"],
        "jaxlib": jaxlib.__version__,
    }
    return of_several | machine | describe_programs()


def describe_programs() -> dict[str, str]:
    """Return what decides which operations a run's programs have, whatever computes them."""
    import jax

    return other_settings() | {"jax": jax.__version__}


def environment_hash(environment: Mapping[str, str]) -> str:
    """Return the SHA-256 of what of the devices can change bits, hex."""
    text = json.dumps({**environment}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def difference(
    current: Mapping[str, str], trained: Mapping[str, str]
) -> tuple[str, str | None, str | None] | None:
    """Return the first setting that differs from that of the devices that trained, or None.

    It is the setting's name, its value here and its value there.
    """
    names = sorted(current.keys() | trained.keys())
    entries = ((name, current.get(name), trained.get(name)) for name in names)
    return next((entry for entry in entries if _deciding(entry[1]) != _deciding(entry[2])), None)


def never_comparable(run: "Run", *, repeats: bool) -> str | None:
    """Return why nobody can replay a run's windows bit for bit, on any machine, or None.

    repeats: Whether the run file says that its steps repeat.
    """
    if not repeats:
        return "[workload] repeats = false: its steps differ from one time to the next"
    if run.peers.bits == "everywhere":
        return None
    if run.peers.layout != "each":
        return (
            f"[peers] layout = {run.peers.named_layout} is another program than a lone peer's: "
            f'comparable with layout = "each", or with {BY_RULES} in any layout'
        )
    if run.peers.processes > 1:
        return (
            f"[peers] processes = {run.peers.processes} sum in an order of their own: comparable "
            f"with 1, or with {BY_RULES}"
        )
    return None


def check_by_rules(here: Mapping[str, str], trained: Mapping[str, str], repeated: bool) -> None:
    """Check what a run whose bits no machine changes says of its machine: what any would say.

    Nobody's word about a machine leaves a window uncompared there. `repeated` is whether a step
    repeated.

    Raises:
      RequestError: Its steps were other operations than here.
      LockstepError: No such run says this.
    """
    expects = f"with {BY_RULES}"
    if found := difference(here, trained):
        name, value, theirs = found
        elsewhere = name in ("operations", "jax") and theirs
        raise (RequestError if elsewhere else LockstepError)(
            f"header.json: environment.{name} is {brief(repr(theirs))}, expected "
            f"{brief(repr(value))} as here, {expects}"
            + "; another version of JAX or Lockstep may have other operations"
            * bool(elsewhere)
        )
    if not repeated:
        raise LockstepError(f"header.json: bitwise is false, expected true {expects}")


def _deciding(setting: str | None) -> str | None:
    """Return the part of a setting that can change bits; XLA's logging flags cannot."""
    if setting is None or DUMPS not in setting:
        return setting
    return " ".join(flag for flag in setting.split() if not flag.startswith(DUMPS))


def _has_gpu_plugin() -> bool:
    return any(importlib.util.find_spec(f"jax_cuda{v}_plugin") for v in (12, 13))


def _instruction_set() -> str:
    """Return the widest vector instructions of this CPU that XLA uses; they affect bits."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return os.uname().machine
    names = ("amx_tile", "avx512f", "avx2", "avx", "sve", "asimd")
    return next((name for name in names if name in flags.split()), os.uname().machine)
