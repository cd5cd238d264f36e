"""Tokens of a hub, read while training, train to the bits of those of a folder."""

from pathlib import Path

import pytest

from lockstep.files import read_json
from tests import tiny
from tests.servers import hub as hub_server

pytestmark = pytest.mark.long

DATASET = "ours/tokens"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The same run twice: its root by where its tokens come from."""
    folder = tmp_path_factory.mktemp("elsewhere")
    data = tiny.write_data(folder / "tokens")
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        hub_server.running_hub(monkeypatch, folder / "home") as hub,
    ):
        hub.datasets[DATASET] = repo = hub_server.Repo()
        repo.commit(tiny.contents(data))
        locations = {
            "folder": ({"Local": str(data)}, False),
            "stream": ({"Hub": {"repo_id": DATASET}}, True),
        }
        for name, (location, stream) in locations.items():
            train(folder / name, location, stream)
        yield folder, hub


def train(folder: Path, location: dict, stream: bool) -> None:
    folder.mkdir()
    changes = {"model__LLM__data_location": location, "download__stream": stream}
    tiny.write_run(folder / "run.toml", tiny.run_document(folder, **changes))
    tiny.make(folder / "run.toml", folder, "download", "convert", "train")


def results(root: Path) -> dict[str, bytes]:
    """All that a run leaves but what repeats the run file, or names a key."""
    return {
        name: content
        for name, content in tiny.contents(root / "data" / "trained").items()
        if name != "transcript/header.json" and not name.startswith("made-")
    }


def test_a_run_over_the_hub_trains_to_the_bits_of_one_over_the_same_folder(trained):
    folder, _ = trained
    expected, found = results(folder / "folder"), results(folder / "stream")
    assert any(name.endswith("params.safetensors") for name in expected)
    assert [one for one in expected if expected[one] != found.get(one)] == []
    assert found.keys() == expected.keys()


def test_a_witness_reads_the_same_ranges_again_and_accepts(trained):
    folder, hub = trained
    asked = len(hub.elsewhere)
    said = tiny.make(folder / "stream" / "run.toml", folder / "stream", "witness")
    verdict = read_json(folder / "stream" / "data/verdict/verdict.json")
    assert (verdict["accepted"], verdict["not_comparable"]) == (True, None), said
    assert len(hub.elsewhere) > asked


def test_the_export_is_measured_on_held_out_tokens_that_lie_elsewhere(trained):
    folder, _ = trained
    run_file, root = folder / "stream" / "run.toml", folder / "stream"
    tiny.make(run_file, root, "witness", "export", "evaluate")
    measured = read_json(root / "metrics" / "evaluate.json")
    assert 0 < measured["held_out_loss"] < 10
