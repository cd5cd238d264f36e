"""Every shell recipe of a page is a script, of commands and options that exist; some are run."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from dvc.cli import DvcParserError, parse_args
from pyarrow import parquet
from snakemake.cli import get_argument_parser

from pipeline.__main__ import app
from tests import tiny
from tests.pipeline import trained_run
from tests.test_docs import PAGES, PROJECT, options

RECIPE = re.compile(r"^( *)```(?:sh|bash|shell|console)\n(.*?)^\1```", re.M | re.S)
RECIPES = [
    pytest.param(match[2], id=f"{page.relative_to(PROJECT)}:{match.start()}")
    for page in PAGES
    for match in RECIPE.finditer(page.read_text())
]
each_recipe = pytest.mark.parametrize("recipe", RECIPES)
MAKEFILE = (PROJECT / "Makefile").read_text()
TARGETS = {*re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.M)}
EXTRAS = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
BEFORE = re.compile(r"(?:[A-Z_]\w*=.*|srun|exec|time|env|do|then|if|!|until|while|-.*|\$\(|`)")


def commands(recipe: str) -> Iterator[list[str]]:
    """Yield the words of each simple command of a script, without what stands before it."""
    for line in recipe.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.commenters, lexer.wordchars = "#", f"{lexer.wordchars}:@$%+,[]{{}}^!"
        words: list[str] = []
        try:
            tokens = [*lexer, ";"]
        except ValueError:  # a quotation of several lines, which bash has read
            continue
        for token in tokens:
            if set(token) <= set(";&|()<>"):
                while words and BEFORE.fullmatch(words[0]):
                    words = words[1:]
                if words:
                    yield words
                for word in words[1:]:  # as of sh -c
                    if re.match(r"(?:lockstep|dvc|snakemake|make) ", word):
                        yield from commands(word)
                words = []
            else:
                words.append(token)


def calls(recipe: str, program: str) -> Iterator[list[str]]:
    """Yield the arguments of each call of a program."""
    for words in commands(recipe):
        if words[0].rpartition("/")[2] == program:
            yield words[1:]


def long_options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--") and len(word) > 2}


@each_recipe
def test_a_recipe_is_a_script(recipe):
    done = subprocess.run(["bash", "-n"], input=recipe, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


@each_recipe
def test_what_a_recipe_calls_of_lockstep_exists(recipe):
    for words in calls(recipe, "lockstep"):
        command, rest = typer.main.get_command(app), words
        known = {*options(command, within=False)}
        while rest and rest[0] in getattr(command, "commands", {}):
            command, rest = command.commands[rest[0]], rest[1:]
            known |= options(command, within=False)
        assert not getattr(command, "commands", {}) or not rest or rest[0].startswith("-"), words
        if not command.context_settings.get("ignore_unknown_options"):
            assert long_options(words) <= known, words
    for words in calls(recipe, "python"):
        if words[:1] == ["-m"]:
            assert importlib.util.find_spec(words[1]), words


@each_recipe
def test_what_a_recipe_calls_of_dvc_snakemake_make_and_pip_exists(recipe):
    for words in calls(recipe, "dvc"):
        try:
            parse_args(words)
        except (DvcParserError, SystemExit) as error:
            raise AssertionError(words) from error
    known = {*get_argument_parser()._option_string_actions}
    for words in calls(recipe, "snakemake"):
        assert long_options(words) <= known, words
    for words in calls(recipe, "make"):
        for word in words:
            name, is_set, _ = word.partition("=")
            assert name in TARGETS or (is_set and f"$({name})" in MAKEFILE), words
    for words in calls(recipe, "pip"):
        for extras in re.findall(r"^(?:\.|lockstep)\[([\w,]+)\]", "\n".join(words), re.M):
            assert {*extras.split(",")} <= EXTRAS.keys(), words


def test_a_slurm_job_ends_with_its_training(tmp_path):
    page = (PROJECT / "docs/how-to/scale.md").read_text()
    (job,) = [recipe for _, recipe in RECIPE.findall(page) if "$SLURM_PROCID" in recipe]
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    path = f"PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH\n"
    (tmp_path / ".venv" / "bin" / "activate").write_text(path)
    # there is no run file, so the training fails at once
    done = subprocess.run(
        ["sh", "-c", job], cwd=tmp_path, env=tiny.environment(PROJECT), timeout=120,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "params/run.toml" in done.stderr


TEMPLATE = """{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def test_the_page_on_chats_labels_answers_alone(tmp_path, monkeypatch):
    import transformers

    page = (PROJECT / "docs/how-to/train-on-chats.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    plain = trained_run.make_tokenizer(["<|user|>", "<|assistant|>", "<|end|>"])
    kept = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|end|>")
    kept.chat_template = TEMPLATE
    kept.save_pretrained("my-chat-model")
    chat = [("user", "2 + 2?"), ("assistant", "4"), ("user", "3 * 3?"), ("assistant", "9, I say")]
    line = json.dumps({"messages": [{"role": role, "content": text} for role, text in chat]})
    Path("chats").mkdir(), Path("packed").mkdir()
    for split in ("train", "validation"):
        Path(f"chats/{split}.jsonl").write_text(f"{line}\n" * 9)
    exec(code, {})
    rows = parquet.read_table("packed/train.parquet").to_pylist()
    assert sum(len(row["sequence_lengths"]) for row in rows) == 9 and len(rows) > 1
    for row in rows:
        counted = [token for token in row["labels"] if token != -100]
        answers = "4<|end|>\n9, I say<|end|>\n" * len(row["sequence_lengths"])
        assert plain.decode(counted, skip_special_tokens=False) == answers
        given = [(a, b) for a, b in zip(row["inputs"], row["labels"], strict=True) if b != -100]
        assert all(a == b for a, b in given) and sum(row["sequence_lengths"]) <= len(row["inputs"])
