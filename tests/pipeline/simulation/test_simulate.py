"""`simulate` against loops written by hand; kills, faults and bytes as of any run."""

import csv
import json
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lockstep
import pipeline
from pipeline.errors import LockstepError
from pipeline.optim.sgd import sgd
from pipeline.simulation.settings import DEFAULTS, SPELLED, asked_of, tagged
from pipeline.wire.message import HEADER

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 0.5]) + 0.3).astype(np.float32)
DATA = {"x": X, "y": Y}
PARAMS = {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}
SGD = {"SGD": {"momentum": 0.0}}
DILOCO = {"DiLoCo": {"inner_steps": 2, "inner": SGD}}
FEDAVG = {"FedAvg": {"inner_steps": 2, "inner": SGD}}
SPARTA = {"SPARTA": {"inner_steps": 2, "share": 0.3, "inner": SGD}}
DISTRO = {"Distro": {"compression_topk": 2, "compression_chunk": 4}}


def squares(params, batch, rng):
    del rng
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """XLA compiles a program for each device anew."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)


simulate = partial(pipeline.simulate, show_progress=False)
short = partial(simulate, squares, PARAMS, DATA, peers=2, steps=4, batch_size=4, learning_rate=0.1)


def same(one, other) -> bool:
    """Whether two results are equal to the bit, apart from the time that they took here."""
    bits = [
        jax.tree.map(lambda x: x.tobytes(), (result.params, result.local_params))
        for result in (one, other)
    ]
    rows = [
        [{name: x for name, x in row.items() if name != "seconds"} for row in result.curves.train]
        for result in (one, other)
    ]
    return (
        bits[0] == bits[1]
        and rows[0] == rows[1]
        and (one.curves.validation == other.curves.validation)
    )


def gradient(w, x, y):
    """Of w = (w, b), in float64."""
    x1 = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    return 2 * x1.T @ (x1 @ w - y) / len(x)


def found(result) -> np.ndarray:
    return np.array([*result.params["w"], result.params["b"]])


def test_equals_a_loop_by_hand():
    told = []
    result = short(
        optimizer="sgd", shuffle=False, eval_data=DATA, eval_every=2, on_round=told.append
    )
    w, losses = np.zeros(4), []
    for step in range(4):
        batch = slice(step * 8 % 24, step * 8 % 24 + 8)  # the peers' lots, in order, and again
        losses.append(np.mean((X[batch] @ w[:3] + w[3] - Y[batch]) ** 2))
        w -= 0.1 * gradient(w, X[batch], Y[batch])
    np.testing.assert_allclose(found(result), w, rtol=1e-5)
    np.testing.assert_allclose(result.train["loss"], losses, rtol=1e-5)
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


def test_a_batch_counts_alike_however_it_is_cut():
    whole, cut = (short(optimizer="sgd", micro_batch=size) for size in (4, 2))
    np.testing.assert_allclose(found(whole), found(cut), rtol=1e-5)
    assert (whole.micro_batch, cut.micro_batch) == (4, 2)
    assert short(optimizer="sgd").micro_batch == 4  # what fits


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
    with pytest.raises(LockstepError, match=r"seed is 1, expected 0 as in the checkpoints in"):
        simulate(squares, PARAMS, DATA, DATA, **arguments, **folder, seed=1)
    other = PARAMS | {"w": np.zeros((3, 1), np.float32)}
    with pytest.raises(LockstepError, match="params is .*, expected .* as in the checkpoints"):
        simulate(lambda p, *_: p["w"].sum(), other, DATA, **arguments, **folder)
    with pytest.raises(LockstepError, match="steps is 4, expected at least 5, the rounds of the"):
        simulate(squares, PARAMS, DATA, DATA, **arguments | {"steps": 4}, **folder)

    further = simulate(squares, PARAMS, DATA, DATA, **arguments | {"steps": 7}, **folder)
    at_once = simulate(squares, PARAMS, DATA, DATA, **arguments | {"steps": 7})
    assert further.params["w"].tobytes() == at_once.params["w"].tobytes()
    assert further.train["loss"].tolist() == at_once.train["loss"].tolist()


def test_arrays_a_dataset_and_a_factory_give_the_same():
    items = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
    arguments = dict(optimizer="sgd", steps=4, batch_size=4, eval_every=4, learning_rate=0.1)
    arrays = simulate(squares, PARAMS, DATA, DATA, peers=2, **arguments)
    assert same(arrays, simulate(squares, PARAMS, items, items, peers=2, **arguments))
    alone = simulate(squares, PARAMS, DATA, DATA, peers=1, **arguments)
    assert same(alone, simulate(squares, PARAMS, lambda *_: items, peers=1, **arguments))


def test_examples_of_64_bits_are_what_jax_makes_of_them():
    wide = {"x": X.astype(np.float64), "y": Y.astype(np.float64)}
    arguments = dict(optimizer="sgd", peers=1, steps=2, batch_size=4)
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

    simulate(mean, PARAMS, dataset, None, optimizer="sgd", peers=1, steps=4, batch_size=12)
    orders = [seen[-48:-24], seen[-24:]]
    assert all(sorted(order) == list(range(24)) for order in orders)
    assert orders[0] != orders[1] != list(range(24))


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
    assert result.train["applied"].tolist() == [4] + 9 * [3] + 2 * [4]
    assert {"crash", "lazy", "wrong_data", "wrong_precision"} <= result.fired.keys()


def test_of_many_peers_some_are_witnesses_and_a_broken_message_is_left_out():
    faults = [{"kind": "malformed", "peer": 9, "rounds": [2, 2]}]
    result = short(optimizer="sgd", peers=10, faults=faults)
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


def test_an_optimizer_of_ones_own_and_any_schedule():
    by_name = short(optimizer="sgd", learning_rate=lambda step: 0.1 / step)
    own = sgd(lambda step: 0.1 / step, momentum=0.0, nesterov=False)
    assert same(by_name, short(optimizer=own, learning_rate=None))
    with pytest.raises(LockstepError, match="learning_rate is 0.1, expected None with an Op"):
        short(optimizer=own)


def test_a_state_of_flax_comes_back_as_one():
    graph, state = nnx.split(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))

    def loss_fn(state, batch, rng):
        return jnp.mean((nnx.merge(graph, state)(batch["x"])[:, 0] - batch["y"]) ** 2)

    result = simulate(loss_fn, state, DATA, DATA, optimizer="sgd", peers=2, steps=30, batch_size=8)
    assert jax.tree.structure(result.params) == jax.tree.structure(state)
    assert result.validation["loss"][-1] < 0.01 * result.validation["loss"][0]


def test_the_loss_computes_in_the_precision_that_was_asked_for():
    seen = set()

    def loss_fn(params, batch, rng):
        seen.update((params["w"].dtype.name, batch["x"].dtype.name))
        return squares(params, batch, rng)

    result = simulate(
        loss_fn, PARAMS, DATA, optimizer="sgd", peers=1, steps=1, batch_size=4, dtype="bfloat16"
    )
    assert result.params["w"].dtype == np.float32
    assert "bfloat16" in seen


@pytest.mark.soak
def test_the_layouts_give_the_same_up_to_rounding():
    each = short(optimizer=DILOCO)
    for layout in ("vmap", "shard_map"):
        np.testing.assert_allclose(
            found(short(optimizer=DILOCO, layout=layout)), found(each), rtol=1e-4
        )


def test_a_plot_is_drawn(tmp_path):
    result = short(optimizer="sgd", eval_data=DATA)
    assert result.plot(tmp_path / "loss.svg").read_text().startswith("<?xml")
    with pytest.raises(LockstepError, match="plot to .*loss.xyz, expected a name such as loss.png"):
        result.plot(tmp_path / "loss.xyz")


ASKED = {
    "peers": 2, "steps": 2, "batch_size": 3, "aggregation": "mean", "liars": None,
    "links": {}, "faults": [], "verification_percent": 0,
    "max_round_train_time": 9, "seed": 0, "shuffle": True, "micro_batch": None,
    "dtype": "float32", "layout": "each", "stacked": (), "eval_every": 1, "correlation_every": None,
}  # fmt: skip


@pytest.mark.parametrize("name", [*DEFAULTS, "demo", "streaming_diloco"])
def test_every_default_is_a_whole_table(name):
    asked = asked_of(name, None, ASKED)
    rows = asked.round_settings(name).coordinator.batch_size(0)
    assert rows == 2 * 3 * asked.optimizer.steps_of_a_round


WRONG = [
    ({"peers": 0}, "peers is 0, expected an integer from 1"),
    ({"peers": 300}, "peers is 300, expected a number less than or equal to 256"),
    ({"steps": True}, "steps is True, expected an integer from 1"),
    ({"steps": 10**12}, r"steps is 1000000000000, expected a Python integer from 1, below"),
    ({"batch_size": 2**31}, "batch_size is 2147483648: 4,294,967,296 examples in a round"),
    ({"max_round_train_time": 2**64}, "max_round_train_time is 18446744073709551616, expected"),
    ({"batch_size": np.int64(2)}, r"batch_size is np.int64\(2\), expected a Python integer"),
    ({"eval_every": 2.5}, "eval_every is 2.5, expected an integer from 1"),
    ({"verification_percent": True}, "verification_percent is True, expected a Python integer"),
    ({"peers": None}, "peers is None, expected an integer from 1"),
    ({"learning_rate": True}, "learning_rate.Constant.base_lr is true, expected a number"),
    ({"learning_rate": {3: {}}}, "learning_rate is a table with 3, expected exactly one of Const"),
    ({"data": jnp.float32(2)}, "train_data is ArrayImpl, expected arrays with a leading axis"),
    ({"shuffle": "no"}, "shuffle is 'no', expected True or False"),
    ({"show_progress": 0}, "show_progress is 0, expected True or False"),
    ({"on_round": 3}, "on_round is 3, expected a function of a round's numbers, or None"),
    ({"log_dir": True}, "log_dir is True, expected a path or None"),
    ({"log_dir": 5e-324}, "log_dir is 5e-324, expected a path or None"),
    ({"checkpoint_dir": ""}, "checkpoint_dir is '', expected a path or None"),
    ({"log_dir": __file__}, "log_dir is '.*', expected a folder to write to: File exists"),
    ({"checkpoint_dir": f"{__file__}/x"}, "checkpoint_dir is '.*', expected a folder .*: Not a"),
    ({"log_dir": "/proc/self/x"}, "log_dir is '/proc/self/x', expected a folder .*: No such"),
    ({"log_dir": "a\0b"}, "log_dir is .*, expected a folder to write to: embedded null"),
    ({"optimizer": "adam"}, "optimizer is 'adam', expected one of demo, .*did you mean adamw"),
    ({"optimizer": "dilco"}, "optimizer is 'dilco'.*streaming_diloco, .*did you mean diloco?"),
    ({"optimizer": {"DiLoCo": {"inner_steps": 0}}}, "optimizer.DiLoCo.inner_steps is 0, expected"),
    ({"optimizer": {"DiLoCo": {"steps": 1}}}, "optimizer.DiLoCo.steps: unknown key, expected one"),
    ({"optimizer": "muon"}, r"stacked is \(\), expected the names of params whose arrays are"),
    ({"stacked": None}, "stacked is None, expected a tuple of names"),
    ({"stacked": "w"}, "stacked is 'w', expected a tuple of names"),
    ({"stacked": ("w",)}, r"stacked is \('w',\), expected none with SGD, which takes"),
    ({"stacked": ("w",), "optimizer": "fedavg"}, r"stacked is \('w',\), expected none with AdamW"),
    ({"stacked": ("w",), "optimizer": sgd(1)}, r"stacked is \('w',\), expected none with an Optim"),
    ({"stacked": ("z",)}, "stacked has 'z', expected some of b, w"),
    ({"learning_rate": -1.0}, "learning_rate.Constant.base_lr is -1.0, expected a number greater"),
    ({"learning_rate": 1e30}, "loss is (inf|nan) at round [23], expected a finite number; try a"),
    (
        {"loss_fn": lambda p, b, r: squares(p, b, r) + jnp.sqrt(jnp.sum(p["b"] * 0))},
        "no peer's message is finite at round 1: gradients are infinite or NaN though the loss is",
    ),
    ({"links": {"upload": 3}}, "links.upload: unknown key, expected one of upload_mbps, "),
    ({"faults": [{"kind": "noise", "peer": 7, "rounds": [1, 1]}]}, r"faults\[0\].peer is 7, exp"),
    (
        {"faults": [{"kind": "scale_up", "peer": 1, "rounds": [1, 1]}], "optimizer": DISTRO},
        r'faults\[0\].kind is "scale_up", expected a kind for signs',
    ),
    ({"dtype": "float16"}, "dtype is 'float16', expected 'float32' or 'bfloat16'"),
    ({"micro_batch": 8}, r"micro_batch is 8, expected at most batch_size \(4\)"),
    ({"seed": -1}, "seed is -1, expected a Python integer from 0"),
    ({"params": {}}, "params is an empty tree, expected arrays"),
    ({"params": {"w": np.zeros(3, int)}}, "params w is int64, expected an array of floating-po"),
    (
        {"params": {"w": np.zeros((0, 4), np.float32)}, "optimizer": DISTRO},
        r"params w has the shape \(0, 4\), expected elements in it",
    ),
    ({"data": {"x": X, "y": Y[:3]}}, r"train_data has arrays of shapes \(24, 3\), \(3,\), exp"),
    ({"data": 3}, "train_data is int, expected arrays with a leading axis"),
    ({"data": []}, "train_data has no examples, expected at least one"),
    ({"data": [X[:2], X[0]]}, "train_data has items of different shapes, expected equal ones"),
    ({"data": lambda peer: 3}, "train_data is a function that cannot be called so: too many"),
    ({"data": ["a", "b"]}, "train_data has items of <U1, expected arrays of numbers"),
    ({"eval_data": lambda peer: 3}, "eval_data is a function that cannot be called so: too"),
    ({"eval_data": 3}, "eval_data is int, expected arrays"),
    ({"loss_fn": 3}, r"loss_fn is int, expected a function: loss_fn\(params, batch, rng\)"),
    ({"loss_fn": lambda p, b: 0}, "loss_fn is a function that cannot be called so: too many"),
    ({"loss_fn": lambda p, b, r: p["w"]}, r"loss_fn returns float32\[3\], expected a loss: one"),
    ({"loss_fn": lambda p, b, r: None}, "loss_fn returns nothing, expected a loss: one floating"),
    ({"loss_fn": lambda p, b, r: {"loss": p["b"]}}, "loss_fn returns dict, expected a loss: one"),
    ({"loss_fn": lambda p, b, r: 0.5}, "loss_fn returns the constant 0.5, expected a loss: one fl"),
    (
        {"loss_fn": lambda p, b, r: (p["b"], {})},
        r"loss_fn returns a tuple \(float32\[\], dict\), expected the loss alone, without aux: one",
    ),
]  # fmt: skip


@pytest.mark.parametrize("changes, message", WRONG, ids=[message[:30] for _, message in WRONG])
def test_what_is_wrong_is_said_in_one_line(changes, message):
    given = {"loss_fn": squares, "params": PARAMS, "data": DATA} | changes
    data = [given.pop(name) for name in ("loss_fn", "params", "data")]
    arguments = {"optimizer": "sgd", "peers": 2, "steps": 3, "batch_size": 4} | given
    with pytest.raises(LockstepError, match=f"^simulate: {message}") as refused:
        simulate(*data, **arguments)
    assert "\n" not in str(refused.value)


def test_a_folder_that_cannot_be_is_said_before_anything_is_compiled(monkeypatch):
    took = lambda *_, **__: pytest.fail("took rounds")  # noqa: E731
    monkeypatch.setattr("pipeline.simulation.simulate.take_rounds", took)
    with pytest.raises(LockstepError, match="log_dir is .*, expected a folder to write to"):
        short(optimizer="sgd", log_dir=__file__)


@pytest.mark.parametrize("name", ["demo", *(SPELLED.get(tag, tag.lower()) for tag in DEFAULTS)])
def test_the_names_that_an_error_lists_are_names_of_the_library(name):
    assert name in lockstep.__all__
    assert tagged(name)[0] in DEFAULTS


def test_the_pipeline_alone_imports_no_jax():
    program = "import pipeline, sys; assert not {'jax', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match="no attribute 'simulated'"):
        pipeline.simulated  # noqa: B018
