"""Whatever becomes of peers, no sequence is lost and none is trained twice."""

from dataclasses import replace

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lockstep.protocol import driver
from lockstep.protocol.attestation import attest
from lockstep.protocol.consensus import ElectedWitnesses, SharedStore
from tests.lockstep.protocol.driver.driven_run import Settings, begun, evidence, other

FATES = ("fine", "fine", "fine", "fine", "late", "gone", "lost", "refused", "two", "witness")


@hypothesis_settings(max_examples=60)
@given(
    count=st.integers(3, 9),
    batch=st.integers(1, 20),
    witness_nodes=st.integers(0, 3),
    verification_percent=st.sampled_from((0, 34)),
    by_time=st.booleans(),
    reports=st.sampled_from((ElectedWitnesses(), SharedStore())),
    seed=st.integers(0, 2**64),
    fates=st.lists(st.lists(st.sampled_from(FATES), min_size=9, max_size=9), max_size=12),
)
def test_no_sequence_is_lost_and_none_is_trained_twice_whatever_becomes_of_peers(
    count, batch, witness_nodes, verification_percent, by_time, reports, seed, fates
):
    settings = Settings(
        init_min_clients=min(count, 4),
        min_clients=min(count, 3),
        witness_nodes=witness_nodes,
        verification_percent=verification_percent,
        total_steps=12,
        batch=batch,
        epoch_time=50 if by_time else None,
        rounds_per_epoch=None if by_time else 3,
    )
    progress, steps, clock, trained = begun(settings, count, seed, reports=reports), 0, 0.0, []
    out, away, given_out = set(), set(), 0  # peers, peers, sequences
    while True:
        progress, round = driver.next_round(progress)
        if round is None:
            members = {*range(count)} - out - away
            assert not progress.waiting or len(members) < settings.init_min_clients
            break
        steps += 1
        assert round.step == steps and not out & set(round.peers)
        new = [i for a, b in round.assignment.values() for i in range(a, b + 1)]
        assert len(new) == len(set(new)) == round.batch_size
        assert not set(new) & set(trained)
        assert round.data_index == given_out
        given_out = max([given_out, *(i + 1 for i in new)])

        row = fates[steps - 1] if steps <= len(fates) else ["fine"] * 9
        fate = {peer: row[peer] for peer in round.peers}
        silent = tuple(peer for peer in round.peers if fate[peer] == "gone")
        senders = [peer for peer in round.assignment if peer not in silent]
        late = {"late": 31.0, "lost": None}
        said = evidence(
            round,
            {peer: late.get(fate[peer], 1.0 + peer) for peer in senders},
            others={p: other(round.witnesses[:1]) for p in senders if fate[p] == "two"},
            refused=tuple(peer for peer in senders if fate[peer] == "refused"),
            silent=silent,
        )
        lies = [w for w in said.attestations if fate[w.witness] == "witness"]
        words = [
            attest(w.witness, round.seed, round.peers, said.commitments) if w in lies else w
            for w in said.attestations
        ]
        progress, decision = driver.finish_round(
            progress, round, replace(said, attestations=tuple(words))
        )
        assert set(decision.applied) | set(decision.late) <= set(round.assignment)
        assert not set(decision.applied) & ({*decision.late, *decision.ejected, *silent})
        named = {peer for peer in decision.ejected if fate[peer] in ("refused", "two", "witness")}
        assert named == set(decision.ejected)
        assert set(decision.dropped) <= set(silent)
        for peer in decision.applied:
            first, last = round.assignment[peer]
            trained += range(first, last + 1)
        assert decision.now >= clock + decision.train_seconds + 2 and decision.train_seconds <= 30
        clock = decision.now
        out |= set(decision.ejected)
        away |= {peer for peer in silent if peer % 2}  # the others come back
        back = driver.may_ask(progress, (p for p in range(count) if p not in away))
        progress = driver.ask(progress, back)
    assert len(trained) == len(set(trained))
    waiting = [i for a, b in progress.state.untrained for i in range(a, b + 1)]
    assert sorted(trained + waiting) == list(range(given_out))
    assert steps <= settings.total_steps
