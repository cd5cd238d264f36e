"""Each row of the matrix with each kind of server: the exact bytes, or one clear error."""

import dataclasses
import logging
import random

import pytest

from tests import tiny
from tests.pipeline.net import token_servers as sources
from tests.pipeline.net.faults.matrix import MATRIX, RIGHT
from tests.pipeline.net.faults.outcome import outcome, pin_of
from tests.pipeline.net.token_servers import KINDS, SECRETS, TRUTH
from tests.servers import misbehaviour as m
from tests.servers.misbehaviour import Misbehaviour


@pytest.mark.parametrize(
    ("row", "source"),
    [
        pytest.param(row, kind, id=f"{kind}: {row.what}")
        for row in MATRIX
        for kind in KINDS
        if row.of(kind) is not None
    ],
    indirect=["source"],
)
def test_the_bytes_come_right_or_one_line_says_why_and_the_next_run_is_right(
    row, source, request, root, tmp_path, caplog, capfd
):
    caplog.set_level(logging.DEBUG)
    for library in ("urllib3", "httpx2", "httpcore2"):  # as the command does
        caplog.set_level(logging.WARNING, library)
    kind = request.node.callspec.params["source"]
    pin = pin_of(source, tmp_path / "pinned") if row.pinned else ""
    faults = [dataclasses.replace(f, where=source.places[row.where]) for f in row.faults]
    source.server.faults = list(faults)
    message = outcome(source, root, pin)
    assert all(fault.hits for fault in faults), "it happened"
    assert bool(message) == bool(row.of(kind))
    assert row.of(kind) in message
    if not row.pinned:  # until it is compared with its pin, nothing is known against it
        sources.check_store(root, TRUTH)
    source.server.faults.clear()
    assert outcome(source, root, pin) == RIGHT
    printed = capfd.readouterr()
    for secret in SECRETS:
        assert secret not in caplog.text + printed.out + printed.err
        for name, content in tiny.contents(root / "data" / "shards").items():
            assert secret.encode() not in content, name


# Not of bytes that are wrong where no checksum tells.
SPOILS = [
    *(m.refused, m.silent, m.not_http, m.dropped, m.truncated, m.stalled, m.trickling),
    *(m.hinted, m.always_100, m.long_headers, m.slow_headers, m.endless_redirect),
    *(m.redirected(), m.redirected("http://[::"), m.sign_in(), m.sign_in(None)),
    *(m.status(code) for code in (204, 403, 404, 416, 429, 500, 503)),
    *(m.shorter, m.longer, m.too_much, m.endless, m.chunked, m.no_length, m.other_size(2)),
    *(m.whole, m.other_range, m.compressed, m.identity, m.untagged, m.other_tag, m.itself_again),
]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("source", KINDS, indirect=True)
def test_any_faults_together_end_in_the_right_bytes_or_in_one_line(source, root, seed):
    rng = random.Random(seed)
    source.server.faults += [
        Misbehaviour(
            rng.choice(SPOILS),
            times=rng.choice([1, 1, 2, None]),
            where=rng.choice(["", "^HEAD", "^GET", *source.places.values()]),
            after=rng.choice([0, 0, 1, 3]),
        )
        for _ in range(rng.randint(1, 3))
    ]
    outcome(source, root)
    sources.check_store(root, TRUTH)
    source.server.faults.clear()
    assert outcome(source, root) == RIGHT
