"""Random trouble for a training whose peers are processes, two of them behind a bad network.

kill     SIGKILL of a peer; whoever started it starts it again
stop     SIGSTOP of a peer for longer than it is waited for
slow     SIGSTOP of a peer for a moment
leave    SIGTERM of a peer
cut      a connection is closed, and opens again
drop     a connection passes nothing on for a while
delay    a connection holds back what it passes on
trainer  SIGKILL of the trainer, which is started again
"""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests import tiny

ANSWER_SECONDS = 6.0
PATIENCE = 120.0  # for the next rounds after an event: starting over takes most of it
GAVE_UP = "no peer's process is left"  # "the same command goes on"
EVENTS = ("kill", "stop", "slow", "leave", "cut", "drop", "delay", "trainer")
BY_HAND = (2, 3)  # the others are the trainer's children


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Proxy:
    """TCP connections to a port here that can be cut, held back or made to lose what they carry."""

    def __init__(self, port: int):
        self.port, self.delay, self.dropping = port, 0.0, False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.open: list[socket.socket] = []
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.port), 5)
            except OSError:
                near.close()
                continue
            self.open += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self.pump, args=(one, other), daemon=True).start()

    def pump(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(2**16):
                time.sleep(self.delay)
                if self.dropping:  # what ZeroMQ cannot repair: the stream ends
                    break
                other.sendall(data)
        except OSError:
            pass
        one.close()
        other.close()

    def cut(self) -> None:
        for one in self.open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self.open.clear()

    def close(self) -> None:
        self.listener.close()
        self.cut()


class Chaos:
    """A training in a folder, and what goes wrong with it; `seed` repeats that."""

    def __init__(self, folder: Path, seed: int, rounds: int, peers: int = 4):
        self.peers = range(peers)
        self.rng, self.folder, self.root = random.Random(seed), folder, folder / "root"
        self.counts: Counter[str] = Counter()
        port = free_port()
        self.run_file = folder / "run.toml"
        document = tiny.run_document(
            tiny.write_data(folder / "tokens"),
            config__total_steps=rounds,
            config__witness_nodes=0,
            config__verification_percent=0,
            config__epoch_time=8,
            config__max_round_train_time=5,
            config__warmup_time=5,
            config__cooldown_time=1,
            peers__count=peers,
            witness__snapshot_every=20,
            runtime__checkpoint_every=10,
            runtime__carrier="processes",
            runtime__by_hand=list(BY_HAND),
            runtime__listen=f"127.0.0.1:{port}",
            runtime__answer_seconds=ANSWER_SECONDS,
        )
        tiny.write_run(self.run_file, document)
        self.proxies = {peer: Proxy(port) for peer in BY_HAND}
        self.by_hand: dict[int, subprocess.Popen] = {}
        self.trainer: subprocess.Popen | None = None
        self.log = (folder / "log.txt").open("ab")

    # ---- The processes ----

    def start(self, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline", *arguments],
            env=tiny.environment(tiny.PROJECT),
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def look_after(self) -> None:
        """Starts again what has ended, as an operator does."""
        if self.trainer is not None and self.trainer.poll() == 1 and GAVE_UP in self.said():
            self.counts["gave up"] += 1
            self.log.write(b"--- started again\n")
            self.trainer = None
        if self.trainer is None or (self.trainer.poll() or 0) < 0:
            self.trainer = self.start("train", "--run", self.run_file, "--root", self.root)
        for secret in (self.root / "data/runs").glob("*/secret.json"):
            for peer in BY_HAND:
                process = self.by_hand.get(peer)
                if process is None or process.poll() is not None:
                    connect = "--connect", self.proxies[peer].address
                    self.by_hand[peer] = self.start(
                        "sidecar", *connect, "--peer", str(peer), "--secret", secret
                    )

    def said(self) -> str:
        """What the processes said since the trainer was started the last time."""
        self.log.flush()
        return (self.folder / "log.txt").read_text().rsplit("---", 1)[-1]

    def pid(self, peer: int) -> int | None:
        """The process of a peer, if there is one."""
        if peer in BY_HAND:
            process = self.by_hand.get(peer)
            return process.pid if process and process.poll() is None else None
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            parent, number = (str(n).encode() for n in (self.trainer.pid, peer))
            child = b"--parent-pid" in command and parent in command
            if child and command[command.index(b"--peer") + 1] == number:
                return int(entry.name)
        return None

    def rounds(self) -> int:
        files = (self.root / "data/runs").glob("*/transcript/rounds.jsonl")
        return sum(file.read_bytes().count(b"\n") for file in files)

    # ---- What happens ----

    def event(self, kind: str) -> None:
        """Does one thing to one process or connection."""
        self.counts[kind] += 1
        self.log.write(f"--- {kind} after round {self.rounds()}\n".encode())
        self.log.flush()
        if kind == "trainer":
            children = [
                pid for peer in self.peers if peer not in BY_HAND and (pid := self.pid(peer))
            ]
            self.trainer.kill()
            self.trainer.wait()
            until = time.monotonic() + 10
            while any(Path(f"/proc/{pid}").exists() for pid in children):
                assert time.monotonic() < until, "a peer outlives its trainer"
                time.sleep(0.05)
            return
        if kind in ("cut", "drop", "delay"):
            proxy = self.proxies[self.rng.choice(BY_HAND)]
            if kind == "delay":
                proxy.delay = 0.05
            else:
                proxy.dropping = kind == "drop"
                proxy.cut()
            time.sleep(self.rng.uniform(0.2, 1.5))
            proxy.delay, proxy.dropping = 0.0, False
            return
        if (pid := self.pid(self.rng.choice(self.peers))) is None:
            return
        if kind in ("kill", "leave"):
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGTERM)
            return
        os.kill(pid, signal.SIGSTOP)
        time.sleep(ANSWER_SECONDS + 1 if kind == "stop" else self.rng.uniform(0.1, 1.0))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def go(self, events: int, kinds: tuple[str, ...] = EVENTS) -> None:
        """Trains to the end, while `events` things happen; some rounds pass between two."""
        for stage in ("download", "convert"):
            assert self.start(stage, "--run", self.run_file, "--root", self.root).wait(120) == 0
        self.wait_for(3)
        for number in range(events):
            self.event(kinds[number] if number < len(kinds) else self.rng.choice(kinds))
            if self.finished():
                break
            self.wait_for(self.rounds() - 10 + self.rng.randint(12, 16))  # a kill may cost 10
        self.wait_for(None)
        assert self.trainer.wait() == 0, f"the trainer ended with {self.trainer.returncode}"

    def finished(self) -> bool:
        return self.trainer is not None and self.trainer.poll() == 0

    def wait_for(self, rounds: int | None) -> None:
        """Waits for rounds, or for the end; nothing may take longer than its deadlines allow."""
        until, seen = time.monotonic() + PATIENCE, self.rounds()
        while not self.finished() and (rounds is None or self.rounds() < rounds):
            self.look_after()
            if (now := self.rounds()) != seen:
                until, seen = time.monotonic() + PATIENCE, now
            assert time.monotonic() < until, f"no round in {PATIENCE} s, after {dict(self.counts)}"
            assert (self.trainer.poll() or 0) <= 0, "the trainer gave up"
            time.sleep(0.05)

    def close(self) -> None:
        for process in (self.trainer, *self.by_hand.values()):
            if process and process.poll() is None:
                process.kill()
                process.wait()
        for proxy in self.proxies.values():
            proxy.close()
        self.log.close()
