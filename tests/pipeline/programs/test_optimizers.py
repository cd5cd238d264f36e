"""Each variant of the run file's optimizer and schedule has an engine that takes its keys."""

import inspect

import pytest

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.programs.optimizers import SCHEDULES, Setting, build, optimizer_of
from pipeline.runfile import OptimizerVariant, ScheduleVariant
from pipeline.runfile.serde_enum import variants_of


@pytest.mark.parametrize("table", variants_of(ScheduleVariant))
def test_a_schedules_keys_are_its_functions_arguments(table):
    assert set(inspect.signature(SCHEDULES[table]).parameters) == set(table.model_fields)


def test_every_optimizer_but_dummy_can_be_built():
    built = {table for table in optimizer_of.registry if issubclass(table, OptimizerVariant)}
    assert built == set(variants_of(OptimizerVariant)) - {runfile.OptimizerDummy}


def test_dummy_is_refused_with_what_could_stand_in_its_place():
    expected = r"optimizer.Dummy: .* expected model.LLM.optimizer.Distro, AdaDistro, AdamW or Muon"
    with pytest.raises(LockstepError, match=expected):
        build(runfile.OptimizerDummy(), Setting(lambda step: 0.1, 0, ()), ())
