"""`lockstep generate` on a tiny exported folder: prompts, lines, and one line for a mistake."""

import io
import json
import os
import shutil
import signal
import sys

import pytest
from tokenizers import Tokenizer, models

from lockstep.errors import LockstepError
from lockstep.files import read_json, write_json
from pipeline import generate
from pipeline.__main__ import app
from pipeline.weights import exported
from tests import tiny
from tests.errors import refused as refuses
from tests.pipeline.exported import END, HF_CONFIG, make_tokenizer, write

PROMPTS = ["def f(x", "re", "é"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An export whose tokens include all bytes, so that its texts have parts of characters."""
    return write(tmp_path_factory.mktemp("exported") / "export")


@pytest.fixture
def lockstep(capsys):
    """Run the command in this process; its output."""

    def run(*arguments):
        with tiny.like_a_process():
            app(["generate", *map(str, arguments)], standalone_mode=False)
        return capsys.readouterr().out

    return run


def test_a_text_is_the_same_alone_in_a_batch_and_by_lines(folder, lockstep, monkeypatch):
    options = ["--max-new-tokens", 20, "--temperature", 0.7, "--top-k", 40, "--seed", 3]
    found = [
        json.loads(line) for line in lockstep(folder, *PROMPTS, "--json", *options).split("\n")[:-1]
    ]
    assert [each["prompt"] for each in found] == PROMPTS
    for each in found:
        assert each["ended"] == (each["tokens"][-1] == END)
        assert each["text"] == make_tokenizer().decode(each["tokens"]) != ""
        assert each["ended"] or len(each["tokens"]) == 20
    plain = lockstep(folder, *PROMPTS, *options)
    assert plain == "\n".join(each["prompt"] + each["text"] + "\n" for each in found)

    lines = "".join(f"{prompt}\n" for prompt in PROMPTS)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    said = "".join(each["prompt"] + each["text"] + "\n" for each in found)
    assert lockstep(folder, *options) == said
    monkeypatch.setattr(sys, "stdin", io.StringIO("re"))
    assert lockstep(folder, "-", *options) == found[1]["prompt"] + found[1]["text"] + "\n"


@pytest.mark.parametrize("idle", ["--top-k", "--top-p", "--seed"])
def test_an_option_of_draws_is_refused_where_nothing_is_drawn(idle, folder, lockstep):
    with refuses(idle, "--temperature 0"):
        lockstep(folder, "re", "--temperature", 0, idle, 1)


def test_ctrl_c_stops_the_text_and_not_the_program(capsys):
    class Endless:
        def stream(self, prompt):
            yield f"{prompt} and"
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                yield " on"

    generate._stream(Endless(), "on")
    assert capsys.readouterr().out == "on and\n"


def refused(folder):
    write_json(folder / "refused.json", {"why": "peer 2 in round 7 (replay)"})


def with_another_token(folder):
    tokenizer = make_tokenizer()
    fillers = HF_CONFIG["vocab_size"] - tokenizer.get_vocab_size()
    tokenizer.add_tokens([*(f"filler{n}" for n in range(fillers)), "zebra"])
    tokenizer.save(str(folder / "tokenizer.json"))


def with_config(**values):
    """In a folder whose tokenizer says nothing of its tokens."""

    def damage(folder):
        (folder / "tokenizer_config.json").unlink(missing_ok=True)
        write_json(folder / "config.json", read_json(folder / "config.json") | values)

    return damage


without_beginning = with_config(bos_token_id=None, eos_token_id=None)


def without_unknown(folder):
    Tokenizer(models.WordLevel({"def": 0})).save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("damage", "prompt", "said"),
    [
        (without_unknown, "zebra", "tokenizer.json, the prompt: expected a text that the tok"),
        (with_config(bos_token_id=272), "", r"found 272 as .*, expected .* vocab_size \(272\)"),
        (with_config(eos_token_id=2**63, bos_token_id=None), "", "found 9223372036854775808 as"),
        (with_config(rms_norm_eps=2**63), "def", "rms_norm_eps is 9223372036854775808, expected"),
        (with_config(eos_token_id="x"), "def", "eos_token_id is 'x', expected a token id"),
        (lambda folder: None, "\udcff", "the prompt has .*udcff at character 0, expected UTF-8"),
        (
            refused,
            "def",
            r"refused.json: peer 2 in round 7 \(replay\); expected an export that was",
        ),
        (
            lambda folder: (folder / "tokenizer.json").unlink(),
            "def",
            "found no tokenizer.json, expected one to read",
        ),
        (without_beginning, "", "the prompt is empty, expected text: .* has no bos_token_id"),
        (with_another_token, "def zebra", r"has token 272 in the prompt, expected .* \(272\)"),
    ],
)
def test_a_mistake_is_one_line(damage, prompt, said, lockstep, tmp_path, capsys):
    damage(folder := write(tmp_path / "export"))
    with pytest.raises(LockstepError, match=said):
        lockstep(folder, prompt)
    assert capsys.readouterr().out == ""  # nor the prompt


def test_a_token_that_the_model_does_not_have_ends_no_text(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "export")
    with_config(eos_token_id=[END, 2**63])(tmp_path / "export")
    assert exported.read(tmp_path / "export").ends == (END,)


@pytest.mark.parametrize(
    ("terminal", "said"), [(True, "a\\x1b]0;pwned\\x07\n\tb"), (False, "a\x1b]0;pwned\x07\n\tb")]
)
def test_what_a_model_wrote_steers_no_terminal_and_is_as_it_is_in_a_pipe(
    monkeypatch, capsys, terminal, said
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    generate._say("a\x1b]0;pwned\x07\n\tb")
    assert capsys.readouterr().out == said
