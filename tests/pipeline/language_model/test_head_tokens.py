"""For how many tokens a step makes logits at a time is what the run file says."""

import re

import jax
import numpy as np
import pytest

from pipeline.language_model.language_model import LanguageModel, programs_of
from tests import tiny
from tests.errors import refused

TOKENS = 3 * 16
RULES = {"peers__bits": "everywhere", "peers__product_bits": 8}


def rows_of_logits(**changes):
    """The sizes of the logits' first axis, of arrays with two, in a gradient as it is traced."""
    programs = programs_of(tiny.parsed(**changes), tiny.MODEL)
    rows_MBT = np.zeros((1, 3, 16), np.int32)
    traced = jax.make_jaxpr(programs.steps.gradient)(programs.task.shapes, rows_MBT, np.int32(3))
    found = re.findall(rf"f32\[(\d+),{tiny.MODEL['vocab_size']}\] = dot_general", str(traced))
    return {int(rows) for rows in found} - {tiny.MODEL["hidden_size"]}


@pytest.mark.parametrize("rules", [{}, RULES], ids=["as compiled", "by rules"])
def test_logits_are_made_for_so_many_tokens_at_a_time(rules):
    assert rows_of_logits(peers__head_tokens=20, **rules) == {20}
    assert rows_of_logits(peers__head_tokens=10**6, **rules) == {TOKENS}


def test_logits_that_no_memory_holds_are_refused():
    run = tiny.parsed(peers__micro_batch=4096, runtime__memory_gb=0.01, peers__head_tokens=65536)
    with refused("head_tokens = 65536", "0.0 GB"):
        LanguageModel(run, tiny.MODEL)
