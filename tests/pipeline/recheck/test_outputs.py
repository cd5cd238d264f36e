"""Each stage makes its outputs again, and every output has a line that says how it is checked."""

from importlib import import_module

import pytest

from pipeline.recheck import outputs
from pipeline.stage.keys import STAGES
from tests.errors import refused


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_makes_its_outputs_again(stage):
    assert callable(import_module(f"pipeline.recheck.{stage}").recheck)
    assert all(one.kind for one in outputs.OUTPUTS[stage] if one.published)


def test_an_output_that_no_line_has_is_named_with_its_stage():
    assert outputs.need("evaluate", "metrics/evaluate.json").kind == "proven"
    with refused("data/evaluate/new.json", "evaluate", "pipeline/recheck/outputs.py"):
        outputs.need("evaluate", "new.json")
