"""A publication whose list or content was changed is refused, or verified, in one line."""

import json
import random
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from parts.publication import layout
from tests import tiny
from tests.errors import refused
from tests.parts.publication.published_run import add, change_json, flip, forge, lose, verify
from tests.pipeline.audit.bundle.test_strange import put

pytestmark = pytest.mark.long


def say_twice(folder: Path) -> None:
    """The list has a key once more, before the one that Python takes."""
    path = folder / layout.MANIFEST
    path.write_text(path.read_text().replace("{", '{"release": 1, ', 1))


CHANGED = {
    "a card with one flipped bit": (flip("README.md"), "README.md: found "),
    "a missing file": (lose("config.json"), "config.json: no such file"),
    "a file too many": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        "adapter_config.json: a file"),
    "a file elsewhere": (
        change_json(
            layout.MANIFEST, lambda m: m["files"].update({"../x.json": m["files"]["README.md"]})
        ),
        "lists a file named '../x.json'"),
    "a file beside the weights that others would load": (
        add("adapter_config.json"), "lists 'adapter_config.json'"),
    "a file of the proof that no stage leaves": (add("proof/x1.json"), "lists 'proof/x1.json'"),
    "a file of a window under another name": (
        add("proof/rows/000001-000.safetensors"), "lists 'proof/rows/000001-000.safetensors'"),
    "a list that says two things": (
        say_twice, "proof/publication.json: the key 'release'"),
    "no rounds": (
        change_json(layout.MANIFEST, lambda m: m["files"].pop(layout.ROUNDS)),
        "does not list proof/transcript/rounds.jsonl.gz"),
    "another number of windows": (
        change_json(layout.MANIFEST, lambda m: m.update(windows=9)),
        "windows is 9, and proof/rows/ has 1"),
    "100 GB": (
        change_json(layout.MANIFEST, lambda m: m["files"]["README.md"].update(bytes=10**11)),
        "100.0 GB, expected at most 1 GB"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGED)
def test_what_its_list_does_not_have_is_not_verified(folder, case):
    change, said = CHANGED[case]
    change(folder)
    with refused(said):
        verify(folder)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200))
def test_a_mutated_publication_is_verified_or_refused_in_one_short_line(seed, folder):
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 2)):
        path = folder / rng.choice(
            [n for n in tiny.contents(folder) if n.endswith(("json", "jsonl"))]
        )
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        at = rng.randrange(len(lines))
        lines[at] = json.dumps(put(rng, json.loads(lines[at])))
        path.write_text("\n".join(lines))
    with suppress(Exception):  # the lists themselves are no lists any more
        forge(folder)
    try:
        verify(folder)
    except LockstepError as error:
        assert str(error).isprintable() and len(str(error)) < 3000
