"""The rules of a run file over a store; beside these run_file_errors.txt has what is refused."""

import pytest

from tests.errors import refused
from tests.pipeline.runfile.edited_run import fault, load


def test_over_a_store_a_volunteer_trains_in_one_process():
    pytest.importorskip("parts.carrier.tables")
    edits = ("links.clock", "store"), ("config.witness_nodes", 0)
    with refused("runtime.carrier", "processes", "in_process"):
        load(*edits, ("runtime", {"carrier": "processes"}))


@pytest.mark.parametrize("kind", ["sign_flip", "malformed"])
def test_over_a_store_peers_may_lie_in_their_messages(kind):
    edits = ("links.clock", "store"), ("config.witness_nodes", 0)
    run = load(*edits, ("faults.schedule", [fault(kind=kind)]))
    assert run.faults.schedule[0].changes_only_message
