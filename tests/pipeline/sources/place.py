"""What a place of data is, for tests of each data location."""

from dataclasses import dataclass, field

from tests.pipeline.net.token_servers import HOW
from tests.servers import web

SEEDED = HOW["shuffle"]
LENGTH = 32  # tokens of a sequence in these tests


@dataclass
class Place:
    """Where tokens are.

    Attributes:
      location: as a run file has it.
      servers: that are asked.
      listed: whether it is token files as they stand, so that it can be limited and streamed.
      sure: whether each sequence comes just once.
    """

    location: dict | str
    servers: list[web.Served] = field(default_factory=list)
    listed: bool = True
    sure: bool = True

    def sent(self) -> int:
        """Bytes of files that servers have sent."""
        return sum(sum(server.sent.values()) for server in self.servers)
