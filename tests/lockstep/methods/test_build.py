"""Each variant of the run file's optimizer and schedule has an engine that takes its keys."""

import inspect

import jax
import pytest

from lockstep.errors import LockstepError
from lockstep.methods.build import SCHEDULES, Setting, build, optimizer_of
from lockstep.optim.compressed.compressor import SomeBlocks
from lockstep.tables.variant import variants_of
from pipeline import runfile
from pipeline.runfile import OptimizerVariant, ScheduleVariant
from tests import tiny


@pytest.mark.parametrize("table", variants_of(ScheduleVariant))
def test_a_schedules_keys_are_its_functions_arguments(table):
    assert set(inspect.signature(SCHEDULES[table]).parameters) == set(table.model_fields)


def test_every_optimizer_but_dummy_can_be_built():
    built = {table for table in optimizer_of.registry if issubclass(table, OptimizerVariant)}
    assert built == set(variants_of(OptimizerVariant)) - {runfile.OptimizerDummy}


@pytest.mark.parametrize("file", tiny.READY_RUNS, ids=lambda f: f.name)
def test_the_optimizer_of_every_ready_run_can_be_built(file):
    groups = ("embed", "layers", "norm", "lm_head")
    build(runfile.load(file).llm.optimizer, Setting(lambda step: 0.1, 0, ("layers",)), groups)


def test_dummy_is_refused_with_what_could_stand_in_its_place():
    expected = r"optimizer.Dummy: .* expected model.LLM.optimizer.Distro, .* or SPARTADiLoCo"
    with pytest.raises(LockstepError, match=expected):
        build(runfile.OptimizerDummy(), Setting(lambda step: 0.1, 0, ()), ())


@pytest.mark.parametrize("skip", [None, False, True])
def test_blocks_of_zeros_are_skipped_only_where_a_run_asks_for_it(skip):
    table = runfile.OptimizerDistro(
        compression_decay=0.9,
        compression_topk=4,
        compression_chunk=8,
        quantize_1bit=True,
        skip_zero_blocks=skip,
    )
    optimizer = build(table, Setting(lambda step: 0.1, 0, ()), ())
    areas = optimizer.areas({"w": jax.ShapeDtypeStruct((8, 16), "float32")})
    assert areas == {"w": SomeBlocks(0, 64) if skip else 64}
