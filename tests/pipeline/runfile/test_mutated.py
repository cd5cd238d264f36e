"""A run file with anything in it is a run, or one line of error: three ways to read it, by seed."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from pipeline import runfile
from pipeline.runfile.psyche_import import import_psyche
from pipeline.stage.keys import PROJECT, RUN_FILE, Keys

TEXT = (PROJECT / RUN_FILE).read_text()
VALUES = ["nan", "-inf", "5e-324", "1e308", "-1", "0", "9" * 400, "true", "''", "[]", "{}"]
VALUES += ["4294967295", "18446744073709551616", "'\\u202e'", "'" + "x" * 5000 + "'", "[[[]]]"]
VALUES += ["{a = {b = 1}}", '"\\ud800"', "'../../etc'", "'http://[::1'", "'~nosuchuser/x'"]
VALUES += ["1979-05-27"]


STRAY = ["\x00", "\x1b[31m", "\ufeff", "\u202e", "\n", '"', "'''", "[", "]]", "=", "."]
STRAY += ["#", "é", "a.b.c"]


def mutated(rng: random.Random) -> str:
    """The default run file after a few edits of any kind."""
    text = TEXT
    for _ in range(rng.randint(1, 4)):
        lines = text.splitlines()
        at, place = rng.randrange(len(lines)), rng.randrange(len(text))
        match rng.randrange(6):
            case 0:  # another value
                key, equals, _ = lines[at].partition(" = ")
                lines[at] = f"{key} = {rng.choice(VALUES)}" if equals else lines[at]
                text = "\n".join(lines)
            case 1:  # a line less, or twice
                lines[at : at + 1] = [lines[at]] * rng.choice((0, 2))
                text = "\n".join(lines)
            case 2:
                text = text[:place] + rng.choice(STRAY) * rng.choice((1, 1, 1000)) + text[place:]
            case 3:
                text = text[:place] + text[place + rng.randrange(200) :]
            case 4:  # a key that nobody knows
                key = rng.choice(("a", "a" * 9000, ".".join("a" * rng.randrange(2, 9000)), '"\\n"'))
                lines.insert(at, f"{key} = {rng.choice(VALUES)}")
                text = "\n".join(lines)
            case 5:  # a bit
                text = (
                    text[:place] + chr(ord(text[place]) ^ 1 << rng.randrange(7)) + text[place + 1 :]
                )
        text = text or "\n"
    return text


def key(path: Path) -> str:
    """What both engines ask first; this stage's key has all others in it."""
    return Keys(path).key("report")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("read", [runfile.load, import_psyche, key])
def test_a_mutated_run_file_is_read_or_refused_in_one_short_line(
    seed: int, read: Callable[[Path], object], tmp_path: Path
):
    rng, path = random.Random(seed), tmp_path / "run.toml"
    for _ in range(100):
        path.write_bytes(mutated(rng).encode("utf-8", "surrogatepass"))
        try:
            read(path)
        except LockstepError as error:
            assert str(error).isprintable() and len(str(error)) < 2000
