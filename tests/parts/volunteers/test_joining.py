"""`lockstep volunteer join`, as two strangers type it; and who has addresses and no share."""

import subprocess

import pytest

from parts.volunteers.chain.statements import read_run
from parts.volunteers.store import addresses
from parts.volunteers.store.schemes import open_store
from tests import tiny
from tests.parts.volunteers import volunteering

pytestmark = pytest.mark.long


def test_two_strangers_join_and_end_with_the_same_rounds(tmp_path):
    address, started = volunteering.opened(tmp_path, 2, config__total_steps=3), []
    for peer in range(2):
        arguments = ["--root", tmp_path / f"new{peer}"]
        arguments += ["--key", tmp_path / f"{peer:03}" / "key.pem"]
        environment = tiny.environment(tiny.PROJECT)
        environment.pop("GLIBC_TUNABLES", None)  # a user has none: the command begins anew
        with open(tmp_path / f"new{peer}.txt", "wb") as file:
            command = ["python", "-m", "pipeline", "volunteer", "join", address, *arguments]
            options = {"cwd": tiny.PROJECT, "env": environment, "start_new_session": True}
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **options)
            started.append(process)
    assert volunteering.ended(started) == [0, 0], volunteering.output(tmp_path)
    assert len(volunteering.rounds(tmp_path, "new0", "new1")) == 3
    first, second = (volunteering.transcript(tmp_path, f"new{peer}") for peer in range(2))
    assert tiny.contents(first / "payloads") == tiny.contents(second / "payloads")
    for peer in range(2):
        said = (tmp_path / f"new{peer}.txt").read_text()
        assert said.count("join: ") == 1
        assert f"peer {peer} runs on" in said and f"peer {1 - peer} runs on" not in said


def test_bytes_that_nobody_signed_hold_no_round_up(tmp_path):
    last = 4
    address = volunteering.opened(tmp_path, 3, config__init_min_clients=2, config__total_steps=last)
    store = open_store(address)
    reader = addresses.AddressReader(2, None, "", read_run(store)[0])
    for step in range(1, last + 1):  # all that peer 2 has addresses for
        for ask in addresses.own_puts(reader, step):
            assert store.create(ask.name, b"x" * ask.size)
    rounds = volunteering.train_all(tmp_path, ("000", "001", "follower"), 240)
    assert [one["decision"]["applied"] for one in rounds] == [[0, 1]] * last
