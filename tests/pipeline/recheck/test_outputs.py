"""Each stage makes its outputs again, and says how others know those that are published."""

from importlib import import_module

import pytest

from pipeline.recheck import outputs
from pipeline.stage.keys import STAGES


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_makes_its_outputs_again(stage):
    assert callable(import_module(f"pipeline.recheck.{stage}").recheck)
    assert all(one.kind for one in outputs.OUTPUTS[stage] if one.published)
