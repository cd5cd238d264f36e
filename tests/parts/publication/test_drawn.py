"""Which windows are published and repeated, by nobody's choice."""

import json
import shutil
from types import SimpleNamespace

import pytest

from lockstep.errors import RequestError
from lockstep.files import read_json, write_json
from lockstep.transcript.windows import Snapshots
from parts.publication import publish, readers_checks
from parts.publication.claims import VerifyOutcome
from parts.publication.layout import (
    MANIFEST,
    Publication,
    ReaderAsks,
    choose,
    draw,
    matmul_precision,
    parse,
    seed_of,
)
from pipeline.audit.sample import Beacon
from pipeline.recheck import outputs
from tests import tiny
from tests.errors import refused
from tests.parts.publication.published_run import (
    LIMITS,
    STAGES,
    change_tensors,
    forge,
    refusal,
    verify,
)
from tests.servers.files import Files

pytestmark = pytest.mark.long

WINDOWS = Snapshots(0, 40, every=10).windows
SENDERS = {1: (0, 1, 2, 3), 11: (0, 1, 3), 21: (0, 1, 3), 31: (1, 3)}  # 2 was ejected, 0 left


def transcript(name: str, senders: dict[int, tuple] = SENDERS) -> SimpleNamespace:
    return SimpleNamespace(hash=name, senders=lambda asked: {*senders[asked.first]})


def drawn(
    count: int, seed: str = "a", *, kept: bool = True, senders: dict[int, tuple] = SENDERS
) -> list[tuple[int, int]]:
    """The first rounds and the peers of the windows that are drawn."""
    said = transcript("a", senders)
    windows = draw(said, WINDOWS, seed, count, kept=kept, show_own=True)
    assert len(windows) == min(count, 12 if kept else 4)
    return [(window.first, peer) for window, peers in windows for peer in peers]


def test_no_pair_is_drawn_twice_and_the_last_window_is_one_of_all():
    for count in (1, 3, 12):
        found = drawn(count)
        assert len({*found}) == count and found == sorted(found)
    assert {drawn(1, seed)[0][0] for seed in "abcdefghij"} == SENDERS.keys()


def test_only_who_sent_something_in_a_window_is_drawn_for_it():
    assert drawn(99) == [(first, peer) for first, peers in SENDERS.items() for peer in peers]


def test_transcript_reader_and_beacon_each_decide_the_draw():
    for seeds in (
        [seed_of(transcript(name), None, None) for name in "abcdefgh"],
        [seed_of(transcript("a"), seed, None) for seed in "abcdefgh"],
        [seed_of(transcript("a"), None, Beacon(value, "")) for value in "abcdefgh"],
    ):
        assert drawn(4, seeds[0]) == drawn(4, seeds[0])
        assert len({tuple(drawn(4, seed)) for seed in seeds}) > 4


def test_where_messages_are_not_kept_a_window_is_drawn_for_all_its_peers_and_the_last_always():
    for count in (1, 2):
        assert drawn(count, kept=False)[-2:] == [(31, 1), (31, 3)]
    with refused("proof/transcript", 21, 30):  # a window in which nobody sent
        drawn(99, kept=False, senders=SENDERS | {21: ()})


# ---- The reader's ----


def listing(names: list[str]) -> Publication:
    said = {"format": 3, "release": "1", "commit": None, "rounds": "ab" * 32, "windows": 3}
    files = dict.fromkeys(sorted(names), {"bytes": 1, "sha256": "ab" * 32})
    return Publication(**said, seed=None, columns=("inputs",), files=files)


def test_a_list_of_an_earlier_format_names_the_release_that_reads_it():
    said = json.loads(listing(["proof/rows/00001.safetensors"]).model_dump_json())
    assert parse(json.dumps(said).encode(), "here").release == "1"
    with refused("here: format 2, expected 3; release 0.2.1, which", error=RequestError):
        parse(json.dumps(said | {"format": 2, "release": "0.2.1"}).encode(), "here")


@pytest.mark.parametrize("firsts", [("00001", "00011", "00031"), ("00001", "99951", "100001")])
def test_where_messages_are_not_kept_the_last_window_is_repeated_besides_those_drawn(firsts):
    names = [f"{outputs.ROWS}/{first}.safetensors" for first in firsts]
    several = listing(names)
    assert several.row_files == choose(several, ReaderAsks()) == names
    drawn = [choose(several, ReaderAsks(seed)) for seed in "abcdefgh"]
    assert {tuple(chosen) for chosen in drawn} == {(names[0], names[2]), (names[1], names[2])}
    assert choose(several, ReaderAsks("a", 2)) == choose(several, ReaderAsks("a", 3)) == names
    assert choose(listing(names[-1:]), ReaderAsks("a")) == names[-1:]


def test_windows_of_peers_are_in_the_order_of_their_rounds():
    ends = ("00001-000", "00001-1000", "99951-001", "100001-000")
    names = [f"{outputs.ROWS}/{end}.safetensors" for end in ends]
    assert listing(names).row_files == choose(listing(names), ReaderAsks()) == names
    assert choose(listing(names), ReaderAsks("a", 4)) == names


def test_a_reader_computes_with_the_precision_that_the_header_names_if_jax_knows_it(tmp_path):
    for said, taken in (("tensorfloat32", "tensorfloat32"), ("ab" * 99, None), ([], None)):
        header = tmp_path / outputs.TRANSCRIPT / "header.json"
        write_json(header, {"environment": {"matmul_precision": said}})
        assert matmul_precision(tmp_path) == taken
    write_json(header, {"environment": 3})
    assert matmul_precision(tmp_path) is None


def test_a_reader_may_ask_for_windows_that_nobody_could_foresee(published, tmp_path):
    folder = tmp_path / "asked"
    publish.write(folder, published.run_file, published.root, 3, "a reader's word")
    verified = verify(folder, seed="a reader's word")
    assert len(verified.claim("windows").values["repeated"]) == 3
    assert "drawn by the transcript's hash and a word that the author has too, and could try" in (
        verified.text
    )
    assert verified.outcome is VerifyOutcome.CONSISTENT
    assert "the transcript's hash and the author's own seed" in verify(folder, windows=1).text
    for count in (1, 3):
        few = verify(folder, seed="another", windows=count)
        assert few.why_not == ["its author chose the 3 of 4 windows to draw among"]


def test_a_reader_draws_among_the_published_windows_and_fetches_no_others(published, tmp_path):
    folder, seen = published.whole, set()
    with Files().serving() as server:
        server.add(folder)
        for seed in "abcd":
            with tiny.like_a_process():
                verified = readers_checks.verify_publication(
                    server.address, tmp_path, LIMITS, ReaderAsks(seed)
                )
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
    with refused(4, 5, error=RequestError):
        verify(folder, windows=5)


def test_where_messages_are_not_kept_the_readers_word_draws_beside_the_last_window(tmp_path):
    words = [f"{n:08x}5f0c1e9a7d3b8246" for n in range(4)]
    run_file, root = tiny.start(tmp_path, model__LLM__optimizer=tiny.ADAMW, config__total_steps=12)
    tiny.make(run_file, root, *STAGES)
    whole, last = tmp_path / "whole", tmp_path / "last"
    publish.write(whole, run_file, root, 4, None)
    publish.write(last, run_file, root, 1, None)
    publication = Publication.model_validate_json((whole / MANIFEST).read_text())
    drawn = [choose(publication, ReaderAsks(word)) for word in words]
    assert all(len(names) == 2 and names[1] == publication.row_files[3] for names in drawn)
    lied, other = drawn[0][0], next(n for n, names in enumerate(drawn) if names != drawn[0])
    change_tensors(lied, lambda rows: rows.update(rows=rows["rows"][::-1].copy()))(whole)
    forge(whole)
    assert "its replay gives" in refusal(whole, seed=words[0])
    verified = verify(whole, seed=words[other])
    said = verified.claim("windows").values
    firsts = [int(name[-17:-12]) for name in drawn[other]]
    assert said["drawn"] == 1 and sorted({first for first, *_ in said["repeated"]}) == firsts
    assert verified.outcome is VerifyOutcome.VERIFIED
    assert "6 of 12 rounds" in verified.text.splitlines()[0]
    assert verified.claim("other_windows").values == {"count": 2, "rounds": 6}
    only = verify(last, seed=words[0])
    assert only.outcome is VerifyOutcome.CONSISTENT and only.claim("windows").values["drawn"] == 0


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
