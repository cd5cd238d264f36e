"""`lockstep volunteer join`, as two strangers type it."""

import subprocess

import pytest

from tests import tiny
from tests.parts.volunteers import volunteering

pytestmark = pytest.mark.long


def test_two_strangers_join_and_end_with_the_same_rounds(tmp_path):
    address, started = volunteering.opened(tmp_path, 2, config__total_steps=3), []
    for peer in range(2):
        arguments = [
            "--root",
            tmp_path / f"new{peer}",
            "--key",
            tmp_path / f"{peer:03}" / "key.pem",
        ]
        environment = tiny.environment(tiny.PROJECT)
        environment.pop("GLIBC_TUNABLES", None)  # a user has none: the command begins anew
        with open(tmp_path / f"new{peer}.txt", "wb") as file:
            command = ["python", "-m", "pipeline", "volunteer", "join", address, *arguments]
            options = {"cwd": tiny.PROJECT, "env": environment, "start_new_session": True}
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **options)
            started.append(process)
    assert volunteering.ended(started) == [0, 0], volunteering.output(tmp_path)
    first, second = (volunteering.transcript(tmp_path, f"new{peer}") for peer in range(2))
    assert (first / "rounds.jsonl").read_bytes().count(b"\n") == 3
    assert tiny.contents(first / "payloads") == tiny.contents(second / "payloads")
    for peer in range(2):
        said = (tmp_path / f"new{peer}.txt").read_text()
        assert said.count("join: ") == 1
        assert f"peer {peer} runs on" in said and f"peer {1 - peer} runs on" not in said
