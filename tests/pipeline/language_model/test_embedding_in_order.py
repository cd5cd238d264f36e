"""On a GPU, the embedding's gradient of a run as compiled is summed in the order of its rows."""

import jax
import numpy as np
import pytest

from pipeline.language_model.language_model import programs_of
from tests import tiny

ROWS_MBT = np.random.default_rng(0).integers(0, 40, (1, 3, 16), np.int32)


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def gradient(**changes):
    """A gradient as it is traced, and what it gives for random params."""
    programs = programs_of(tiny.parsed(**changes), tiny.MODEL)
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda x: rng.normal(0, 0.1, x.shape).astype(x.dtype), programs.task.shapes
    )
    arguments = params, ROWS_MBT, np.int32(3)
    traced = str(jax.make_jaxpr(programs.steps.gradient)(*arguments))
    return "sort[" in traced, jax.jit(programs.steps.gradient)(*arguments)[1]


def test_the_gradient_is_that_of_a_scatter(monkeypatch):
    in_order, expected = gradient()
    assert not in_order
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    in_order, found = gradient()
    assert in_order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), found, expected)


@pytest.mark.parametrize("changes", [{"peers__bits": "everywhere"}, {"peers__fsdp": 2}])
def test_neither_by_rules_nor_where_devices_share_the_table(on_a_gpu, changes):
    programs = programs_of(tiny.parsed(**changes), tiny.MODEL)
    assert not programs.task.embedding_in_order
