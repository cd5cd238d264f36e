"""A published run verifies from anywhere; a bad one does not, however its hashes are updated."""

import json
import random
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import jax
import pytest

from pipeline import runfile
from pipeline.__main__ import app
from pipeline.errors import LockstepError
from pipeline.pages import push
from pipeline.publication import commands, layout, publish
from pipeline.stage.artifacts import _digest, read_json, sha256_file, write_json
from pipeline.stage.keys import needs
from pipeline.transcript.transcript import Transcript
from pipeline.weights import hf
from pipeline.weights.trees import load_arrays, save_tree
from pipeline.wire.commitment import tree_hash
from tests import tiny
from tests.pipeline import trained_run
from tests.pipeline.audit.test_strange_bundles import put
from tests.servers.files import Files
from tests.servers.hub import REPO, running_hub

STAGES = layout.STAGES
TRANSCRIPT = layout.TRANSCRIPT


class Published:
    """A finished tiny run, and its publication."""

    def __init__(self, folder: Path):
        self.run_file, self.root = folder / "run.toml", folder / "root"
        self.data = tiny.write_data(folder / "tokens")
        self.folder = folder / "published"
        tiny.write_run(self.run_file, tiny.run_document(self.data))
        tiny.make(self.run_file, self.root, *STAGES, layout.REPORT)
        publish.write(self.folder, self.run_file, self.root, 1, None)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Published:
    return Published(tmp_path_factory.mktemp("published"))


@pytest.fixture
def folder(published, tmp_path) -> Path:
    """A copy of the publication, to change."""
    return shutil.copytree(published.folder, tmp_path / "folder")


def verify(source: Path | str, seed: str | None = None):
    """What the command proves, or the error that it prints."""
    with tiny.like_a_process():
        return commands._verify(str(source), Path("nowhere"), seed, 1)


def refusal(source: Path) -> str:
    with pytest.raises(LockstepError) as caught:
        verify(source)
    assert "\n" not in str(caught.value) and "/tmp" not in str(caught.value)
    return str(caught.value)


def print_of(capsys, *arguments: str) -> tuple[int, str]:
    """The exit status of the command, and what it prints."""
    with tiny.like_a_process(), pytest.raises(SystemExit) as caught:
        app(list(arguments))
    return caught.value.code, capsys.readouterr().out


# ---- Good ones ----


def test_a_published_run_verifies_from_a_plain_web_server(published, tmp_path, capsys):
    with Files().serving() as server:
        server.add(published.folder)
        code, said = print_of(capsys, "verify", server.address, "--root", str(tmp_path))
    count, peer = len(tiny.contents(published.folder)) - 1, last_peer(published.folder)
    loss = read_json(published.root / "metrics/evaluate.json")["held_out_loss"]
    assert (code, said) == (
        0,
        f"verified: {count} files as published; the run began with fresh weights of seed 0; the "
        f"weights are the params after round 6; window 4-6 of peer {peer}, drawn by the "
        f"transcript's hash, repeats bit for bit; held-out loss {loss:.4f} measured again; not "
        "repeated: 3 of 4 windows, and where the sequences come from\n",
    )
    assert not list((tmp_path / "data/store").glob("verify-*"))


def test_it_is_pushed_to_the_hub_and_verifies_from_there(published, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_sentinel")
    with running_hub(monkeypatch, tmp_path / "home") as hub:
        hub.commit({"proof/old.json": b"{}", "NOTES.txt": b"mine"})
        push.push(published.run_file, published.root, [REPO], private=False, with_proof=True)
        pushed = dict(hub.files)
        assert pushed.pop("NOTES.txt") == b"mine"  # and nothing is left of an older proof
        assert pushed == tiny.contents(published.folder)
        arguments = ["verify", REPO, "--root", str(tmp_path)]
        _, said = print_of(capsys, *arguments)
        assert said.endswith(
            "NOTES.txt: a file that proof/publication.json does not list, expected none\n"
        )
        hub.commit(pushed)
        code, said = print_of(capsys, *arguments)
        assert (code, said[:10]) == (0, "verified: ")
        hub.damaged = "README.md"
        code, said = print_of(capsys, "verify", REPO, "--root", str(tmp_path / "elsewhere"))
        assert code == 1 and "not verified: README.md: received git-sha1:" in said


def last_peer(folder: Path) -> int:
    """The peer whose state a publication of one window holds."""
    (own,) = (folder / TRANSCRIPT).glob("snapshots/*/own-*")
    return int(own.stem.removeprefix("own-"))


def test_it_holds_nothing_twice(published):
    names = set(tiny.contents(published.folder))
    opening = f"{TRANSCRIPT}/snapshots/00003"
    assert {name for name in names if name.startswith(TRANSCRIPT)} == {
        f"{TRANSCRIPT}/header.json",
        f"{TRANSCRIPT}/rounds.jsonl",
        f"{TRANSCRIPT}/payloads/00004.bin",
        *(f"{TRANSCRIPT}/snapshots/{step:05}/state.json" for step in (0, 3, 6)),
        f"{opening}/params.safetensors",
        f"{opening}/shared.safetensors",
        f"{opening}/own-{last_peer(published.folder):03}.safetensors",
        f"{TRANSCRIPT}/snapshots/00006/shared.safetensors",
    }


def test_a_reader_may_ask_for_windows_that_nobody_could_foresee(published, tmp_path):
    folder = tmp_path / "asked"
    publish.write(folder, published.run_file, published.root, 3, "a reader's word")
    proven = verify(folder, "a reader's word")
    assert len(proven.repeated) == 3 and (4, 6) in {(a, b) for a, b, _ in proven.repeated}
    assert (
        "drawn by the transcript's hash and the reader's seed, repeat bit for bit" in proven.line()
    )
    with pytest.raises(LockstepError, match="seed is .*a reader's word.*, expected 'another'"):
        verify(folder, "another")


def test_rounded_weights_verify_too_and_without_a_report(published, tmp_path):
    root, run_file = shutil.copytree(published.root, tmp_path / "root"), tmp_path / "run.toml"
    tiny.write_run(run_file, tiny.run_document(published.data, export__dtype="bfloat16"))
    tiny.make(run_file, root, "export", "evaluate")
    publish.write(tmp_path / "rounded", run_file, root, 1, None)
    assert verify(tmp_path / "rounded").last == 6


# ---- Bad ones, whose author updates every hash ----


def forge(folder: Path) -> None:
    """Makes card, made files and list agree with the files, as anybody could."""
    listed = read_json(folder / layout.MANIFEST)
    text = (folder / "README.md").read_text()
    for name, file in listed["files"].items():
        if (folder / name).is_file():
            text = text.replace(file["sha256"], sha256_file(folder / name))
    (folder / "README.md").write_text(text)
    places = {  # of a stage's files, here and in its own folder
        "train": (f"{TRANSCRIPT}/", "transcript/"),
        "witness": ("proof/", ""),
        "export": ("", ""),
        "report": ("", ""),
        "evaluate": ("proof/", "metrics/"),
    }
    for stage in (*STAGES, layout.REPORT):
        path = folder / layout.made(stage)
        if not path.is_file():
            continue
        made = read_json(path)
        del made["sha256"]
        made["needs"] = {n: sha256_file(folder / layout.made(n)) for n in needs(stage)}
        place, original = places.get(stage, ("nowhere/", ""))
        for name in made["files"]:
            found = folder / f"{place}{name.removeprefix(original)}"
            if name.startswith(original) and found.is_file():
                made["files"][name] = entry(found)
        write_json(path, made | {"sha256": _digest(made)})
    for name in listed["files"]:
        if (folder / name).is_file():
            listed["files"][name] = entry(folder / name)
    write_json(folder / layout.MANIFEST, listed)


def entry(path: Path) -> dict:
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def change_json(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        said = read_json(folder / name)
        change(said)
        write_json(folder / name, said)

    return changed


def change_tensors(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = load_arrays(folder / name)
        change(tensors)
        save_tree(folder / name, tensors)

    return changed


def flip(name: str) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)

    return changed


def change_round(folder: Path, number: int, change: Callable[[dict], object]) -> None:
    path = folder / TRANSCRIPT / "rounds.jsonl"
    lines = path.read_text().splitlines()
    said = json.loads(lines[number - 1])
    change(said)
    lines[number - 1] = json.dumps(said, separators=(",", ":"))
    path.write_text("\n".join(lines) + "\n")


def other_weights(folder: Path) -> None:
    """Of another run, as stage export would write them."""
    config, params = hf.read_folder(folder)
    hf.write_folder(folder, config, jax.tree.map(lambda x: 1.01 * x, params), "float32")


def other_weights_and_their_hash(folder: Path) -> None:
    other_weights(folder)
    found = tree_hash(hf.read_folder(folder)[1])
    change_json(f"{TRANSCRIPT}/snapshots/00006/state.json", lambda s: s.update(params=found))(
        folder
    )


def other_rate(tables: dict) -> None:
    tables["model"]["LLM"]["lr_schedule"]["Cosine"]["base_lr"] = 4e-3


def other_seed(folder: Path) -> None:
    """The run file and the transcript's header say another seed of the fresh weights."""

    def change(tables: dict) -> None:
        tables["model"]["LLM"]["checkpoint"]["Init"]["seed"] = 1

    change_json(layout.RUN, change)(folder)
    change_json(f"{TRANSCRIPT}/header.json", lambda header: change(header["run"]))(folder)


def change_token(tensors: dict) -> None:
    tensors["rows"] = tensors["rows"].copy()
    tensors["rows"][:, 3] = (tensors["rows"][:, 3] + 1) % 64


def new_transcript_hash(folder: Path) -> None:
    """The verdict is of the rounds as they are."""
    found = Transcript(folder / TRANSCRIPT).hash
    change_json(layout.VERDICT, lambda v: v.update(transcript=found, sample_seed=found))(folder)


def change_commitment(folder: Path) -> None:
    """One message of the first window, which is not published, is committed to as another."""
    change_round(folder, 2, lambda e: e["evidence"]["messages"]["0"].update(commitment="ab" * 32))
    new_transcript_hash(folder)


def change_card(folder: Path, pattern: str, said: str) -> None:
    path = folder / "README.md"
    text, count = re.subn(pattern, said, path.read_text(), count=1)
    assert count
    path.write_text(text)


def better_loss(folder: Path) -> None:
    change_json(layout.EVALUATED, lambda e: e.update(held_out_loss=1.0))(folder)
    change_card(folder, "(held_out_loss\n +value:) [0-9.]+", r"\1 1.0")


def lose(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


FORGED = {
    "weights of another run": (
        other_weights,
        "the weights: params of hash ",
    ),
    "weights of another run, with their hash in the transcript": (
        other_weights_and_their_hash,
        "round 6, params: the params do not follow from the window's messages",
    ),
    "another model in config.json": (
        change_json("config.json", lambda c: c.update(rms_norm_eps=1e-3)),
        "config.json: ",
    ),
    "a changed round": (change_commitment, "round 2, decision: does not follow from the evidence"),
    "a changed token": (
        change_tensors(layout.TOKENS, change_token),
        ", message: sent ",
    ),
    "a changed payload": (flip(f"{TRANSCRIPT}/payloads/00004.bin"), "proof/transcript: round "),
    "a changed state": (
        flip(f"{TRANSCRIPT}/snapshots/00003/params.safetensors"),
        "round 3, snapshot: ",
    ),
    "a verdict that was refused": (
        change_json(
            layout.VERDICT,
            lambda v: v["findings"].append(
                {"round": 2, "peer": 1, "kind": "message", "detail": "d", "applied": True}
            ),
        ),
        "proof/verdict.json: accepted is True, expected False, which follows from",
    ),
    "a verdict that replayed more": (
        change_json(layout.VERDICT, lambda v: v.update(windows=9)),
        "proof/verdict.json: windows is 9, expected 4",
    ),
    "a run file with another learning rate": (
        change_json(layout.RUN, other_rate),
        "round 0, header: its run differs from the auditor's own",
    ),
    "other fresh weights": (
        other_seed,
        "proof/transcript: params before the first round of hash ",
    ),
    "a better loss on the card": (
        lambda folder: change_card(folder, "(held_out_loss\n +value:) [0-9.]+", r"\1 1.0"),
        "README.md: held-out loss ['1.0'] in its model-index, expected ",
    ),
    "a better loss, on the card too": (
        better_loss,
        "proof/evaluate.json: held_out_loss is 1.0000, expected ",
    ),
}


@pytest.mark.parametrize("case", FORGED)
def test_what_contradicts_itself_is_not_verified_though_all_hashes_agree(folder, case):
    change, said = FORGED[case]
    change(folder)
    forge(folder)
    assert said in refusal(folder)


@pytest.mark.soak  # compiles another program
def test_another_learning_rate_in_the_transcript_too_is_found_by_the_replay(folder):
    change_json(layout.RUN, other_rate)(folder)
    change_json(f"{TRANSCRIPT}/header.json", lambda header: other_rate(header["run"]))(folder)
    forge(folder)
    assert ", message: sent " in refusal(folder)


CHANGED = {
    "a card with one flipped bit": (flip("README.md"), "README.md: found "),
    "a missing file": (lose("config.json"), "config.json: no such file, expected it as proof/"),
    "a file too many": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        "adapter_config.json: a file that proof/publication.json does not list, expected none",
    ),
    "a file elsewhere": (
        change_json(
            layout.MANIFEST, lambda m: m["files"].update({"../x.json": m["files"]["README.md"]})
        ),
        "lists a file named '../x.json', expected a path inside it",
    ),
    "code": (
        change_json(
            layout.MANIFEST, lambda m: m["files"].update({"x.py": m["files"]["README.md"]})
        ),
        "lists 'x.py', expected files of an export and of proof/ alone",
    ),
    "no rounds": (
        change_json(layout.MANIFEST, lambda m: m["files"].pop(f"{TRANSCRIPT}/rounds.jsonl")),
        "does not list proof/transcript/rounds.jsonl, expected it in a publication",
    ),
    "100 GB": (
        change_json(layout.MANIFEST, lambda m: m["files"]["README.md"].update(bytes=10**11)),
        "100.0 GB, expected at most 1 GB; where a publication may be that large",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_its_list_does_not_have_is_not_verified(folder, case):
    change, said = CHANGED[case]
    change(folder)
    with pytest.raises(LockstepError) as caught:
        verify(folder)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_command_says_why_and_exits_with_one(folder, capsys):
    flip("README.md")(folder)
    code, said = print_of(capsys, "verify", str(folder))
    assert code == 1 and said.startswith("not verified: README.md: found ")
    code, said = print_of(capsys, "verify", str(folder), "--json")
    assert (code, json.loads(said)["proven"]) == (1, False)


def test_a_card_of_other_weights_is_not_verified(folder):
    text = (folder / "README.md").read_text()
    forge(folder)
    weights = sha256_file(folder / "model.safetensors")
    (folder / "README.md").write_text(text.replace(weights, "0" * 64))
    forge(folder)
    assert refusal(folder).startswith("README.md: another SHA-256 of model.safetensors, expected")


# ---- What is not published ----


def test_a_refused_export_is_not_published(tmp_path):
    finding = {"round": 2, "peer": 1, "kind": "message", "detail": "d"}
    trained_run.make(tmp_path / "run", verdict={"accepted": False, "findings": [finding]})
    with pytest.raises(
        LockstepError, match=r"refused.json: peer 1 in round 2 \(message\); expected"
    ):
        publish.write(tmp_path / "new", tmp_path / "run/run.toml", tmp_path / "run", 1, None)
    assert not (tmp_path / "new").exists()


def test_files_of_others_are_not_replaced_and_no_secret_is_published(published, tmp_path):
    (tmp_path / "mine.txt").touch()
    with pytest.raises(LockstepError, match="has files, expected a new or an empty folder"):
        publish.write(tmp_path, published.run_file, published.root, 1, None)
    signed = {"Url": {"url": "https://example.org/a.ds?signature=secret"}}
    run_file = tmp_path / "signed.toml"
    tiny.write_run(run_file, tiny.run_document(Path(), model__LLM__data_location=signed))
    with pytest.raises(LockstepError, match="has a user, a password or a query") as caught:
        publish.write(tmp_path / "new", run_file, published.root, 1, None)
    assert "secret" not in str(caught.value)


def test_the_published_run_file_names_nothing_of_a_machine_and_is_valid_on_the_walls_clock():
    document = tiny.run_document(
        Path("tokens"),
        links__clock="wall",
        runtime__carrier="processes",
        runtime__by_hand=[1],
        runtime__listen="10.0.0.7:5000",
    )
    said = publish.public(runfile.parse(document.unwrap(), "run.toml"))
    assert "10.0.0.7" not in json.dumps(said) and not said["runtime"]["by_hand"]
    assert runfile.parse(said, "run.json").links.clock == "wall"


# ---- Other machines, other runs, and anything at all ----


@pytest.mark.soak
def test_on_another_machine_it_verifies_within_a_tolerance_and_says_why(published, monkeypatch):
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "float32")  # the same bits on a CPU
    line = verify(published.folder).line()
    assert "repeats within a tolerance of 0.05, because matmul_precision is 'float32' here" in line


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", [tiny.ADAMW, tiny.DILOCO], ids=["AdamW", "DiLoCo"])
def test_a_run_whose_messages_are_not_kept_is_verified_for_all_its_peers(optimizer, tmp_path):
    run_file, root = tmp_path / "run.toml", tmp_path / "root"
    data = tiny.write_data(tmp_path / "tokens")
    tiny.write_run(run_file, tiny.run_document(data, model__LLM__optimizer=optimizer))
    tiny.make(run_file, root, *STAGES)
    publish.write(tmp_path / "published", run_file, root, 1, None)
    assert verify(tmp_path / "published").repeated == [(4, 6, 0), (4, 6, 1)]


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
