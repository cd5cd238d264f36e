"""The table `[links]`: speeds of the simulated network and of the simulated peers."""

from typing import Annotated, Literal

from pydantic import Field

from lockstep.tables.table import Table, per_peer, wrong

# Within these bounds, every time is a finite number, however large a message is.
Speed = Annotated[float, Field(ge=0.001)]
Latency = Annotated[float, Field(ge=0, le=1e6)]
Topology = Literal["broadcast", "hub", "ring"]


class Links(Table):
    """The simulated network and speed: one number for all peers, or a list with one per peer."""

    upload_mbps: per_peer(Speed) = 20.0
    """Upload bandwidth of a peer, in megabits per second."""
    download_mbps: per_peer(Speed) = 100.0
    """Download bandwidth of a peer, in megabits per second."""
    latency_seconds: per_peer(Latency) = 0.05
    """Latency of a message in seconds, in addition to its transfer time."""
    tokens_per_second: per_peer(Speed) = 10_000.0
    """Training speed of a peer, in tokens per second."""
    topology: Topology = "broadcast"
    """Who sends to whom, on the simulated clock. broadcast: each peer uploads its message once, and
    downloads all others'. hub: a hub merges the messages, and each peer downloads the result. ring:
    peers sum parts of their messages around a ring. Witnesses and the audit see every message in
    any case; the topology changes only time and bytes."""
    clock: Literal["simulated", "wall", "store"] = "simulated"
    """Which clock decides who is late. simulated: a clock that follows from the numbers above,
    which an audit computes again. wall: real time, with peers in processes of their own; it is
    recorded, and an audit takes the author's word for it. A step is compiled before its round
    begins, so config.max_round_train_time need not leave room for that. store: the clock of the
    object store over which volunteers exchange messages, in whole seconds."""

    @property
    def computed(self) -> bool:
        """Whether all times follow from these links' numbers; else they are real, and recorded."""
        return self.clock == "simulated"

    def check(self, count: int, name: str = "peers.count") -> None:
        """Check that lists of `[links]` have a number for each of `count` peers, in errors `name`.

        Raises:
          PydanticCustomError: One has another length, with its key and what was expected.
        """
        for key in Links.model_fields:
            value = getattr(self, key)
            if isinstance(value, tuple) and len(value) != count:
                raise wrong(("links", key), f"one number, or {count} of them ({name})")
