"""Every kind of fault is seen: in its round by other peers, or afterwards by the audit; and whoever
is honest is never named."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from lockstep.tables.faults import KINDS
from tests.lockstep.swarm.simulated import BY_TIME, LOCAL, Seen, entries, run_of, see

pytestmark = pytest.mark.long

LIAR, FIRST, LAST = 1, 3, 6
ROUNDS = LAST  # of a run, in two windows


class Case(NamedTuple):
    """A kind of fault, and what becomes of it.

    form: of the run's messages.
    rounds, peer: of the fault; LIAR is among them.
    also: other faults, without which it has no occasion.
    caught: why peers eject the liar with verifiers, and without.
    found: what the audit finds besides of one who was not caught; by default, in each window, a
      message that was applied.
    """

    form: str = "signs"
    rounds: tuple[int, int] = (FIRST, LAST)
    peer: int | Sequence[int] = LIAR
    also: tuple[dict, ...] = ()
    caught: tuple[str | None, str | None] = ("false message", None)
    found: tuple[tuple[int, str, bool], ...] = ((FIRST, "message", True), (5, "message", True))

    def schedule(self, kind: str) -> list[dict]:
        peer = self.peer if isinstance(self.peer, int) else list(self.peer)
        return [{"kind": kind, "peer": peer, "rounds": list(self.rounds)}, *self.also]


AT_ONCE = {"caught": ("no message", "no message"), "found": ()}
HARMLESS = {"caught": (None, None), "found": ()}
LOST = {"kind": "dropped", "peer": 2, "rounds": [1, ROUNDS]}

USUALLY = {"bytes": AT_ONCE, "clock": HARMLESS}  # by what a kind takes the place of
FORMS = {form: form for form in ("values", "plain", "rules")}  # that a kind needs
CASES = {
    kind: Case(FORMS.get(row.needs, "signs"), **USUALLY.get(row.wraps, {}))
    for kind, row in KINDS.items()
} | {
    "drift": Case("values"),
    # too little for a sign of these messages: its own state tells
    "bit_flip": Case("rules", found=((FIRST, "state", True), (5, "state", True))),
    "collude": Case(peer=(LIAR, 5)),  # which trains when it does
    "equivocation": Case(caught=("two messages",) * 2, found=()),
    "join": Case(rounds=(1, 3), **HARMLESS),
    "false_witness": Case(
        rounds=(1, ROUNDS), also=(LOST,), caught=("false witness",) * 2, found=()
    ),
    "denying_witness": Case(rounds=(1, ROUNDS), **HARMLESS),
    "false_verifier": Case(rounds=(1, ROUNDS), caught=("false check", None), found=()),
}
VALUES = ("free_rider", "noise", "forged")
SWEPT = "places", "average"  # forms that "two parts" and "local" contain
DENSE = {
    "sign_flip": Case("dense"),
    "noise": Case("dense"),
    "lazy": Case("dense"),
    "scale_up": Case("dense"),
    "not_finite": Case("dense", **AT_ONCE),
    "malformed": Case("dense", **AT_ONCE),
}
ALL = [(kind, case) for kind, case in CASES.items()]
ALL += [(kind, CASES[kind]._replace(form="values")) for kind in VALUES]
ALL += list(DENSE.items())
KEPT = [form for form in LOCAL if form not in SWEPT]
ALL += [("sign_flip", DENSE["sign_flip"]._replace(form=form)) for form in KEPT]
ALL += [("lazy", DENSE["lazy"]._replace(form="local"))]
ALL += [("not_finite", DENSE["not_finite"]._replace(form=form)) for form in ("codes", "largest")]
USUAL = {(kind, case.form) for kind, case in ALL}
SWEEP = [  # every other kind that dense messages can carry
    (kind, case._replace(form=form))
    for form in ("dense", *LOCAL)
    for kind, case in CASES.items()
    if (kind, form) not in USUAL
    and (
        KINDS[kind].needs not in ("plain", "rules")
        and (KINDS[kind].needs != "positions" or form == "largest")
    )
]
SWEEP += [(kind, CASES[kind]._replace(form="values")) for kind in ("sign_flip", "lazy", "copycat")]
KIND_OF = {  # a finding, by why its peer was ejected
    "no message": {"payload", "commitment", "ejected"},
    "false message": {"message", "state"},
    "two messages": {"equivocation"},
    "false witness": {"attestation"},
    "false check": {"check"},
}


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Callable[[str, bool], Seen]:
    """Runs without a fault, by form and whether there are verifiers; only those that are asked for,
    since each process of the tests makes its own."""

    @cache
    def one(form: str, verified: bool) -> Seen:
        folder = tmp_path_factory.mktemp(f"{form}-{verified}")
        return see(form, run_of(form, verified=verified, total_steps=ROUNDS), folder)

    return one


def lines(seen: Seen) -> list[str]:
    return (seen.transcript.folder / "rounds.jsonl").read_text().splitlines()


LOCAL_FORMS = [
    form if form in KEPT else pytest.param(form, marks=pytest.mark.soak) for form in LOCAL
]


@pytest.mark.parametrize("form", ["signs", "values", "plain", "rules", "dense", *LOCAL_FORMS])
def test_an_honest_run_has_no_findings_and_loses_nobody(form, honest):
    for verified in (False, True):
        seen = honest(form, verified)
        assert (seen.blamed, seen.ejected, seen.dropped) == ([], {}, {})
        assert not seen.fired


@pytest.mark.parametrize("form", LOCAL_FORMS)
def test_local_steps_killed_after_every_round_go_on_to_the_same_bits(form, honest):
    told, _ = entries(form, run_of(form, total_steps=ROUNDS), killed=True)
    for found, line in zip(told, lines(honest(form, False)), strict=True):
        expected = json.loads(line)
        for message in expected["evidence"]["messages"].values():
            message |= {"payload": None, "offset": None}  # nothing writes them here
        assert json.loads(found) == expected


def seen_by_verifiers_or_audit() -> Iterator:
    """Where verifiers change nothing about what is caught, a run with them is for soak."""
    for kind, case in ALL + SWEEP:
        for verified in [True, False] if kind != "false_verifier" else [True]:
            alike = verified and case.caught[0] == case.caught[1]
            marks = [pytest.mark.soak] if alike or (kind, case) in SWEEP else []
            name = f"{'verified' if verified else 'audited'}-{kind}-{case.form}"
            yield pytest.param(kind, case, verified, id=name, marks=marks)


@pytest.mark.parametrize(("kind", "case", "verified"), list(seen_by_verifiers_or_audit()))
def test_a_fault_is_seen_and_nobody_else_is_named(kind, case, verified, honest, tmp_path: Path):
    timed = kind in ("crash", "join")
    changes = {**BY_TIME, "total_steps": 12} if timed else {"total_steps": ROUNDS}
    run = run_of(case.form, *case.schedule(kind), verified=verified, **changes)
    seen = see(case.form, run, tmp_path / "transcript")
    liars = {case.peer} if isinstance(case.peer, int) else {*case.peer}
    assert seen.fired[kind] > 0
    assert {peer for _, peer, _, _ in seen.blamed} <= liars
    assert seen.ejected.keys() <= liars

    # as in the honest run until it begins, and all others' messages are still in its first round
    first = case.rounds[0]
    if not timed:
        assert lines(seen)[: first - 1] == lines(honest(case.form, verified))[: first - 1]
    if KINDS[kind].wraps in ("message", "bytes", "work", "program"):
        now, then = (s.transcript.rounds[first - 1] for s in (seen, honest(case.form, verified)))
        true = {peer: sent for peer, sent in then.evidence.messages.items() if peer not in liars}
        assert {p: now.evidence.messages[p].commitment for p in true} == {
            p: sent.commitment for p, sent in true.items()
        }

    why = case.caught[not verified]
    if why is not None:
        step, said = seen.ejected[LIAR]
        assert said == why and first <= step <= case.rounds[1]
        caught = {row for row in seen.blamed if row[1] == LIAR}
        assert {row[0] for row in caught} == {step}  # afterwards it is out
        assert {row[2] for row in caught} <= KIND_OF[why]
        assert not any(applied for *_, applied in caught), "it was discarded in its round"
        later = seen.transcript.rounds[step:]
        assert later and all(LIAR not in entry.round.peers for entry in later)
    elif kind != "denying_witness":
        assert not seen.ejected
        found = [row for row in seen.blamed if row[1] == LIAR]
        if KINDS[kind].wraps == "program":  # its signs may be the true ones for a round
            found = [(max(FIRST, (step - 1) // 4 * 4 + 1), *rest) for step, *rest in found]
        assert found == [(step, LIAR, what, applied) for step, what, applied in case.found]
        assert {peer for _, peer, _, _ in seen.blamed} == (liars if case.found else set())
    if timed and case.form == "signs":
        expect_back(seen, case, dropped={LIAR: FIRST} if kind == "crash" else {})


def expect_back(seen: Seen, case: Case, dropped: dict[int, int]) -> None:
    """Who comes back or joins takes part from the next epoch on."""
    entries = seen.transcript.rounds
    assert (seen.blamed, seen.dropped) == ([], dropped)
    (asked,) = (e.round.step for e in entries if LIAR in e.asked and e.round.step > 1)
    assert asked == case.rounds[1] + 1
    (joined,) = (e for e in entries if e.round.joined)
    assert joined.round.joined == (LIAR,) and joined.joined_params is not None
    last = entries[joined.round.step - 2]
    assert joined.round.epoch == last.round.epoch + 1 and last.round.step >= asked - 1
    members = [LIAR in e.round.peers for e in entries]
    away = slice(FIRST if dropped else 0, joined.round.step - 1)
    assert members == [n not in range(12)[away] for n in range(12)]
    assert all(
        LIAR in e.evidence.messages
        for e in entries[joined.round.step - 1 :]
        if LIAR in e.round.assignment
    )


# ---- What is nobody's lie ----


def expect_given_out_again(seen: Seen) -> int:
    """Sequences of messages that were not applied are the next round's; how many messages."""
    rounds, missing = seen.transcript.rounds, 0
    for now, after in zip(rounds, rounds[1:], strict=False):
        left = now.round.assignment.keys() - {*now.decision.applied}
        spans = {now.round.assignment[peer] for peer in left}
        assert spans <= {*after.round.assignment.values()}
        missing += len(left)
    return missing


@pytest.mark.parametrize("kind", ["dropped", "late"])
def test_a_message_that_does_not_arrive_is_trained_on_by_others(kind, tmp_path):
    seen = see("signs", run_of("signs", *CASES[kind].schedule(kind)), tmp_path / "transcript")
    late = {e.round.step: e.decision.late for e in seen.transcript.rounds if e.decision.late}
    assert late == dict.fromkeys(range(FIRST, LAST + 1), (LIAR,))
    assert expect_given_out_again(seen) == seen.fired[kind] == 4
    assert (seen.ejected, seen.dropped, seen.blamed) == ({}, {}, [])


def test_a_witness_that_denies_costs_a_message_where_all_witnesses_have_to_agree(tmp_path):
    kind = "denying_witness"
    seen = see("signs", run_of("signs", *CASES[kind].schedule(kind)), tmp_path / "transcript")
    assert seen.fired[kind] > 1
    assert expect_given_out_again(seen) in (seen.fired[kind], seen.fired[kind] - 1)
    assert {row[1:] for row in seen.blamed} == {(LIAR, "attestation", False)}
    assert len(seen.blamed) == seen.fired[kind]
