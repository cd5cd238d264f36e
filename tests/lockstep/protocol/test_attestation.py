"""A witness's word on a message counts where its filter has it and a proof leads to its root."""

import base64
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace

import pytest
from pydantic import TypeAdapter

from benchmarks import minority
from benchmarks.minority import Settings, follow
from lockstep.protocol import consensus, driver, sets
from lockstep.protocol.attestation import Attestation, Check, Claim, Ruling, attest, proven, settle
from lockstep.protocol.round import Decision, Round
from lockstep.protocol.sets import BITS, participant
from lockstep.transcript.entry import Entry
from lockstep.transcript.transcript import Transcript, Writer
from lockstep.transcript.windows import Snapshots
from tests.errors import refused
from tests.lockstep.protocol import records
from tests.lockstep.protocol.driver.driven_run import evidence, started

SEED = 12345
SENT = {peer: f"{peer:02x}" * 32 for peer in (0, 2, 3, 5)}
OTHERS = {2: "0f" * 32}
EVERYTHING = base64.b64encode(b"\xff" * (BITS // 8)).decode()  # a filter that always says yes
NOTHING = base64.b64encode(bytes(BITS // 8)).decode()
HONEST = attest(5, SEED, [0, 2, 3, 5], SENT)


def root(commitments: Iterable[str]) -> str:
    return sets.root([bytes.fromhex(text) for text in commitments]).hex()


def test_an_honest_word_is_proven_for_every_message_held():
    assert proven(HONEST, SEED, SENT, {}) == SENT
    assert HONEST.received == (0, 2, 3, 5)
    assert HONEST.root == root(SENT[peer] for peer in HONEST.received)


def test_a_word_does_not_depend_on_the_order_in_which_messages_came():
    backwards = dict(reversed(SENT.items()))
    assert attest(5, SEED, [5, 3, 2, 0], backwards, refused=(4, 1)) == replace(
        HONEST, refused=(1, 4)
    )


def test_nothing_held_is_nothing_proven():
    word = attest(5, SEED, [5], {})
    assert (word.root, proven(word, SEED, SENT, {})) == (sets.EMPTY.hex(), {})


@pytest.mark.parametrize(
    "word",
    [
        replace(HONEST, root=root(["0e" * 32] * 4)),
        replace(HONEST, root=sets.EMPTY.hex()),
        replace(HONEST, root=root(list(SENT.values())[::-1])),
        replace(HONEST, broadcasts=NOTHING),
        replace(HONEST, received=(0, 2, 3)),  # its root is over four leaves
        replace(HONEST, received=(0, 2, 5, 3)),
        replace(HONEST, received=()),
    ],
    ids=["other leaves", "no leaves", "other order", "no filter", "fewer", "mixed", "none"],
)
def test_filter_or_root_over_anything_else_supports_nothing(word):
    assert proven(word, SEED, SENT, {}) == {}


def test_what_a_filter_holds_by_mistake_has_no_proof():
    held = {peer: SENT[peer] for peer in (0, 2)}
    word = replace(attest(5, SEED, held, held), broadcasts=EVERYTHING)
    assert word.broadcasts_filter(SEED).holds([bytes.fromhex(SENT[3])]) == [True]
    assert proven(word, SEED, SENT, {}) == held
    claims_more = replace(word, received=(0, 2, 3))
    assert proven(claims_more, SEED, SENT, {}) == {}


def test_a_filter_counts_for_its_own_witness_and_round_only():
    assert proven(HONEST, SEED + 1, SENT, {}) == {}
    assert proven(replace(HONEST, witness=4), SEED, SENT, {}) == {}


def test_a_claim_about_a_commitment_that_nobody_made_supports_nothing():
    claims = attest(5, SEED, SENT, SENT | {4: "0d" * 32})
    assert proven(claims, SEED, SENT, {}) == {}
    held = {peer: SENT[peer] for peer in (0, 2)}
    one_more = replace(attest(5, SEED, held, held), received=(0, 2, 4))  # the root says nothing
    assert proven(one_more, SEED, SENT, {}) == {}
    no_other = replace(HONEST, others=(2,))
    assert proven(no_other, SEED, SENT, {}) == {}


def test_equivocation_shows_as_two_proven_commitments_of_one_peer():
    other = attest(3, SEED, SENT, SENT | OTHERS, others=[2])
    assert proven(HONEST, SEED, SENT, OTHERS)[2] == SENT[2]
    assert proven(other, SEED, SENT, OTHERS) == SENT | OTHERS
    # whoever says it holds the other message, and holds the first, proves neither
    assert proven(replace(HONEST, others=(2,)), SEED, SENT, OTHERS).get(2) is None


def test_a_witness_says_whom_it_heard_from():
    word, peers = attest(5, SEED, [0, 5], {}), [participant(peer) for peer in range(20)]
    assert [p for p, hit in enumerate(word.participants_filter(SEED).holds(peers)) if hit] == [0, 5]
    assert not word.participants_filter(SEED + 1).holds(peers)[0]


# ---- On its way through a transcript ----


def entry(*words: Attestation) -> Entry:
    round = Round(1, 0, SEED, 0, 4, (0, 2, 3, 5), {0: (0, 3)}, (), (5,), ())
    decision = Decision((), (0,), (), {}, 1, 1.0, 2.0)
    return records.entry(round, records.evidence({}, attestations=words), decision)


def test_words_come_back_from_json_as_they_were(tmp_path):
    words = (HONEST, attest(0, SEED, [0], SENT | OTHERS, [2], [3]), attest(2, SEED, [], {}))
    Writer(tmp_path, Snapshots(0, 1, every=1)).round(entry(*words), {})
    (read,) = Transcript(tmp_path).rounds
    assert read == entry(*words)
    assert proven(read.evidence.attestations[0], SEED, SENT, {}) == SENT


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("broadcasts", EVERYTHING[:-1]),
        ("broadcasts", EVERYTHING + "A"),
        ("participants", "é" + EVERYTHING[1:]),
        ("participants", EVERYTHING[:-1] + "\n"),
        ("participants", ""),
        ("root", "ab" * 31),
        ("root", "AB" * 32),
    ],
)
def test_what_is_no_base64_or_hex_is_refused_with_one_line(tmp_path, name, text):
    said = entry(HONEST).model_dump_json()
    good = TypeAdapter(dict).validate_json(said)
    good["evidence"]["attestations"] = [asdict(HONEST) | {name: text}]
    bad = TypeAdapter(dict).dump_json(good).decode()
    (tmp_path / "rounds.jsonl").write_text(bad + "\n")
    with refused("rounds.jsonl:1", f"evidence.attestations[0].{name}"):
        _ = Transcript(tmp_path).rounds


VERIFIER, PEER = 3, 7
FOUND, CLAIMED, OTHER = (Claim(letter * 64, letter * 64) for letter in "abc")
CHECK = Check(VERIFIER, PEER, FOUND, 1.0, 10)


def ruling(*found: Claim, verifier: int = VERIFIER, peer: int = PEER) -> Ruling:
    return Ruling(verifier, peer, dict(enumerate(found)))


@pytest.mark.parametrize(
    ("found", "peers", "loser"),
    [
        ((FOUND, FOUND, FOUND), 5, PEER),
        ((FOUND, CLAIMED, FOUND), 5, PEER),
        ((CLAIMED, FOUND, CLAIMED), 5, VERIFIER),
        ((FOUND,), 3, PEER),
        ((CLAIMED,), 3, VERIFIER),
        ((FOUND, CLAIMED), 4, None),  # a tie is no verdict
        ((FOUND, CLAIMED, OTHER), 5, None),
        ((OTHER, OTHER, OTHER), 5, None),  # they agree, but with neither party
        ((FOUND,), 4, None),  # who says nothing agrees with nobody
        ((), 2, None),
    ],
)
def test_more_than_half_of_a_rounds_peers_say_who_lost(found, peers, loser):
    assert settle(CHECK, CLAIMED, [ruling(*found)], peers) == loser


def test_claim_about_the_message_alone_is_not_enough():
    same_message = Claim(FOUND.message, OTHER.state)
    assert settle(CHECK, CLAIMED, [ruling(same_message, same_message, same_message)], 5) is None


def test_ruling_on_another_dispute_settles_nothing():
    others = [ruling(FOUND, verifier=4), ruling(FOUND, peer=6)]
    assert settle(CHECK, CLAIMED, others, 3) is None
    assert settle(CHECK, CLAIMED, [*others, ruling(CLAIMED)], 3) == VERIFIER
    assert settle(CHECK, CLAIMED, [], 3) is None


TEN = Settings(10, 5, 4, 20, total_steps=8)


def first_round(seed: int = 1) -> tuple[driver.RunProgress, Round]:
    return driver.next_round(driver.ask(started(TEN, 10, seed, row_tokens=1), range(10)))


@pytest.mark.parametrize("colluders", [1, 2, 3, 4])
def test_witnesses_that_refuse_what_others_can_show_eject_nobody(colluders):
    progress, round_ = first_round()
    said, liars = evidence(round_), round_.witnesses[:colluders]
    others = round_.assignment.keys() - set(liars)
    words = [attest(w, round_.seed, round_.peers, {}, refused=others) for w in liars]
    attestations = (*words, *said.attestations[colluders:])
    _, decision = driver.finish_round(
        progress, round_, minority.replace(said, attestations=attestations)
    )
    assert decision.ejected == {} and decision.quorum == 3
    assert bool(decision.applied) == (colluders == 1)


@pytest.mark.parametrize(("refuse", "ejected"), [(2, {}), (3, {1: "no message"})])
def test_a_tie_of_witnesses_is_no_verdict(refuse, ejected):
    progress, round_ = first_round()
    assert 1 in round_.assignment
    said = evidence(round_, refused=(1,))
    held = {p: m.commitment for p, m in said.messages.items() if p != 1}
    silent = [attest(w, round_.seed, round_.peers, held) for w in round_.witnesses[refuse:]]
    attestations = (*said.attestations[:refuse], *silent)
    _, decision = driver.finish_round(
        progress, round_, minority.replace(said, attestations=attestations)
    )
    assert decision.ejected == ejected and 1 not in decision.applied


def test_whom_verifiers_check_follows_from_every_commitment_and_not_from_the_seed_alone():
    drawn: Counter[int] = Counter()
    _, round_ = first_round()
    peers = sorted(round_.assignment)
    for number in range(400):
        said = evidence(round_)
        last = peers[number % len(peers)]
        message = minority.replace(said.messages[last], commitment=f"{number:064x}")
        varied = minority.replace(said, messages=said.messages | {last: message})
        pairs = consensus.checked(round_, varied)
        assert pairs == consensus.checked(round_, varied) and [*pairs] == [*round_.verifiers]
        drawn.update(pairs.values())
    # 2 of 8 each time, 100 expected of each: 5 standard deviations
    assert drawn.keys() == set(peers) and all(60 < count < 140 for count in drawn.values())


@pytest.mark.parametrize(("peers", "witnesses"), [(8, 2), (12, 4)])
def test_a_quarter_that_colludes_ejects_no_honest_peer(peers, witnesses):
    settings = (peers, witnesses, 25, peers // 4)
    assert all(follow(*settings, "eject", seed, 25).honest is None for seed in range(2))
    outcome = follow(*settings, "lie", 0, 25)
    assert outcome.colluders == peers // 4 and outcome.sent > outcome.applied
