"""`simulate` of rounds that close without those that are late."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lockstep.errors import LockstepError
from tests.lockstep.simulation.least_squares import (
    DATA,
    PARAMS,
    SGD,
    found,
    same,
    short,
    simulate,
    squares,
)

pytestmark = pytest.mark.usefixtures("one_device")

INNER = {"inner_steps": 4, "fragments": 2, "delay": 0, "inner": SGD}
OUTER = {"Nesterov": {"learning_rate": 0.7, "momentum": 0.5}}
UNLIKE = {"tokens_per_second": [10.0, 10.0, 5.0], "latency_seconds": [0.05, 3.0, 0.05]}


def decoupled(**changes) -> dict:
    table = {"adopt": "carry", "quorum": 2, "grace_seconds": 0.1, "outer": OUTER, **INNER}
    return {"DecoupledDiLoCo": table | changes}


def run(optimizer=None, **changes):
    given = {"peers": 3, "steps": 8, "links": UNLIKE} | changes
    return short(optimizer=optimizer or decoupled(), **given)


def test_rounds_do_not_wait_for_the_slowest_whose_steps_are_fewer_and_late():
    whole = run()
    waiting = run(decoupled(quorum=3, grace_seconds=1000.0))
    rows = whole.curves.train
    assert [row["applied"] for row in rows].count(3) >= 1  # what was late was merged too
    assert rows[-1]["link_seconds"] < waiting.curves.train[-1]["link_seconds"] / 2
    # 4 examples in each of 2 local steps; half of them of the slow peer, none of one that travels
    assert rows[-1]["examples"] < waiting.curves.train[-1]["examples"] == 8 * (8 + 8 + 4)
    assert rows[-1]["loss"] < rows[0]["loss"] / 2


def test_a_loss_that_is_nan_of_padding_alone_loses_nobody():
    def of_directions(params, batch, rng):
        x = batch["x"] / jnp.linalg.norm(batch["x"], axis=1, keepdims=True)
        return squares(params, batch | {"x": x}, rng)

    arguments = dict(peers=3, steps=4, batch_size=4, links=UNLIKE, learning_rate=0.1)
    trained = simulate(of_directions, PARAMS, DATA, optimizer=decoupled(), **arguments)
    assert np.isfinite(trained.train["loss"]).all() and max(trained.train["applied"]) == 3


def test_one_peer_trains_as_with_streaming_diloco():
    outer = {"outer_learning_rate": 0.7, "outer_momentum": 0.5, "nesterov": True}
    streaming = {"StreamingDiLoCo": {**INNER, **outer, "mixing": 0.0}}
    alone = {"peers": 1, "links": {}, "steps": 4}
    one = decoupled(quorum=1, adopt="overwrite", grace_seconds=0.0)
    assert same(run(one, **alone), run(streaming, **alone))


class KilledError(Exception):
    """In place of a signal."""


@pytest.mark.long
def test_one_that_goes_on_after_kills_has_the_messages_that_were_on_their_way(tmp_path):
    """Killed between checkpoints too, whose rounds are taken again, and at each of them."""
    kills = [1, 3, 3, 5]

    def kill(row):
        if kills and row["step"] == kills[0]:
            del kills[0]
            raise KilledError

    kept = {"checkpoint_dir": tmp_path, "checkpoint_every": 2, "on_round": kill}
    for _ in range(len(kills)):
        with pytest.raises(KilledError):
            run(**kept)
    assert same(run(**kept), run())
    for steps in (1, 2, 4, 8):
        again = run(steps=steps, checkpoint_dir=tmp_path / "each", checkpoint_every=1)
    assert same(run(), again)


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(3))
        self.b = torch.nn.Parameter(torch.zeros(()))


def torch_squares(module, batch):
    return ((batch["x"] @ module.w + module.b - batch["y"]) ** 2).mean()


def test_a_torch_module_takes_as_many_local_steps():
    module = Line()
    result = short.func(
        torch_squares, module, DATA, show_progress=False, peers=3, steps=8, batch_size=4,
        learning_rate=0.1, links=UNLIKE, optimizer=decoupled(),
    )  # fmt: skip
    np.testing.assert_allclose(found(result), found(run()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"optimizer": decoupled(quorum=4)}, r"optimizer.DecoupledDiLoCo.quorum is 4, .*peers \(3"),
        ({"layout": "vmap"}, "layout is .vmap., expected each with Decoupled"),
    ],
)
def test_what_cannot_be_is_named(changes, error):
    with pytest.raises(LockstepError, match=error):
        run(**changes)
