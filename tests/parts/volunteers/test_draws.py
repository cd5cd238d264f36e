"""Whose windows are audited, and the odds that the page of volunteers has."""

import hashlib
import json
import re

import pytest

from parts.volunteers.chain.draws import AuditDraw, AuditDraws, is_drawn
from tests.tiny import PROJECT

LINKS = [hashlib.sha256(b"%d" % n).hexdigest() for n in range(2000)]


def test_first_two_windows_of_a_newcomer_are_drawn_and_later_ones_by_the_links_hash():
    assert all(is_drawn(link, 3, windows, 0.0) for link in LINKS[:20] for windows in (1, 2))
    assert not any(is_drawn(link, 3, 3, 0.0) for link in LINKS)
    assert all(is_drawn(link, 3, 3, 100.0) for link in LINKS)
    drawn = [[is_drawn(link, peer, 3, 6.25) for link in LINKS] for peer in (3, 4)]
    assert drawn[0] != drawn[1]
    for one in drawn:
        assert 0.045 < sum(one) / len(LINKS) < 0.08  # 2000 draws: three standard errors


def test_draws_follow_a_slots_key_and_a_checkpoint():
    draws = AuditDraws(0.0)
    for number, senders in enumerate(({0: "a", 1: "b"}, {0: "a"}, {0: "a", 1: "b"}, {0: "z"})):
        draws.took({0: "y"} if number == 3 else {})
        draws.took(senders)
        restored = AuditDraws(0.0)
        restored.restore(json.loads(json.dumps(draws.to_json())))
        draws = restored
        rounds = (3 * number + 1, 3 * number + 3)
        draws.close(number, rounds, LINKS[number], 1, 100 + number)
    found = [(one.peer, one.number) for one in draws.drawn]
    assert found == [(0, 0), (1, 0), (0, 1), (1, 2), (0, 3)]  # the last with a new key
    assert draws.drawn[-1] == AuditDraw(0, 3, 10, 12, 103, "", 1, by_chance=False)
    assert draws.spared == [AuditDraw(0, 2, 7, 9, 102, "a", 1, by_chance=True)]


def test_who_signed_the_link_that_draws_is_drawn_whatever_its_hash_is():
    draws = AuditDraws(0.0)
    for number in range(4):
        draws.took({0: "a", 1: "b", 2: "c"})
        draws.close(number, (number + 1, number + 1), LINKS[number], number % 3, 0)
    later = [(one.peer, one.number) for one in draws.drawn if one.number > 1]
    assert later == [(2, 2), (0, 3)]


def test_the_pages_odds_are_those_of_the_formula():
    page = (PROJECT / "docs" / "explanation" / "volunteers.md").read_text()
    table = page.split("| false windows |")[1].split("\n\n")[0]
    heads, _, *rows = table.splitlines()
    percents = [float(text) for text in re.findall(r"([\d.]+) %", heads)]
    assert 6.25 in percents
    for row in rows:
        count, *odds = [cell.strip() for cell in row.strip("|").split("|")]
        assert [float(one) for one in odds] == pytest.approx(
            [1 - (1 - percent / 100) ** int(count) for percent in percents], abs=0.0051
        )
    assert len(rows) >= 4
