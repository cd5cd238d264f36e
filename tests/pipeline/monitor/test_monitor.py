"""What a shell and scripts see of a training in progress, and how its owner pauses it."""

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.protocol import consensus, driver
from lockstep.protocol.round import Message
from pipeline import __main__ as commands
from pipeline.monitor import training
from pipeline.monitor.training import Members, Status
from pipeline.stage import lock
from tests.errors import refused
from tests.lockstep.protocol import records, three_peers
from tests.lockstep.protocol.driver.driven_run import started

SETTINGS = three_peers.Settings(init_min_clients=6, verification_percent=17, rounds_per_epoch=9)


def test_members_are_told_by_what_they_did_and_why_they_did_nothing():
    progress = driver.ask(started(SETTINGS, 7), range(6))
    progress, round_ = driver.next_round(progress)
    silent, late, broken, *others = round_.assignment
    sent = {p: Message("ab" * 32, 1, "cd" * 32) for p in (late, broken, *others)}
    arrivals = dict.fromkeys((broken, *others), 1.0)
    said = records.evidence(sent, arrivals=arrivals, silent=(silent,), broken=(broken,))
    said = replace(said, attestations=consensus.witnessed(round_, said, 30))
    progress, decision = driver.finish_round(progress, round_, said)
    progress = driver.ask(progress, [6])
    seen = Members.after(progress, records.entry(round_, said, decision))
    assert seen == Members(
        training=tuple(sorted((late, broken, *others))),
        verifying=tuple(round_.verifiers),
        witnessing=tuple(sorted({*round_.witnesses} - {silent})),
        late=(late,),
        waiting=(6,),
        dropped=(silent,),
        ejected=(broken,),
    )


STATUS = Status(
    state="training",
    run="params/run.toml",
    process=os.getpid(),
    round=50,
    rounds=200,
    epoch=3,
    loss=4.5,
    held_out_loss=4.25,
    rounds_per_second=0.5,
    tokens_per_second=12_345.0,
    message_bytes=19_300.0,
    peers=Members(
        training=(0, 1, 2, 5), verifying=(4,), witnessing=(0, 4), late=(5,), ejected=(3,)
    ),
    updated=0.0,
)


@pytest.fixture
def folder(tmp_path) -> Path:
    """The work in progress of a training, below a root."""
    folder = tmp_path / "data" / "runs" / "abc"
    folder.mkdir(parents=True)
    STATUS.model_copy(update={"updated": time.time() - 65}).write(folder)
    (folder / "payload").write_bytes(bytes(1_000_000))
    return folder


def test_a_running_training_is_a_few_lines(folder, tmp_path, capsys):
    with lock.hold(folder.with_name("abc.lock")):
        commands.status(tmp_path)
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert re.fullmatch(rf"1\.0 MB in {re.escape(str(folder))}, .* free", lines.pop("disk"))
    assert lines == {
        "run": f"params/run.toml, process {os.getpid()}",
        "state": "training",
        "round": "50 of 200, epoch 3, 1 min 5 s ago",
        "rate": "0.5 rounds/s, 12,345 tokens/s",
        "left": "5 min",
        "loss": "4.500, held out 4.250",
        "training": "0-2 5",
        "verifying": "4",
        "witnessing": "0 4",
        "late": "5",
        "ejected": "3",
        "sent": "19.3 kB by each peer in a round",
    }


def test_a_rate_of_rows_is_one_of_rows(folder):
    told = STATUS.model_copy(update={"tokens_per_second": None, "rows_per_second": 16.0})
    said = dict(training.Training(folder, told, os.getpid()).rows())
    assert said["rate"] == "0.5 rounds/s, 16 rows/s"


def test_a_script_reads_the_same_of_a_killed_training(folder, tmp_path, capsys):
    commands.status(tmp_path, as_json=True)
    seen = json.loads(capsys.readouterr().out)
    assert seen["state"] == "stopped" and seen["disk_bytes"] > 1_000_000
    assert (seen["round"], seen["seconds_left"], seen["peers"]["late"]) == (50, 300.0, [5])


def test_the_training_that_goes_on_is_shown_before_a_later_one_that_was_killed(folder, tmp_path):
    other = tmp_path / "data" / "runs" / "def"
    other.mkdir()
    STATUS.model_copy(update={"updated": time.time()}).write(other)
    assert training.in_progress(tmp_path)[0].folder == other
    with lock.hold(folder.with_name("abc.lock")):
        assert training.in_progress(tmp_path)[0].folder == folder


@pytest.mark.parametrize("command", ["status", "pause", "resume"])
def test_without_a_training_there_is_one_line(command, tmp_path):
    with refused(tmp_path / "data/runs"):
        getattr(commands, command)(tmp_path)


def test_only_a_running_training_is_paused_and_only_a_paused_one_resumed(folder, tmp_path):
    for change in (commands.pause, commands.resume):
        with refused(folder, "stopped"):
            change(tmp_path)
    with lock.hold(folder.with_name("abc.lock")):
        commands.pause(tmp_path)
        assert training.in_progress(tmp_path)[0].state == "pausing"
        with refused(folder, "pausing"):
            commands.pause(tmp_path)
        commands.resume(tmp_path)
        assert training.in_progress(tmp_path)[0].state == "training"


def test_of_several_trainings_a_request_is_for_the_one_that_can_meet_it(folder, tmp_path, capsys):
    def asked(change, *arguments) -> str:
        change(tmp_path, *arguments)
        return capsys.readouterr().out

    other = tmp_path / "data" / "runs" / "def"
    other.mkdir()
    STATUS.model_copy(update={"run": "params/other.toml", "updated": 0.0}).write(other)
    with lock.hold(folder.with_name("abc.lock")):
        said = asked(commands.pause)  # the other was killed
        assert "abc" in said and STATUS.run in said
        with lock.hold(folder.with_name("def.lock")):
            assert "def" in asked(commands.pause)
            for key, meant in ((None, "--key"), ("ab", "mean abc?")):
                with refused("abc", "def", "params/other.toml", "--key", meant):
                    commands.resume(tmp_path, key)
            shown = asked(commands.status)
            assert sum(line.startswith("other") for line in shown.splitlines()) == 1
            assert "params/other.toml" in shown and "def" in shown
            first = json.loads(asked(commands.status, True))
            assert [one["run"] for one in first["others"]] == ["params/other.toml"]
            STATUS.model_copy(update={"run": "a.toml", "updated": time.time()}).write(other)
            assert asked(commands.status).splitlines()[0] == shown.splitlines()[0]
            assert "abc" in asked(commands.resume, "abc")
            said = asked(commands.resume)  # the only one that is paused
            assert "def" in said and "a.toml" in said
            with refused("abc", "def", "--key"):
                commands.pause(tmp_path)
            assert "def" in asked(commands.pause, "def")


def test_a_training_that_was_started_again_and_told_nothing_yet_is_starting(folder, tmp_path):
    STATUS.model_copy(update={"process": 1}).write(folder)
    with lock.hold(folder.with_name("abc.lock")):
        assert training.in_progress(tmp_path)[0].state == "starting"


def test_a_damaged_status_is_one_line(folder, tmp_path):
    (folder / "status.json").write_text('{"round": "x"}')
    with refused("status.json"):
        training.in_progress(tmp_path)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.6, "1 min"), (3661, "1 h 1 min"), (200_000, "2 d 7 h"), (86_400, "1 d")],
)
def test_durations_are_in_their_two_largest_units(seconds, text):
    assert training.duration(seconds) == text
