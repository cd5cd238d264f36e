"""What carriers add to a run file: where peers run, in `[runtime]`."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, cast

from pydantic import Field

from lockstep.tables.faults import PeerNumber
from lockstep.tables.table import AsTuple, Table, wrong
from pipeline.runfile.strangers_values import AnswerRow
from pipeline.runfile.tables import CoreRuntime

if TYPE_CHECKING:
    from pipeline.runfile import Run


class CarrierRuntime(CoreRuntime):
    """The keys of `[runtime]` for peers in processes of their own."""

    told: ClassVar[tuple[str, ...]] = ("carrier",)

    carrier: Literal["in_process", "processes"] = "in_process"
    """Where peers run. in_process: all in the process that trains. processes: each in a process of
    its own, which the trainer starts on this host, unless `by_hand` has it."""
    by_hand: Annotated[tuple[PeerNumber, ...], AsTuple] = ()
    """Peers whose processes the trainer does not start: `lockstep sidecar` starts them, on any host
    that reaches the trainer. Applies to carrier = "processes"."""
    listen: Annotated[str, Field(pattern=r"^[^:/]+:[0-9]{1,5}$")] = "127.0.0.1:0"
    """Address, host:port, where the trainer waits for its peers' processes; port 0 is any free one.
    A process that connects must know a key of the run. Applies to carrier = "processes"."""

    @property
    def in_one_process(self) -> bool:
        """Whether all peers run in the process that trains."""
        return self.carrier == "in_process"


TABLES: dict[str, type[Table]] = {}
RUNTIME = CarrierRuntime
ANSWERS: tuple[AnswerRow, ...] = ()  # [runtime] is the reader's own


def runtime_of(run: "Run") -> CarrierRuntime:
    """Return the table `[runtime]` of a run, with the keys for carriers."""
    return cast("CarrierRuntime", run.runtime)


def rules(run: "Run") -> None:
    """Check that a run's peers can be where `[runtime]` puts them."""
    runtime, peers = runtime_of(run), run.peers
    if not runtime.in_one_process and peers.layout != "each":
        text = f"in_process with peers.layout = {peers.layout}, one program for all peers"
        raise wrong(("runtime", "carrier"), text)
    if max(runtime.by_hand, default=0) >= peers.count:
        raise wrong(("runtime", "by_hand"), f"numbers less than peers.count ({peers.count})")
