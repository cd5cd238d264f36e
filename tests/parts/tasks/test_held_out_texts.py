"""The held-out split as text."""

import numpy as np
import pytest

from lockstep.programs.columns import PLAIN
from parts.tasks import next_line_task
from pipeline import runfile
from pipeline.tokens.shards import Shards, write_shards
from tests import tiny
from tests.pipeline import trained_run
from tests.pipeline.tokens.shards_folder import measure, rows_of

LENGTH, END = 16, 0
TEXTS = ("def f():\n    return '\u00e9'\n", "x = 1\n", "class A:\n    pass\n" * 4)


@pytest.fixture
def read(tmp_path):
    """Writes files of tokens as a held-out split, and reads its documents."""

    def read(*files: list[int], columns=PLAIN, sequences: int = 4, rows=None) -> list[str]:
        run_file, size = tmp_path / "run.toml", 2 if rows is None else 4
        changes = {"model__LLM__max_seq_len": LENGTH, "held_out__sequences": sequences}
        tiny.write_run(run_file, tiny.run_document(tmp_path, **changes))
        for split, contents in (("train", [[END] * 64 * len(columns)]), ("held_out", files)):
            (tmp_path / split).mkdir()
            for number, tokens in enumerate(contents):
                np.array(tokens, f"<u{size}").tofile(tmp_path / split / f"{number:05}.ds")
        shards = Shards(
            format=2,
            token_size_in_bytes=size,
            vocab_size=None,
            shuffle="DontShuffle",
            columns=columns,
            files=measure(tmp_path, size),
            rows=rows,
            source={},
        )
        write_shards(tmp_path, shards)
        found = next_line_task.documents(
            runfile.load(run_file), tmp_path, trained_run.make_tokenizer()
        )
        return [*found]

    return read


def tokens() -> list[int]:
    tokenizer = trained_run.make_tokenizer()
    return [token for text in TEXTS for token in (*tokenizer.encode(text).ids, END)]


def test_documents_are_the_texts_that_were_tokenized(read):
    padded = tokens() + [END] * (-len(tokens()) % LENGTH)
    assert [text for text in read(padded) if text] == [*TEXTS]


def test_a_document_that_continues_in_another_file_is_two(read):
    first = tokens()[:LENGTH]
    found = [text for text in read(first, first) if text]
    assert found == [TEXTS[0][:LENGTH]] * 2


def test_only_so_many_tokens_are_read_spread_over_the_split(read, monkeypatch):
    monkeypatch.setattr(next_line_task, "MOST_TOKENS", 4 * LENGTH)
    monkeypatch.setattr(next_line_task, "STRETCH", 2)
    tokenizer = trained_run.make_tokenizer()
    letters = tokenizer.encode("abcdefghijkl").ids
    found = read(
        *(
            [a] * 2 * LENGTH + [b] * 2 * LENGTH
            for a, b in zip(letters[::2], letters[1::2], strict=True)
        )
    )
    assert [len(text) for text in found] == [2 * LENGTH] * 2
    assert [text[0] for text in found] != ["a", "b"]


def test_nothing_is_read_where_nothing_is_held_out_or_rows_are_packed(read):
    assert read(tokens(), sequences=0) == []


ARRAYS = rows_of(x=np.zeros((1, LENGTH), np.uint32))


@pytest.mark.parametrize("kind", [{"columns": ("inputs", "labels")}, {"rows": ARRAYS}])
def test_rows_that_are_not_tokens_alone_are_no_documents(read, kind):
    assert read([5] * 2 * LENGTH, **kind) == []
