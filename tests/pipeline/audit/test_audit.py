"""The audit and the replay find whatever differs from an honest run, and say whose it is."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline import runfile
from pipeline.audit.audit import audit, audit_rounds
from pipeline.audit.replay import Replay
from pipeline.audit.verdict import Finding, accepts, merged
from pipeline.errors import LockstepError
from pipeline.protocol import consensus, driver
from pipeline.protocol.attestation import attest
from pipeline.protocol.round import Evidence, Message
from pipeline.stage.artifacts import read_json
from pipeline.swarm.round_settings import RoundSettings
from pipeline.transcript.entry import Entry, EpochParams
from pipeline.transcript.transcript import Transcript
from pipeline.weights.trees import load_nested
from pipeline.wire.commitment import tree_hash
from tests.pipeline.protocol import records
from tests.pipeline.swarm.simulated import BY_TIME, lab, run_of


@dataclass(frozen=True)
class Audited:
    """A finished run of six peers, and its auditor."""

    run: runfile.Run
    folder: Path

    @cached_property
    def findings(self) -> list[Finding]:
        """What is found where nobody edits anything."""
        return self.audit(self.folder)

    def audit(self, folder: Path) -> list[Finding]:
        return audit(lab("signs").setup(self.run), Transcript(folder))

    def replay(self, folder: Path, bitwise: bool = True) -> list[Finding]:
        work = [(window, range(6)) for window in self.run.snapshots().windows]
        replay = Replay(lab("signs").setup(self.run), Transcript(folder), bitwise, work)
        return [f for some in work for f in replay.window(*some, lambda: None)]


@pytest.fixture(scope="module")
def audited(tmp_path_factory) -> Audited:
    """An honest run of 8 rounds, snapshots after 0, 4 and 8."""
    folder, run = tmp_path_factory.mktemp("audited"), run_of("signs", verified=True)
    lab("signs").train(run, folder)
    return Audited(run, folder)


@pytest.fixture(scope="module")
def eventful(tmp_path_factory) -> Audited:
    """A run in which there is something in every field of a round, in one round or another."""
    faults = [
        {"kind": "late", "peer": 2, "rounds": [1, 1]},
        {"kind": "sign_flip", "peer": 4, "rounds": [2, 12]},
        {"kind": "equivocation", "peer": 1, "rounds": [3, 12]},
        {"kind": "crash", "peer": 3, "rounds": [4, 5]},
    ]
    times = {**BY_TIME, "witness_nodes": 0, "total_steps": 12}
    run = run_of("signs", *faults, verified=True, **times)
    folder = tmp_path_factory.mktemp("eventful")
    entries = lab("signs").train(run, folder).transcript.rounds
    for there in (with_late, with_other, with_ruling, with_silent, with_joined, with_checks):
        assert any(there(flat(entry.model_dump(mode="json"))) for entry in entries), there
    return Audited(run, folder)


@pytest.fixture
def transcript(audited, tmp_path) -> Path:
    """A copy to tamper with."""
    return shutil.copytree(audited.folder, tmp_path / "transcript")


EVIDENCE = {field.name for field in fields(Evidence)}


def flat(entry: dict) -> dict:
    """A line of rounds.jsonl with the fields of its evidence beside its own."""
    return entry | entry.pop("evidence")


def edit_round(folder: Path, step: int, edit) -> None:
    path = folder / "rounds.jsonl"
    lines = path.read_text().splitlines()
    entry = flat(json.loads(lines[step - 1]))
    edit(entry)
    evidence = {name: entry.pop(name) for name in list(entry) if name in EVIDENCE}
    lines[step - 1] = json.dumps(entry | {"evidence": evidence})
    path.write_text("\n".join(lines) + "\n")


def edit_arrays(folder: Path, step: int, name: str, by: float = 1) -> None:
    """Adds to one number of a snapshot's file, and leaves its recorded hash."""
    path = folder / "snapshots" / f"{step:05}" / f"{name}.safetensors"
    arrays = load_file(path)
    first = sorted(arrays)[0]
    arrays[first] = arrays[first].copy()
    arrays[first].flat[0] += by
    path.unlink()  # a hard link may stand elsewhere
    save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, path)


def record(folder: Path, step: int, edit) -> None:
    path = folder / "snapshots" / f"{step:05}" / "state.json"
    recorded = json.loads(path.read_text())
    edit(recorded)
    path.write_text(json.dumps(recorded))


def test_an_honest_transcript_has_no_findings(audited):
    assert audited.findings == []
    assert audited.replay(audited.folder) == []
    assert audited.replay(audited.folder, bitwise=False) == []


# ---- A round that was edited ----


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


def any_round(e: dict) -> bool:
    return e["round"]["step"] == 8


def with_late(e: dict) -> bool:
    return e["round"]["step"] == 1 and e["decision"]["late"]


def with_checks(e: dict) -> bool:
    return e["checks"] and not (e["rulings"] or e["decision"]["late"])


with_other, with_ruling, with_silent = map(itemgetter, ("others", "rulings", "silent"))


def with_joined(e: dict) -> list[int]:
    return e["round"]["joined"]


def of_all(field: str, value: object) -> Callable[[dict], None]:
    return lambda e: e.update({field: value})


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
    ("asked: one too few", with_late, of_all("asked", [0, 1, 2, 3, 4]), {"assignment"}),
    ("asked: one too many", any_round, of_all("asked", [0]), {"rounds"}),
    ("asked: nobody's number", any_round, of_all("asked", [99]), {"rounds"}),
    ("asked: below zero", with_late, of_all("asked", [-1, 0, 1, 2, 3, 4, 5]), {"rounds"}),
    ("round: assignment", any_round, lambda e: e["round"]["assignment"].update({"0": [0, 0]}),
     {"assignment"}),
    ("round: seed", any_round, lambda e: e["round"].update(seed=1), {"assignment"}),
    ("round: verifiers", with_checks, lambda e: e["round"].update(verifiers={}), {"assignment"}),
    ("round: witnesses", any_round, lambda e: e["round"].update(witnesses=[0]), {"assignment"}),
    ("round: joined", with_joined, lambda e: e["round"].update(joined=[]), {"assignment"}),
    ("messages: one too few", any_round, lambda e: e["messages"].popitem(), {"messages"}),
    ("messages: state", with_checks, other_state, {"decision", "checks"}),
    ("messages: no state", with_checks, lambda e: next(iter(e["messages"].values())).update(
        state=None), {"messages"}),
    ("others: none", with_other, of_all("others", {}), {"attestation", "decision"}),
    ("others: other", with_other, lambda e: next(iter(e["others"].values())).update(
        commitment="00" * 32), {"decision", "commitment"}),
    ("others: to others", with_other, lambda e: next(iter(e["others"].values())).update(to=[0]),
     {"attestation"}),
    ("others: one more", any_round, another_message, {"commitment"}),
    ("broken: an honest one", any_round, lambda e: e.update(
        broken=[int(next(iter(e["messages"])))]), {"messages"}),
    ("arrivals: too early", any_round, lambda e: e["arrivals"].update(
        {next(iter(e["arrivals"])): 0.0}), {"arrivals"}),
    ("arrivals: later", any_round, lambda e: e["arrivals"].update(
        {next(iter(e["arrivals"])): 4.9}), {"decision"}),
    ("silent: nobody", with_silent, of_all("silent", []), {"messages"}),
    ("silent: another", any_round, of_all("silent", [0]), {"messages"}),
    ("silent: no member", any_round, of_all("silent", [7]), {"messages"}),
    ("attestations: one too few", any_round, lambda e: e["attestations"].pop(), {"messages"}),
    ("attestations: one twice", any_round, lambda e: e["attestations"].append(
        e["attestations"][0]), {"messages"}),
    ("attestations: claims more", with_late, claim_the_late, {"decision"}),
    ("attestations: claims less", any_round, lambda e: word_of(
        e, without=e["attestations"][0]["received"][:1]), {"attestation"}),
    ("attestations: refuses", any_round, lambda e: word_of(
        e, refused=e["attestations"][0]["received"][:1]), {"attestation"}),
    ("attestations: other root", any_round, lambda e: e["attestations"][0].update(root="00" * 32),
     {"attestation"}),
    ("attestations: other filter", any_round, lambda e: e["attestations"][0].update(
        broadcasts=EVERYTHING), {"attestation"}),
    ("attestations: heard others", any_round, lambda e: e["attestations"][0].update(
        participants=EVERYTHING), {"attestation"}),
    ("checks: none", with_checks, of_all("checks", []), {"checks", "decision"}),
    ("checks: other pair", with_checks, lambda e: e["checks"][0].update(
        peer=next(int(p) for p in e["messages"] if int(p) != e["checks"][0]["peer"])),
     {"checks", "decision"}),
    ("checks: other result", with_checks, first_check(found=["00" * 32, "00" * 32]),
     {"decision", "checks"}),
    ("checks: other time", with_checks, first_check(seconds=0.25), {"checks", "decision"}),
    ("checks: too late", with_checks, first_check(seconds=99.0), {"decision"}),
    ("checks: other size", with_checks, first_check(bytes=1), {"checks"}),
    ("rulings: none", with_ruling, of_all("rulings", []), {"decision"}),
    ("rulings: other judge", with_ruling, other_judge, {"checks"}),
    ("rulings: one too few", with_ruling, lambda e: e["rulings"][0]["found"].popitem(),
     {"checks"}),
    ("settle_seconds", with_ruling, of_all("settle_seconds", 0.5), {"checks"}),
    ("settle_seconds: long", any_round, of_all("settle_seconds", 50.0), {"decision"}),
    ("joined_params: none", with_joined, of_all("joined_params", None), {"messages"}),
    ("joined_params: for nobody", any_round, of_all("joined_params", "00" * 32), {"messages"}),
    ("decision: applied", any_round, decided(applied=[0]), {"decision"}),
    ("decision: late", with_late, decided(late=[]), {"decision"}),
    ("decision: dropped", with_silent, decided(dropped=[]), {"decision"}),
    ("decision: ejected", with_ruling, decided(ejected={}), {"decision"}),
    ("decision: another", any_round, decided(ejected={"0": "false witness"}), {"decision"}),
    ("decision: now", any_round, decided(now=0.0), {"decision"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("where", "edit", "kinds"), [row[1:] for row in EDITS], ids=[row[0] for row in EDITS]
)
def test_an_edited_round_is_a_finding(eventful, tmp_path, where, edit, kinds):
    folder = shutil.copytree(eventful.folder, tmp_path / "transcript")
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    entry = next(entry for entry in map(json.loads, lines) if where(flat(dict(entry))))
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
        ("payload", lambda m: m.update(payload=None)),
        ("payload", lambda m: m.update(offset=1)),
        ("payload", lambda m: m.update(offset=2**62)),
        ("payload", lambda m: m.update(bytes=1)),
        ("payload", lambda m: m.update(bytes=2**50)),
    ],
)
def test_a_message_that_is_not_what_it_says_names_its_sender(audited, transcript, kind, edit):
    def tamper(entry: dict) -> None:
        edit(entry["messages"][sender])

    sender = str(next(iter(Transcript(transcript).rounds[3].evidence.messages)))
    edit_round(transcript, 4, tamper)
    found = [(f.peer, f.kind) for f in audited.audit(transcript) if f.round == 4]
    assert (int(sender), kind) in found or found[0] == (None, "decision")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("asked", ["0"]),
        ("silent", None),
        ("joined_params", "abc"),
        ("settle_seconds", -1.0),
        ("checks", [{"verifier": 0}]),
        ("rulings", [[]]),
        ("others", {"x": {}}),
        ("decision", {}),
    ],
)
def test_a_field_of_another_type_is_refused_in_one_line(transcript, name, value):
    edit_round(transcript, 4, of_all(name, value))
    with pytest.raises(LockstepError, match=rf"rounds\.jsonl:4: (evidence\.)?{name}") as error:
        _ = Transcript(transcript).rounds
    assert "\n" not in str(error.value)


# ---- Who left, and a pause ----


def driven(run: runfile.Run, **events: int) -> list[Entry]:
    """The rounds of honest peers, driven and recorded without training.

    Args:
      run: the run, whose peers all begin it.
      events: round in which something happens: peer 2 "leaves", the owner "pauses".
    """
    progress = lab("signs").begin.progress(RoundSettings.of(run))
    asked, entries = tuple(range(6)), []
    while True:
        if progress.pausing:
            progress = driver.resume(progress)
        progress, round_ = driver.next_round(driver.ask(progress, asked))
        if round_ is None:
            return entries
        left = (2,) if events.get("leaves") == round_.step else ()
        progress, paused = driver.leave(progress, left), events.get("pauses") == round_.step
        progress = driver.pause(progress) if paused else progress
        sent = {peer: Message("ab" * 32, 1) for peer in round_.assignment}
        said = records.evidence(sent, arrivals=dict.fromkeys(sent, 1.0))
        said = replace(said, attestations=consensus.witnessed(round_, said, 9.0))
        progress, decision = driver.finish_round(progress, round_, said)
        more = {"asked": asked, "left": left, "paused": paused}
        peer = driver.checkpointer(progress)
        if run.config.checkpointers and peer is not None:
            progress = driver.checkpointed(progress, peer, "cd" * 32)
            more["checkpointed"] = EpochParams(peer=peer, params="cd" * 32)
        entries.append(records.entry(round_, said, decision, **more))
        asked = ()


def audited_rounds(run: runfile.Run, entries: list[Entry]) -> list[tuple[int, str]]:
    header = SimpleNamespace(sketched=False)
    transcript = SimpleNamespace(rounds=entries, header=header)  # without payloads
    found = audit_rounds(lab("signs").setup(run), transcript, windows=(), last=0)
    return [(finding.round, finding.kind) for finding in found]


def test_who_left_and_a_pause_are_recorded_and_recomputed():
    run = run_of("signs")
    entries = driven(run, leaves=2, pauses=4)
    assert [(len(e.round.peers), e.round.epoch) for e in entries[1:5]] == [
        (6, 0), (5, 0), (5, 0), (5, 1),
    ]  # fmt: skip
    lines = [entry.model_dump_json() for entry in entries]
    assert ["left" in line or "paused" in line for line in lines] == [n in (1, 3) for n in range(8)]
    read = [Entry.model_validate_json(line) for line in lines]
    assert read == entries and audited_rounds(run, read) == []
    for step, changes in ((2, {"left": ()}), (4, {"paused": False}), (5, {"paused": True})):
        tampered = [e.model_copy(update=changes if e.round.step == step else {}) for e in entries]
        assert audited_rounds(run, tampered) == [(step + 1, "assignment")]
    nobody = entries[2].model_copy(update={"left": (2,)})
    assert audited_rounds(run, [*entries[:2], nobody]) == [(3, "rounds")]


def test_who_stored_an_epochs_params_is_recomputed_where_the_run_has_checkpointers():
    run, older = run_of("signs"), {"rounds_per_epoch": 3, "global_batch_size": 15}
    same = runfile.OlderConfig.model_fields.keys() & runfile.CurrentConfig.model_fields.keys()
    older |= {name: getattr(run.config, name) for name in same} | {"checkpointers": ("a/b",)}
    run = run.model_copy(update={"config": runfile.OlderConfig(**older)})
    entries = driven(run, leaves=2)
    assert [e.round.step for e in entries if e.checkpointed] == [3, 6, 8]
    assert audited_rounds(run, entries) == []
    another = EpochParams(peer=1, params="cd" * 32)
    for step, stored in ((3, None), (3, another), (4, another)):
        tampered = list(entries)
        tampered[step - 1] = entries[step - 1].model_copy(update={"checkpointed": stored})
        assert audited_rounds(run, tampered) == [(step, "decision")]


def test_a_check_in_a_round_without_verifiers_is_a_finding(tmp_path):
    run = run_of("signs")
    lab("signs").train(run, tmp_path)
    check = {"verifier": 0, "peer": 1, "found": ["00" * 32] * 2, "seconds": 1.0, "bytes": 1}
    edit_round(tmp_path, 2, of_all("checks", [check]))
    assert [(f.round, f.kind) for f in Audited(run, tmp_path).audit(tmp_path)] == [(2, "messages")]


def test_broken_bytes_that_the_transcript_keeps_quiet_about_are_a_finding(tmp_path):
    run = run_of("signs", {"kind": "malformed", "peer": 1, "rounds": [2, 2]})
    lab("signs").train(run, tmp_path)
    auditor = Audited(run, tmp_path)
    assert [(f.round, f.peer, f.applied) for f in auditor.audit(tmp_path)] == [(2, 1, False)]
    edit_round(tmp_path, 2, of_all("broken", []))
    assert (2, None, "messages") in [(f.round, f.peer, f.kind) for f in auditor.audit(tmp_path)]


def test_a_run_cut_off_where_it_waits_for_members_is_a_finding(tmp_path):
    crash = {"kind": "crash", "peer": [1, 2], "rounds": [3, 8]}
    run = run_of("signs", crash, min_clients=5, init_min_clients=6, witness_nodes=0)
    lab("signs").train(run, tmp_path)
    path = tmp_path / "rounds.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    assert [(f.round, f.kind) for f in Audited(run, tmp_path).audit(tmp_path)] == [(4, "rounds")]


def test_params_that_a_peer_did_not_join_with_are_a_finding_of_the_replay(eventful, tmp_path):
    folder = shutil.copytree(eventful.folder, tmp_path / "transcript")
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    (step,) = (e["round"]["step"] for e in map(json.loads, lines) if e["round"]["joined"])
    edit_round(folder, step, of_all("joined_params", "00" * 32))
    before = eventful.replay(eventful.folder)
    found = [f for f in eventful.replay(folder) if f not in before]
    assert [(f.round, f.peer, f.kind) for f in found] == [(step, None, "params")]


def test_a_state_that_nobody_checked_is_found_by_the_replay(audited, transcript):
    def tamper(entry: dict) -> None:
        checked = {check["peer"] for check in entry["checks"]}
        peer = next(p for p in entry["messages"] if int(p) not in checked)
        entry["messages"][peer]["state"] = "00" * 32
        liar.append(int(peer))

    liar = []
    edit_round(transcript, 6, tamper)
    assert audited.audit(transcript) == []
    assert [(f.round, f.peer, f.kind) for f in audited.replay(transcript)] == [
        (6, liar[0], "state")
    ]


# ---- What a verdict makes of findings ----


DISCARDED, APPLIED = (Finding(3, 1, "message", "", applied) for applied in (False, True))


@pytest.mark.parametrize(
    ("findings", "applied", "strict"),
    [
        ([], True, True),
        ([DISCARDED], True, False),
        ([APPLIED], False, False),
        ([DISCARDED, APPLIED], False, False),
    ],
)
def test_policy_applied_refuses_what_got_into_the_params_and_strict_refuses_all(
    findings, applied, strict
):
    assert (accepts("applied", findings), accepts("strict", findings)) == (applied, strict)


def test_that_a_peer_was_ejected_is_said_only_where_nothing_else_says_why():
    ejected = [Finding(step, peer, "ejected", "", False) for step, peer in ((5, 1), (3, 1), (3, 2))]
    assert merged([ejected[0], DISCARDED, *ejected[1:]]) == [DISCARDED, ejected[2], ejected[0]]


# ---- Files ----


def test_a_peers_message_in_anothers_place_is_a_finding(audited, transcript):
    def swap(entry: dict) -> None:
        first, second = (entry["messages"][peer] for peer in pair)
        for name in ("offset", "bytes"):
            first[name], second[name] = second[name], first[name]

    pair = [str(peer) for peer in list(Transcript(transcript).rounds[1].evidence.messages)[:2]]
    edit_round(transcript, 2, swap)
    found = [(f.round, f.peer, f.kind) for f in audited.audit(transcript)]
    assert all((2, int(peer), "commitment") in found for peer in pair)


def test_a_flipped_bit_of_a_payload_is_a_finding(audited, transcript):
    path = transcript / "payloads" / "00001.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
    last = max(Transcript(transcript).rounds[3].evidence.messages)
    assert (4, last) in [(f.round, f.peer) for f in audited.audit(transcript)]


def test_rounds_that_are_missing_or_too_many_are_findings(audited, transcript):
    path = transcript / "rounds.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5]))
    assert [(f.round, f.kind) for f in audited.audit(transcript)] == [(6, "rounds")]
    path.write_text("".join([*lines, lines[-1]]))
    assert [(f.round, f.kind) for f in audited.audit(transcript)] == [(8, "rounds")]


@pytest.mark.parametrize(
    "edit",
    [
        *(lambda s, name=name: shutil.rmtree(s / name) for name in ("00000", "00004", "00008")),
        lambda s: shutil.copytree(s / "00004", s / "00005"),
        lambda s: (s / "00004" / "params.safetensors").unlink(),  # kept as hashes only
    ],
    ids=["without the first", "without one", "without the last", "one too many", "not whole"],
)
def test_snapshots_other_than_the_run_file_asks_for_are_a_finding(audited, transcript, edit):
    edit(transcript / "snapshots")
    found = [(f.round, f.peer, f.kind) for f in audited.audit(transcript)]
    assert found == [(0, None, "snapshot")]


@pytest.mark.parametrize("step", [0, 4, 8])
@pytest.mark.parametrize("name", ["params", "own-001"])
def test_a_snapshots_file_that_was_changed_is_a_finding(audited, transcript, step, name):
    edit_arrays(transcript, step, name)
    assert [(f.round, f.kind) for f in audited.audit(transcript)] == [(step, "snapshot")]


def test_a_snapshots_file_that_is_missing_is_a_finding_that_names_no_machine(audited, transcript):
    (transcript / "snapshots" / "00004" / "own-001.safetensors").unlink()
    (finding,) = audited.audit(transcript)
    assert (finding.round, finding.kind) == (4, "snapshot")
    assert finding.detail.startswith("snapshots/00004/own-001.safetensors: ")


@pytest.mark.parametrize(("step", "value"), [(4, np.nan), (8, np.inf)])
def test_a_state_that_is_no_number_is_a_finding_whatever_its_hash(audited, transcript, step, value):
    edit_arrays(transcript, step, "own-001", value)
    own = load_nested(transcript / "snapshots" / f"{step:05}" / "own-001.safetensors")
    record(transcript, step, lambda recorded: recorded["own"].__setitem__(1, tree_hash(own)))
    (finding,) = audited.audit(transcript)
    assert (finding.round, finding.peer, finding.kind) == (step, None, "snapshot")
    assert finding.detail.startswith(f"snapshots/{step:05}/own-001.safetensors: tensor ")
    assert finding.detail.endswith(f" has a value of {value}, expected numbers")


def test_another_start_than_the_auditors_is_a_finding(audited, transcript):
    edit_arrays(transcript, 0, "params")
    params, _ = Transcript(transcript).agreed(0, lab("signs").begin.state)
    record(transcript, 0, lambda recorded: recorded.update(params=tree_hash(params)))
    (finding,) = audited.audit(transcript)
    assert (finding.round, finding.kind) == (0, "snapshot")
    assert "stage convert" in finding.detail


@pytest.mark.parametrize("part", ["run", "model"])
def test_a_header_that_tells_of_another_run_is_a_finding(audited, transcript, part):
    header = read_json(transcript / "header.json")
    header[part] = header[part] | {"rms_norm_eps": 1.0}
    (transcript / "header.json").write_text(json.dumps(header))
    assert [f.kind for f in audited.audit(transcript)] == ["header"]


def test_a_state_that_does_not_follow_names_the_peer_and_the_window_that_ends_in_it(
    audited, transcript
):
    edit_arrays(transcript, 4, "own-001")
    own = Transcript(transcript).own(4, 1, lab("signs").begin.state.own[1])
    record(transcript, 4, lambda recorded: recorded["own"].__setitem__(1, tree_hash(own)))
    assert audited.audit(transcript) == []
    found = [(f.round, f.peer, f.kind) for f in audited.replay(transcript)]
    assert found[0] == (4, 1, "state")


@pytest.mark.parametrize("bitwise", [True, False])
def test_params_that_do_not_follow_are_a_finding_about_the_author(audited, transcript, bitwise):
    path = transcript / "snapshots" / "00008" / "params.safetensors"
    arrays = {name: value * 1.5 for name, value in load_file(path).items()}
    path.unlink()
    save_file(arrays, path)
    params, _ = Transcript(transcript).agreed(8, lab("signs").begin.state)
    record(transcript, 8, lambda recorded: recorded.update(params=tree_hash(params)))
    assert audited.audit(transcript) == []
    found = [(f.round, f.peer, f.kind) for f in audited.replay(transcript, bitwise)]
    assert found == [(8, None, "params")]


@pytest.mark.parametrize("line", ["{}", "no JSON", '{"round": {"step": "1"}}'])
def test_a_line_that_is_no_round_is_one_line_of_error(transcript, line):
    path = transcript / "rounds.jsonl"
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(LockstepError, match=r"rounds.jsonl:1: ") as raised:
        _ = Transcript(transcript).rounds
    assert "\n" not in str(raised.value)


def test_another_format_names_the_release_that_reads_it(transcript):
    header = read_json(transcript / "header.json") | {"format": 7}
    (transcript / "header.json").write_text(json.dumps(header))
    with pytest.raises(LockstepError, match="format 7, expected 2; a later release"):
        _ = Transcript(transcript).header


# ---- Snapshots of which only the hashes are kept ----


def sparse(folder: Path, *schedule: dict) -> Audited:
    """A run of 8 rounds with hashes after every second, kept whole after 0, 4 and 8."""
    run = run_of("signs", *schedule)
    witness = run.witness.model_copy(update={"snapshot_every": 2, "keep_every": 2})
    run = run.model_copy(update={"witness": witness})
    lab("signs").train(run, folder)
    return Audited(run, folder)


@pytest.fixture(scope="module")
def hashed(tmp_path_factory) -> Audited:
    return sparse(tmp_path_factory.mktemp("hashed"))


def test_snapshots_kept_as_hashes_take_no_space_and_audit_clean(hashed):
    transcript = Transcript(hashed.folder)
    assert (transcript.snapshots, transcript.kept) == ([0, 2, 4, 6, 8], [0, 4, 8])
    assert [f.name for f in (hashed.folder / "snapshots" / "00002").iterdir()] == ["state.json"]
    assert hashed.findings == hashed.replay(hashed.folder) == []


def test_a_lie_in_a_longer_window_is_found(tmp_path):
    run = sparse(tmp_path, {"kind": "sign_flip", "peer": 4, "rounds": [7, 7]})
    assert run.findings == []
    assert [(f.round, f.peer, f.kind) for f in run.replay(tmp_path)] == [(7, 4, "message")]


@pytest.mark.parametrize("name", ["params", "own"])
def test_a_false_hash_within_a_window_is_found_in_its_round(hashed, tmp_path, name):
    def edit(recorded: dict) -> None:
        recorded["own"][3] = "ab" * 32
        if name == "params":
            recorded["params"] = "ab" * 32

    folder = shutil.copytree(hashed.folder, tmp_path / "transcript")
    record(folder, 6, edit)
    assert hashed.audit(folder) == []
    found = [(f.round, f.peer, f.kind) for f in hashed.replay(folder)]
    state, params = (6, 3, "state"), (6, None, "params")
    assert found == ([params, state] if name == "params" else [state])


def test_hashes_that_are_missing_are_one_line_of_error(hashed, tmp_path):
    folder = shutil.copytree(hashed.folder, tmp_path / "transcript")
    record(folder, 6, lambda recorded: recorded.pop("own"))
    with pytest.raises(LockstepError, match=r"00006/state\.json: own: missing"):
        hashed.replay(folder)
