"""A private key lies outside of the checkout, and git takes none that lies in it."""

import os
import stat
import subprocess
import sys

from pipeline.stage.keys import PROJECT


def test_a_key_is_made_in_the_folder_of_its_user_unless_a_file_is_named(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "XDG_CONFIG_HOME": str(tmp_path / "c")}
    asked = [sys.executable, "-m", "pipeline", "volunteer", "key"]
    first, again = (
        subprocess.check_output(asked, cwd=tmp_path, env=environment, text=True) for _ in range(2)
    )
    assert first.startswith("ed25519:") and first == again
    (key,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert key == tmp_path / "c" / "lockstep" / "volunteer.pem"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_git_takes_no_private_key_of_a_checkout():
    names = ["volunteer.pem", "mine.pem", "params/lab.pem", "data/x.pem", "mine.key"]
    done = subprocess.run(
        ["git", "check-ignore", *names], cwd=PROJECT, capture_output=True, text=True
    )
    assert done.stdout.split() == names
