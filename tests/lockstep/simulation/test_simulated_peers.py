"""What becomes of simulated peers: faults, bytes and links as of any run."""

import numpy as np
import pytest

from lockstep.wire.message import HEADER
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
    short,
    simulate,
    squares,
)

pytestmark = pytest.mark.usefixtures("one_device")


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
