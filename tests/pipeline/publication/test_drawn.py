"""Which windows are published: the last, and others, by nobody's choice."""

from types import SimpleNamespace

import pytest

from pipeline.publication.drawn import draw
from pipeline.runfile import Snapshots

WINDOWS = Snapshots(0, 40, every=10).windows
SENDERS = {1: (0, 1, 2, 3), 11: (0, 1, 3), 21: (0, 1, 3), 31: (1, 3)}  # 2 was ejected, 0 left


def transcript(name: str) -> SimpleNamespace:
    def window(asked):
        messages = dict.fromkeys(SENDERS[asked.first])
        return [SimpleNamespace(evidence=SimpleNamespace(messages=messages))]

    return SimpleNamespace(hash=name, window=window)


def pairs(drawn) -> list[tuple[int, int]]:
    return [(window.first, peer) for window, peers in drawn for peer in peers]


@pytest.mark.parametrize("count", [1, 3, 12, 99])
def test_the_last_window_is_always_drawn_and_no_pair_twice(count):
    drawn = pairs(draw(transcript("a"), WINDOWS, None, count, kept=True))
    assert len(set(drawn)) == len(drawn) == min(count, 12)
    assert drawn == sorted(drawn) and drawn[-1][0] == 31


def test_only_who_sent_something_in_a_window_is_drawn_for_it():
    drawn = pairs(draw(transcript("a"), WINDOWS, None, 99, kept=True))
    assert drawn == [(first, peer) for first, peers in SENDERS.items() for peer in peers]


def test_transcript_and_reader_each_decide_the_draw():
    def drawn(name: str, seed: str | None) -> tuple:
        return tuple(pairs(draw(transcript(name), WINDOWS, seed, 4, kept=True)))

    assert drawn("a", None) == drawn("a", None)
    assert len({drawn(name, None) for name in "abcdefgh"}) > 4
    assert len({drawn("a", seed) for seed in "abcdefgh"}) > 4


def test_where_messages_are_not_kept_a_window_is_drawn_for_all_its_peers():
    assert pairs(draw(transcript("a"), WINDOWS, None, 1, kept=False)) == [(31, 1), (31, 3)]
