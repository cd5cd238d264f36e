"""A torch model's gradients, over a real connection, beside what torch itself computes."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from parts.workload.process.messages import WorkerError
from tests.errors import refused
from tests.parts.workload.worker_host import Host, array_rows

HERE = Path(__file__).parent
TOKENS = {"kind": "tokens", "columns": ["inputs"], "length": 5}
EXCLUDED = ("coarse.*",)


@pytest.fixture(scope="module")
def odd(tmp_path_factory, python):
    torch.set_num_threads(1)  # as the worker does
    folder = tmp_path_factory.mktemp("odd")
    with Host("odd_models:OddWorkload", {}, folder, [HERE], python) as host:
        yield host


@pytest.fixture
def odd_models(module):
    """The same classes here."""
    return module("odd_models", HERE)


def tokens(rows):
    return np.random.default_rng(0).integers(0, 9, (rows, 5)).astype(np.int32)


def pictures(rows):
    draw = np.random.default_rng(1)
    x = draw.standard_normal((rows, 5)).astype(np.float32)
    return x, draw.integers(0, 3, rows)


def odd_reference(odd, odd_models):
    """The model in this process, with the values that are in the worker's."""
    torch.manual_seed(3)
    model = odd_models.Odd()
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for name, values in odd.split(odd.params).items():
            parameters[name].copy_(torch.from_numpy(values))
    return model.train()


def test_a_gradient_is_torchs_own_bit_for_bit(odd, odd_models):
    odd.begin(TOKENS, seed=3)
    words = tokens(8)
    found = odd.ask("gradient", **odd.write(words), seed=17)
    model, rows = odd_reference(odd, odd_models), torch.from_numpy(words).long()
    torch.manual_seed(17)
    loss = F.cross_entropy(model(rows[:, :-1]), rows[:, -1])
    loss.backward()
    assert found == {"loss": loss.item()}
    gradients, parameters = odd.split(odd.gradients), dict(model.named_parameters())
    assert gradients.keys() == {
        "coarse.bias", "coarse.weight", "embed.weight", "norm.bias", "norm.weight", "scale",
        "unused",
    }  # fmt: skip
    for name, gradient in gradients.items():
        expected = parameters[name].grad
        expected = torch.zeros(3) if name == "unused" else expected.float()
        np.testing.assert_array_equal(gradient, expected.numpy(), err_msg=name)
    assert np.any(gradients["coarse.weight"])


def test_micro_batches_are_weighted_by_their_rows(odd_models, tmp_path, python):
    x, y = pictures(7)
    words, spec = array_rows(x=x, y=y)
    with Host("odd_models:Small", {}, tmp_path, [HERE], python) as small:
        small.begin(spec, micro_batch=3)
        found = small.ask("gradient", **small.write(words), seed=0)
    workload = odd_models.Small({})
    model = workload.model()
    model.load_state_dict({n: torch.from_numpy(v) for n, v in small.split(small.params).items()})
    whole = workload.loss(model, {"x": torch.from_numpy(x), "y": torch.from_numpy(y)})
    whole.backward()
    assert found["loss"] == pytest.approx(whole.item(), rel=1e-6)
    for name, gradient in small.split(small.gradients).items():
        expected = model.get_parameter(name).grad.numpy()
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


def test_the_same_arguments_give_the_same_bits_and_another_seed_others(odd):
    """Also what a batch norm counts is put back."""
    odd.begin(TOKENS)
    given, seen = odd.write(tokens(6)), []
    before = odd.ask("measure", **given)
    for seed in (1, 2, 1):
        found = odd.ask("gradient", **given, seed=seed)
        seen.append((found["loss"], odd.gradients.tobytes()))
    assert seen[0] == seen[2] != seen[1]
    assert odd.ask("measure", **given) == before


def test_rows_are_measured_one_by_one_without_dropout(odd, odd_models):
    odd.begin(TOKENS, seed=3, micro_batch=4)
    words = tokens(6)
    found = odd.ask("measure", **odd.write(words))
    model = odd_reference(odd, odd_models).eval()
    rows = torch.from_numpy(words).long()
    with torch.no_grad():
        losses = [F.cross_entropy(model(row[None, :-1]), row[None, -1]).item() for row in rows]
    assert found == {"losses": losses}


@pytest.mark.parametrize(
    ("name", "of", "refusal"),
    [
        ("Coupled", "pairs", "row_losses: the mean over 4 rows is 0, and loss of the same rows"),
        ("Coupled", "labels", "let loss return a sum and what counts"),
        ("CoupledRows", "pairs", None),
        ("Noisy", "", None),
    ],
)
def test_a_loss_that_is_not_the_mean_of_its_rows_losses_is_not_measured(
    tmp_path, name, of, refusal, python
):
    words, spec = array_rows(**dict(zip("xy", pictures(6), strict=True)))
    with Host(f"odd_models:{name}", {"of": of}, tmp_path, [HERE], python) as host:
        host.begin(spec, micro_batch=4)
        given = host.write(words)
        if refusal is None:
            assert min(host.ask("measure", **given)["losses"]) > 0.01
            return
        with refused(refusal):
            host.ask("measure", **given)


def test_what_begin_says_is_what_there_is(odd):
    found = odd.begin(TOKENS, exclude=EXCLUDED)
    assert [tensor["name"] for tensor in found["tensors"]] == [
        "embed.weight", "norm.bias", "norm.weight", "scale", "unused",
    ]  # fmt: skip
    assert found["tied"] == {"head.weight": "embed.weight"}
    assert found["integers"] == ["norm.num_batches_tracked"]
    assert {part["name"]: part["why"] for part in found["frozen"]} == {
        "frozen.bias": "frozen",
        "frozen.weight": "frozen",
        "coarse.bias": "excluded",
        "coarse.weight": "excluded",
        "norm.running_mean": "statistics",
        "norm.running_var": "statistics",
    }
    assert found["parameter_count"] == 66 + 6 + 6 + 1 + 3


def test_a_seed_decides_all_that_the_workers_begin_with(odd):
    """Two workers of a run have the same frozen values, or the host sees that they differ."""
    seen = []
    for seed in (5, 6, 5):
        found = odd.begin(TOKENS, seed=seed)
        seen.append((found["frozen_sha256"], odd.params.tobytes()))
    assert seen[0] == seen[2]
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] != seen[1][1]


def test_init_after_a_gradient_gives_the_first_params_again(odd):
    odd.begin(TOKENS, seed=4)
    before = odd.params.copy()
    odd.ask("gradient", **odd.write(tokens(3)), seed=0)
    odd.params[:] += 1
    odd.ask("init")
    np.testing.assert_array_equal(odd.params, before)


def test_no_parameter_that_travels_is_refused_with_the_globs(odd):
    with refused("begin: ValueError: no parameter travels: 13", "no.such.*", "coarse.*"):
        odd.begin(TOKENS, include=["no.such.*"], exclude=["coarse.*"])


def test_users_code_that_exits_is_an_error_and_the_worker_goes_on(odd):
    odd.begin(TOKENS)
    with pytest.raises(WorkerError, match=r": SystemExit: enough \(odd_models.py:\d+, in loss\)"):
        odd.ask("gradient", **odd.write(np.full((2, 5), 9, np.int32)), seed=0)
    assert odd.ask("hello")["protocol_version"] == 2


@pytest.mark.long
def test_a_worker_of_torch_imports_neither_us_nor_jax(tmp_path):
    with Host("odd_models:OddWorkload", {}, tmp_path, [HERE]) as host:
        found = host.process.hello.environment
        maps = Path(f"/proc/{host.group.child.pid}/maps").read_text()
    assert found["torch"] == torch.__version__
    assert found["threads"] == "1"
    assert "jax" not in found and "flax" not in found
    assert "libtorch_cpu" in maps and "jaxlib" not in maps
