"""Peers as Ray actors on an existing cluster: `[runtime] carrier = "ray"`, extra `ray`.

Ray starts processes on hosts, and starts them again when they end. It retries no request: what
becomes of a round without an answer, the coordinator decides.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lockstep.errors import LockstepError, brief, expecting
from parts.carrier.carrier import Carrier
from parts.carrier.requests import AnswerHeader, Buffer, FrameError, PeerRequest, decode
from parts.carrier.sidecar import PeerProcess
from parts.carrier.tables import RayCluster
from pipeline.stage import signals


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
        answer = self.process.answer([memoryview(buffer) for buffer in buffers])
        return [] if answer is None else _arrays(answer)


@dataclass
class _Actor:
    """State of a peer's actor, as its trainer knows it."""

    handle: ray.actor.ActorHandle
    hello: ray.ObjectRef | None  # the call that tells its name; None once it has
    name: str | None = None  # None until then, and while the peer is lost
    fresh: bool = False  # whether nobody has asked it anything since it came


@dataclass
class RayActors(Carrier):
    """A carrier to actors; none asks to leave, since an actor does not learn of its end."""

    options: dict  # of each actor, as Ray takes them
    backend: str  # "cpu" or "cuda"
    reserved: PlacementGroup | None = None  # a bundle of resources for each actor
    _of: dict[int, _Actor] = field(default_factory=dict)
    _open: dict[int, ray.ObjectRef] = field(default_factory=dict, init=False)

    def start(self, peer: int) -> None:
        """Start the actor of a peer."""
        options = dict(self.options)
        if self.reserved:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self.reserved, placement_group_bundle_index=peer
            )
        handle = ray.remote(PeerActor).options(**options).remote(peer, self.backend)
        self._of[peer] = _Actor(handle, handle.hello.remote())

    def arrived(self) -> frozenset[int]:
        for peer, actor in list(self._of.items()):
            if actor.hello is not None and ray.wait([actor.hello], timeout=0)[0]:
                self._greet(peer, actor)
        return frozenset(peer for peer, actor in self._of.items() if actor.fresh)

    def dismiss(self, peer: int) -> None:
        ray.kill(self._of.pop(peer).handle)

    def close(self) -> None:
        for actor in self._of.values():
            ray.kill(actor.handle)
        if self.reserved:
            remove_placement_group(self.reserved)
        ray.shutdown()

    def _is_there(self, peer: int) -> bool:
        return self._of[peer].name is not None

    def _send(self, peers: list[int], request: PeerRequest) -> None:
        """Send a request; what several peers get travels to each host once."""
        ref = ray.put(_arrays(request.buffers(self._trainer, self._number)))
        for peer in peers:
            actor = self._of[peer]
            actor.fresh = False
            self._open[peer] = actor.handle.answer.remote(ref)

    def _listen(self, seconds: float) -> None:
        peer_of = {answer: peer for peer, answer in self._open.items()}
        if not peer_of:
            time.sleep(seconds)
            return
        for answer in ray.wait([*peer_of], timeout=seconds)[0]:
            self._take(peer_of[answer])

    def _take(self, peer: int) -> None:
        try:
            buffers = [memoryview(buffer) for buffer in ray.get(self._open[peer])]
            header, arrays = decode(AnswerHeader, buffers)
        except (RayError, FrameError, TypeError) as error:
            self.lose(peer, _line(error))
            return
        if header.process != self._of[peer].name:
            self.lose(peer, "its process was started again")
        elif header.error is None and header.number != self._number:
            self.lose(peer, f"an answer to request {header.number}, expected {self._number}")
        elif answer := self._answered(peer, header, arrays):
            del self._open[peer]
            self._answers[peer] = answer

    def _greet(self, peer: int, actor: _Actor) -> None:
        """Take an actor's name, or ask for it again if its process ended before it answered."""
        try:
            actor.name, actor.hello = ray.get(actor.hello), None
            actor.fresh = True
        except ActorDiedError:  # for good: Ray does not start it again
            self.start(peer)
        except RayError:
            actor.hello = actor.handle.hello.remote()

    def _forget(self, peer: int) -> None:
        """Forget an actor's process, and ask it for its name again."""
        actor = self._of[peer]
        actor.name, actor.fresh = None, False
        if actor.hello is None:
            actor.hello = actor.handle.hello.remote()


def connect(cluster: RayCluster) -> None:
    """Connect this process to a cluster as its driver."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise LockstepError(
            f"RAY_AUTH_MODE: {os.environ.get('RAY_AUTH_MODE')!r}, expected 'token': without it, "
            "whoever reaches a Ray cluster runs code there; docs/how-to/scale.md has the steps"
        )
    where, kinds = f"[runtime.ray] address = {cluster.address!r}", (RuntimeError, ValueError)
    with expecting(where, "a Ray cluster", ConnectionError, *kinds), signals.restoring_handlers():
        ray.init(
            address=cluster.address or None,
            configure_logging=False,
            log_to_driver=False,
            include_dashboard=False if not cluster.address else None,
        )


def shortage(count: int, cluster: RayCluster) -> str | None:
    """Return a line where the connected cluster has no room for `count` peers, else None.

    It counts all that its hosts have, whoever uses it now.
    """
    hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    bundle = _bundle(cluster)
    rooms = [
        min((int(host.get(name, 0) // amount) for name, amount in bundle.items()), default=count)
        for host in hosts
    ]
    if cluster.strategy.startswith("STRICT_"):
        spread = cluster.strategy == "STRICT_SPREAD"
        room = sum(map(bool, rooms)) if spread else max(rooms, default=0)
    else:
        room = sum(rooms)
    if room >= count:
        return None
    totals = " and ".join(
        f"{sum(host.get(name, 0) for host in hosts):g} {name}, expected {count} x {amount:g}"
        for name, amount in bundle.items()
    )
    return (
        f"[runtime.ray]: room for {room} of {count} peers on {len(hosts)} hosts, placed by "
        f"{cluster.strategy}: {totals}"
    )


def shortage_of(count: int, cluster: RayCluster) -> str | None:
    """Return `shortage` of a cluster that this process is connected to for that alone."""
    connect(cluster)
    try:
        return shortage(count, cluster)
    finally:
        ray.shutdown()


def start(
    count: int, cluster: RayCluster, *, environment: Mapping[str, str], backend: str
) -> RayActors:
    """Return a carrier to one actor for each of `count` peers; `backend` is "cpu" or "cuda"."""
    connect(cluster)
    runtime_env: dict = {"env_vars": dict(environment)}
    if cluster.working_dir:
        runtime_env["working_dir"] = cluster.working_dir
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
    # Where there is no room for the bundles yet, the actors wait for it.
    bundles = [_bundle(cluster)] * count
    group = placement_group(bundles, strategy=cluster.strategy) if strict else None
    carrier = RayActors(options, backend, group)
    for peer in range(count):
        carrier.start(peer)
    return carrier


def _bundle(cluster: RayCluster) -> dict[str, float]:
    """Return what a peer reserves, by Ray's names."""
    bundle = {"CPU": cluster.cpus, "GPU": cluster.gpus, "memory": cluster.memory_gb * 10**9}
    return {name: amount for name, amount in bundle.items() if amount}


def _arrays(buffers: list[Buffer]) -> list[np.ndarray]:
    return [np.frombuffer(buffer, np.uint8) for buffer in buffers]


def _line(error: Exception) -> str:
    return brief(f"{type(error).__name__}: {error}".splitlines()[0], 200)
