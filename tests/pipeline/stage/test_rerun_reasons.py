"""What runs again, and why, is said before it does."""

import shutil

from lockstep.files import write_json
from pipeline.stage import artifacts, keys
from pipeline.stage.keys import STAGES
from tests.pipeline import finished_run

CHANGED = "changed since its result: "


def test_a_finished_run_runs_nothing_again_and_a_change_is_named_where_it_matters(
    tmp_path, monkeypatch
):
    run_file = finished_run.finish(tmp_path)
    found = artifacts.rerun_reasons(run_file, tmp_path)
    assert found == dict.fromkeys(STAGES) | {"report": "it has no result yet"}

    text = run_file.read_text()
    run_file.write_text(text.replace("replay_percent = 25", "replay_percent = 50"))
    found = artifacts.rerun_reasons(run_file, tmp_path)
    assert found["train"] is None
    assert found["witness"] == CHANGED + "[witness]"
    assert found["export"] == CHANGED + "stage witness"
    run_file.write_text(text)

    digest = keys.digest_of_source
    with monkeypatch.context() as patch:
        edited = lambda path: "edited" if path.name == "start" else digest(path)  # noqa: E731
        patch.setattr(keys, "digest_of_source", edited)
        found = artifacts.rerun_reasons(run_file, tmp_path)
    assert found["convert"] is None
    assert found["train"] == CHANGED + "pipeline/start"
    assert found["witness"] == CHANGED + "pipeline/start, stage train"

    shutil.rmtree(tmp_path / "data" / "init")
    found = artifacts.rerun_reasons(run_file, tmp_path)
    assert found["convert"] == "it has no result yet"
    assert found["train"] == "its result is made from a different data/init than the current one"

    (made,) = (tmp_path / "data" / "shards").glob("made-*.json")
    write_json(made.with_name("made-0123456789ab.json"), {"sha256": ""})
    made.unlink()
    found = artifacts.rerun_reasons(run_file, tmp_path)
    assert found["download"] == "its result is damaged, or of an older release"
