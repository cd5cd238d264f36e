"""Files of a shards folder that lie elsewhere, and streams that read them on this machine."""

from pathlib import Path

from pipeline.net.origin import Origin
from pipeline.runfile import Network
from pipeline.tokens.shards import ShardFile
from tests.pipeline.tokens.shards_folder import edit


def elsewhere(file: ShardFile, url: str, size: int, **of_origin) -> ShardFile:
    """The file, as it is listed where it is not in the folder."""
    origin = Origin(url=url, size=size, **of_origin)
    return file.model_copy(update={"sha256": None, "origin": origin})


def send_away(folder: Path, store: Path, which) -> None:
    """Moves files out of the folder, to be read where they go."""
    store.mkdir(exist_ok=True)

    def change(document: dict) -> None:
        for number, file in enumerate(document["files"]):
            if number in which:
                here, there = folder / file["path"], store / f"{number}.ds"
                here.rename(there)
                status = there.stat()
                tag = str(status.st_mtime_ns)
                origin = {"url": str(there), "size": status.st_size, "tag": tag}
                file.update(sha256=None, origin=origin, name=f"far/{number}.ds")

    edit(folder, change)


class FakeStreams:
    """Reads files of this machine by their addresses, and writes down what it is asked."""

    def __init__(self, network: Network):
        self.network, self.read_ranges, self.expected = network, [], []
        FakeStreams.last = self

    def read(self, wanted) -> list[bytes]:
        self.read_ranges += wanted
        return [Path(origin.url).read_bytes()[start:stop] for origin, start, stop in wanted]

    def expect(self, wanted) -> None:
        self.expected += wanted
