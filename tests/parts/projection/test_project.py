"""`lockstep project`: bytes and hours that follow from links and failures, by our own clock."""

import math

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from lockstep.methods import CARDS
from parts.projection.commands import mbps, seconds
from parts.projection.project import METHODS, PlannedSwarm, at_least, lines, project
from pipeline import __main__ as command_line
from tests.errors import check_names, refused

SWARM = PlannedSwarm(
    peers=8,
    params=1e9,
    batch=4e6,
    tokens=2e10,
    flops=4e14,
    upload_mbps=1000.0,
    download_mbps=1000.0,
    latency_seconds=1.0,
    mtbf=43_200,
    restart=180,
    quorum=0.8,
)


def by_label(swarm: PlannedSwarm) -> dict:
    return {found.method.label: found for found in project(swarm)}


def test_a_dense_round_takes_what_is_counted_by_hand():
    """8 peers, 4 GB each: 7.5 s of training, 1 s of latency, 32 s up, 7 messages down."""
    found = by_label(SWARM)["AdamW, Muon, SGD: gradients whole"]
    assert (found.sent, found.received) == (4e9, 28e9)
    seconds_trained = 500_000 * 6e9 / 4e14
    whole = seconds_trained + 1 + 32 + 7 * 32
    assert found.seconds == pytest.approx(whole)
    assert found.utilisation == pytest.approx(seconds_trained / whole, rel=1e-6)
    steps = 2e10 / 4e6
    present = 43_200 / 43_380
    others = at_least(6, 7, present)  # beside this peer, of 7 that are needed
    hours = steps * whole / 3600 / present / others / math.exp(-whole / 43_200)
    assert found.hours == pytest.approx(hours, rel=1e-6)


def test_local_steps_hide_links_and_topologies_change_bytes():
    found = by_label(SWARM)
    computes = [one.utilisation for one in found.values()]
    assert computes[0] < computes[1] < computes[2] <= 1
    assert found[
        "Streaming DiLoCo, Decoupled DiLoCo, 4 fragments, 4 bits"
    ].utilisation == pytest.approx(1.0, abs=0.01)
    ring = by_label(SWARM._replace(topology="ring"))
    summed = {"AdamW, Muon, SGD: gradients whole", "DiLoCo, FedAvg, 100 local steps"}
    assert {*ring} == summed | {"SPARTA, SPARTA-DiLoCo"}  # what can be summed on the way
    assert ring["SPARTA, SPARTA-DiLoCo"].received == pytest.approx(2 * 7 / 8 * 4e8)  # a tenth
    assert ring["AdamW, Muon, SGD: gradients whole"].received == 2 * 7 / 8 * 4e9
    hub = by_label(SWARM._replace(topology="hub"))
    assert hub["AdamW, Muon, SGD: gradients whole"].received == 4e9
    distro = hub["DisTrO"]
    assert distro.received == 8 * distro.sent  # the union of sparse messages, at most
    many = by_label(SWARM._replace(topology="hub", peers=1000))["DisTrO"]
    assert many.received == 4e9  # and never more than all params


@pytest.mark.parametrize("present", [0.5, 0.9, 0.999])
def test_the_quorum_is_the_binomial_sum(present):
    expected = sum(math.comb(20, k) * present**k * (1 - present) ** (20 - k) for k in range(16, 21))
    assert SWARM._replace(peers=20, quorum=0.8).needed == 16
    assert at_least(16, 20, present) == pytest.approx(expected, rel=1e-9)
    assert at_least(0, 20, present) == pytest.approx(1.0)
    assert at_least(20, 20, 1.0) == 1.0


def test_one_machine_of_many_chips_fails_as_often_as_they_do_together():
    """So M learners train as one with a share of 1 / M of the chips."""
    for chips in (1, 125):
        alone = SWARM._replace(mtbf=43_200 / chips).present
        assert SWARM._replace(peers=chips).all_or_nothing == pytest.approx(alone)


def test_a_peer_that_fails_loses_its_round_so_long_rounds_lose_more():
    """By a simulation of one peer: up for a while, away, and in again at the next round."""
    rng = np.random.default_rng(0)
    for round_seconds in (600.0, 3600.0):
        time = done = 0.0
        fails = rng.exponential(43_200)
        for _ in range(40_000):
            whole = fails > time + round_seconds
            done += whole
            time += round_seconds
            while fails < time:  # away, and rejoins at the beginning of a round
                back = fails + 180
                fails = back + rng.exponential(43_200)
                time = max(time, math.ceil(back / round_seconds) * round_seconds)
        share = done * round_seconds / time
        swarm = SWARM._replace(quorum=0.0)
        assert swarm.kept_share(round_seconds) == pytest.approx(share, abs=0.02)


def test_the_table_says_what_it_rests_on():
    said = "\n".join(lines(SWARM))
    assert all(f"| {method.label} |" in said for method in METHODS)
    ring = "\n".join(lines(SWARM._replace(topology="ring")))
    assert "Not by a ring" in ring and "signs" in ring and "Not by" not in said
    assert "Nothing here was run." in said and "each downloads every other's message" in said


@pytest.mark.parametrize(
    "text", ["100", "Mbps", "0Mbps", "-1Mbps", "1e999Mbps", "1e300Mbps", "infMbps", "1..2Mbps"]
)
def test_a_wrong_quantity_is_one_line(text):
    with refused("--uplink", text):
        mbps("--uplink", text)
    with refused("--mtbf", text):
        seconds("--mtbf", text)


@pytest.mark.parametrize("value", ["inf", "1e300"])
@pytest.mark.parametrize("flag", ["--params", "--batch", "--tokens", "--flops"])
def test_no_number_that_is_none_or_beyond_all_bounds_is_projected(flag, value):
    given = {"--params": "1e9", flag: value}
    arguments = [part for pair in given.items() for part in pair]
    asked = ["project", "--peers", "4", "--uplink", "1Gbps", *arguments]
    raised = CliRunner().invoke(command_line.app, asked, standalone_mode=False).exception
    assert isinstance(raised, typer.BadParameter)
    check_names(raised.format_message(), flag, value)


def test_numbers_may_have_units():
    asked = ["project", "--peers", "4", "--uplink", "1Gbps", "--params"]
    said = {CliRunner().invoke(command_line.app, [*asked, of]).output for of in ("7B", "7e9")}
    assert len(said) == 1 and "1.4e+11 tokens" in said.pop()


def test_quantities_have_units():
    assert (seconds("--mtbf", "12h"), seconds("--restart", "1.5m")) == (43_200, 90)
    assert [mbps("--uplink", text) for text in ("500kbps", "100Mbps", "2gbps")] == [0.5, 100, 2000]


def test_the_command_answers_for_each_method():
    arguments = ["project", "--peers", "100", "--params", "40e9", "--uplink", "100Mbps"]
    done = CliRunner().invoke(command_line.app, arguments)
    assert done.exit_code == 0
    hours = [line.split("|")[-2].strip() for line in done.output.splitlines() if " % |" in line]
    assert len(hours) == len(METHODS) and "never" in hours and {*hours} != {"never"}
    named = {card.tag for card in CARDS.values()} - {"Distro"}  # DeMo's table has DisTrO's name
    labels = " ".join(method.label for method in METHODS).replace(" ", "").replace("-", "")
    assert not [tag for tag in named if tag.replace("-", "") not in labels]
    too_few = CliRunner().invoke(command_line.app, [*arguments, "--batch", "10"])
    assert "expected at least a token" in str(too_few.exception)
