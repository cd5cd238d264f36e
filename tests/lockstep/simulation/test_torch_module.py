"""`simulate` of a torch module: the same rounds, on torch's gradients."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lockstep import simulate
from tests.errors import refused

pytestmark = pytest.mark.long

ROWS, WIDTH, CLASSES = 96, 6, 3


class Net(torch.nn.Module):
    """As EXO Gym's: the module takes a batch and returns its loss."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.hidden = torch.nn.Linear(WIDTH, 8)
        self.dropout = torch.nn.Dropout(dropout)
        self.out = torch.nn.Linear(8, CLASSES)

    def forward(self, batch):
        x, y = batch
        return F.cross_entropy(self.out(self.dropout(torch.relu(self.hidden(x)))), y)


class Pictures(torch.utils.data.Dataset):
    """Items are pairs of tensors."""

    def __init__(self):
        draw = np.random.default_rng(0)
        self.x = draw.standard_normal((ROWS, WIDTH)).astype(np.float32)
        self.y = (self.x @ draw.standard_normal((WIDTH, CLASSES))).argmax(1)

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return torch.from_numpy(self.x[index]), torch.tensor(self.y[index])


class Distorted(Pictures):
    """Each is read with noise, as torchvision's random transforms add it; counts what is drawn."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        noise = torch.randn(WIDTH) + random.random() + np.random.random()
        self.drawn.append((index, tuple(noise.tolist())))
        return x + noise, y


def net(dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(dropout)


def run(module=None, **changes):
    given = {"optimizer": "diloco", "peers": 2, "steps": 3, "batch_size": 8, "learning_rate": 1e-2}
    given = given | {"optimizer": {"DiLoCo": {"inner_steps": 3}}} | changes
    loss = given.pop("loss", lambda module, batch: module(batch))
    data = given.pop("data", None) or Pictures()
    return simulate(loss, net() if module is None else module, data, show_progress=False, **given)


def equal(a, b) -> bool:
    return all(torch.equal(a.params[name], b.params[name]) for name in a.params)


def by_torch(module, rate: float, rows: int, steps: int):
    """The module after torch's own SGD, on so many rows at a time in their order."""
    data, optimizer = Pictures(), torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9)
    for first in range(0, rows * steps, rows):
        some = slice(first % ROWS, first % ROWS + rows)
        optimizer.zero_grad()
        module((torch.from_numpy(data.x[some]), torch.from_numpy(data.y[some]))).backward()
        optimizer.step()
    return module


def test_plain_data_parallelism_is_torchs_own_sgd_on_all_the_rows():
    sgd = {"SGD": {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0}}
    found = run(optimizer=sgd, learning_rate=0.1, shuffle=False, steps=4, peers=2)
    for name, parameter in by_torch(net(), 0.1, 16, 4).named_parameters():
        torch.testing.assert_close(found.params[name], parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["distro", {"DiLoCo": {"inner_steps": 3}}])
def test_the_same_arguments_give_the_same_bits_with_dropout_too(optimizer):
    first = run(net(0.5), optimizer=optimizer)
    assert equal(first, run(net(0.5), optimizer=optimizer))
    assert not equal(first, run(net(0.5), optimizer=optimizer, seed=1))


class Norms(torch.nn.Module):
    """As EXO Gym's MNIST: batch norms; a tied head, a mask, complex numbers, a frozen param."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.hidden = torch.nn.Linear(WIDTH, WIDTH)
        self.again = torch.nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.hidden.weight
        self.phase = torch.nn.Parameter(torch.randn(WIDTH, CLASSES, dtype=torch.complex64))
        self.register_buffer("mask", torch.ones(WIDTH))
        self.shift = torch.nn.Parameter(torch.full((1,), 5.0), requires_grad=False)

    def forward(self, batch):
        x, y = batch
        normed = self.norm(3 * x + self.shift)
        hidden = torch.relu(self.again(torch.relu(self.hidden(normed)))) * self.mask
        return F.cross_entropy((hidden.to(torch.complex64) @ self.phase).abs(), y)


def test_batch_norms_are_measured_as_torchs_own_training_leaves_them():
    torch.manual_seed(0)
    module, data, sgd = Norms(), Pictures(), {"SGD": {"momentum": 0.9, "weight_decay": 0.0}}
    given = {"optimizer": sgd, "learning_rate": 0.05, "shuffle": False, "peers": 1}
    held_out = data.x[:64], data.y[:64]
    found = run(copy.deepcopy(module), **given, steps=60, batch_size=32, eval_data=held_out)
    by_torch(module, 0.05, 32, 60)
    loaded = Norms()
    loaded.load_state_dict(found.params)  # a whole one: with buffers, frozen params and tied heads
    assert torch.equal(found.params["hidden.weight"], found.params["again.weight"])
    assert not torch.equal(found.params["again.weight"], Norms().again.weight)
    some = tuple(map(torch.from_numpy, held_out))
    with torch.no_grad():
        theirs, ours = module.eval()(some).item(), loaded.eval()(some).item()
    assert theirs < 0.5
    assert found.validation["loss"][-1] == pytest.approx(ours, abs=1e-5)
    assert ours < theirs + 0.02


class Moving(Net):
    """A teacher that follows in the forward pass, or a counter."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.register_buffer("teacher", self.out.weight.detach().clone())
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("queue", torch.arange(4.0))

    def forward(self, batch):
        if self.name == "queue":
            self.queue.copy_(self.queue.roll(1))
        elif self.name == "teacher":
            self.teacher.lerp_(self.out.weight.detach(), 0.5)
        elif self.name == "steps":
            self.steps += 1
        elif self.name == "out.bias" and self.training:  # an optimizer within the loss
            self.out.bias.data.mul_(0.9)
        return super().forward(batch) + (self.out.weight - self.teacher).square().sum()


@pytest.mark.parametrize("name", ["teacher", "steps", "out.bias", "queue"])
def test_what_moves_and_is_kept_by_nobody_is_one_line(name):
    with refused("simulate", f"{name} changed"):
        run(Moving(name))


def test_spectral_norms_follow_from_the_weights_and_are_right_where_they_are_loaded():
    def made():
        module = net()
        torch.nn.utils.parametrizations.spectral_norm(module.hidden)
        return module

    held_out = Pictures()
    given = {"steps": 12, "learning_rate": 0.05, "eval_data": (held_out.x, held_out.y)}
    found, cut, loaded = run(made(), **given), run(made(), **given, micro_batch=3), made()
    loaded.load_state_dict(found.params)
    with torch.no_grad():
        loss = loaded.eval()((torch.from_numpy(held_out.x), torch.from_numpy(held_out.y))).item()
    assert found.validation["loss"][-1] == pytest.approx(loss, abs=1e-5)
    weight = loaded.hidden.parametrizations.weight.original
    assert torch.linalg.matrix_norm(loaded.hidden.weight, 2).item() == pytest.approx(1, abs=5e-3)
    assert torch.linalg.matrix_norm(weight, 2).item() != pytest.approx(1, abs=0.01)
    for name, tensor in found.params.items():  # a pass more moves nothing
        torch.testing.assert_close(cut.params[name], tensor, rtol=1e-3, atol=1e-5)


def test_a_compiled_module_has_its_own_names_and_bits():
    compiled = torch.compile(net(), backend="eager")
    found = run(compiled)
    assert equal(found, run(net()))
    Net().load_state_dict(found.params)


def test_a_data_set_is_read_again_in_each_pass_and_its_draws_repeat():
    data, again, elsewhere = Distorted(), Distorted(), Distorted()
    found = run(data=data, steps=6)  # 2 peers x 6 rounds x 3 local steps x 8 examples: 3 passes
    assert equal(found, run(data=again, steps=6)) and set(data.drawn) == set(again.drawn)
    draws = {index: {draw for i, draw in data.drawn if i == index} for index in range(1, ROWS)}
    assert {len(of) for of in draws.values()} == {3}
    assert len(set.union(*draws.values())) == 3 * (ROWS - 1)  # no two are alike
    assert not equal(found, run(data=elsewhere, steps=6, seed=1))


def test_tensors_are_taken_where_arrays_are():
    data = Pictures()
    arrays = (data.x, data.y)
    found = run(data=arrays, eval_data=arrays)
    tensors = tuple(map(torch.from_numpy, arrays))
    told = run(data=tensors, eval_data=tensors)
    assert equal(found, told) and (found.validation["loss"] == told.validation["loss"]).all()
    narrow = (tensors[0].bfloat16().requires_grad_(), tensors[1])
    assert not equal(found, run(data=narrow))


def test_it_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path):
    whole = run(net(0.5), steps=4)
    given = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}
    run(net(0.5), steps=2, **given)
    assert equal(whole, run(net(0.5), steps=4, **given))


def test_a_loss_that_draws_numbers_is_measured_with_the_same_ones_each_time():
    def noisy(module, batch):
        x, y = batch
        return module((x + torch.randn_like(x) * random.random(), y))

    arrays = (Pictures().x, Pictures().y)  # a dataset is read with seeds of its own
    given = {"loss": noisy, "steps": 2, "learning_rate": 0.0, "eval_every": 1, "eval_data": arrays}
    found = run(net(), **given)
    assert len(set(found.validation["loss"].tolist())) == 1
    for seed in range(2):  # whatever the caller drew before
        torch.manual_seed(seed)
        random.seed(seed)
        again = run(net(), **given)
        assert equal(found, again)
        assert (found.validation["loss"] == again.validation["loss"]).all()


def test_a_liar_is_ejected_by_verifiers_and_nobody_else():
    faults = [{"kind": "sign_flip", "peer": 1, "rounds": [1, 8]}]
    found = run(optimizer="distro", peers=4, verification_percent=50, steps=8, faults=faults)
    assert [*found.ejected] == [1]


PRECISION = [{"kind": "wrong_precision", "peer": 0, "rounds": [1, 2]}]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "bfloat16"}, ["dtype", "bfloat16", "float32"]),
        ({"layout": "vmap"}, ["layout", "vmap", "each"]),
        ({"loss": lambda module: 0}, ["loss_fn", "loss_fn(module, batch)"]),
        ({"faults": PRECISION}, ["faults[0].kind", "wrong_precision"]),
        ({"module": net().requires_grad_(False)}, ["params", "Net"]),
    ],
)
def test_what_cannot_be_is_one_line(changes, named):
    with refused("simulate", *named):
        run(**changes)
