"""The contract without a framework: functions over arrays."""

from pathlib import Path

import numpy as np
import pytest

from parts.workload.process.messages import WorkerError
from parts.workload.process.shared_arrays import SharedArrays
from tests.errors import refused
from tests.parts.workload.worker_host import Host, array_rows

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    folder = tmp_path_factory.mktemp("line")
    with Host("line_model:Line", {}, folder, [HERE]) as host:
        yield host


def line_rows(count):
    draw = np.random.default_rng(0)
    x = draw.standard_normal((count, 3)).astype(np.float32)
    return array_rows(x=x, y=draw.standard_normal(count).astype(np.float32)), x


def test_functions_over_arrays_are_enough(line):
    (words, spec), x = line_rows(5)
    found = line.begin(spec, micro_batch=2, exclude=["kept"])
    assert [tensor["name"] for tensor in found["tensors"]] == ["b", "w"]
    assert found["tensors"][0]["dtype"] == "torch.float64"
    assert found["frozen"] == [{"name": "kept", "why": "excluded"}]
    assert found["integers"] == ["order"]
    w = np.random.default_rng(0).standard_normal(3, np.float32)
    np.testing.assert_array_equal(line.params, [0, *w])
    loss = line.ask("gradient", **line.write(words), seed=0)["loss"]
    error = x @ w - words[:, 3].copy().view("<f4")
    assert loss == pytest.approx((error**2).mean())
    np.testing.assert_allclose(line.gradients[0], 2 * error.mean(), rtol=1e-5)
    np.testing.assert_allclose(line.gradients[1:], 2 * error @ x / 5, rtol=1e-5)
    losses = line.ask("measure", **line.write(words))["losses"]
    np.testing.assert_allclose(losses, error**2, rtol=1e-5)


def test_a_loss_that_draws_numbers_is_measured_alike_each_time(folder):
    with Host("line_model:Line", {"noise": True}, folder, [HERE]) as host:
        (words, spec), x = line_rows(4)
        host.begin(spec, micro_batch=2, exclude=["kept"])
        first, alone = (host.ask("measure", **host.write(rows)) for rows in (words, words[2:]))
        evaluated = host.ask("evaluate_params", split="held_out")
        host.ask("gradient", **host.write(words), seed=1)
        assert host.ask("evaluate_params", split="held_out") == evaluated
        assert host.ask("measure", **host.write(words)) == first
        assert alone["losses"] == first["losses"][2:]  # whichever rows come before
        error = x @ host.split(host.params)["w"] - words[:, 3].copy().view("<f4")
        noise = first["losses"] - error**2
        assert len({round(float(value), 3) for value in noise}) == 4  # micro-batches draw others


def test_params_are_evaluated_and_saved_as_they_are(line, tmp_path):
    (_, spec), _ = line_rows(1)
    line.begin(spec, exclude=["kept"])
    line.params[:] = [7, 1, 2, 3]
    found = line.ask("evaluate_params", split="held_out")["metrics"]
    assert found == {"split": "held_out", "bias": 7, "nothing": "nan", "fine": True}
    line.ask("save_params", path=str(tmp_path))
    saved = np.load(tmp_path / "saved.npz")
    np.testing.assert_array_equal(saved["w"], [1, 2, 3])
    np.testing.assert_array_equal(saved["kept"], [1, 1])


@pytest.mark.parametrize(
    "method, params, expected",
    [
        ("gradient", {"rows": 0, "width": 4, "seed": 0}, "0 rows of 4 words"),
        ("gradient", {"rows": 1, "width": 3, "seed": 0}, "rows of 4 words expected"),
        ("measure", {"rows": 2**13, "width": 4}, "room for 16384 words"),
        ("gradient", {"rows": 1, "width": 4}, "'seed' is missing"),
        ("open_arrays", {"params": [0, 9], "gradients": [0, 4], "rows": [0, 4]}, "params of 9"),
        ("open_arrays", {"params": [0, 4], "gradients": [9999, 4], "rows": [0, 4]}, "gradients"),
        ("begin", {"rows": {"kind": "words"}, "micro_batch": 1}, "rows of kind 'words'"),
        ("save", {}, "unknown method 'save'"),
    ],
)
def test_what_does_not_fit_is_refused(line, method, params, expected, tmp_path):
    (_, spec), _ = line_rows(1)
    line.begin(spec, exclude=["kept"])
    arrays = SharedArrays(tmp_path, 4)
    if method == "open_arrays":
        params = arrays.request() | params
    with pytest.raises(WorkerError, match=expected):
        line.ask(method, **params)
    arrays.forget()


def test_a_step_before_its_time_is_refused(tmp_path, host):
    with Host("line_model:Line", {}, tmp_path, [HERE]) as other, refused("gradient before begin"):
        other.ask("gradient", rows=1, width=4, seed=0)
    with refused("Plain has no gradient"):
        host.ask("begin")
