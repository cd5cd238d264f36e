"""Where a coordinator was follows from the rounds that it led, whatever happened in them."""

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from lockstep.protocol import consensus, driver
from lockstep.protocol.driver import RunProgress
from lockstep.protocol.round import Evidence, Message, Round
from lockstep.transcript.entry import Entry, EpochParams
from lockstep.transcript.recomputed import ContradictionError, begin_round, finish_round, follow
from lockstep.transcript.transcript import RoundsFile, Writer
from lockstep.transcript.windows import Snapshots
from pipeline import runfile
from pipeline.start.round_settings import round_settings
from tests.errors import refused
from tests.lockstep.protocol import records
from tests.lockstep.swarm.simulated import PEERS, run_of

PARAMS = "cd" * 32


def run_with_checkpointers() -> runfile.Run:
    """A run of 8 rounds in epochs of 3, whose params are stored at each one's end."""
    run = run_of("signs", min_clients=2)
    older = {"rounds_per_epoch": 3, "global_batch_size": 15, "checkpointers": ("a/b",)}
    same = runfile.OlderConfig.model_fields.keys() & runfile.CurrentConfig.model_fields.keys()
    older |= {name: getattr(run.config, name) for name in same}
    return run.model_copy(update={"config": runfile.OlderConfig(**older)})


RUN = run_with_checkpointers()


def start() -> RunProgress:
    return driver.start(round_settings(RUN), 0, 0, [1.0] * PEERS)


class Led(NamedTuple):
    """A run that a coordinator led, of peers that are not there.

    Attributes:
      entries: its rounds.
      after: where it was before the first round, and after each.
      seen: how often things happened.
    """

    entries: list[Entry]
    after: list[RunProgress]
    seen: Counter


def led(seed: int) -> Led:
    """Peers come, leave, fall silent, are late and lie at random, and the owner pauses."""
    chance, seen, progress = random.Random(seed), Counter(), start()
    entries, after, asked = [], [progress], tuple(range(PEERS))
    while True:
        if progress.pausing:
            progress = driver.resume(progress)
        progress = driver.ask(progress, asked)
        progress, round_ = driver.next_round(progress)
        if progress.waiting:  # all that may come do
            more = driver.may_ask(progress, range(PEERS))
            if not more:
                return Led(entries, after, seen)
            asked += more
            progress, round_ = driver.next_round(driver.ask(progress, more))
        if round_ is None:
            return Led(entries, after, seen)
        said = evidence(round_, chance)
        present = said.present(round_.peers)
        left = tuple(peer for peer in present if chance.random() < 0.05)
        progress, paused = driver.leave(progress, left), chance.random() < 0.15
        progress = driver.pause(progress) if paused else progress
        progress, decision = driver.finish_round(progress, round_, said)
        stored, member = None, driver.checkpointer(progress)
        if member is not None:
            stored = EpochParams(peer=member, params=PARAMS)
            progress = driver.checkpointed(progress, member, PARAMS)
        joined = PARAMS if round_.joined else None
        more = {"asked": asked, "left": left, "paused": paused, "joined_params": joined}
        entries.append(records.entry(round_, said, decision, checkpointed=stored, **more))
        after.append(progress)
        able = driver.may_ask(progress, range(PEERS))
        asked = tuple(peer for peer in able if chance.random() < 0.5)
        happened = {
            "joined": round_.joined, "left": left, "paused": paused, "stored": stored,
            "dropped": decision.dropped, "ejected": decision.ejected, "late": decision.late,
            "untrained": progress.state.untrained,
        }  # fmt: skip
        seen.update(name for name, value in happened.items() if value)


def evidence(round_: Round, chance: random.Random) -> Evidence:
    """What was sent in a round; now and then somebody is silent, late or sends no message."""
    silent = tuple(peer for peer in round_.peers if chance.random() < 0.1)
    senders = [peer for peer in round_.assignment if peer not in silent]
    late = {peer for peer in senders if chance.random() < 0.1}
    said = records.evidence(
        {peer: Message(f"{peer:02x}" * 32, 1) for peer in senders},
        arrivals={peer: chance.uniform(0, 3) for peer in senders if peer not in late},
        silent=silent,
        broken=tuple(peer for peer in senders if chance.random() < 0.03),
    )
    limit = RUN.config.max_round_train_time
    return replace(said, attestations=consensus.witnessed(round_, said, limit))


def test_a_coordinator_killed_after_any_round_is_where_it_was(tmp_path):
    seen = Counter()
    for seed in range(12):
        rounds, run = RoundsFile(tmp_path / f"{seed}.jsonl"), led(seed)
        for entry in run.entries:
            rounds.round(entry)
        seen += run.seen
        for count in reversed(range(len(run.after))):
            assert follow(start(), rounds.cut(count), rounds) == run.after[count]
    assert len(seen) == 8, seen


def edited(change: Callable[[dict], object]) -> Callable[[str], str]:
    def edit(line: str) -> str:
        entry = json.loads(line)
        change(entry)
        return json.dumps(entry)

    return edit


DAMAGE = {
    "a byte": (lambda line: line.replace("{", "(", 1), "JSON"),
    "half a line": (lambda line: line[:200], "JSON"),
    "a field": (edited(lambda e: e.pop("decision")), "decision"),
    "who was there": (edited(lambda e: e["round"]["peers"].pop()), "the run"),
    "who was heard": (edited(lambda e: e["evidence"]["attestations"].pop()), "attestations"),
    "what was decided": (edited(lambda e: e["decision"].update(now=1.5)), "now"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_rounds_that_were_damaged_are_refused_in_one_line(tmp_path, damage):
    rounds, (edit, reason) = RoundsFile(tmp_path / "rounds.jsonl"), DAMAGE[damage]
    for entry in led(0).entries[:3]:
        rounds.round(entry)
    first, second, third = rounds.path.read_text().splitlines()
    rounds.path.write_text(f"{first}\n{edit(second)}\n{third}\n")
    with refused(f"{rounds.path}:2: ", reason):
        follow(start(), rounds.cut(3), rounds)
    assert len(rounds.cut(1)) == 1  # what comes after a checkpoint may be damaged


def test_payloads_that_lost_bytes_before_a_checkpoint_are_refused_in_one_line(tmp_path):
    writer = Writer(tmp_path, Snapshots(0, 8, every=4))
    for entry in led(0).entries[:2]:
        writer.round(entry, {peer: b"x" for peer in entry.evidence.messages})
    payloads: Path = tmp_path / "payloads" / "00001.bin"
    whole = payloads.read_bytes()
    payloads.write_bytes(whole + b"of a round in flight")
    assert len(writer.cut(2)) == 2 and payloads.read_bytes() == whole
    payloads.write_bytes(whole[:-1])
    with refused(len(whole) - 1, len(whole)):
        writer.cut(2)


# ---- Who left, pauses, and who stored an epoch's params ----

EVENTFUL = led(3).entries  # two leave in round 3, and there is a pause in round 1
ANOTHER = EpochParams(peer=1, params="ab" * 32)
TAMPERED = {  # a round and its false record; the round that contradicts it, and what of that
    "nobody left": (3, {"left": ()}, 4, "assignment"),
    "who was away left": (5, {"left": (2,)}, 5, "rounds"),
    "no pause": (1, {"paused": False}, 1, "decision"),
    "a pause": (2, {"paused": True}, 2, "decision"),
    "a pause at an epoch's end": (7, {"paused": True}, 8, "assignment"),
    "nobody stored": (1, {"checkpointed": None}, 1, "decision"),
    "another stored": (1, {"checkpointed": ANOTHER}, 1, "decision"),
    "somebody stored": (2, {"checkpointed": ANOTHER}, 2, "decision"),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_who_left_a_pause_and_who_stored_params_are_recomputed(case):
    number, false, step, kind = TAMPERED[case]
    entries, progress = list(EVENTFUL), start()
    entries[number - 1] = entries[number - 1].model_copy(update=false)
    with pytest.raises(ContradictionError) as caught:
        for entry in entries:
            progress = finish_round(begin_round(progress, entry), entry)
    assert (caught.value.step, caught.value.kind) == (step, kind)


def test_a_round_says_who_left_and_that_there_was_a_pause_only_where_it_was_so():
    for entry in EVENTFUL:
        said = json.loads(entry.model_dump_json())
        assert ("left" in said, "paused" in said) == (bool(entry.left), entry.paused)
