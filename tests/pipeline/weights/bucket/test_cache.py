"""The cache: what is there is not fetched again, unless it was damaged."""

from pipeline.net import web
from tests.pipeline.conversion import same_params
from tests.pipeline.weights.bucket.our_bucket import FOLDER, NAME, flipped, push, read, refusal


def test_what_is_there_is_not_fetched_again(tmp_path, served, model):
    generation = push(model)
    read(tmp_path)
    before = dict(served.sent)
    read(tmp_path, generation=generation)
    assert served.sent == before


def test_offline_what_was_read_before_is_read_again(tmp_path, served, model, monkeypatch):
    push(model)
    read(tmp_path)
    monkeypatch.setenv(web.OFFLINE, "1")
    before = list(served.seen)
    assert same_params(read(tmp_path), model)
    assert served.seen == before
    assert "HF_HUB_OFFLINE is set" in refusal(tmp_path / "other", generation=5)


def test_a_cached_file_that_was_damaged_is_fetched_again(tmp_path, served, model):
    generation = push(model)
    read(tmp_path)
    file = tmp_path / f"data/store/gcs/{NAME}/{FOLDER}/step-7-{generation}/model.safetensors"
    file.write_bytes(flipped(file.read_bytes()))
    assert same_params(read(tmp_path), model)
    assert file.read_bytes() == (model / "model.safetensors").read_bytes()


def test_a_link_in_the_cache_is_replaced_and_not_written_through(tmp_path, served, model):
    push(model)
    read(tmp_path)
    (file,) = (tmp_path / "data" / "store").rglob("model.safetensors")
    ours = file.rename(tmp_path / "ours.safetensors")
    before = ours.read_bytes()
    file.symlink_to(ours)
    assert same_params(read(tmp_path), model)
    assert not file.is_symlink() and ours.read_bytes() == before


def test_a_download_that_broke_off_goes_on_where_it_stopped(tmp_path, served, model):
    push(model)
    name = f"{FOLDER}/model.safetensors"
    size = len(served.live()[name])
    served.spoil[name] = lambda content: content[: len(content) // 2]
    assert refusal(tmp_path).endswith("within 1 attempts; run again to resume")
    assert 0 < served.sent[name] < size
    had = served.sent.pop(name)
    del served.spoil[name]
    assert same_params(read(tmp_path), model)
    assert served.sent[name] == size - had
