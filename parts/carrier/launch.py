"""Launch the peers of a run in processes of their own, as `[runtime] carrier` says."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from lockstep.transcript.state import State
from parts.carrier.carrier import Carrier
from parts.carrier.channel import Hub, Place, Secrets
from parts.carrier.processes import Processes
from parts.carrier.remote_peers import Patience, RemotePeers
from pipeline import extras, runfile
from pipeline.start.begin import Setup

log = logging.getLogger(__name__)
SMALL_BYTES = 2**26  # of a message beside states: headers, losses of rows


def remote_peers(
    setup: Setup,
    state: State,
    scratch: Path,
    keeps: Callable[[int], bool],
    absent: Sequence[int] = (),
) -> RemotePeers:
    """Start the peers' processes, and give them the state to begin with, as `RemotePeers` takes it.

    `scratch`, the folder of the training in progress, gets the keys and the peers' logs.
    """
    run = setup.run
    answer, limit = run.runtime.answer_seconds, run.config.max_round_train_time
    patience = Patience(answer, answer, limit if run.links.clock == "wall" else answer)
    carrier = _carrier(setup, state, scratch)
    try:
        return RemotePeers(setup, state, carrier, patience, keeps, absent)
    except BaseException:
        carrier.close()
        raise


def _carrier(setup: Setup, state: State, scratch: Path) -> Carrier:
    run, runtime = setup.run, setup.run.runtime
    environment = {"PYTHONUNBUFFERED": "1"}
    if folder := jax.config.jax_compilation_cache_dir:
        environment["JAX_COMPILATION_CACHE_DIR"] = os.fspath(folder)
    backend = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if runtime.carrier == "ray":
        return _ray(run, environment, backend)
    peers, ranks = run.peers.count, run.peers.processes
    states = jax.tree.leaves((state.params, state.shared, setup.start.state.own[0]))
    message_bytes = SMALL_BYTES + 4 * sum(leaf.nbytes for leaf in states)
    hub = Hub(f"tcp://{runtime.listen}", Secrets(scratch / "secrets", peers, ranks), message_bytes)
    count, parts = jax.local_device_count(), run.peers.fsdp // ranks

    def environment_of(place: Place) -> dict[str, str]:
        """Give one of a peer's processes its devices of this host."""
        peer, rank = place
        if backend == "cpu":
            return environment | {"JAX_NUM_CPU_DEVICES": str(parts)}
        return environment | {"CUDA_VISIBLE_DEVICES": gpus_of(peer * ranks + rank, count, parts)}

    spawned = frozenset(range(peers)).difference(runtime.by_hand)
    return Processes(hub, scratch, spawned, environment_of, backend, ranks)


def gpus_of(number: int, count: int, parts: int) -> str:
    """Return the GPUs of a process, as CUDA names them; processes beyond their number share them.

    Processes of all peers are numbered, the host has `count` GPUs and a process has `parts`.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(gpu) for gpu in range(count)]
    first = number % max(1, len(gpus) // parts) * parts
    return ",".join(gpus[first : first + parts])


def _ray(run: runfile.Run, environment: dict[str, str], backend: str) -> Carrier:
    try:
        from parts.carrier import ray_actors
    except ModuleNotFoundError as error:
        raise extras.lacking('[runtime] carrier = "ray"', "ray") from error
    environment["JAX_NUM_CPU_DEVICES"] = str(run.peers.fsdp)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    cluster, count = run.runtime.ray, run.peers.count
    carrier = ray_actors.start(count, cluster, environment=environment, backend=backend)
    if short := ray_actors.shortage(count, cluster):
        log.warning(f"train: {short}; waits {run.runtime.answer_seconds:g} s for more")
    return carrier
