"""Random trouble for a training whose peers are processes, two of them behind a bad network.

kill     SIGKILL of a peer; whoever started it starts it again
stop     SIGSTOP of a peer for longer than it is waited for
slow     SIGSTOP of a peer for a moment
leave    SIGTERM of a peer
cut      a connection is closed, and opens again
drop     a connection passes nothing on for a while
delay    a connection holds back what it passes on
harm     a connection spoils, loses or doubles a byte
crowd    1,100 strangers connect and say nothing, or begin to say a lot; the trainer may have 1,024
         files open
trainer  SIGKILL of the trainer, which is started again
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

from parts.carrier.channel import PART_BYTES
from tests import tiny
from tests.parts.carrier.tap import COMMAND, GREETING, HARMS, Tap, stranger

ANSWER = 6.0  # seconds that a peer is waited for, at least
PATIENCE = 20  # times as long for the next rounds after an event: starting over takes most of it
GAVE_UP = "all processes of peers have ended"  # "the same command goes on"
EVENTS = ("kill", "crowd", "stop", "harm", "slow", "leave", "cut", "drop", "delay", "trainer")
LIMITED = ("sh", "-c", 'ulimit -n 1024; exec "$@"', "sh")  # open files
WAIT = 20.0  # seconds that a process by hand waits for a trainer
BY_HAND = (2, 3)  # the others are the trainer's children


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Chaos:
    """A training in a folder, and what goes wrong with it; `seed` repeats that."""

    def __init__(self, folder: Path, seed: int, rounds: int, peers: int):
        self.peers, self.answer_seconds = range(peers), ANSWER
        self.rng, self.folder, self.root = random.Random(seed), folder, folder / "root"
        self.counts: Counter[str] = Counter()
        port = free_port()
        self.run_file = folder / "run.toml"
        self.document = tiny.run_document(
            tiny.write_data(folder / "tokens"),
            config__total_steps=rounds,
            config__witness_nodes=0,
            config__verification_percent=0,
            **tiny.SHORT_EPOCHS,
            peers__count=peers,
            witness__snapshot_every=20,
            runtime__checkpoint_every=10,
            runtime__carrier="processes",
            runtime__by_hand=list(BY_HAND),
            runtime__listen=f"127.0.0.1:{port}",
        )
        tiny.write_run(self.run_file, self.document)
        self.taps = {peer: Tap(port) for peer in BY_HAND}
        self.by_hand: dict[int, subprocess.Popen] = {}
        self.trainer: subprocess.Popen | None = None
        self.log = (folder / "log.txt").open("ab")

    # ---- The processes ----

    def start(self, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [*LIMITED, sys.executable, "-m", "pipeline", *arguments],
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
        for secrets in (self.root / "data/runs").glob("*/secrets"):
            for peer in BY_HAND:
                process, secret = self.by_hand.get(peer), secrets / f"peer-{peer}.json"
                if (process is None or process.poll() is not None) and secret.exists():
                    connect = "--connect", self.taps[peer].address, "--wait", str(WAIT)
                    self.by_hand[peer] = self.start("sidecar", *connect, "--secret", secret)

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
        if kind == "crowd":
            self.crowd()
            return
        if kind in ("cut", "drop", "delay", "harm"):
            tap = self.taps[self.rng.choice(BY_HAND)]
            if kind == "delay":
                tap.delay = 0.05
            elif kind == "harm":
                tap.harm[self.rng.choice(("up", "down"))] = self.rng.choice([*HARMS])
            else:
                tap.dropping = kind == "drop"
                tap.cut()
            time.sleep(self.rng.uniform(0.2, 1.5))
            tap.delay, tap.dropping = 0.0, False
            return
        if (pid := self.pid(self.rng.choice(self.peers))) is None:
            return
        if kind in ("kill", "leave"):
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGTERM)
            return
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.answer_seconds + 1 if kind == "stop" else self.rng.uniform(0.1, 1.0))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def crowd(self) -> None:
        port, large = self.taps[BY_HAND[0]].port, COMMAND + (PART_BYTES).to_bytes(8, "big")
        with ExitStack() as open_ones:
            for number in range(1100):
                says = b"" if number % 10 else GREETING + large + bytes(PART_BYTES - 1)
                with suppress(ConnectionError):  # it is cut off while it speaks
                    open_ones.enter_context(stranger(port, says))
            time.sleep(self.rng.uniform(0.2, 1.5))

    def go(self, events: int, kinds: tuple[str, ...] = EVENTS) -> None:
        """Trains to the end, while `events` things happen; some rounds pass between two."""
        for stage in ("download", "convert"):
            began = time.monotonic()
            assert self.start(stage, "--run", self.run_file, "--root", self.root).wait(600) == 0
        # a peer's first answer takes what stage convert took: to import JAX and to compile
        self.answer_seconds = max(ANSWER, 3 * (time.monotonic() - began))
        self.document["runtime"]["answer_seconds"] = self.answer_seconds
        tiny.write_run(self.run_file, self.document)
        self.wait_for(3)
        for number in range(events):
            self.event(kinds[number] if number < len(kinds) else self.rng.choice(kinds))
            if self.finished():
                break
            self.wait_for(self.rounds() - 10 + self.rng.randint(12, 16))  # a kill may cost 10
        self.wait_for(None)
        assert self.trainer.wait() == 0, f"the trainer ended with {self.trainer.returncode}"
        until = time.monotonic() + WAIT + 10
        while any(process.poll() is None for process in self.by_hand.values()):
            assert time.monotonic() < until, "a process by hand outlives its run"
            time.sleep(0.05)

    def finished(self) -> bool:
        return self.trainer is not None and self.trainer.poll() == 0

    def wait_for(self, rounds: int | None) -> None:
        """Waits for rounds, or for the end; nothing may take longer than its deadlines allow."""
        patience, seen = PATIENCE * self.answer_seconds, self.rounds()
        until = time.monotonic() + patience
        while not self.finished() and (rounds is None or self.rounds() < rounds):
            self.look_after()
            if (now := self.rounds()) != seen:
                until, seen = time.monotonic() + patience, now
            assert time.monotonic() < until, (
                f"no round in {patience:.0f} s, after {dict(self.counts)}"
            )
            assert (self.trainer.poll() or 0) <= 0, "the trainer gave up"
            time.sleep(0.05)

    def close(self) -> None:
        for process in (self.trainer, *self.by_hand.values()):
            if process and process.poll() is None:
                process.kill()
                process.wait()
        for tap in self.taps.values():
            tap.close()
        self.log.close()
