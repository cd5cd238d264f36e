"""Which snapshots a run takes, and the windows between those that are kept whole."""

import pytest

from lockstep.transcript.windows import Snapshots, Window


@pytest.mark.parametrize(
    ("snapshots", "steps", "kept"),
    [
        (Snapshots(0, 200, 50), [0, 50, 100, 150, 200], [0, 50, 100, 150, 200]),
        (Snapshots(0, 200, 50, 2), [0, 50, 100, 150, 200], [0, 100, 200]),
        (Snapshots(0, 199, 50, 3), [0, 50, 100, 150, 199], [0, 150, 199]),
        (Snapshots(0, 6, 50, 2), [0, 6], [0, 6]),
        # a run that extends another counts from the snapshot that it starts with
        (Snapshots(60, 200, 50, 2), [60, 100, 150, 200], [60, 150, 200]),
        (Snapshots(50, 200, 50, 2), [50, 100, 150, 200], [50, 150, 200]),
    ],
)
def test_windows_lie_between_the_snapshots_that_are_kept_whole(snapshots, steps, kept):
    assert (snapshots.steps, snapshots.kept) == (steps, kept)
    windows = snapshots.windows
    assert [window.opening for window in windows] == kept[:-1]
    assert [window.last for window in windows] == kept[1:]
    assert snapshots.window_count == len(windows)
    openings = range(-1, snapshots.end + 2)
    assert [step for step in openings if snapshots.takes(step)] == steps
    assert [step for step in openings if snapshots.keeps(step)] == kept
    assert [w for w in map(snapshots.window_after, openings) if w is not None] == windows
    rounds = [step for window in windows for step in window.rounds]
    assert rounds == list(range(snapshots.start + 1, snapshots.end + 1))


def test_nothing_is_listed_to_ask_about_one_step_of_an_endless_run():
    endless = Snapshots(0, 2**40, 1)
    assert endless.window_count == 2**40
    assert endless.takes(2**39) and endless.keeps(2**39)
    assert endless.window_after(2**39) == Window(2**39 + 1, 2**39 + 1)
    assert Window(1, 2**40).rounds[-1] == 2**40


def test_payload_files_begin_after_each_snapshot():
    first = Snapshots(60, 200, 50, 2).first_round_of_payloads
    assert [first(step) for step in (61, 100, 101, 150, 151, 200)] == [61, 61, 101, 101, 151, 151]
