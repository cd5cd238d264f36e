"""Inner loops: what they leave, and the numbers that they draw again where they are replayed."""

from pathlib import Path

import numpy as np
import pytest

from tests.parts.burn_p2p.totals import total


def inner(host, model_id, path, *, ids=("a",), **more):
    return host.ask(
        "run_inner_loop",
        model_id=model_id,
        batches=[{"kind": "cached_microshard_group", "microshard_ids": list(ids)}],
        num_inner_steps=3,
        inner_optimizer_state_path=None,
        output_parameter_pack_path=str(path / "out"),
        model_schema_hash="a schema",
        require_exact_steps=True,
        state_dict_filter={},
        **more,
    )


def test_an_inner_loop_leaves_the_pack_and_the_state_of_its_optimizer(host, model_id, tmp_path):
    before = total(host, model_id)
    found = inner(host, model_id, tmp_path)
    assert found["steps_completed"] == 3
    assert found["inner_optimizer_state_encoding"] == "mine"
    assert Path(found["inner_optimizer_state_path"]).read_bytes() == b"state"
    values = np.fromfile(tmp_path / "out" / "values.f32le", "<f4")
    assert values.sum() == pytest.approx(before + 18)
    assert total(host, model_id) == pytest.approx(before + 18)


def test_a_replayed_inner_loop_draws_the_same_numbers(host, model_id, tmp_path):
    draws = []
    for i, given in enumerate(({}, {"ids": ("b",)}, {}, {"seed": 1}, {"seed": 1})):
        (tmp_path / str(i)).mkdir()
        draws.append(inner(host, model_id, tmp_path / str(i), **given)["metrics"]["draw"])
    assert draws[0] == draws[2] != draws[1]
    assert draws[3] == draws[4] != draws[0]
