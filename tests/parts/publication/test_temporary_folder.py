"""Work aside: what others have there stays, and `lockstep clean` removes what SIGKILL leaves."""

from parts.publication import temporary_folder
from pipeline.__main__ import clean


def test_what_was_there_before_stays(tmp_path):
    other = tmp_path / "data" / "runs" / "1234"
    other.mkdir(parents=True)
    with temporary_folder.folder(other.parent, "verify", "again") as place:
        assert list(place.iterdir()) == [] and place.parent == other.parent
    assert list(other.parent.iterdir()) == [other]


def test_clean_removes_what_a_kill_leaves(tmp_path, monkeypatch):
    runs = tmp_path / "data" / "runs"
    with monkeypatch.context() as patch:
        patch.setattr(temporary_folder.shutil, "rmtree", lambda *_, **__: None)  # as a kill would
        with temporary_folder.folder(runs, "verify", "again") as place:
            (place / "weights").write_text("x")
    assert place.exists()
    clean(tmp_path)
    assert not [path for path in runs.iterdir() if path.is_dir()]
