"""The driver: exactly K rounds, no sequence lost, liars out of the run, and all of it in JSON."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pipeline.errors import LockstepError
from pipeline.protocol import committee, consensus, driver, merkle
from pipeline.protocol.attestation import attest
from pipeline.protocol.coordinator import CoordinatorError, Pause, RunState, tick
from pipeline.protocol.dispute import Check, Claim, Ruling
from pipeline.protocol.driver import RunProgress
from pipeline.protocol.round import Decision, Evidence, Message, Round
from tests.pipeline.protocol import records, three_peers


@dataclass(frozen=True)
class Settings(three_peers.Settings):
    """Seconds 3 waiting, 20 warm-up, 30 train, 2 witness, 5 cooldown; 4 rounds an epoch."""

    init_min_clients: int = 4
    min_clients: int = 4
    witness_nodes: int = 3
    total_steps: int = 10
    waiting_for_members_extra_time: int = 3
    batch: int = 8

    def batch_size(self, tokens: int) -> int:
        return self.batch if tokens < 10 * 40 else self.batch + 3


LONG = Settings(init_min_clients=5, min_clients=3, batch=10, rounds_per_epoch=100)
VERIFIED = replace(LONG, verification_percent=34)  # of 5 peers, 1 verifies and 4 train


def begun(settings: Settings = Settings(), count: int = 4, seed: int = 1, **more) -> RunProgress:  # noqa: B008
    """A run that all its peers joined at its start."""
    return driver.ask(driver.start(settings, count, seed, 10, **more), range(count))


def commitment(round: Round, peer: int) -> str:
    return f"{round.step:02x}{peer:02x}" * 16


def commitments(said: Evidence) -> dict[int, str]:
    return {peer: message.commitment for peer, message in said.messages.items()}


def evidence(
    round: Round,
    arrivals: Mapping[int, float | None] | float = 1.0,
    *,
    others: Mapping[int, Message] = {},  # noqa: B006
    refused: tuple[int, ...] = (),
    silent: tuple[int, ...] = (),
    **said: object,
) -> Evidence:
    """What was sent, and what honest witnesses say of it: every peer that is not silent sent its
    message, which arrived after a second, or after its `arrivals`; None is never."""
    if isinstance(arrivals, float):
        arrivals = dict.fromkeys(round.assignment, arrivals)
    senders = [peer for peer in round.assignment if peer not in silent]
    times = {peer: arrivals.get(peer, 1.0) for peer in senders}
    state = "ab" * 32 if round.verifiers else None
    found = records.evidence(
        {peer: Message(commitment(round, peer), 1, state) for peer in senders},
        arrivals={peer: at for peer, at in times.items() if at is not None},
        others=others,
        broken=refused,
        silent=silent,
        **said,
    )
    return replace(found, attestations=consensus.witnessed(round, found, 30))


def train(
    progress: RunProgress, seconds: float = 1.0
) -> tuple[list[Round], list[Decision], RunProgress]:
    """Everybody's messages arrive after `seconds`, until the run has finished."""
    trained, decided = [], []
    while True:
        progress, round = driver.next_round(progress)
        if round is None:
            return trained, decided, progress
        progress, decision = driver.finish_round(progress, round, evidence(round, seconds))
        trained.append(round)
        decided.append(decision)


def spans(round: Round) -> set[tuple[int, int]]:
    return set(round.assignment.values())


# ---- Rounds, epochs, the clock ----


def test_total_steps_trains_exactly_that_many_rounds():
    trained, _, progress = train(begun())
    assert [round.step for round in trained] == list(range(1, 11))
    assert [round.epoch for round in trained] == [0] * 4 + [1] * 4 + [2] * 2
    assert {round.joined for round in trained} == {()}  # who joins at the start is no newcomer
    assert progress.state.run_state == RunState.Finished


def test_clock_adds_up_over_epochs():
    _, decided, progress = train(begun(), seconds=1.5)
    # Each epoch: 3 waiting, no warm-up, 3.5 a round, 5 cooling down.
    assert [decision.now for decision in decided[:5]] == [6.5, 10.0, 13.5, 17.0, 28.5]
    assert progress.now == 3 * 3 + 10 * 3.5 + 3 * 5
    assert {decision.train_seconds for decision in decided} == {1.5}


def test_epoch_by_time_ends_at_a_round_boundary_and_loses_no_batch():
    settings = Settings(epoch_time=60, rounds_per_epoch=None)
    trained, decided, _ = train(begun(settings), seconds=28.0)
    # 30 seconds a round: the second round of an epoch ends at 60, which is in time.
    assert [round.epoch for round in trained] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert len({decision.applied for decision in decided}) == 1


def test_round_is_a_pure_function_of_seed_step_and_data_index():
    whole, _, _ = train(begun())
    again, _, _ = train(begun(), seconds=25.0)
    assert again == whole  # whatever the clock says
    sixth = whole[5]
    extended, _, _ = train(begun(start_step=5, start_data_index=sixth.data_index))
    assert [round.step for round in extended] == [6, 7, 8, 9, 10]
    assert extended[0] == replace(sixth, epoch=0)
    assert extended[0].seed == committee.round_seed(1, 6)
    other, _, _ = train(begun(seed=2))
    assert all(a.seed != b.seed for a, b in zip(whole, other, strict=True))


def test_round_is_pinned():
    progress, round = driver.next_round(begun())
    assert round == Round(
        step=1,
        epoch=0,
        seed=17934626734559793897,
        data_index=0,
        batch_size=8,
        peers=(0, 1, 2, 3),
        assignment={0: (6, 7), 1: (4, 5), 2: (0, 1), 3: (2, 3)},
        verifiers={},
        witnesses=(0, 2, 3),
        joined=(),
    )
    assert (progress.now, round.trainers) == (3.0, 4)


def test_verifiers_train_nothing_and_each_is_given_a_trainer_with_work():
    for settings in (VERIFIED, replace(VERIFIED, batch=2)):
        _, round = driver.next_round(begun(settings, 5))
        (verifier,) = round.verifiers
        assert verifier not in round.assignment
        assert round.verifiers[verifier] in round.assignment
        assert (round.trainers, len(round.assignment)) == (4, min(4, settings.batch))


def test_next_round_asked_again_gives_the_same_round():
    progress, round = driver.next_round(begun())
    assert driver.next_round(progress) == (progress, round)


def test_all_messages_in_time_are_all_applied_and_the_round_ends_early():
    progress, round = driver.next_round(begun())
    arrivals = {0: 4.0, 1: 30.0, 2: 0.5, 3: 7.0}  # the last moment is in time
    _, decision = driver.finish_round(progress, round, evidence(round, arrivals))
    assert decision == Decision(
        applied=(0, 1, 2, 3),
        late=(),
        dropped=(),
        ejected={},
        quorum=2,
        train_seconds=30.0,
        now=3 + 30 + 2.0,
    )


def test_honest_witnesses_attest_to_what_arrived_in_time_and_was_not_refused():
    _, round = driver.next_round(begun())
    said = evidence(round, {1: 31.0}, refused=(3, 1)).attestations
    assert [word.witness for word in said] == list(round.witnesses)
    root = merkle.root([bytes.fromhex(commitment(round, p)) for p in (0, 2)]).hex()
    assert {(word.received, word.refused, word.root) for word in said} == {((0, 2), (3,), root)}


@pytest.mark.parametrize("lateness", [30.001, float("inf"), float("nan"), None])
def test_late_message_is_applied_by_nobody_and_its_sequences_are_given_out_again(lateness):
    progress, round = driver.next_round(begun())
    progress, decision = driver.finish_round(progress, round, evidence(round, {1: lateness}))
    assert (decision.applied, decision.late) == ((0, 2, 3), (1,))
    assert (decision.train_seconds, decision.now) == (30.0, 35.0)
    _, after = driver.next_round(progress)
    assert round.assignment[1] in spans(after)
    assert (after.data_index, after.batch_size) == (8, 8)  # 6 of which are new


def test_round_in_which_nothing_arrives_applies_nothing_and_all_is_given_out_again():
    progress, round = driver.next_round(begun())
    nothing = evidence(round, dict.fromkeys(range(4)))
    assert {word.root for word in nothing.attestations} == {merkle.EMPTY.hex()}
    progress, decision = driver.finish_round(progress, round, nothing)
    assert (decision.applied, decision.late) == ((), (0, 1, 2, 3))
    _, after = driver.next_round(progress)
    assert (after.step, spans(after)) == (2, spans(round))


def test_peer_without_sequences_is_waited_for_by_nobody():
    progress, round = driver.next_round(begun(Settings(batch=2)))
    assert len(round.assignment) == 2
    _, decision = driver.finish_round(progress, round, evidence(round))
    assert (decision.applied, decision.late) == (tuple(sorted(round.assignment)), ())
    assert decision.train_seconds == 1.0


def test_decision_does_not_depend_on_the_order_in_which_peers_are_listed():
    progress, round = driver.next_round(begun(Settings(batch=12), 12))
    said = evidence(round, {2: 40.0, 10: 40.0})
    decided = driver.finish_round(progress, round, said)
    as_text = sorted(round.assignment, key=str)  # 0, 1, 10, 11, 2: what sorted JSON makes of them
    listed = replace(round, assignment={peer: round.assignment[peer] for peer in as_text})
    mixed = replace(said, arrivals={peer: said.arrivals[peer] for peer in as_text})
    assert driver.finish_round(progress, listed, mixed) == decided
    assert decided[1].late == (2, 10)


# ---- Who lies is out of the run ----


def attested(said: Evidence, round: Round, count: int = 1, without: int | None = None) -> Evidence:
    """The first witnesses attest to every message, or to all but one."""
    held = {peer: c for peer, c in commitments(said).items() if peer != without}
    words = [attest(witness, round.seed, round.peers, held) for witness in round.witnesses[:count]]
    return replace(said, attestations=(*words, *said.attestations[count:]))


def false_witness(round: Round) -> tuple[Evidence, dict[int, str]]:
    late = next(peer for peer in round.assignment if peer not in round.witnesses)
    said = evidence(round, {late: None})
    return attested(said, round), {round.witnesses[0]: "false witness"}


def no_message(round: Round) -> tuple[Evidence, dict[int, str]]:
    return evidence(round, refused=(1,)), {1: "no message"}


def other(to: tuple[int, ...]) -> Message:
    """An equivocator's other message, and who gets it."""
    return Message("0f" * 32, 1, to=to)


def two_messages(round: Round) -> tuple[Evidence, dict[int, str]]:
    return evidence(round, others={1: other(round.witnesses[:1])}), {1: "two messages"}


def disputed(round: Round, rulings: Callable[[Check, Claim], dict[int, Claim]]) -> Evidence:
    """The verifier found something else than the trainer claims; the tie-breakers' findings."""
    ((verifier, peer),) = round.verifiers.items()
    check = Check(verifier, peer, Claim("cd" * 32, "ef" * 32), 2.0, 100)
    claimed = Claim(commitment(round, peer), "ab" * 32)
    ruling = Ruling(verifier, peer, rulings(check, claimed))
    return evidence(round, checks=(check,), rulings=(ruling,), settle_seconds=3.0)


def false_message(round: Round) -> tuple[Evidence, dict[int, str]]:
    said = disputed(round, lambda check, claimed: {0: check.found, 1: check.found, 2: claimed})
    return said, {said.checks[0].peer: "false message"}


def false_check(round: Round) -> tuple[Evidence, dict[int, str]]:
    said = disputed(round, lambda check, claimed: {0: claimed, 1: check.found, 2: claimed})
    return said, {said.checks[0].verifier: "false check"}


@pytest.mark.parametrize(
    "lie", [false_witness, no_message, two_messages, false_message, false_check]
)
def test_a_liar_is_ejected_its_message_discarded_and_its_sequences_given_out_again(lie):
    settings = VERIFIED if lie in (false_message, false_check) else LONG
    progress, round = driver.next_round(begun(settings, 5))
    said, ejected = lie(round)
    progress, decision = driver.finish_round(progress, round, said)
    assert decision.ejected == ejected
    (liar,) = ejected
    gone = set() if lie in (false_witness, false_check) else {liar}  # its own message was true
    gone |= set(decision.late)
    discarded = round.assignment.keys() & ({liar} | gone)
    assert set(decision.applied) == round.assignment.keys() - discarded
    _, after = driver.next_round(progress)
    assert liar not in after.peers and len(after.peers) == 4
    again = {round.assignment[peer] for peer in discarded}
    assert len(again & spans(after)) == len(again)
    with pytest.raises(CoordinatorError, match="ejected"):
        driver.ask(progress, [liar])


def test_witness_that_claims_to_hold_what_is_no_message_is_ejected_with_its_sender():
    progress, round = driver.next_round(begun(LONG, 5))
    said = attested(evidence(round, refused=(1,)), round)
    _, decision = driver.finish_round(progress, round, said)
    assert decision.ejected == {round.witnesses[0]: "false witness", 1: "no message"}
    assert not {*decision.applied} & decision.ejected.keys()


@pytest.mark.parametrize(("deny", "applied"), [(1, (0, 1, 2, 3, 4)), (2, (1, 2, 3, 4))])
def test_one_witness_that_denies_is_outvoted_and_without_a_quorum_nobody_applies(deny, applied):
    progress, round = driver.next_round(begun(LONG, 5))
    said = attested(evidence(round), round, deny, without=0)
    _, decision = driver.finish_round(progress, round, said)
    assert (decision.applied, decision.ejected) == (applied, {})


def test_other_message_that_a_quorum_holds_is_not_the_one_that_is_applied():
    progress, round = driver.next_round(begun(LONG, 5))
    said = evidence(round, others={1: other(round.witnesses)})
    _, decision = driver.finish_round(progress, round, said)
    assert 1 not in decision.applied


def no_majority(check: Check, claimed: Claim) -> dict[int, Claim]:
    return {0: check.found, 1: claimed, 2: Claim("00" * 32, "00" * 32)}


@pytest.mark.parametrize("rulings", [no_majority, lambda check, claimed: {}])
def test_dispute_that_nobody_settles_discards_the_message_and_ejects_nobody(rulings):
    progress, round = driver.next_round(begun(VERIFIED, 5))
    said = disputed(round, rulings)
    peer = said.checks[0].peer
    progress, decision = driver.finish_round(progress, round, said)
    assert (decision.ejected, decision.late) == ({}, ())
    assert set(decision.applied) == round.assignment.keys() - {peer}
    assert round.assignment[peer] in spans(driver.next_round(progress)[1])


def test_round_waits_for_checks_and_for_disputes_to_be_settled():
    progress, round = driver.next_round(begun(VERIFIED, 5))
    said = disputed(round, lambda check, claimed: {0: check.found})
    _, decision = driver.finish_round(progress, round, said)
    assert (decision.train_seconds, decision.now) == (2.0, 3 + 2 + 3)  # 3 > round_witness_time
    _, quick = driver.finish_round(progress, round, replace(said, settle_seconds=0.5))
    assert quick.now == 3 + 2 + 2


def test_check_that_comes_too_late_counts_for_nothing():
    progress, round = driver.next_round(begun(VERIFIED, 5))
    said = disputed(round, lambda check, claimed: {0: check.found})
    said = replace(said, checks=(replace(said.checks[0], seconds=30.5),))
    _, decision = driver.finish_round(progress, round, said)
    assert (decision.ejected, decision.applied) == ({}, tuple(sorted(round.assignment)))
    assert decision.train_seconds == 30.0


# ---- Who comes and goes ----


def test_member_that_nobody_hears_from_is_dropped_and_may_come_back_next_epoch():
    settings = replace(LONG, rounds_per_epoch=3)
    progress, round = driver.next_round(begun(settings, 5))
    progress, decision = driver.finish_round(progress, round, evidence(round, silent=(2,)))
    assert (decision.dropped, decision.ejected, decision.late) == ((2,), {}, (2,))
    assert decision.train_seconds == 30.0
    progress = driver.ask(progress, [2])
    seen = []
    for _ in range(4):
        progress, round = driver.next_round(progress)
        seen.append((round.epoch, 2 in round.peers, round.joined))
        progress, _ = driver.finish_round(progress, round, evidence(round))
    assert seen == [(0, False, ()), (0, False, ()), (1, True, (2,)), (1, True, ())]


def test_peer_that_joins_a_run_waits_for_the_epochs_end_and_for_its_params():
    progress = driver.start(Settings(), 5, 1, 10, load_seconds=[0, 0, 0, 0, 7.0])
    progress, round = driver.next_round(driver.ask(progress, range(4)))
    progress = driver.ask(progress, [4])
    trained, decided, _ = train(progress)
    assert [len(round.peers) for round in trained] == [4] * 4 + [5] * 6
    assert [round.joined for round in trained] == [()] * 4 + [(4,)] + [()] * 5
    # 3 waiting and 3 a round; then 5 cooling down, 3 waiting, and 7 until it has the params.
    assert decided[4].now - decided[3].now == 5 + 3 + 7 + 3
    assert decided[8].now - decided[7].now == 5 + 3 + 3  # nobody loads anything any more


def test_peer_that_cannot_load_within_the_warmup_is_silent_and_dropped():
    progress = driver.start(Settings(), 5, 1, 10, load_seconds=[0, 0, 0, 0, 20.5])
    progress, _ = driver.next_round(driver.ask(progress, range(4)))
    progress = driver.ask(progress, [4])
    seen = []
    while True:
        progress, round = driver.next_round(progress)
        if round is None:
            break
        seen.append((round.step, 4 in round.peers, round.joined, progress.unready))
        said = evidence(round, silent=progress.unready)
        progress, decision = driver.finish_round(progress, round, said)
        assert decision.dropped == ((4,) if round.step == 5 else ())
    assert seen[4] == (5, True, (4,), (4,))
    assert {row[1:] for row in seen if row[0] != 5} == {(False, (), ())}


def test_peer_that_leaves_in_a_round_has_its_message_applied_and_no_seat_in_the_next():
    settings = replace(LONG, rounds_per_epoch=3)
    progress, round = driver.next_round(begun(settings, 5))
    progress = driver.leave(progress, [round.witnesses[0]])
    progress, decision = driver.finish_round(progress, round, evidence(round))
    assert decision.applied == tuple(range(5)) and decision.train_seconds == 1.0
    (left,) = progress.left
    progress = driver.ask(progress, [left])  # it may come back, as a newcomer
    assert progress.left == ()
    seen = []
    for _ in range(4):
        progress, round = driver.next_round(progress)
        seen.append((left in round.peers, round.joined))
        progress, _ = driver.finish_round(progress, round, evidence(round))
    assert seen == [(False, ()), (False, ()), (True, (left,)), (True, ())]


def test_peer_that_leaves_without_its_message_is_not_dropped_besides():
    progress, round = driver.next_round(begun(LONG, 5))
    progress, decision = driver.finish_round(
        driver.leave(progress, [2]), round, evidence(round, silent=(2,))
    )
    assert (decision.late, decision.dropped) == ((2,), ())
    _, after = driver.next_round(progress)
    assert after.peers == (0, 1, 3, 4) and round.assignment[2] in spans(after)


def test_peer_that_asked_and_leaves_before_its_first_round_is_no_newcomer_twice():
    progress, _ = driver.next_round(driver.ask(driver.start(LONG, 6, 1, 10), range(5)))
    progress = driver.ask(driver.leave(driver.ask(progress, [5]), [5]), [5])
    assert (progress.fresh, progress.left, progress.state.pending) == ((5,), (), (5,))


@pytest.mark.parametrize("peers", [[5], [-1], [2, 2]])
def test_peer_that_takes_no_part_cannot_leave(peers):
    progress, _ = driver.next_round(begun(LONG, 5))
    with pytest.raises(CoordinatorError, match="not a member"):
        driver.leave(progress, peers)


# ---- A pause ----


def test_pause_ends_the_epoch_and_resumed_members_go_on_as_they_were():
    whole, decided, _ = train(begun())  # epochs of 4 rounds
    progress = begun()
    trained, clock = [], []
    while True:
        if progress.pausing:
            with pytest.raises(CoordinatorError, match="halted"):
                driver.next_round(progress)  # until it is resumed
            progress = driver.resume(progress)
        progress, round = driver.next_round(progress)
        if round is None:
            break
        if round.step == 2:
            progress = driver.pause(progress)
        progress, decision = driver.finish_round(progress, round, evidence(round))
        assert progress.pausing == (round.step == 2)
        trained.append(round)
        clock.append(decision.now)
    assert [round.epoch for round in trained] == [0] * 2 + [1] * 4 + [2] * 4
    assert [replace(round, epoch=0) for round in trained] == [replace(r, epoch=0) for r in whole]
    assert clock[2] - clock[1] == decided[4].now - decided[3].now  # as between any two epochs


def test_pause_in_the_last_round_changes_nothing_and_only_a_pause_can_be_resumed():
    progress, round = driver.next_round(begun(replace(Settings(), total_steps=1)))
    with pytest.raises(CoordinatorError, match="not paused"):
        driver.resume(progress)
    progress, _ = driver.finish_round(driver.pause(progress), round, evidence(round))
    assert driver.next_round(driver.resume(progress))[1] is None


def test_first_member_stores_the_params_that_end_an_epoch():
    progress, round = driver.next_round(begun(replace(LONG, rounds_per_epoch=1), 5))
    assert driver.checkpointer(progress) is None
    with pytest.raises(CoordinatorError, match="expected Cooldown"):
        driver.checkpointed(progress, 0, "ab" * 32)
    progress, _ = driver.finish_round(driver.leave(progress, [0]), round, evidence(round))
    assert driver.checkpointer(progress) == 1
    progress = driver.checkpointed(progress, 1, "ab" * 32)
    assert (progress.state.checkpointer, progress.state.checkpoint) == (1, "ab" * 32)


@pytest.mark.parametrize("peer", [5, -1])
def test_peer_that_the_run_does_not_have_cannot_ask(peer):
    with pytest.raises(CoordinatorError, match=r"expected one of the run's 5"):
        driver.ask(driver.start(LONG, 5, 1, 10), [peer])


# ---- What is refused ----


@pytest.mark.parametrize(
    ("arrivals", "senders"),
    [({0: 1.0}, ()), ({9: 1.0}, (9,)), ({}, (9,))],
    ids=["no message", "no trainer", "no trainer, no arrival"],
)
def test_messages_that_are_not_the_trainers_are_refused(arrivals, senders):
    progress, round = driver.next_round(begun())
    with pytest.raises(ValueError, match="all among"):
        sent = dict.fromkeys(senders, Message("ab" * 32, 1))
        driver.finish_round(progress, round, records.evidence(sent, arrivals=arrivals))


def test_round_that_is_not_in_progress_is_refused():
    start = begun()
    progress, round = driver.next_round(start)
    said = evidence(round)
    for other in (start, driver.finish_round(progress, round, said)[0]):
        with pytest.raises(ValueError, match="round 1 is not in progress"):
            driver.finish_round(other, round, said)
    with pytest.raises(ValueError, match="not in progress"):
        driver.finish_round(progress, replace(round, data_index=1), said)


@pytest.mark.parametrize(
    ("count", "start_step", "message"),
    [
        (3, 0, r"\[peers\] count = 3, expected 4"),
        (257, 0, r"\[peers\] count = 257, expected 4 .* to 256"),
        (4, 10, r"total_steps = 10, expected more than the 10"),
    ],
)
def test_run_that_could_not_train_is_refused_with_its_key(count, start_step, message):
    with pytest.raises(LockstepError, match=message) as refusal:
        driver.start(Settings(), count, 1, 10, start_step=start_step)
    assert "\n" not in str(refusal.value)


def test_run_without_enough_members_or_paused_does_not_hang():
    progress = driver.start(Settings(), 4, 1, 10)
    for alone in (progress, driver.ask(progress, range(3))):
        with pytest.raises(CoordinatorError, match="never come"):
            driver.next_round(alone)
    paused = replace(begun(), state=tick(begun().state, Pause(1)))
    with pytest.raises(CoordinatorError, match="halted"):
        driver.next_round(paused)


# ---- Whatever happens ----

FATES = ("fine", "fine", "fine", "fine", "late", "gone", "lost", "refused", "two", "witness")


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    count=st.integers(3, 9),
    batch=st.integers(1, 20),
    witness_nodes=st.integers(0, 3),
    verification_percent=st.sampled_from((0, 34)),
    by_time=st.booleans(),
    seed=st.integers(0, 2**64),
    fates=st.lists(st.lists(st.sampled_from(FATES), min_size=9, max_size=9), max_size=12),
)
def test_no_sequence_is_lost_and_none_is_trained_twice_whatever_becomes_of_peers(
    count, batch, witness_nodes, verification_percent, by_time, seed, fates
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
    progress, steps, clock, trained = begun(settings, count, seed), 0, 0.0, []
    out, away, given_out = set(), set(), 0  # peers, peers, sequences
    while True:
        try:
            progress, round = driver.next_round(progress)
        except CoordinatorError:  # too few are left to go on
            members = {*range(count)} - out - away
            assert len(members) < settings.init_min_clients
            break
        if round is None:
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
            attest(w.witness, round.seed, round.peers, commitments(said)) if w in lies else w
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
