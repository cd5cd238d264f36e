"""The hub: a model by its revision, checked and recorded; an export as one commit."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.files import read_json
from pipeline.net import limits
from pipeline.weights import hf, hub_model
from tests import tiny
from tests.pipeline.conversion import (
    check_silence,
    convert_in,
    refused,
    rename_shards,
    same_params,
    start,
    write_model,
)
from tests.servers import misbehaviour
from tests.servers.hub import REPO, Hub, running_hub
from tests.servers.misbehaviour import Misbehaviour
from tests.servers.web import Answer

TOKEN = "hf_sentinel"


@pytest.fixture
def served(tmp_path, monkeypatch) -> Iterator[Hub]:
    """A hub without a repository, and nobody's token."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with running_hub(monkeypatch, tmp_path / "home") as hub:
        yield hub


def by_hand(folder: Path, repo: dict) -> tuple[int, str]:
    """The stage in a process of its own: $HF_ENDPOINT is read when huggingface_hub is imported."""
    process = tiny.lockstep("convert", start(folder, {"Hub": repo}), folder)
    said = process.communicate()[0]
    return process.returncode, said


def files_in(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(folder.iterdir())}


# ---- Reading ----


def test_a_model_on_the_hub_is_fetched_checked_and_recorded(tmp_path, served):
    model = write_model(tmp_path / "model", max_shard_bytes=3000)
    commit = served.add(model)
    status, said = by_hand(tmp_path, {"repo_id": REPO})
    assert status == 0, said
    assert f"is commit {commit} today; set revision to that" in said
    out = tmp_path / "data" / "init"
    assert same_params(out, model)
    assert (out / "hf" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert read_json(out / "source.json")["commit"] == commit
    fetched = {path.name for path in (tmp_path / "data" / "store").rglob("*")}
    assert "tokenizer.json" in fetched
    assert not {"modeling.py", "pytorch_model.bin", "notes.json"} & fetched


def test_weights_in_shards_of_any_name_are_fetched_as_the_index_names_them(tmp_path, served):
    model = write_model(tmp_path / "model", max_shard_bytes=3000)
    rename_shards(model)
    (model / "model.fp16.safetensors").write_bytes(b"the same in another dtype")
    commit = served.add(model)
    repo = {"Hub": {"repo_id": REPO, "revision": commit}}
    assert same_params(convert_in(tmp_path, repo), model)
    fetched = {path.name for path in (tmp_path / "data" / "store").rglob("*")}
    assert "model.fp16.safetensors" not in fetched
    next(model.glob("pytorch_*2-of*")).unlink()
    (tmp_path / "other").mkdir()
    said = refused(tmp_path / "other", {"Hub": repo["Hub"] | {"revision": served.add(model)}})
    assert f"{hf.INDEX} names pytorch_model-00002-of-" in said


def test_a_branch_a_tag_and_a_commit_each_name_a_revision(tmp_path, served, caplog):
    caplog.set_level(logging.WARNING)
    models = [write_model(tmp_path / name, seed=seed) for seed, name in enumerate(("old", "new"))]
    old, new = (served.add(model) for model in models)
    served.refs |= {"draft": old, "v1": old}
    for revision, commit, model in (
        (old, old, models[0]),
        ("v1", old, models[0]),
        ("draft", old, models[0]),
        ("main", new, models[1]),
    ):
        caplog.clear()
        (root := tmp_path / f"at-{revision}").mkdir()
        out = convert_in(root, {"Hub": {"repo_id": REPO, "revision": revision}})
        source = read_json(out / "source.json")
        assert (source["revision"], source["commit"]) == (revision, commit)
        assert same_params(out, model)
        # what moves is said; a commit does not
        assert (f"is commit {commit} today" in caplog.text) == (revision != commit)


def test_a_file_with_another_hash_than_the_hubs_is_refused_and_fetched_again(tmp_path, served):
    commit = served.add(write_model(tmp_path / "model"))
    repo = {"repo_id": REPO, "revision": commit}
    for damaged in ("model.safetensors", "tokenizer.json"):  # a SHA-256, and git's SHA-1
        served.faults[:] = [Misbehaviour(misbehaviour.flipped, where=damaged)]
        (root := tmp_path / damaged).mkdir()
        said = refused(root, {"Hub": repo})
        name = f"model.LLM.checkpoint.Hub: {REPO} at {commit}"
        assert said.startswith(f"{name}: {damaged}: received ")
        assert "as the server says, 2 times; the damaged copy is removed" in said
    served.faults.clear()
    convert_in(root, {"Hub": repo})


@pytest.mark.parametrize(
    "repo",
    [{"repo_id": "ours/other"}, {"repo_id": REPO, "revision": "v2"}, {"repo_id": "./none"}],
    ids=lambda repo: repo.get("revision", repo["repo_id"]),
)
def test_a_model_that_the_hub_does_not_have_is_refused_in_one_line(tmp_path, served, repo):
    served.add(write_model(tmp_path / "model"))
    said = refused(tmp_path, {"Hub": repo})
    assert said.startswith(f"model.LLM.checkpoint.Hub: {repo['repo_id']}")
    assert said.endswith("expected a folder or a model on the hub")


@pytest.mark.parametrize("place", ["/revision/", "/tree/"])
def test_a_hub_that_drips_its_listing_is_left(tmp_path, served, monkeypatch, place):
    monkeypatch.setattr(limits.ListingLimit, "seconds", 0.2)
    served.add(write_model(tmp_path / "model"))
    served.faults.append(Misbehaviour(misbehaviour.trickling, where=place))
    began = time.monotonic()
    said = refused(tmp_path, {"Hub": {"repo_id": REPO}})
    assert said.startswith(f"model.LLM.checkpoint.Hub: {REPO}: a listing of over ")
    assert time.monotonic() - began < 5  # what it has to say takes ten seconds


def test_a_hub_may_say_what_kind_of_file_it_sends(tmp_path, served):
    def say(answer: Answer) -> Answer:
        answer.headers["Content-Type"] = "application/json"
        return answer

    served.add(write_model(tmp_path / "model"))
    served.faults.append(Misbehaviour(say, where="config.json"))
    convert_in(tmp_path, {"Hub": {"repo_id": REPO}})


def test_a_model_that_was_fetched_is_there_without_the_hub(tmp_path, served, monkeypatch):
    commit = served.add(write_model(tmp_path / "model"))
    convert_in(tmp_path, {"Hub": {"repo_id": REPO}})
    asked = len(served.seen)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    out = convert_in(tmp_path, {"Hub": {"repo_id": REPO}})
    assert read_json(out / "source.json")["commit"] == commit
    assert len(served.seen) == asked
    (other := tmp_path / "other").mkdir()
    said = refused(other, {"Hub": {"repo_id": "ours/other"}})
    assert "HF_HUB_OFFLINE is set" in said


# ---- Writing ----


def test_a_push_leaves_no_weights_of_an_earlier_one_and_nothing_else_is_touched(tmp_path, served):
    whole = write_model(tmp_path / "whole")
    shards = write_model(tmp_path / "s", max_shard_bytes=3000)
    hub_model.push(files_in(whole), REPO, "whole", private=False)
    (shards / "generation_config.json").unlink()
    served.commit(served.files | {"LICENSE": b"theirs", "model-v1/a.safetensors": b"theirs"})
    revision = hub_model.push(files_in(shards), REPO, "shards", private=False)
    theirs = {"LICENSE", "model-v1/a.safetensors", ".gitattributes"}
    assert set(served.commits[revision]) == {file.name for file in shards.iterdir()} | theirs
    hub_model.push(files_in(whole), REPO, "whole again", private=False)
    assert set(served.files) == {file.name for file in whole.iterdir()} | theirs


def test_two_pushes_at_once_are_one_and_a_refusal(tmp_path, served, monkeypatch):
    from huggingface_hub import HfApi

    model = write_model(tmp_path / "model")
    hub_model.push(files_in(model), REPO, "first", private=False)
    info = HfApi.model_info

    def and_then_somebody_pushes(self, repo_id, **options):
        found = info(self, repo_id, **options)
        served.commit(served.files | {"theirs": b"theirs"})
        return found

    monkeypatch.setattr(HfApi, "model_info", and_then_somebody_pushes)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(LockstepError, match="A commit has happened since"):
        hub_model.push(files_in(model), REPO, "second", private=False)
    assert served.files["theirs"] == b"theirs"
    assert served.messages == ["first"]


# ---- The token ----


@pytest.mark.parametrize("status", [401, 403, 500])
@pytest.mark.parametrize("place", ["repos/create", "commit/main", "large"])
def test_the_token_reaches_the_hub_and_nothing_else(
    tmp_path, served, monkeypatch, capfd, caplog, status, place
):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    model = write_model(tmp_path / "model")
    served.refuse = (place, status)
    with pytest.raises(LockstepError) as caught:
        hub_model.push(files_in(model), REPO, "Step 1", private=False)
    assert ("POST", "/api/repos/create", f"Bearer {TOKEN}") in served.seen
    assert str(caught.value).startswith(f"{REPO}: ")
    assert "we do not like" in str(caught.value) or place == "large"
    assert str(caught.value).endswith("expected a repository on the hub that HF_TOKEN may write to")
    check_silence(TOKEN, tmp_path, str(caught.value), capfd, caplog)


def test_the_token_reaches_nothing_that_a_download_leaves(
    tmp_path, served, monkeypatch, capfd, caplog
):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    served.add(write_model(tmp_path / "model"))
    served.refuse = ("tokenizer.json", 403)
    said = refused(tmp_path, {"Hub": {"repo_id": REPO}})
    assert "we do not like" in said
    check_silence(TOKEN, tmp_path, said, capfd, caplog)
    served.refuse = None
    convert_in(tmp_path, {"Hub": {"repo_id": REPO}})
    assert {said for _, _, said in served.seen} == {f"Bearer {TOKEN}"}
    check_silence(TOKEN, tmp_path, "", capfd, caplog)
