"""Scores and texts of a run with `bits = "everywhere"`: every operation has a rule."""

import jax
import numpy as np
import pytest

from lockstep.programs.placement import device_groups
from lockstep.same_bits.evaluation import without_rule
from parts.tasks import task_model
from pipeline.language_model.sampling import Draws, Sampling
from pipeline.language_model.text_writer import TextWriter
from pipeline.runfile.tables import Peers
from pipeline.weights import exported
from tests.parts.tasks.exported import CONTEXT, write

pytestmark = pytest.mark.long

REQUESTS = [((5, 6, 7), (9, 8)), ((5,), (6, 7, 200))]


def test_scores_and_texts_by_rules_are_those_of_compiled_programs_to_rounding(tmp_path):
    folder = write(tmp_path / "export")
    compiled = exported.read(folder)
    by_rules = exported.read(folder, Peers(count=1, bits="everywhere"))
    groups = device_groups(jax.devices()[:1], 1)
    one, other = (task_model.from_folder(m, folder, groups, 4) for m in (compiled, by_rules))
    for found, expected in zip(
        other.log_likelihoods(REQUESTS), one.log_likelihoods(REQUESTS), strict=True
    ):
        np.testing.assert_allclose(found.log_likelihood, expected.log_likelihood, rtol=1e-5)
        assert (found.greedy, found.tokens) == (expected.greedy, expected.tokens)
    places = np.zeros(8, np.int32)
    tokens = np.zeros((4, 8), np.int32)
    assert without_rule(other.score, by_rules.params, tokens, places, places, np.int32(3)) == set()

    drawn = Sampling(temperature=0.8, top_k=50, top_p=0.9)
    one, other = (
        TextWriter(model, model.params_to_write, context=CONTEXT) for model in (compiled, by_rules)
    )
    texts = [
        writer.write([[5, 6], [7]], max_new_tokens=12, sampling=drawn, seeds=[1, 2])
        for writer in (one, other)
    ]
    assert texts[0] == texts[1]
    first, draws = np.zeros(2, np.int32), Draws.seeded(drawn, [1, 2])

    def begin(params, tokens):
        return other._begin(params, tokens, first, first, draws, room=16)

    params, tokens = by_rules.params_to_write, np.zeros((2, 16), np.int32)
    assert without_rule(begin, params, tokens) == set()
    rows = jax.eval_shape(begin, params, tokens)

    def go_on(params, rows):
        return other._continue(params, rows, first > 0, np.int32(3), first, draws, room=16)

    assert without_rule(go_on, params, rows) == set()
