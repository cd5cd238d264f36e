"""What is set before JAX is imported, and what of it is recorded."""

import os
from pathlib import Path

import jax
import pytest

from lockstep.machine import cores
from pipeline.stage import devices
from tests import tiny
from tests.errors import refused


@pytest.fixture
def environment(monkeypatch):
    for name in ("NPROC", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "JAX_DEFAULT_MATMUL_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2), raising=False)
    monkeypatch.setattr(cores, "CGROUP", Path("nowhere"))
    yield monkeypatch
    monkeypatch.undo()
    devices.prepare_alone()  # which tells the tests' JAX


@pytest.mark.parametrize(
    ("cores", "threads", "count", "fsdp", "expected"),
    [
        (2, 4, 4, 1, "2"),
        (64, 8, 4, 1, "4"),
        (64, 3, 4, 1, "3"),
        (2, 4, 4, 2, "2"),
        (2, 8, 4, 4, "4"),
        (64, 64, 4, 4, "16"),
        (64, 11, 4, 2, "4"),
    ],
)
def test_devices_are_as_many_as_cores_peers_and_threads_allow(
    environment, cores, threads, count, fsdp, expected
):
    environment.setattr(os, "sched_getaffinity", lambda _: range(cores))
    changes = {"peers__threads": threads, "peers__count": count, "peers__fsdp": fsdp}
    devices.prepare(tiny.parsed(**changes, peers__micro_batch=fsdp))
    assert os.environ["JAX_NUM_CPU_DEVICES"] == expected


@pytest.mark.parametrize(
    ("count", "fsdp", "named"),
    [
        ("4", 2, ("JAX_NUM_CPU_DEVICES", 4, 2)),
        ("4", 4, ("[peers] fsdp", 4, 2)),
        ("8", 1, ("JAX_NUM_CPU_DEVICES", 8, "[peers] threads")),  # which would change bits
        ("two", 1, ("JAX_NUM_CPU_DEVICES", "two")),
        ("", 1, ("JAX_NUM_CPU_DEVICES", "''")),
        ("0", 1, ("JAX_NUM_CPU_DEVICES", "0")),
    ],
)
def test_devices_that_leave_no_thread_to_spare_are_refused(environment, count, fsdp, named):
    environment.setenv("JAX_NUM_CPU_DEVICES", count)
    with refused(*named):
        devices.prepare(tiny.parsed(peers__threads=4, peers__fsdp=fsdp, peers__micro_batch=4))


def test_devices_of_one_program_wait_for_each_other_on_half_of_the_threads(environment):
    environment.setattr(os, "sched_getaffinity", lambda _: range(64))
    for threads in (1, 4, 9):
        environment.delenv("JAX_NUM_CPU_DEVICES", raising=False)
        devices.prepare(
            run := tiny.parsed(peers__threads=threads, peers__count=8, peers__layout="shard_map")
        )
        most = max(1, threads // 2)
        assert os.environ["JAX_NUM_CPU_DEVICES"] == str(most)
        environment.setenv("JAX_NUM_CPU_DEVICES", str(most + 1))
        with refused("JAX_NUM_CPU_DEVICES", most + 1):
            devices.prepare(run)


def test_what_the_user_set_stays_but_threads_are_the_run_files_whatever_the_machine(environment):
    environment.setenv("NPROC", "64")
    environment.setenv("JAX_NUM_CPU_DEVICES", "1")
    environment.setenv("XLA_FLAGS", "--xla_dump_to=here")
    devices.prepare(tiny.parsed(peers__threads=3))
    assert (os.environ["NPROC"], os.environ["JAX_NUM_CPU_DEVICES"]) == ("3", "1")
    assert os.environ["XLA_FLAGS"].endswith("--xla_dump_to=here")


def test_stages_of_one_process_record_the_flags_of_a_stage_alone(environment):
    devices.prepare(tiny.parsed())
    alone = dict(os.environ)
    devices.prepare(tiny.parsed())
    assert dict(os.environ) == alone


def test_of_jaxs_variables_only_those_stay_that_change_no_result_or_are_recorded(environment):
    stay = {"JAX_PLATFORMS": "cpu", "JAX_LOG_COMPILES": "0", "JAX_DEFAULT_MATMUL_PRECISION": "high"}
    jaxs = ("JAX_ENABLE_X64", "JAX_OF_A_LATER_RELEASE", "FLAX_FIX_RNG_SEPARATOR", "CHECK_VMA")
    # PJRT_NPROC has precedence over NPROC, which [peers] threads sets and a header records
    go = (*jaxs, "PJRT_NPROC", "TRITON_DEFAULT_FP_FUSION", "CUBLAS_EMULATE_SINGLE_PRECISION")
    for name, value in {**stay, **dict.fromkeys(go, "1")}.items():
        environment.setenv(name, value)
    environment.setenv("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "all")
    devices.prepare_alone()
    assert os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] == ""
    assert not os.environ.keys() & set(go)
    assert {name: os.environ[name] for name in stay} == stay


def test_a_jax_imported_before_is_told_what_it_would_have_read():
    program = """import os, jax
from pipeline.stage import devices
from tests import tiny
os.environ |= {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}  # as `lockstep try --cpu`
devices.prepare(tiny.parsed(peers__threads=3))
print(jax.config.jax_default_matmul_precision, jax.device_count())"""
    unset = f"import os; os.environ.pop('JAX_DEFAULT_MATMUL_PRECISION', 0); {program}"
    assert tiny.python("-c", unset, JAX_PLATFORMS="cuda").stdout == "highest 2\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
        ("XLA_FLAGS", "--xla_allow_excess_precision"),
        ("XLA_FLAGS", "--xla_gpu_per_fusion_autotune_cache_dir=/tmp/tuned"),
        ("XLA_FLAGS", "--xla_gpu_load_autotune_results_from=tuned.pb"),
        ("JAX_PLATFORMS", "cuda"),
    ],
)
def test_what_leaves_bits_open_or_is_not_there_is_refused(environment, name, value):
    environment.setattr(devices, "_has_gpu_plugin", lambda: False)
    environment.setenv(name, value)
    with refused(name, value):
        devices.prepare_alone()


def test_the_description_holds_what_can_change_bits_and_no_core_count():
    described = devices.describe()
    assert (described["platform"], described["threads"]) == ("cpu", os.environ["NPROC"])
    assert not {"JAX_NUM_CPU_DEVICES", "jax_threefry_partitionable"} & described.keys()
    assert all(isinstance(value, str) for value in described.values())
    with jax.threefry_partitionable(False):
        assert devices.describe()["jax_threefry_partitionable"] == "False"


def test_the_first_difference_from_where_a_run_was_trained_is_named():
    here = devices.describe()
    assert devices.difference(here, here) is None
    assert devices.difference(here, here | {"jax": "0.0"}) == ("jax", here["jax"], "0.0")
    assert devices.difference(here, here | {"later": "x"}) == ("later", None, "x")
    less = {name: value for name, value in here.items() if name != "threads"}
    assert devices.difference(here, less) == ("threads", here["threads"], None)
    flags = here["xla_flags"]
    dumped = here | {"xla_flags": f"{flags} --xla_dump_to=/x --xla_dump_hlo_as_text"}
    assert devices.difference(here, dumped) is None
    other = here | {"xla_flags": f"{flags} --xla_x=1"}
    assert devices.difference(dumped, other)[0] == "xla_flags"
