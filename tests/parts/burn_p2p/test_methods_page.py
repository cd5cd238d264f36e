"""The page of the bridge: a row for each feature, and the JSON that our worker answers."""

import re

from tests.parts.burn_p2p import methods_page


def test_the_bridge_has_a_row_for_each_feature_in_order():
    rows = re.findall(r"^\| F(\d+) \|", methods_page.PAGE.read_text(), re.MULTILINE)
    assert rows == [str(number) for number in range(1, 53)]


def test_the_json_of_the_bridges_methods_is_what_our_worker_answers(module):
    module("lockstep_worker")
    stale = methods_page.PAGE.read_text() != methods_page.page()
    assert not stale, "run `python -m tests.parts.burn_p2p.methods_page`"
