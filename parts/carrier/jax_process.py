"""A peer's process that computes with JAX: prepared for a run before JAX is imported."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import LockstepError
from parts.carrier.operation_tables import Create
from parts.carrier.peer_process import PeerProcess
from pipeline import runfile
from pipeline.stage import devices

if TYPE_CHECKING:
    from parts.carrier.operations import Operations

HEARTBEAT_SECONDS = 30  # a gang's process that says nothing for so long ends the others


class JaxProcess(PeerProcess):
    """The process of a peer that computes with the run's own programs."""

    worker: "Operations | None"
    _gang = ""  # the address at which it has joined the peer's other processes

    def create(self, create: Create, gang: str) -> "Operations":
        """Prepare this process for the run, once: JAX reads its settings when it is imported."""
        run = runfile.parse(create.run, "create")
        if self.holder is not None and gang != self._gang:
            raise LockstepError("the first of the peer's processes is another one; start this anew")
        if self.holder is not None and self.holder.run == run:
            return self.holder
        if self.rank.count != run.peers.processes:
            raise LockstepError(
                f"--world-size {self.rank.count}, expected [peers] processes = "
                f"{run.peers.processes}"
            )
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(run.peers.fsdp // self.rank.count))
        devices.prepare(run)
        if folder := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
            devices.keep_compiled(Path(folder))
        if self.rank.count > 1:
            self._join(gang, run.runtime.answer_seconds)
        from parts.carrier.operations import Operations
        from pipeline.stage import allocator

        allocator.trim_after_compiling()
        return Operations(run, create.model, create.first_step, create.columns)

    def _join(self, gang: str, seconds: float) -> None:
        """Join the peer's other processes, once, before JAX sees a device."""
        if self._gang:
            raise LockstepError("the peer's processes are in another run; start them anew")
        self._gang = gang
        os.environ["JAX_ENABLE_PREEMPTION_SERVICE"] = "0"  # it would take SIGTERM from us
        import jax

        jax.distributed.initialize(
            gang,
            coordinator_bind_address=self.rank.address or None,  # not on every interface
            num_processes=self.rank.count,
            process_id=self.rank.number,
            initialization_timeout=max(1, round(seconds)),
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
