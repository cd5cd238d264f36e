"""One mean: a step and a measure are those of all that counts, however a batch is cut.

The reference is NumPy in float64, on the whole batch at once. What is cut: micro-batches, full ones
or not, layouts, and peers, whose examples do not count alike.
"""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.errors import refused
from tests.lockstep.simulation.least_squares import SGD, simulate

torch = pytest.importorskip("torch")

ROWS, WIDTH = 14, 4
RNG = np.random.default_rng(5)
X = RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)
Y = (X.sum(axis=1) + np.arange(ROWS)).astype(np.float32)
MASK = RNG.random((ROWS,)) < 0.6
MASK[:7], MASK[0] = False, True  # of the first peer's examples one counts
DATA = {"x": X, "y": Y, "mask": MASK}
RATE = 0.1


def squares(w, batch):
    return (batch["x"] @ w - batch["y"]) ** 2


def mean(params, batch, rng):
    return squares(params["w"], batch).mean()


def counted(params, batch, rng):
    return (squares(params["w"], batch) * batch["mask"]).sum(), batch["mask"].sum()


def weighted(params, batch, rng):
    """Counts that are no whole numbers, the same for the sum."""
    total, count = counted(params, batch, rng)
    return total * 0.3, count * 0.3


def torch_mean(module, batch):
    return ((module(batch["x"])[:, 0] - batch["y"]) ** 2).mean()


def torch_counted(module, batch):
    losses = (module(batch["x"])[:, 0] - batch["y"]) ** 2
    return (losses * batch["mask"]).sum(), batch["mask"].sum()


LOSSES = {
    "mean": (mean, np.ones(ROWS)),
    "sum and count": (counted, MASK),
    "sum and fractions": (weighted, MASK),
    "torch, mean": (torch_mean, np.ones(ROWS)),
    "torch, sum and count": (torch_counted, MASK),
}


def reference(weight, steps=2):
    """Params, train losses and the loss at the end, of the mean by these weights."""
    x, y, weight = X.astype(np.float64), Y.astype(np.float64), weight / weight.sum()
    w, losses = np.zeros(WIDTH), []
    for _ in range(steps):
        error = x @ w - y
        losses.append(weight @ error**2)
        w = w - RATE * 2 * x.T @ (weight * error)
    return w, losses, weight @ (x @ w - y) ** 2


def started(loss):
    if not loss.__name__.startswith("torch"):
        return {"w": np.zeros(WIDTH, np.float32)}
    module = torch.nn.Linear(WIDTH, 1, bias=False)
    torch.nn.init.zeros_(module.weight)
    return module


CUTS = [
    *({"peers": 1, "micro_batch": size} for size in (14, 7, 5, 4, 1)),
    *({"peers": 2, "micro_batch": size} for size in (7, 4, 2)),
    {"peers": 7, "micro_batch": 1},
    {"peers": 2, "micro_batch": 4, "layout": "vmap"},
    {"peers": 2, "micro_batch": 3, "layout": "shard_map"},
    {"peers": 2, "micro_batch": 4, "bits": "everywhere"},
]


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: "-".join(map(str, cut.values())))
@pytest.mark.parametrize("name", LOSSES)
def test_the_same_step_and_the_same_measure_however_a_batch_is_cut(name, cut, monkeypatch):
    loss, weight = LOSSES[name]
    if loss.__name__.startswith("torch") and cut.keys() & {"layout", "bits"}:
        pytest.skip("of JAX alone")
    monkeypatch.setattr("lockstep.simulation.rounds.MEASURED_AT_ONCE", 5)
    result = simulate(
        loss, started(loss), DATA, DATA, optimizer=SGD, steps=2, shuffle=False,
        batch_size=ROWS // cut["peers"], learning_rate=RATE, **cut,
    )  # fmt: skip
    assert result.micro_batch == cut["micro_batch"]
    w, losses, measured = reference(weight)
    (found,) = jax.tree.leaves(jax.tree.map(np.array, result.params))
    np.testing.assert_allclose(found.reshape(-1), w, rtol=2e-5)
    np.testing.assert_allclose(result.train["loss"], losses, rtol=2e-5)
    np.testing.assert_allclose(result.validation["loss"][-1], measured, rtol=2e-5)


def test_a_count_is_a_number_from_0_and_rows_are_read_once():
    with refused("loss_fn", "count of -14", "expected from 0"):
        simulate(
            lambda p, b, r: (squares(p["w"], b).sum(), -jnp.float32(len(b["x"]))), started(mean),
            DATA, optimizer=SGD, peers=1, steps=1, batch_size=ROWS,
        )  # fmt: skip

    with refused("loss_fn", "complex64"):
        simulate(
            lambda p, b, r: (squares(p["w"], b).sum(), jnp.complex64(3)), started(mean),
            DATA, optimizer=SGD, peers=1, steps=1, batch_size=ROWS,
        )  # fmt: skip

    class Noting(list):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    data = Noting({name: x[row] for name, x in DATA.items()} for row in range(ROWS))
    simulate(counted, started(mean), data, optimizer=SGD, peers=2, steps=3, batch_size=7)
    assert data.reads == 3 * ROWS + 2 * 7 + 2  # and to see what they are


COUNTS = {
    "of what was computed": (lambda out, batch: (out > 0).sum(), "zeros"),
    "complex": (lambda out, batch: torch.tensor(3j), "complex64"),
    "several": (lambda out, batch: batch["mask"], "[14]"),
    "no number": (lambda out, batch: "many", "str"),
}


@pytest.mark.parametrize("case", COUNTS)
def test_what_counts_for_torch_is_a_number_that_follows_from_the_rows_alone(case):
    count, found = COUNTS[case]

    def loss(module, batch):
        out = module(batch["x"])[:, 0]
        return ((out - batch["y"]) ** 2).sum(), count(out, batch)

    with refused("loss", found):
        simulate(
            loss, torch.nn.Linear(WIDTH, 1), DATA, optimizer=SGD, peers=1, steps=1, batch_size=ROWS
        )


def test_a_count_that_is_drawn_is_of_its_rows():
    def loss(module, batch):
        drawn = torch.rand(len(batch["x"])) < 0.5
        losses = (torch.nn.functional.dropout(module(batch["x"])[:, 0]) - batch["y"]) ** 2
        return (losses * drawn).sum(), drawn.sum()

    module = torch.nn.Linear(WIDTH, 1)
    ended = simulate(loss, module, DATA, optimizer=SGD, peers=1, steps=2, batch_size=ROWS)
    assert len(ended.train["loss"]) == 2


@pytest.mark.parametrize("pair", [False, True])
def test_rows_of_earlier_rounds_are_let_go(pair):
    rows, held = {"x": np.ones((8, 2**15), np.float32)}, []

    def loss(params, batch, rng):
        losses = (batch["x"].mean(axis=1) - params["w"][0]) ** 2
        return (losses.sum(), len(losses)) if pair else losses.mean()

    def note(row):
        held.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    try:
        simulate(
            loss, started(mean), rows, optimizer=SGD, peers=1, steps=8, batch_size=8, on_round=note
        )
    finally:
        tracemalloc.stop()
    assert held[7] - held[3] < 2 * rows["x"].nbytes  # what is kept of four rounds is four times it
