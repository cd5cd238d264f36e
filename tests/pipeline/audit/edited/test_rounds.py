"""An honest transcript has no findings; whatever is edited in a round is one."""

import json
import shutil
from collections.abc import Callable

import pytest

from lockstep.errors import LockstepError
from lockstep.protocol.attestation import attest
from lockstep.protocol.round import Message
from lockstep.transcript.transcript import Transcript
from tests.pipeline.audit.edited.audited_run import WHERE, edit_round, flat, of_all, rows, trained

pytestmark = pytest.mark.long


def test_an_honest_transcript_has_no_findings(audited):
    assert audited.findings == audited.replay() == []


def word_of(e: dict, **changes: object) -> None:
    """Puts another word in the place of the first witness's."""
    said = e["attestations"][0]
    sent = {int(peer): m["commitment"] for peer, m in e["messages"].items()}
    held = {peer: sent[peer] for peer in said["received"]} | changes.pop("holds", {})
    for peer in changes.pop("without", ()):
        del held[peer]
    more = {"refused": said["refused"], "others": said["others"]} | changes
    word = attest(said["witness"], e["round"]["seed"], e["round"]["peers"], held, **more)
    e["attestations"][0] = json.loads(json.dumps(vars(word)))


def claim_the_late(e: dict) -> None:
    (late,) = e["decision"]["late"]
    word_of(e, holds={late: e["messages"][str(late)]["commitment"]})


def first_check(**changes: object) -> Callable[[dict], None]:
    return lambda e: e["checks"][0].update(changes)


def decided(**changes: object) -> Callable[[dict], None]:
    return lambda e: e["decision"].update(changes)


def other_state(e: dict) -> None:
    e["messages"][str(e["checks"][0]["peer"])]["state"] = "00" * 32


def other_judge(e: dict) -> None:
    found = e["rulings"][0]["found"]
    found["0" if "0" not in found else "5"] = found.pop(next(iter(found)))


def another_message(e: dict) -> None:
    peer = next(p for p in e["messages"] if p not in e["others"])
    e["others"][peer] = e["messages"][peer] | {"to": [0], "commitment": "00" * 32}


EVERYTHING = "/" * 426 + "8="  # a filter that always says yes
EDITS = [
    ("asked: one too few", "late", of_all("asked", [0, 1, 2, 3, 4]), {"assignment"}),
    ("asked: one too many", "any", of_all("asked", [0]), {"rounds"}),
    ("asked: nobody's number", "any", of_all("asked", [99]), {"rounds"}),
    ("asked: below zero", "late", of_all("asked", [-1, 0, 1, 2, 3, 4, 5]), {"rounds"}),
    ("round: assignment", "any", lambda e: e["round"]["assignment"].update({"0": [0, 0]}),
     {"assignment"}),
    ("round: seed", "any", lambda e: e["round"].update(seed=1), {"assignment"}),
    ("round: verifiers", "checks", lambda e: e["round"].update(verifiers=[]), {"assignment"}),
    ("round: witnesses", "any", lambda e: e["round"].update(witnesses=[0]), {"assignment"}),
    ("round: joined", "joined", lambda e: e["round"].update(joined=[]), {"assignment"}),
    ("messages: one too few", "any", lambda e: e["messages"].popitem(), {"messages"}),
    ("messages: state", "checks", other_state, {"decision", "checks"}),
    ("messages: no state", "checks", lambda e: next(iter(e["messages"].values())).update(
        state=None), {"messages"}),
    ("others: none", "others", of_all("others", {}), {"attestation", "decision"}),
    ("others: other", "others", lambda e: next(iter(e["others"].values())).update(
        commitment="00" * 32), {"decision", "commitment"}),
    ("others: to others", "others", lambda e: next(iter(e["others"].values())).update(to=[0]),
     {"attestation"}),
    ("others: one more", "any", another_message, {"commitment"}),
    ("broken: an honest one", "any", lambda e: e.update(
        broken=[int(next(iter(e["messages"])))]), {"messages"}),
    ("arrivals: too early", "any", lambda e: e["arrivals"].update(
        {next(iter(e["arrivals"])): 0.0}), {"arrivals", "decision"}),
    ("arrivals: later", "any", lambda e: e["arrivals"].update(
        {next(iter(e["arrivals"])): 4.9}), {"decision"}),
    ("silent: nobody", "silent", of_all("silent", []), {"messages"}),
    ("silent: another", "any", of_all("silent", [0]), {"messages"}),
    ("silent: no member", "any", of_all("silent", [7]), {"messages"}),
    ("attestations: one too few", "any", lambda e: e["attestations"].pop(), {"messages"}),
    ("attestations: one twice", "any", lambda e: e["attestations"].append(
        e["attestations"][0]), {"messages"}),
    ("attestations: claims more", "late", claim_the_late, {"decision"}),
    ("attestations: claims less", "any", lambda e: word_of(
        e, without=e["attestations"][0]["received"][:1]), {"attestation"}),
    ("attestations: refuses", "any", lambda e: word_of(
        e, refused=e["attestations"][0]["received"][:1]), {"attestation"}),
    ("attestations: other root", "any", lambda e: e["attestations"][0].update(root="00" * 32),
     {"attestation"}),
    ("attestations: other filter", "any", lambda e: e["attestations"][0].update(
        broadcasts=EVERYTHING), {"attestation"}),
    ("attestations: heard others", "any", lambda e: e["attestations"][0].update(
        participants=EVERYTHING), {"attestation"}),
    ("checks: none", "checks", of_all("checks", []), {"checks", "decision"}),
    ("checks: other pair", "checks", lambda e: e["checks"][0].update(
        peer=next(int(p) for p in e["messages"] if int(p) != e["checks"][0]["peer"])),
     {"checks", "decision"}),
    ("checks: other result", "checks", first_check(found=["00" * 32, "00" * 32]),
     {"decision", "checks"}),
    ("checks: other time", "checks", first_check(seconds=0.25), {"checks", "decision"}),
    ("checks: too late", "checks", first_check(seconds=99.0), {"decision"}),
    ("checks: other size", "checks", first_check(bytes=1), {"checks"}),
    ("rulings: none", "rulings", of_all("rulings", []), {"decision"}),
    ("rulings: other judge", "rulings", other_judge, {"checks"}),
    ("rulings: one too few", "rulings", lambda e: e["rulings"][0]["found"].popitem(),
     {"checks", "decision"}),
    ("settle_seconds", "rulings", of_all("settle_seconds", 0.5), {"checks"}),
    ("settle_seconds: long", "any", of_all("settle_seconds", 50.0), {"decision"}),
    ("joined_params: none", "joined", of_all("joined_params", None), {"messages"}),
    ("joined_params: for nobody", "any", of_all("joined_params", "00" * 32), {"messages"}),
    ("decision: applied", "any", decided(applied=[0]), {"decision"}),
    ("decision: late", "late", decided(late=[]), {"decision"}),
    ("decision: dropped", "silent", decided(dropped=[]), {"decision"}),
    ("decision: ejected", "rulings", decided(ejected={}), {"decision"}),
    ("decision: another", "any", decided(ejected={"0": "false witness"}), {"decision"}),
    ("decision: now", "any", decided(now=0.0), {"decision"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("where", "edit", "kinds"), [row[1:] for row in EDITS], ids=[row[0] for row in EDITS]
)
def test_an_edited_round_is_a_finding(eventful, tmp_path, where, edit, kinds):
    folder = shutil.copytree(eventful.folder, tmp_path / "transcript")
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    entry = next(entry for entry in map(json.loads, lines) if WHERE[where](flat(dict(entry))))
    step = entry["round"]["step"]
    edit_round(folder, step, edit)
    found = [finding for finding in eventful.audit(folder) if finding not in eventful.findings]
    assert found, "nothing was found"
    assert {finding.kind for finding in found if finding.round == step} & kinds
    assert min(finding.round for finding in found) == step


@pytest.mark.parametrize(
    ("kind", "edit"),
    [
        ("commitment", lambda m: m.update(commitment="00" * 32)),
        ("payload", lambda m: m.update(payload="00009.bin")),
        ("payload", lambda m: m.update(payload="00099.bin")),
        ("payload", lambda m: m.update(payload=f"{'1' * 300}.bin")),
        ("payload", lambda m: m.update(payload=None)),
        ("payload", lambda m: m.update(offset=1)),
        ("payload", lambda m: m.update(offset=2**62)),
        ("payload", lambda m: m.update(bytes=1)),
        ("payload", lambda m: m.update(bytes=2**50)),
    ],
)
def test_a_message_that_is_not_what_it_says_names_its_sender(
    audited, transcript, kind, edit, monkeypatch
):
    def tamper(entry: dict) -> None:
        edit(entry["messages"][sender])

    def read(self: Transcript, message: Message) -> bytes:
        assert message.bytes < 10**9, "too many are not read"
        return payload(self, message)

    payload = Transcript.payload
    sender = str(min(Transcript(transcript).rounds[3].evidence.messages))
    monkeypatch.setattr(Transcript, "payload", read)
    (transcript / "payloads/00099.bin").mkdir()  # is no file
    edit_round(transcript, 4, tamper)
    found = [row[1:] for row in rows(audited.audit(transcript)) if row[0] == 4]
    assert (int(sender), kind) in found or found[0] == (None, "decision")


@pytest.mark.parametrize(
    ("name", "value"),
    [("silent", None), ("joined_params", "abc"), ("settle_seconds", -1.0), ("decision", {})],
)
def test_a_field_of_another_type_is_refused_in_one_line(transcript, name, value):
    edit_round(transcript, 4, of_all(name, value))
    with pytest.raises(LockstepError, match=rf"rounds\.jsonl:4: (evidence\.)?{name}") as error:
        _ = Transcript(transcript).rounds
    assert "\n" not in str(error.value)


def test_a_check_in_a_round_without_verifiers_is_a_finding(tmp_path):
    run = trained(tmp_path)
    check = {"verifier": 0, "peer": 1, "found": ["00" * 32] * 2, "seconds": 1.0, "bytes": 1}
    edit_round(tmp_path, 2, of_all("checks", [check]))
    assert rows(run.audit()) == [(2, None, "messages")]


def test_broken_bytes_that_the_transcript_keeps_quiet_about_are_a_finding(tmp_path):
    run = trained(tmp_path, {"kind": "malformed", "peer": 1, "rounds": [2, 2]})
    assert [(f.round, f.peer, f.applied) for f in run.audit()] == [(2, 1, False)]
    edit_round(tmp_path, 2, of_all("broken", []))
    assert (2, None, "messages") in rows(run.audit())


def test_a_run_cut_off_where_it_waits_for_members_is_a_finding(tmp_path):
    crash = {"kind": "crash", "peer": [1, 2], "rounds": [3, 8]}
    run = trained(tmp_path, crash, min_clients=5, init_min_clients=6, witness_nodes=0)
    path = tmp_path / "rounds.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    assert rows(run.audit()) == [(4, None, "rounds")]


def test_params_that_a_peer_did_not_join_with_are_a_finding_of_the_replay(eventful, tmp_path):
    folder = shutil.copytree(eventful.folder, tmp_path / "transcript")
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    (step,) = (e["round"]["step"] for e in map(json.loads, lines) if e["round"]["joined"])
    edit_round(folder, step, of_all("joined_params", "00" * 32))
    before = eventful.replay()
    found = [f for f in eventful.replay(folder) if f not in before]
    assert rows(found) == [(step, None, "params")]


def test_a_state_that_nobody_checked_is_found_by_the_replay(tmp_path):
    run = trained(tmp_path, verification_percent=17)  # one verifies, and five train

    def tamper(entry: dict) -> None:
        checked = {check["peer"] for check in entry["checks"]}
        peer = next(p for p in entry["messages"] if int(p) not in checked)
        entry["messages"][peer]["state"] = "00" * 32
        liar.append(int(peer))

    liar = []
    edit_round(tmp_path, 6, tamper)
    assert run.audit() == [] and rows(run.replay()) == [(6, *liar, "state")]


def test_a_peers_message_in_anothers_place_is_a_finding(audited, transcript):
    def swap(entry: dict) -> None:
        first, second = (entry["messages"][peer] for peer in pair)
        for name in ("offset", "bytes"):
            first[name], second[name] = second[name], first[name]

    pair = [str(peer) for peer in list(Transcript(transcript).rounds[1].evidence.messages)[:2]]
    edit_round(transcript, 2, swap)
    found = rows(audited.audit(transcript))
    assert all((2, int(peer), "commitment") in found for peer in pair)
