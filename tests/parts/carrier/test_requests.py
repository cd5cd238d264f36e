"""The operations' tables: the bytes of a request, what is refused, and the page about them."""

import json
import subprocess
import sys

import numpy as np
import pytest

from parts.carrier import requests
from parts.carrier.requests import (
    OPERATIONS,
    Asked,
    FrameError,
    RequestHeader,
    decode,
)
from tests.errors import refused
from tests.parts.carrier import operations_page

TRAIN = {"step": 7, "count": 2, "imprecise": False, "keep": True, "hash": False}
CREATE = {"run": {"a": [1.5, None]}, "model": {"b": {}}, "first_step": 3, "columns": ["text"]}
REQUESTS = {
    "create": (requests.Create(**CREATE), CREATE),
    "compile": (requests.Compile(imprecise=True), {"imprecise": True}),
    "align": (requests.Align(step=7, hash=True), {"step": 7, "hash": True}),
    "train": (requests.Train(**TRAIN), TRAIN),
    "optimize": (
        requests.Optimize(step=7, peers=[1, 0], sequences=[4, 5], ages=[0, 2]),
        {"step": 7, "peers": [1, 0], "sequences": [4, 5], "ages": [0, 2]},
    ),
    "extract": (requests.Extract(what="own", hash=True), {"what": "own", "hash": True}),
    "restore": (requests.Restore(), {}),
    "recompute": (requests.Recompute(step=7, count=2), {"step": 7, "count": 2}),
    "forward": (requests.Forward(), {}),
    "exit": (requests.Exit(), {}),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_request_has_these_bytes_and_is_read_as_what_was_asked(operation):
    table, values = REQUESTS[operation]
    buffers = Asked(table, [np.arange(2, dtype="i4")]).buffers("0" * 16, 5, "host:1")
    header = {"version": 2, "trainer": "0" * 16, "number": 5, "operation": operation}
    arrays = [{"dtype": "int32", "shape": [2]}]
    header |= {"gang": "host:1", "values": values, "arrays": arrays}
    assert bytes(buffers[0]).decode() == json.dumps(header, separators=(",", ":"))
    read = Asked.read(*decode(RequestHeader, buffers))
    assert (read.operation, read.values) == (operation, table)


@pytest.mark.parametrize(
    ("operation", "values", "named"),
    [
        ("pickle", {}, ["'pickle'"]),
        ("train", {k: v for k, v in TRAIN.items() if k != "keep"}, ["train", "keep"]),
        ("train", TRAIN | {"step": 0}, ["train", "step"]),
        ("train", TRAIN | {"count": "2"}, ["train", "count"]),
        ("train", TRAIN | {"seed": 1}, ["train", "seed"]),
        ("extract", {"what": "secrets", "hash": False}, ["extract", "what"]),
        ("optimize", {"step": 1, "peers": [-1], "sequences": [1]}, ["optimize", "peers.0"]),
        ("x" * 10**5, {}, ["operation"]),
    ],
)
def test_a_wrong_request_is_refused_in_one_line_that_names_the_field(operation, values, named):
    header = RequestHeader(trainer="0" * 16, number=1, operation=operation, values=values)
    with refused(*named, error=FrameError) as caught:
        Asked.read(header, [])
    assert len(str(caught.value)) < 300


def test_a_process_reads_its_first_request_before_jax_is_imported():
    seen = "import sys, parts.carrier.sidecar; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", seen]).returncode == 0


def test_the_page_has_the_tables():
    stale = operations_page.PAGE.read_text() != operations_page.page()
    assert not stale, "run `python -m tests.parts.carrier.operations_page`"
