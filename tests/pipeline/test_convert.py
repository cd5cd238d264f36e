"""Stage convert: fresh weights, a folder, the hub; each read whole or refused in one line."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from models import llama
from pipeline import artifacts, config, convert, hf
from pipeline.artifacts import Paths
from pipeline.checkpoint import load_nested
from pipeline.errors import LockstepError
from tests import tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def start(folder: Path, checkpoint: dict | str, architecture: str = "HfLlama") -> Path:
    """A run file in `folder` with this checkpoint."""
    document = tiny.run_document(folder / "tokens")
    document["model"]["LLM"]["checkpoint"] = checkpoint
    document["model"]["LLM"]["architecture"] = architecture
    tiny.write_run(folder / "run.toml", document)
    return folder / "run.toml"


def convert_in(folder: Path, checkpoint: dict | str, architecture: str = "HfLlama") -> Path:
    """Runs the stage; returns data/init."""
    run_file = start(folder, checkpoint, architecture)
    paths = Paths("convert", run_file, folder)
    convert.run(config.load(run_file), paths)
    artifacts.verify(folder / paths.keys.made("convert"))
    return paths.out("convert")


def refused(folder: Path, checkpoint: dict | str, architecture: str = "HfLlama") -> str:
    """What the stage says; it leaves nothing that looks like a result."""
    with pytest.raises(LockstepError) as caught:
        convert_in(folder, checkpoint, architecture)
    assert not (folder / "data" / "init").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def name_of(checkpoint: dict | str) -> str:
    return checkpoint if isinstance(checkpoint, str) else next(iter(checkpoint))


def init(seed: int = 0, **changes: object) -> dict:
    return {"Init": {"seed": seed, "config": tiny.MODEL | changes}}


def write_model(folder: Path, dtype: str = "bfloat16", **kwargs: int) -> Path:
    """A Hugging Face folder with a tokenizer's files, and others that nobody asked for."""
    folder.mkdir(parents=True)
    model = llama.Config.from_hf(tiny.MODEL)
    hf.write_folder(folder, model.to_hf(), llama.init(model, 3), dtype, **kwargs)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({"name": name}))
    for name in ("modeling.py", "pytorch_model.bin", "notes.json"):
        (folder / name).write_text("not ours")
    return folder


# ---- Fresh weights ----


def test_fresh_weights_are_a_hugging_face_folder_that_is_read_like_any_other(tmp_path):
    out = convert_in(tmp_path, init(seed=7))
    params = load_nested(out / "params.safetensors")
    expected = llama.init(llama.Config.from_hf(tiny.MODEL), 7)
    np.testing.assert_array_equal(params["embed"]["embedding"], expected["embed"]["embedding"])
    hf_config, read = hf.read_folder(out / "hf")
    np.testing.assert_array_equal(read["embed"]["embedding"], params["embed"]["embedding"])
    assert hf_config["vocab_size"] == tiny.VOCABULARY
    source = artifacts.read_json(out / "source.json")
    assert source["checkpoint"] == "Init"
    assert source["seed"] == 7
    weights = artifacts.sha256_file(out / "hf" / hf.WEIGHTS)
    assert source["files"][hf.WEIGHTS] == weights


def test_another_seed_is_another_model_and_the_same_seed_the_same_bytes(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        convert_in(tmp_path / name, init(seed))
    a, b, c = (tiny.contents(tmp_path / name / "data" / "init") for name in "abc")
    assert a == b
    assert a["params.safetensors"] != c["params.safetensors"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hiden_act": "silu"}, "config.hiden_act: unknown key, expected one of architectures, "),
        ({"dtype": "bfloat16"}, "config.dtype is 'bfloat16', expected 'float32'"),
        ({"hidden_size": 15}, "config: hidden_size is 15, expected a multiple of"),
        ({"hidden_act": "gelu"}, "config: hidden_act is 'gelu', but only 'silu' is supported"),
        ({"model_type": "gpt2"}, "config: model_type is 'gpt2', expected 'llama' as"),
    ],
)
def test_a_key_of_the_fresh_config_that_would_do_nothing_is_refused(tmp_path, changes, said):
    assert f"model.LLM.checkpoint.Init.{said}" in refused(tmp_path, init(**changes))


# ---- A folder ----


@pytest.mark.parametrize("shard_bytes", [5 * 2**30, 3000])
def test_a_folder_is_read_and_its_tokenizer_kept_without_weights_or_code(tmp_path, shard_bytes):
    model = write_model(tmp_path / "model", max_shard_bytes=shard_bytes)
    out = convert_in(tmp_path, {"Hub": {"repo_id": str(model)}}, "HfAuto")
    params, (_, expected) = load_nested(out / "params.safetensors"), hf.read_folder(model)
    np.testing.assert_array_equal(params["lm_head"]["kernel"], expected["lm_head"]["kernel"])
    assert sorted(path.name for path in (out / "hf").iterdir()) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    source = artifacts.read_json(out / "source.json")
    assert source["repo_id"] == str(model)
    assert source["commit"] is None
    assert source["dtype"] == "bfloat16"
    asked = {"modeling.py", "pytorch_model.bin", "notes.json"}
    assert source["files"] == {
        path.name: artifacts.sha256_file(path) for path in model.iterdir() if path.name not in asked
    }


def test_a_model_that_is_converted_and_written_again_has_the_same_bytes(tmp_path):
    model = write_model(tmp_path / "model")
    out = convert_in(tmp_path, {"Hub": {"repo_id": str(model)}})
    hf_config = hf.read_config(out / "hf")
    params = load_nested(out / "params.safetensors")
    (tmp_path / "again").mkdir()
    hf.write_folder(tmp_path / "again", hf_config, params, hf_config["dtype"])
    found, expected = (load_file(f / hf.WEIGHTS) for f in (tmp_path / "again", model))
    assert {n: t.tobytes() for n, t in found.items()} == {
        n: t.tobytes() for n, t in expected.items()
    }


def test_a_model_of_another_type_than_the_architecture_is_refused(tmp_path):
    model = write_model(tmp_path / "model")
    file = model / hf.CONFIG
    file.write_text(file.read_text().replace('"llama"', '"gpt2"'))
    said = refused(tmp_path, {"Hub": {"repo_id": str(model)}})
    assert said.startswith(f"{file}: model_type is 'gpt2', expected 'llama' as model.LLM.arch")
    said = refused(tmp_path, {"Hub": {"repo_id": str(model)}}, "HfDeepseek")
    assert said.startswith(f"{file}: model_type is 'gpt2', expected 'deepseek_v2' or 'deepseek_v3'")
    said = refused(tmp_path, {"Hub": {"repo_id": str(model)}}, "HfAuto")
    assert said.startswith(f"{file}: model_type is 'gpt2', expected one of: deepseek_v2, ")


def test_a_damaged_folder_leaves_the_earlier_result_whole(tmp_path):
    model = write_model(tmp_path / "model")
    out = convert_in(tmp_path, {"Hub": {"repo_id": str(model)}})
    before = tiny.contents(out)
    (model / hf.WEIGHTS).write_bytes((model / hf.WEIGHTS).read_bytes()[:-1])
    with pytest.raises(LockstepError, match="expected a safetensors file"):
        convert_in(tmp_path, {"Hub": {"repo_id": str(model)}})
    assert tiny.contents(out) == before


# ---- What there is no reader for ----


def test_an_architecture_without_a_model_is_refused_by_name(tmp_path):
    said = refused(tmp_path, init(), "Torchtitan")
    assert said.startswith("model.LLM.architecture is Torchtitan: this release cannot train")


@pytest.mark.parametrize(
    "checkpoint",
    [
        "Ephemeral",
        {"Dummy": {"repo_id": "a/b"}},
        {"P2P": {"repo_id": "a/b"}},
        {"Gcs": {"bucket": "b"}},
        {"P2PGcs": {"bucket": "b"}},
    ],
    ids=name_of,
)
def test_a_checkpoint_without_a_reader_is_refused_by_name(tmp_path, checkpoint):
    said = refused(tmp_path, checkpoint)
    assert said == (
        f"model.LLM.checkpoint.{name_of(checkpoint)}: this release cannot read it, "
        "expected Hub or Init or Run"
    )


# ---- The hub: a server that speaks as much of it as huggingface_hub asks for ----


def tag_of(name: str, content: bytes) -> str:
    """The hub's hash of a file: SHA-256 of a large one, git's SHA-1 of another."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def hub(model: Path, damaged: str | None = None) -> Iterator[str]:
    """Serves a folder as the model ours/tiny; `damaged` is sent with one bit flipped."""
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    tree = [
        {"type": "file", "path": name, "size": len(content), "oid": tag_of(name, content)}
        for name, content in files.items()
    ]

    class Hub(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def send(self, status: int, content: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            said = {"Content_Type": "application/json", "X_Repo_Commit": COMMIT}
            file = re.fullmatch(f"/ours/tiny/resolve/{COMMIT}/(.+)", path)
            if not path.startswith(("/api/models/ours/tiny/", "/ours/tiny/")):
                self.send(404, b"{}", X_Error_Code="RepoNotFound")
            elif re.fullmatch(f"/api/models/ours/tiny/revision/(main|{COMMIT})", path):
                self.send(200, json.dumps({"id": "ours/tiny", "sha": COMMIT}).encode(), **said)
            elif path == f"/api/models/ours/tiny/tree/{COMMIT}":
                self.send(200, json.dumps(tree).encode(), **said)
            elif file:
                content = files[file[1]]
                tag = tag_of(file[1], content)
                if file[1] == damaged:
                    content = content[:-1] + bytes([content[-1] ^ 1])
                self.send(200, content, ETag=f'"{tag}"', X_Repo_Commit=COMMIT)
            else:
                self.send(404, b"{}", X_Error_Code="RevisionNotFound")

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def by_hand(folder: Path, repo: dict) -> tuple[int, str]:
    """The stage in a process of its own: $HF_ENDPOINT is read when huggingface_hub is imported."""
    process = tiny.lockstep("convert", start(folder, {"Hub": repo}), folder)
    said = process.communicate()[0]
    return process.returncode, said


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty cache and no token, whoever runs the tests."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path


def test_a_model_on_the_hub_is_fetched_checked_and_recorded(home, monkeypatch):
    model = write_model(home / "model", max_shard_bytes=3000)
    with hub(model) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        status, said = by_hand(home, {"repo_id": "ours/tiny"})
    assert status == 0, said
    assert f"is commit {COMMIT} today; set revision to that" in said
    out = home / "data" / "init"
    params, (_, expected) = load_nested(out / "params.safetensors"), hf.read_folder(model)
    np.testing.assert_array_equal(params["lm_head"]["kernel"], expected["lm_head"]["kernel"])
    assert (out / "hf" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert artifacts.read_json(out / "source.json")["commit"] == COMMIT
    fetched = {path.name for path in (home / "data" / "store").rglob("*")}
    assert "tokenizer.json" in fetched
    assert not {"modeling.py", "pytorch_model.bin", "notes.json"} & fetched


def test_a_file_with_another_hash_than_the_hubs_is_refused_and_fetched_again(home, monkeypatch):
    model = write_model(home / "model")
    repo = {"repo_id": "ours/tiny", "revision": COMMIT}
    for damaged in ("model.safetensors", "tokenizer.json"):  # one has a SHA-256, one git's SHA-1
        (root := home / damaged).mkdir()
        with hub(model, damaged) as address:
            monkeypatch.setenv("HF_ENDPOINT", address)
            status, said = by_hand(root, repo)
        assert status == 1
        assert f"error: model.LLM.checkpoint.Hub: ours/tiny at {COMMIT}: {damaged} has hash" in said
        assert "Traceback" not in said
    with hub(model) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        status, said = by_hand(root, repo)
    assert status == 0, said
    assert "set revision" not in said


@pytest.mark.parametrize(
    "repo",
    [{"repo_id": "ours/other"}, {"repo_id": "ours/tiny", "revision": "v2"}, {"repo_id": "./none"}],
    ids=lambda repo: repo.get("revision", repo["repo_id"]),
)
def test_a_model_that_the_hub_does_not_have_is_refused_in_one_line(home, monkeypatch, repo):
    with hub(write_model(home / "model")) as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        said = refused(home, {"Hub": repo})
    assert said.startswith(f"model.LLM.checkpoint.Hub: {repo['repo_id']}")
    assert said.endswith("expected a folder or a model on the hub")


def test_a_hub_that_does_not_answer_is_one_line_and_status_1(home, monkeypatch):
    with hub(write_model(home / "model")) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
    status, said = by_hand(home, {"repo_id": "ours/tiny"})
    assert status == 1
    assert said.splitlines()[-1].startswith("error: model.LLM.checkpoint.Hub: ours/tiny: ")
    assert "Traceback" not in said
