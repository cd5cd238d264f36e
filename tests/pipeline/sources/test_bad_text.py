"""Text that cannot be read is refused in one line, with its file and where in it."""

import gzip
import json
import os

import pytest

from pipeline.sources import corpus
from pipeline.sources.text import (
    json_lines,
    text_file,
    tokenizing,
)
from tests.pipeline.sources.corpora import fetch, put, stories, write_lines, write_tokenizer
from tests.pipeline.sources.options import refusal

pytestmark = pytest.mark.usefixtures("here")


def test_a_path_without_text_or_with_a_name_that_breaks_a_line_is_refused(tmp_path):
    message = refusal(fetch, tmp_path / "no", tmp_path / "out")
    assert f"Corpus.path: found no {tmp_path / 'no'}, expected a text file" in message
    (tmp_path / "folder").mkdir()
    assert refusal(fetch, tmp_path / "folder", tmp_path / "out2").endswith(
        f"found no text in {tmp_path / 'folder'}"
    )
    (tmp_path / "folder" / "a.txt").touch()
    assert "left out 1 empty files: a.txt" in refusal(fetch, tmp_path / "folder", tmp_path / "out3")
    assert "found no text in" in refusal(fetch, tmp_path / "folder" / "a.txt", tmp_path / "out4")
    put(tmp_path / "folder", {"a\nb.txt": b"text"})
    message = refusal(fetch, tmp_path / "folder", tmp_path / "out6")
    assert "found a file named 'a\\nb.txt'" in message
    path = write_lines(tmp_path / "empty.jsonl", *[{"text": ""}] * 30)
    given = write_tokenizer(tmp_path / "given")
    message = refusal(fetch, path, tmp_path / "out5", tokenizer=given)
    assert message == f"{path}: found no text in what is the train split"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "a"', "expected a JSON object: "),
        (b"{'text': 'a'}", "expected a JSON object: "),
        (b"[" * 100_000, "expected a JSON object: "),
        (b'{"text": ' + b"9" * 5000 + b"}", "expected a JSON object: "),
        (b"[1, 2]", "found a list, expected an object with the key 'text'"),
        (b'"text"', "found \"text\", expected an object with the key 'text'"),
        (b"null", "found null, expected an object with the key 'text'"),
        (b'{"Text": "a", "n": 1}', "found the keys 'Text', 'n', expected 'text' (text_key)"),
        (b"{}", "found the keys none, expected 'text' (text_key) among them"),
        (b'{"text": null}', "'text' is null, expected a string"),
        (b'{"text": ["a"]}', "'text' is a list, expected a string"),
        (b'{"text": {"a": 1}}', "'text' is an object, expected a string"),
        (b'{"text": 1.5}', "'text' is 1.5, expected a string"),
        (b'{"text": "a\xff"}', "found byte 0xff at byte 11 of the line, expected UTF-8"),
        (b'{"text": "ab\\ud800"}', "half a surrogate pair, U+D800, at character 2"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_bad_line_is_refused_with_its_file_and_number(tmp_path, line, said):
    path = tmp_path / "a.jsonl"
    good = b'{"text": "good"}\n'
    path.write_bytes(good * 2 + line + b"\n" + good * 40)
    given = write_tokenizer(tmp_path / "given")
    for name, how in (("trained", {}), ("given", {"tokenizer": given})):
        message = refusal(fetch, path, tmp_path / f"out-{name}", **how)
        assert message.startswith(f"{path}: line 3: ")
        assert said in message


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "LINE_BYTES", 100)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok"}\n' + b" " * 10**6)
    message = refusal(fetch, tmp_path / "a.jsonl", tmp_path / "out")
    assert message.startswith(f"{tmp_path / 'a.jsonl'}: line 2: over 100 bytes")


@pytest.mark.parametrize("damage", ["cut", "flipped", "plain"])
def test_damaged_gzip_is_refused(tmp_path, damage):
    data = gzip.compress("".join(json.dumps({"text": s}) + "\n" for s in stories(99)).encode())
    data = {
        "cut": data[:-20],
        "flipped": data[:200] + bytes([data[200] ^ 255]) + data[201:],
        "plain": b'{"text": "plain"}\n' * 9,
    }[damage]
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    message = refusal(fetch, tmp_path / "a.jsonl.gz", tmp_path / "out")
    assert message.startswith(f"{tmp_path / 'a.jsonl.gz'}: after line ")
    assert message.endswith("expected whole gzip data")


@pytest.mark.parametrize("at", [0, 5, 4095, 4096, 4097, 8192, 8999])
def test_text_that_is_no_utf8_is_refused_with_the_byte(tmp_path, monkeypatch, at):
    monkeypatch.setattr(text_file, "BLOCK", 4096)
    data = bytearray("ä\n".encode() * 3000)
    if at == 8999:
        del data[-2:]  # ends within a character
    else:
        data[at // 3 * 3 + 1] = ord("a")  # where the second byte of ä should be
    for name, begin in (("a.txt", b""), ("mark.txt", b"\xef\xbb\xbf")):
        (tmp_path / name).write_bytes(begin + data)
        given = write_tokenizer(tmp_path / f"given-{name}")
        message = refusal(fetch, tmp_path / name, tmp_path / f"out-{name}", tokenizer=given)
        byte = len(begin) + at // 3 * 3
        assert message == f"{tmp_path / name}: found byte 0xc3 at byte {byte}, expected UTF-8"


def test_gzip_data_that_unpack_to_nothing_but_room_are_refused_soon(tmp_path):
    bomb = tmp_path / "a.jsonl.gz"
    bomb.write_bytes(gzip.compress(b"\n" * 10**7))
    said = refusal(fetch, bomb, tmp_path / "out")
    assert said.startswith(f"{bomb}: ") and "expected at most 200 times as many" in said
    assert "unpack to 4194" in said  # of ten million


@pytest.mark.parametrize("when", [(tokenizing, "write_split"), (corpus, "sha256_file")])
def test_a_file_that_changes_while_it_is_read_or_hashed_is_refused(
    tmp_path, monkeypatch, lines, when
):
    found = getattr(*when)

    def append_and(*arguments):
        with open(lines, "a") as file:
            file.write('{"text": "more"}\n')
        return found(*arguments)

    monkeypatch.setattr(*when, append_and)
    assert refusal(fetch, lines, tmp_path / "out").startswith(f"{lines}: changed while it was read")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "a"})
    path.chmod(0)
    assert refusal(fetch, path, tmp_path / "out").startswith(f"{path}: Permission denied")
