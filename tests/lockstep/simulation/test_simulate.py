"""`simulate` against loops written by hand; the same bits again, of any data and after a kill."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lockstep
from lockstep.errors import LockstepError
from lockstep.optim.dense import sgd
from lockstep.wire.message import HEADER
from tests import tiny
from tests.errors import refused
from tests.lockstep.simulation.least_squares import (
    DATA,
    DILOCO,
    DISTRO,
    FEDAVG,
    PARAMS,
    SGD,
    SPARTA,
    X,
    Y,
    found,
    same,
    short,
    simulate,
    squares,
)

pytestmark = pytest.mark.usefixtures("one_device")


def gradient(w, x, y):
    """Of w = (w, b), in float64."""
    x1 = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    return 2 * x1.T @ (x1 @ w - y) / len(x)


def test_equals_a_loop_by_hand():
    told = []
    result = short(optimizer=SGD, shuffle=False, eval_data=DATA, eval_every=2, on_round=told.append)
    w, losses = np.zeros(4), []
    for step in range(4):
        batch = slice(step * 8 % 24, step * 8 % 24 + 8)  # the peers' lots, in order, and again
        losses.append(np.mean((X[batch] @ w[:3] + w[3] - Y[batch]) ** 2))
        w -= 0.1 * gradient(w, X[batch], Y[batch])
    np.testing.assert_allclose(found(result), w, rtol=1e-5)
    np.testing.assert_allclose(result.train["loss"], losses, rtol=1e-5)
    assert result.micro_batch == 4  # what fits
    assert told == result.curves.train
    assert result.validation["step"].tolist() == [0, 2, 4]
    np.testing.assert_allclose(
        result.validation["loss"][-1], np.mean((X @ w[:3] + w[3] - Y) ** 2), rtol=1e-5
    )


def test_diloco_equals_a_loop_by_hand():
    """Each peer has one example, so that any batch of it is the same."""

    def factory(peer, num_peers, split):
        assert num_peers == 2
        return None if split == "eval" else {"x": X[peer : peer + 1], "y": Y[peer : peer + 1]}

    result = simulate(
        squares, PARAMS, factory, optimizer=DILOCO, peers=2, steps=3, batch_size=2,
        learning_rate=0.1,
    )  # fmt: skip
    w, momentum = np.zeros(4), np.zeros(4)
    for _ in range(3):
        went = []
        for peer in range(2):
            local = w.copy()
            for _ in range(2):
                local -= 0.1 * gradient(local, X[peer : peer + 1], Y[peer : peer + 1])
            went.append(w - local)
        mean = np.mean(went, axis=0)
        momentum = 0.9 * momentum + mean
        w = w - 0.7 * (mean + 0.9 * momentum)
    np.testing.assert_allclose(found(result), w, rtol=1e-4)
    assert not len(result.validation["loss"])


def test_a_key_is_of_the_seed_the_round_the_peer_and_the_local_step():
    def draws(params, batch, rng):
        return jnp.sum(params["w"] * jax.random.normal(rng, (3,)))

    def drawn(seed, step, peer, local_step):
        key = jax.random.key(seed, impl="threefry2x32")
        for number in (step, peer, local_step, 0):  # 0: the micro-batch
            key = jax.random.fold_in(key, number)
        return np.asarray(jax.random.normal(key, (3,)), np.float64)

    result = simulate(
        draws, {"w": np.zeros(3, np.float32)}, DATA, optimizer=FEDAVG, peers=2, steps=2,
        batch_size=1, seed=5, learning_rate=1.0,
    )  # fmt: skip
    w = np.zeros(3)
    for step in (1, 2):
        w -= np.mean([drawn(5, step, p, 0) + drawn(5, step, p, 1) for p in range(2)], axis=0)
    np.testing.assert_allclose(result.params["w"], w, rtol=1e-4)


@pytest.mark.long
def test_the_same_bits_again_and_after_a_kill(tmp_path):
    class Dataset:
        """A process that dies while it reads, once."""

        def __init__(self, reads):
            self.reads = reads

        def __len__(self):
            return len(X)

        def __getitem__(self, index):
            self.reads -= 1
            if not self.reads:
                raise KeyboardInterrupt
            return {"x": X[index], "y": Y[index]}

    arguments = dict(
        optimizer=SPARTA, peers=2, steps=5, batch_size=2, eval_every=2, learning_rate=0.1,
        faults=[{"kind": "stale", "peer": 1, "rounds": [2, 4]}],
    )  # fmt: skip
    whole = simulate(squares, PARAMS, DATA, DATA, **arguments)
    folder = {"checkpoint_dir": tmp_path / "kept", "checkpoint_every": 1, "log_dir": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        simulate(squares, PARAMS, Dataset(30), DATA, **arguments, **folder)
    resumed = simulate(squares, PARAMS, Dataset(-1), DATA, **arguments, **folder)
    assert same(whole, resumed)
    assert whole.fired == resumed.fired == {"stale": 3}
    with open(tmp_path / "train.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == whole.train["loss"].tolist()
    assert json.loads((tmp_path / "config.json").read_text())["peers"] == 2

    done = simulate(squares, PARAMS, Dataset(8), DATA, **arguments, **folder)  # reads no more
    assert same(whole, done)
    with refused("seed", 1, 0):
        simulate(squares, PARAMS, DATA, DATA, **arguments, **folder, seed=1)
    other = PARAMS | {"w": np.zeros((3, 1), np.float32)}
    with pytest.raises(LockstepError, match="params is .*, expected .* as in the checkpoints"):
        simulate(lambda p, *_: p["w"].sum(), other, DATA, **arguments, **folder)
    with refused("steps", 4, 5):
        simulate(squares, PARAMS, DATA, DATA, **arguments | {"steps": 4}, **folder)

    further = simulate(squares, PARAMS, DATA, DATA, **arguments | {"steps": 7}, **folder)
    at_once = simulate(squares, PARAMS, DATA, DATA, **arguments | {"steps": 7})
    assert further.params["w"].tobytes() == at_once.params["w"].tobytes()
    assert further.train["loss"].tolist() == at_once.train["loss"].tolist()


def test_arrays_a_dataset_and_a_factory_give_the_same():
    items = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
    arguments = dict(optimizer=SGD, steps=4, batch_size=4, eval_every=4, learning_rate=0.1)
    arrays = simulate(squares, PARAMS, DATA, DATA, peers=2, **arguments)
    assert same(arrays, simulate(squares, PARAMS, items, items, peers=2, **arguments))
    wide = [{"x": x, "y": np.full(3, y)} for x, y in zip(X, Y, strict=True)]  # of one length
    columns = lambda params, batch, rng: squares(params, batch | {"y": batch["y"][:, 0]}, rng)  # noqa: E731
    assert same(arrays, simulate(columns, PARAMS, wide, wide, peers=2, **arguments))
    alone = simulate(squares, PARAMS, DATA, DATA, peers=1, **arguments)
    assert same(alone, simulate(squares, PARAMS, lambda *_: items, peers=1, **arguments))


def test_examples_of_64_bits_are_what_jax_makes_of_them():
    wide = {"x": X.astype(np.float64), "y": Y.astype(np.float64)}
    arguments = dict(optimizer=SGD, peers=1, steps=2, batch_size=4)
    assert same(*(simulate(squares, PARAMS, data, **arguments) for data in (DATA, wide)))


def test_an_epoch_has_each_example_once_in_an_order_of_its_own():
    seen = []

    def dataset(peer, num_peers, split):
        class Noting(list):
            def __getitem__(self, index):
                seen.append(index)
                return super().__getitem__(index)

        return Noting(X) if split == "train" else None

    def mean(params, batch, rng):
        return jnp.mean(batch @ params["w"])

    simulate(mean, PARAMS, dataset, None, optimizer=SGD, peers=1, steps=4, batch_size=12)
    orders = [seen[-48:-24], seen[-24:]]
    assert all(sorted(order) == list(range(24)) for order in orders)
    assert orders[0] != orders[1] != list(range(24))


def test_an_optimizer_of_ones_own_and_any_schedule():
    by_name = short(optimizer=SGD, learning_rate=lambda step: 0.1 / step)
    own = sgd(lambda step: 0.1 / step, momentum=0.0, nesterov=False)
    assert same(by_name, short(optimizer=own, learning_rate=None))
    with refused("learning_rate", 0.1, "None"):
        short(optimizer=own)


def test_an_optimizer_of_optax_takes_its_own_steps_of_the_mean_gradient():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.1))
    result = short(optimizer=tx, learning_rate=None, shuffle=False, micro_batch=3)
    params = jax.tree.map(jnp.array, PARAMS)
    state = tx.init(params)
    for step in range(4):
        batch = {name: x[step * 8 % 24 :][:8] for name, x in DATA.items()}
        updates, state = tx.update(jax.grad(squares)(params, batch, None), state, params)
        params = optax.apply_updates(params, updates)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), result.params, params
    )


def test_a_state_of_flax_comes_back_as_one():
    graph, state = nnx.split(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))

    def loss_fn(state, batch, rng):
        return jnp.mean((nnx.merge(graph, state)(batch["x"])[:, 0] - batch["y"]) ** 2)

    result = simulate(loss_fn, state, DATA, DATA, optimizer=SGD, peers=2, steps=30, batch_size=8)
    assert jax.tree.structure(result.params) == jax.tree.structure(state)
    assert result.validation["loss"][-1] < 0.01 * result.validation["loss"][0]


def test_the_loss_computes_in_the_precision_that_was_asked_for():
    seen = set()

    def loss_fn(params, batch, rng):
        seen.update((params["w"].dtype.name, batch["x"].dtype.name))
        return squares(params, batch, rng)

    result = simulate(
        loss_fn, PARAMS, DATA, optimizer=SGD, peers=1, steps=1, batch_size=4, dtype="bfloat16"
    )
    assert result.params["w"].dtype == np.float32
    assert "bfloat16" in seen


def images(params, batch, rng):
    seen = jax.lax.conv(batch["image"], params["filter"], (1, 1), "SAME")
    guess = jnp.tanh(seen).mean((2, 3)) @ params["out"]
    return jnp.mean((guess + 0.1 * jax.random.normal(rng, guess.shape) - batch["y"]) ** 2)


@pytest.mark.long
def test_a_model_by_rules_has_the_same_bits_in_every_layout():
    draw = np.random.default_rng(3)
    shapes = {"image": (16, 2, 6, 5), "y": (16, 3), "filter": (4, 2, 3, 3), "out": (4, 3)}
    drawn = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    data, params = ({name: drawn.pop(name) for name in list(drawn)[:2]} for _ in range(2))
    settings = {"peers": 2, "steps": 2, "batch_size": 4, "learning_rate": 0.1, "optimizer": DILOCO}
    settings |= {"bits": "everywhere", "product_bits": 8}
    each, vmap = (
        simulate(images, params, data, layout=layout, **settings) for layout in ("each", "vmap")
    )
    assert same(each, vmap)


def test_an_operation_without_a_rule_is_refused_with_its_line():
    def erf(params, batch, rng):
        return jax.lax.erf(squares(params, batch, rng))

    line = erf.__code__.co_firstlineno + 1
    with refused("bits", "everywhere", f"erf of float32 at simulation/test_simulate.py:{line}"):
        simulate(
            erf, PARAMS, DATA, optimizer=SGD, peers=2, steps=1, batch_size=4, bits="everywhere"
        )
    flip = {"kind": "bit_flip", "peer": 0, "rounds": [1, 1], "size": 99}
    with refused("bit_flip", 99):  # of fewer products
        short(optimizer=SGD, bits="everywhere", faults=[flip])


def test_a_plot_is_drawn(tmp_path):
    result = short(optimizer=SGD, eval_data=DATA)
    assert result.plot(tmp_path / "loss.svg").read_text().startswith("<?xml")
    with refused("loss.xyz", "loss.png"):
        result.plot(tmp_path / "loss.xyz")


def test_the_librarys_names_are_its_public_ones():
    assert dir(lockstep) == sorted(lockstep.__all__)
    assert not {"ast", "Path", "Any"} & {*dir(lockstep)}


def test_the_pipeline_alone_imports_no_jax():
    program = "import pipeline, sys; assert not {'jax', 'numpy'} & sys.modules.keys()"
    assert tiny.python("-c", program).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'simulated'"):
        lockstep.simulated  # noqa: B018


# ---- What becomes of simulated peers: faults, bytes and links as of any run ----


@pytest.mark.parametrize("optimizer", [DILOCO, DISTRO], ids=["DiLoCo", "DisTrO"])
def test_a_liar_is_named_and_nobody_else(optimizer):
    def run(*faults):
        return simulate(
            squares, PARAMS, DATA, optimizer=optimizer, peers=4, steps=6, batch_size=2,
            learning_rate=0.05, verification_percent=50, faults=faults,
        )  # fmt: skip

    assert run().ejected == {}
    lying = run({"kind": "sign_flip", "peer": 2, "rounds": [1, 6]})
    assert list(lying.ejected) == [2]
    assert lying.fired["sign_flip"] >= 1


def test_a_peer_that_was_away_comes_back_and_less_work_is_still_work():
    faults = [
        {"kind": "crash", "peer": 1, "rounds": [2, 4]},
        {"kind": "lazy", "peer": 0, "rounds": [1, 1]},
        {"kind": "wrong_data", "peer": 0, "rounds": [2, 2]},
        {"kind": "wrong_precision", "peer": 0, "rounds": [3, 3]},
    ]
    result = short(optimizer=DILOCO, peers=4, steps=12, faults=faults)
    applied = [4] + 9 * [3] + 2 * [4]
    assert result.train["applied"].tolist() == applied
    assert result.train["examples"].tolist() == (np.cumsum(applied) * 2 * 4).tolist()  # each has 4
    assert {"crash", "lazy", "wrong_data", "wrong_precision"} <= result.fired.keys()


def test_of_many_peers_some_are_witnesses_and_a_broken_message_is_left_out():
    faults = [{"kind": "malformed", "peer": 9, "rounds": [2, 2]}]
    result = short(optimizer=SGD, peers=10, faults=faults)
    assert result.train["applied"][:2].tolist() == [10, 9]
    assert result.fired == {"malformed": 1}


def test_bytes_are_those_of_the_messages_and_time_is_that_of_the_links():
    links = {"upload_mbps": 1.0, "download_mbps": [1e6, 1e6], "latency_seconds": 0.5}
    result = short(optimizer=FEDAVG, links=links | {"tokens_per_second": 16.0})
    size = HEADER.size + 4 * 4
    assert result.train["bytes_up"].tolist() == [size, 2 * size, 3 * size, 4 * size]
    assert result.bytes_per_peer == 4 * size
    assert result.train["bytes_down"][-1] == 4 * size
    seconds = 8 / 16 + 0.5 + size * 8 / 1e6
    np.testing.assert_allclose(result.train["link_seconds"][-1], 4 * seconds, rtol=1e-6)


def test_local_params_are_apart_only_where_peers_are():
    apart, together = (
        short(optimizer=o, eval_data=DATA, correlation_every=2) for o in (SPARTA, DILOCO)
    )
    assert apart.correlation["step"].tolist() == [2, 4]
    assert np.all(apart.correlation["correlation"] < 1)
    np.testing.assert_allclose(together.correlation["correlation"], 1)
    last = {name: values[-1] for name, values in apart.validation.items()}
    assert len({last["loss"], last["local_loss"], last["averaged_loss"]}) == 3
    local = apart.local_params[0]
    expected = np.mean((X @ local["w"] + local["b"] - Y) ** 2)
    np.testing.assert_allclose(last["local_loss"], expected, rtol=1e-5)
    together = {name: values[-1] for name, values in together.validation.items()}
    assert together["loss"] == together["local_loss"]


ADOPTED_AT_ONCE = {"inner_steps": 2, "inner": SGD, "fragments": 1, "delay": 0}
STREAMING = {"StreamingDiLoCo": ADOPTED_AT_ONCE | {"mixing": 0.0, "outer_momentum": 0.9}}
DECOUPLED = {"DecoupledDiLoCo": ADOPTED_AT_ONCE}


@pytest.mark.parametrize("optimizer", [STREAMING, DECOUPLED], ids=["Streaming", "Decoupled"])
def test_local_params_are_those_after_what_the_next_step_adopts(optimizer):
    result = short(optimizer=optimizer, eval_data=DATA, eval_every=1, correlation_every=1)
    measured = result.validation
    for name in ("local_loss", "averaged_loss"):
        np.testing.assert_allclose(measured[name], measured["loss"], rtol=1e-6)
    np.testing.assert_allclose(result.correlation["correlation"], 1)
    for local in result.local_params:
        np.testing.assert_allclose(local["w"], result.params["w"], rtol=1e-6)
    if optimizer is STREAMING:  # then it is DiLoCo
        diloco = short(optimizer=DILOCO, eval_data=DATA, eval_every=1).validation
        np.testing.assert_allclose(measured["loss"], diloco["loss"], rtol=1e-5)
