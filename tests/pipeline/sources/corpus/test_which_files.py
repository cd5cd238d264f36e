"""Which files of a user's folder are read as text, and how."""

import gzip
import socket

import numpy as np

from pipeline.sources.text import tokenizing
from pipeline.sources.text.tokenizing import END
from tests.pipeline.sources.corpora import every_text, fetch, put, read, texts, write_lines


def test_a_folder_is_all_its_text_and_json_lines_by_name(tmp_path):
    four = gzip.compress(b'{"text": "four", "n": 1}\n')
    files = {"b/three.md": b"# Three\r\n", "a.txt": "one ünd\n".encode(), "c.jsonl.gz": four}
    folder = put(tmp_path / "text", files | {"Z": b"five"})
    write_lines(folder / "b" / "two.jsonl", *({"text": f"line {n}\n"} for n in range(3)))
    documents = {
        "Z": ["five"],
        "a.txt": ["one ünd\n"],
        "b/three.md": ["# Three\r\n"],
        "b/two.jsonl": ["line 0\n", "line 1\n", "line 2\n"],
        "c.jsonl.gz": ["four"],
    }
    fetched = fetch(folder, tmp_path / "out", vocab_size=258)
    held_out = [documents.pop(name) for name in fetched.source["held_out_files"]]
    assert texts(tmp_path / "out", "held_out") == sum(held_out, [])
    assert texts(tmp_path / "out", "train") == sum(documents.values(), [])
    assert held_out and documents
    assert fetched.warnings == ()


def test_hidden_files_are_no_text_and_what_else_is_left_out_is_said(tmp_path):
    files = {"a.txt": b"kept\n" * 9, "b.txt": b"kept too\n" * 9, "e/empty": b""}
    files |= {".c.txt": b"hidden", ".git/d.txt": b"hidden", "f.png": b"\x89PNG\r\n\x00\x1a\xff"}
    folder = put(tmp_path / "text", files)
    outside = put(tmp_path / "outside", {"secret.txt": b"not ours\n" * 9})
    (folder / "g.txt").symlink_to(outside / "secret.txt")
    (folder / "h").symlink_to(outside)
    (folder / "i.txt").symlink_to("a.txt")  # leads to what is in the folder
    (folder / "j.txt").symlink_to("nowhere")
    (folder / "k").symlink_to(folder)  # round and round
    with socket.socket(socket.AF_UNIX) as pipe:
        pipe.bind(str(folder / "pipe"))
        fetched = fetch(folder, tmp_path / "out", vocab_size=258)
    assert fetched.source["files"] == 3
    assert {text[:5] for text in every_text(tmp_path / "out")} == {"kept\n", "kept "}
    assert fetched.warnings == (
        f"{folder}: left out 1 empty files: e/empty",
        f"{folder}: left out 2 binary files: f.png and others",
        f"{folder}: left out 4 links out of the folder: g.txt and others",
    )


def test_a_byte_order_mark_blank_lines_and_empty_texts_are_no_documents(tmp_path):
    lines = [b"\xef\xbb\xbf" + b'{"text": "first"}', b"", b'{"text": ""}', b" \t", b'{"text": "x"}']
    (tmp_path / "a.jsonl").write_bytes(b"\r\n".join([*lines, *[b'{"text": "last"}'] * 30]))
    fetch(tmp_path / "a.jsonl", tmp_path / "out", vocab_size=258)
    assert every_text(tmp_path / "out") == ["first", *["last"] * 30, "x"]
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfa\nb\nc\n")
    fetch(tmp_path / "b.txt", tmp_path / "other", vocab_size=258, held_out_percent=40.0)
    assert texts(tmp_path / "other", "train") == ["a\nb\n"]
    assert texts(tmp_path / "other", "held_out") == ["c\n"]


def test_text_that_spells_a_special_token_has_none(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *[{"text": f"a {END} b {tokenizing.PAD}"}] * 20)
    fetch(path, tmp_path / "out", vocab_size=258)
    ids = np.concatenate([read(tmp_path / "out", split) for split in ("train", "held_out")])
    assert np.sum(ids == 0) == 20
    assert np.sum(ids == 1) == 0
