"""Peers as Ray actors, on a cluster that is there: `[runtime] carrier = "ray"`, extra `ray`.

Ray starts processes on hosts and starts them again; that is all that is asked of it. Nothing is
retried: what becomes of a round without an answer is the coordinator's affair.
"""

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pipeline.carrier.carrier import Answered, Asked
from pipeline.carrier.frames import AnswerHeader, Buffer, FrameError, decode
from pipeline.carrier.peer_process import PeerProcess
from pipeline.errors import LockstepError, brief
from pipeline.runfile.tables import RayCluster

POLL_SECONDS = 0.1


class PeerActor:
    """The process of one peer, which Ray calls."""

    def __init__(self, peer: int, backend: str):
        os.environ["JAX_PLATFORMS"] = backend
        self.process = PeerProcess(peer)

    def hello(self) -> str:
        """Return the process's random name."""
        return self.process.name

    def answer(self, buffers: list[np.ndarray]) -> list[np.ndarray]:
        """Return the answer to a request: raw buffers, which Ray does not pickle but point at."""
        answered = self.process.answer([memoryview(one) for one in buffers])
        return [] if answered is None else _arrays(answered)


@dataclass
class _Actor:
    """What is known of a peer's actor.

    Attributes:
      handle: The actor.
      hello: The call that tells its name; None once it has.
      name: That name; None until then, and while the peer is lost.
      fresh: Whether it was not asked anything since it came.
    """

    handle: ray.actor.ActorHandle
    hello: ray.ObjectRef | None
    name: str | None = None
    fresh: bool = False


@dataclass
class RayActors:
    """A carrier to actors.

    Attributes:
      options: What Ray is told of each actor.
      backend: "cpu" or "cuda".
      reserved: What is reserved for all of them, a bundle for each; or None.
    """

    options: dict
    backend: str
    reserved: PlacementGroup | None = None
    _of: dict[int, _Actor] = field(default_factory=dict)
    _lost: dict[int, str] = field(default_factory=dict)
    _trainer: str = field(default_factory=lambda: secrets.token_hex(8))
    _number: int = 0

    def start(self, peer: int) -> None:
        """Start the actor of a peer."""
        options = dict(self.options)
        if self.reserved:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self.reserved, placement_group_bundle_index=peer
            )
        handle = ray.remote(PeerActor).options(**options).remote(peer, self.backend)
        self._of[peer] = _Actor(handle, handle.hello.remote())

    def ask(self, asked: Mapping[int, Asked], seconds: float) -> dict[int, Answered]:
        """Send each peer its request at once, and return the answers that came in time."""
        began, answers = time.monotonic(), {}
        self._number += 1
        stored: dict[int, ray.ObjectRef] = {}  # what several peers get travels to each host once
        waiting: dict[ray.ObjectRef, int] = {}
        for peer, one in asked.items():
            actor = self._of[peer]
            if actor.name is None:
                self.lose(peer, "its process is not there")
                continue
            if id(one) not in stored:
                stored[id(one)] = ray.put(_arrays(one.buffers(self._trainer, self._number)))
            actor.fresh = False
            waiting[actor.handle.answer.remote(stored[id(one)])] = peer
        while waiting and (left := began + seconds - time.monotonic()) > 0:
            for call in ray.wait([*waiting], timeout=left)[0]:
                peer = waiting.pop(call)
                if answer := self._answer(peer, call, began):
                    answers[peer] = answer
        for peer in waiting.values():
            operation = asked[peer].operation
            self.lose(peer, f"no answer to {operation} within {seconds:.3g} s")
        return answers

    def lost(self) -> dict[int, str]:
        """Return the peers lost since the last call, each with the reason in one line."""
        lost, self._lost = self._lost, {}
        return lost

    def arrived(self) -> frozenset[int]:
        """Return the peers whose process is there, and was not asked anything since it came."""
        for peer, actor in list(self._of.items()):
            if actor.hello is not None and ray.wait([actor.hello], timeout=0)[0]:
                self._greet(peer, actor)
        return frozenset(peer for peer, actor in self._of.items() if actor.fresh)

    def leaving(self) -> frozenset[int]:
        """Return no peer: an actor is not told of its end."""
        return frozenset()

    def dismiss(self, peer: int) -> None:
        """End a peer's actor for good."""
        ray.kill(self._of.pop(peer).handle)

    def wait(self, peers: frozenset[int], seconds: float) -> frozenset[int]:
        """Wait until all of these have arrived, and return those that have."""
        until = time.monotonic() + seconds
        while peers - self.arrived() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        return peers & self.arrived()

    def close(self) -> None:
        """End the actors, and let go of the cluster."""
        for actor in self._of.values():
            ray.kill(actor.handle)
        if self.reserved:
            remove_placement_group(self.reserved)
        ray.shutdown()

    def _answer(self, peer: int, call: ray.ObjectRef, began: float) -> Answered | None:
        try:
            buffers = [memoryview(one) for one in ray.get(call)]
            header, arrays = decode(AnswerHeader, buffers)
        except (RayError, FrameError, TypeError) as error:
            self.lose(peer, _line(error))
            return None
        if header.process != self._of[peer].name:
            self.lose(peer, "its process was started again")
        elif header.error is not None:
            self.lose(peer, header.error)
        elif header.number == self._number:
            return Answered(header, arrays, time.monotonic() - began)
        else:
            self.lose(peer, f"an answer to request {header.number}, expected {self._number}")
        return None

    def _greet(self, peer: int, actor: _Actor) -> None:
        """Take an actor's name, or ask for it again where its process ended before it told."""
        try:
            actor.name, actor.hello = ray.get(actor.hello), None
            actor.fresh = True
        except ActorDiedError:  # for good: Ray does not start it again
            self.start(peer)
        except RayError:
            actor.hello = actor.handle.hello.remote()

    def lose(self, peer: int, why: str) -> None:
        """Forget an actor's process; if it is there after all, or again, it will say so."""
        self._lost.setdefault(peer, why)
        actor = self._of[peer]
        actor.name, actor.fresh = None, False
        if actor.hello is None:
            actor.hello = actor.handle.hello.remote()


def start(
    count: int, cluster: RayCluster, *, environment: Mapping[str, str], backend: str
) -> RayActors:
    """Return a carrier to one actor for each peer.

    Args:
      count: How many peers there are.
      cluster: `[runtime.ray]`.
      environment: Environment of the actors.
      backend: "cpu" or "cuda".

    Raises:
      LockstepError: Ray asks nobody for a token, or there is no such cluster.
    """
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise LockstepError(
            f"RAY_AUTH_MODE: {os.environ.get('RAY_AUTH_MODE')!r}, expected 'token': without it, "
            "whoever reaches a Ray cluster runs code there; docs/how-to/scale.md has the steps"
        )
    runtime_env: dict = {"env_vars": dict(environment)}
    if cluster.working_dir:
        runtime_env["working_dir"] = cluster.working_dir
    try:
        ray.init(
            address=cluster.address or None,
            configure_logging=False,
            log_to_driver=False,
            include_dashboard=False if not cluster.address else None,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise LockstepError(
            f"[runtime.ray] address = {cluster.address!r}: {_line(error)}, expected a Ray cluster"
        ) from error
    strict = cluster.strategy.startswith("STRICT_")
    options = {
        "num_cpus": cluster.cpus,
        "num_gpus": cluster.gpus,
        "memory": round(cluster.memory_gb * 10**9) or None,
        "scheduling_strategy": "DEFAULT" if strict else cluster.strategy,
        "max_restarts": -1,
        "max_task_retries": 0,
        "runtime_env": runtime_env,
    }
    carrier = RayActors(options, backend, _reserve(count, cluster) if strict else None)
    for peer in range(count):
        carrier.start(peer)
    return carrier


def _reserve(count: int, cluster: RayCluster) -> PlacementGroup:
    """Ask for a bundle for each peer; where there is no room yet, the actors wait for it."""
    bundle = {"CPU": cluster.cpus, "GPU": cluster.gpus, "memory": cluster.memory_gb * 10**9}
    bundle = {name: amount for name, amount in bundle.items() if amount}
    return placement_group([bundle] * count, strategy=cluster.strategy)


def _arrays(buffers: list[Buffer]) -> list[np.ndarray]:
    return [np.frombuffer(buffer, np.uint8) for buffer in buffers]


def _line(error: Exception) -> str:
    return brief(f"{type(error).__name__}: {error}".splitlines()[0], 200)
