"""Which windows a reader asks for, and who drew those that are published."""

import shutil

import pytest

from lockstep.errors import RequestError
from lockstep.files import read_json
from parts.publication import commands, publish
from parts.publication.claims import VerifyOutcome
from parts.publication.layout import ReaderAsks
from pipeline.again import outputs
from tests import tiny
from tests.parts.publication.published_run import LIMITS, verify
from tests.servers.files import Files


def test_a_reader_may_ask_for_windows_that_nobody_could_foresee(published, tmp_path):
    folder = tmp_path / "asked"
    publish.write(folder, published.run_file, published.root, 3, "a reader's word")
    verified = verify(folder, seed="a reader's word")
    assert len(verified.claim("windows").values["repeated"]) == 3
    assert "drawn by the transcript's hash and a word that the author has too, and could try" in (
        verified.text
    )
    assert verified.outcome is VerifyOutcome.CONSISTENT
    with pytest.raises(RequestError, match="--seed: .* has 3 of 4 windows, expected more than 3"):
        verify(folder, seed="another", windows=3)
    assert "the transcript's hash and the author's own seed" in verify(folder, windows=1).text
    few = verify(folder, seed="another")
    assert few.why_not == ["its author chose the 3 of 4 windows to draw among"]


def test_a_reader_draws_among_the_published_windows_and_fetches_no_others(published, tmp_path):
    folder, seen = tmp_path / "all", set()
    publish.write(folder, published.run_file, published.root, 4, None)
    with Files().serving() as server:
        server.add(folder)
        for seed in "abcd":
            with tiny.like_a_process():
                verified = commands._verify(server.address, tmp_path, LIMITS, ReaderAsks(seed))
            seen |= {*verified.claim("windows").values["repeated"]}
            assert "(1 of 4, drawn by the reader's seed from the 4 that are published)" in (
                verified.text
            )
            assert verified.outcome is VerifyOutcome.VERIFIED
        fetched = {path for path, count in server.sent.items() if count}
    assert 1 < len(seen) < 5
    rows = {name for name in fetched if name.startswith(outputs.ROWS)}
    assert len(rows) == len(seen) == len([name for name in fetched if "/own-" in name])
    assert "(4 of 4, all there are) repeat bit for bit" in verify(folder).text
    with pytest.raises(RequestError, match="has 4 windows, expected 5; ask the author"):
        verify(folder, windows=5)


def test_a_seed_that_would_draw_nothing_is_refused(published):
    with pytest.raises(RequestError, match="--seed: .* has 1 of 4 windows, expected more than 1"):
        verify(published.folder, seed="mine")


def test_a_beacon_draws_audit_and_publication_and_the_line_says_which(published, tmp_path):
    root, run_file = shutil.copytree(published.root, tmp_path / "root"), tmp_path / "run.toml"
    tiny.write_run(run_file, tiny.run_document(published.data, witness__beacon="4 8 15 16 23 42"))
    tiny.make(run_file, root, "witness", "export", "evaluate")
    verdict = read_json(root / "data/verdict/verdict.json")
    assert verdict["sample_seed"] == f"4 8 15 16 23 42 {verdict['transcript']}"
    assert verdict["sample_seed_of"] == "beacon"
    publish.write(tmp_path / "drawn", run_file, root, 1, None)
    verified = verify(tmp_path / "drawn")
    line = verified.text
    assert (
        "drawn by the transcript's hash and the beacon, '4 8 15 16 23 42', given by hand)" in line
    )
    assert verified.outcome is VerifyOutcome.CONSISTENT
    assert ", that the transcript was public before the beacon\n" in line
