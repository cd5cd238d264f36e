"""Streaming DiLoCo in a swarm: who takes up what, and when messages arrive."""

import jax
import numpy as np
import pytest

from lockstep.protocol import links
from lockstep.swarm.faults import FaultSchedule
from lockstep.swarm.peers import make_peers
from lockstep.swarm.swarm import Swarm
from pipeline.start.round_settings import round_settings
from tests.lockstep.swarm.simulated import lab, run_of


def test_a_verifier_takes_up_what_the_round_before_its_own_came_to():
    run, made = run_of("fragments", verified=True), lab("fragments")
    programs, begin = made.programs, made.begin
    peers = make_peers(programs, run.peers.layout, begin.state, made.devices)
    faults = FaultSchedule([], run.peers.seed, programs.form)
    settings = round_settings(run)
    swarm = Swarm(settings, peers, lambda _: made.data, faults)
    progress, sat_out = begin.progress(settings), set()
    for step in range(1, 6):
        before = jax.device_get(peers.state())
        progress, taken = swarm.take_round(progress)
        after = jax.device_get(peers.state())
        for peer in taken.entry.round.idle:
            expected = before.own[peer]
            if step > 1:
                sat_out.add(peer)
                expected = programs.optimizer.align(expected, before.params, (step - 2) % 2)
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-7),
                after.own[peer], expected,
            )  # fmt: skip
    assert len(sat_out) > 1


def test_messages_travel_beside_the_local_steps_until_they_are_needed():
    """A delay of 1 of a round's 2 local steps: half of its training is beside them."""
    run, made = run_of("fragments", total_steps=1), lab("fragments")
    peers = make_peers(made.programs, run.peers.layout, made.begin.state, made.devices)
    faults = FaultSchedule([], run.peers.seed, made.programs.form)
    settings = round_settings(run)
    swarm = Swarm(settings, peers, lambda _: made.data, faults)
    evidence = swarm.take_round(made.begin.progress(settings))[1].entry.evidence
    tokens = dict.fromkeys(evidence.messages, 24 // 6 * run.llm.max_seq_len)
    sizes = {peer: message.bytes for peer, message in evidence.messages.items()}
    waiting = links.arrivals(run.links, range(6), tokens, sizes)
    seconds = tokens[0] / run.links.tokens_per_second
    assert evidence.arrivals == pytest.approx({p: s - seconds / 2 for p, s in waiting.items()})
