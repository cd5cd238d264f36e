"""A bundle of a stranger, with anything in it, is repeated or refused in one line: by seed."""

import json
import random
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from pipeline.audit import bundle
from tests.pipeline.audit.bundle.bundled_run import seal

VALUES = [-1, 0, 10**9, 10**12, 10**30, 2**63, 1e308, 5e-324, True, None]
VALUES += ["", "\x1b[31m\n", "x" * 5000, "../../etc/passwd", [], {}, [[]], {"a": 1}, [10**9] * 3]
JSON = ("run.json", "bundle.json", "transcript/header.json", "transcript/rounds.jsonl")


def put(rng: random.Random, value: object) -> object:
    """The value with one thing in it, anywhere, exchanged, removed or doubled."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.05:
        return rng.choice(VALUES)
    place = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if rng.random() < 0.1:
        if isinstance(value, dict) and rng.random() < 0.5:
            value[f"{place}x"] = value[place]
        else:
            del value[place]
    else:
        value[place] = put(rng, value[place])
    return value


def mutate(rng: random.Random, folder: Path) -> None:
    if rng.random() < 0.3:  # bytes of any file
        path = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
        content = bytearray(path.read_bytes())
        for _ in range(rng.choice((1, 20)) if content else 0):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(content[: rng.choice((None, rng.randrange(len(content) + 1)))])
        return
    path = folder / rng.choice(JSON)
    with suppress(ValueError):  # bytes of it are damaged already
        text = path.read_text()
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        at = rng.randrange(len(lines))
        lines[at] = json.dumps(put(rng, json.loads(lines[at])))
        path.write_text("\n".join(lines))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(400))
def test_a_mutated_bundle_is_repeated_or_refused_in_one_short_line(seed, folder):
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 2)):
        mutate(rng, folder)
    with suppress(LockstepError):  # bundle.json is no table any more
        seal(folder)
    try:
        assert bundle.show(folder, 1) in (0, 1, 3)  # 3: from another kind of device, it says
    except LockstepError as error:
        assert str(error).isprintable() and len(str(error)) < 3000
