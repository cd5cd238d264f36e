"""Ranges of remote files, cached in bounded memory and fetched ahead of need, for training.

The unit is a piece: a requested range, or a part of a long one, known by file, version, start and
stop. So whoever expects a range finds it when reading the same range later. One request brings
pieces of a file that touch, or whose gap is shorter than the second piece: a round of sequences in
a row is a few requests, a shuffled sequence one of its own, and at most twice the requested bytes
are fetched. A piece counts against the memory from the moment it is requested.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Condition, Event, Thread

from .. import remote
from ..errors import NetError, hide
from ..limits import NetSettings
from ..origin import Origin

REQUEST_BYTES = 2**21  # at most, so that connections share a long range
GAP_BYTES = 2**14  # at most, between two pieces of a request

# The queues; a piece that is being fetched, or held by a read, is in none.
URGENT, LATER = "to be fetched for a read", "to be fetched ahead"
AHEAD, USED = "fetched and not read yet", "read before"

Ranges = Sequence[tuple[Origin, int, int]]
Key = tuple[str, str, int, int]


@dataclass(eq=False, slots=True)
class _Piece:
    """A streamed range of a file, with its content or its error once it was fetched."""

    origin: Origin
    start: int
    stop: int
    content: bytes | None = None
    error: Exception | None = None
    readers: int = 0
    queue: str | None = None

    @property
    def key(self) -> Key:
        return self.origin.url, self.origin.tag or "", self.start, self.stop

    def __len__(self) -> int:
        return self.stop - self.start


class Streams:
    """A cache of ranges of remote files. Any thread may read; none keeps the process alive.

    At most `network.connections` requests run at once, and at most `network.cache_bytes` are held;
    `held_bytes` counts all pieces, those being fetched included.
    """

    def __init__(self, network: NetSettings):
        self.network, self.held_bytes = network, 0
        self._longest = max(1, min(REQUEST_BYTES, network.cache_bytes // network.connections))
        self._pieces: dict[Key, _Piece] = {}
        # Ordered sets, the oldest first.
        self._queues: dict[str, dict[_Piece, None]] = {q: {} for q in (URGENT, LATER, AHEAD, USED)}
        self._workers = 0
        self._changed = Condition()
        self._closed = Event()
        weakref.finalize(self, self._closed.set)

    def read(self, ranges: Ranges) -> list[bytes]:
        """Return the streamed bytes of ranges, (origin, start, stop), in order; some cached."""
        cuts = [self._cut(*range_) for range_ in ranges]
        contents: dict[Key, bytes] = {}
        held: deque[_Piece] = deque()
        with self._changed:
            try:
                cached, missing = self._look_up(cuts)
                for piece in cached:  # held first, or what is fetched might displace it
                    self._hold(piece, held)
                for piece in missing:
                    make_room = partial(self._make_room, len(piece), (USED, AHEAD))
                    while held and not make_room():
                        self._take(held, contents)
                    self._wait(make_room)  # until other reads release what they hold
                    self._hold(self._pieces.get(piece.key) or self._add(piece), held)
                while held:
                    self._take(held, contents)
            finally:
                for piece in held:
                    self._release(piece)
        return [b"".join(contents[piece.key] for piece in pieces) for pieces in cuts]

    def expect(self, ranges: Ranges) -> None:
        """Stream these ranges in the background, as far as there is room; returns at once.

        They displace what was read before, not what was expected and not read yet. A failure is
        left to the read that needs the range, which fetches it again.
        """
        cuts = [self._cut(*range_) for range_ in ranges]
        with self._changed:
            cached, missing = self._look_up(cuts)
            for piece in cached:
                if piece.queue == USED:
                    self._move(piece, AHEAD)
            for piece in missing:
                if not self._make_room(len(piece), (USED,)):
                    break
                self._add(piece)

    def close(self) -> None:
        """Start no more requests of streams; reads that wait fail."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()

    # ---- Pieces; callers hold the lock, except those of `_cut` ----

    def _cut(self, origin: Origin, start: int, stop: int) -> list[_Piece]:
        if not 0 <= start <= stop <= origin.size:
            raise NetError(
                f"{hide(origin.url)}: bytes {start} to {stop} requested, expected a range of its "
                f"{origin.size} bytes"
            )
        starts = range(start, stop, self._longest)
        return [_Piece(origin, at, min(at + self._longest, stop)) for at in starts]

    def _look_up(self, cuts: list[list[_Piece]]) -> tuple[list[_Piece], list[_Piece]]:
        """Return the streamed pieces, cached and missing; each once, those of a file in a row."""
        pieces = {piece.key: piece for pieces in cuts for piece in pieces}
        keys = sorted(pieces)
        cached = [self._pieces[key] for key in keys if key in self._pieces]
        return cached, [pieces[key] for key in keys if key not in self._pieces]

    def _make_room(self, size: int, displaced: tuple[str, ...]) -> bool:
        """Drop streamed pieces of these queues until `size` more bytes fit; return whether so."""
        while self.held_bytes + size > self.network.cache_bytes:
            piece = next((piece for queue in displaced for piece in self._queues[queue]), None)
            if piece is None:
                return False
            self._drop(piece)
        return True

    def _add(self, piece: _Piece) -> _Piece:
        self._pieces[piece.key] = piece
        self.held_bytes += len(piece)
        self._move(piece, LATER)
        if self._workers < self.network.connections:
            self._workers += 1
            arguments = (weakref.ref(self), self.network, self._closed)
            Thread(target=_work, args=arguments, daemon=True).start()
        return piece

    def _drop(self, piece: _Piece) -> None:
        self._move(piece, None)
        del self._pieces[piece.key]
        self.held_bytes -= len(piece)

    def _move(self, piece: _Piece, queue: str | None) -> None:
        if piece.queue is not None:
            del self._queues[piece.queue][piece]
        piece.queue = queue
        if queue is not None:
            self._queues[queue][piece] = None

    def _hold(self, piece: _Piece, held: deque[_Piece]) -> None:
        piece.readers += 1
        held.append(piece)
        if piece.queue != URGENT:
            self._move(piece, URGENT if piece.queue == LATER else None)

    def _take(self, held: deque[_Piece], contents: dict[Key, bytes]) -> None:
        """Wait for the first held piece of a stream, take its bytes and release it."""
        piece = held[0]
        self._wait(lambda: piece.content or piece.error)
        if piece.error:
            raise piece.error
        contents[piece.key] = piece.content
        self._release(held.popleft())

    def _release(self, piece: _Piece) -> None:
        piece.readers -= 1
        if not piece.readers and piece.content:
            self._move(piece, USED)
        elif not piece.readers and piece.queue == URGENT:
            self._drop(piece)
        self._changed.notify_all()

    def _wait(self, until: Callable[[], object]) -> None:
        self._changed.wait_for(lambda: self._closed.is_set() or until())
        if self._closed.is_set():
            raise NetError("streams closed while they are read, expected them to stay open")

    # ---- Called by the threads ----

    def _next_request(self) -> list[_Piece]:
        """Return the pieces of the stream's next request; none ends the thread."""
        with self._changed:
            request: list[_Piece] = []
            for piece in self._queues[URGENT] or self._queues[LATER]:
                if request and not self._joins(request, piece):
                    break
                request.append(piece)
            for piece in request:
                self._move(piece, None)
            if not request:
                self._workers -= 1
            return request

    def _joins(self, request: list[_Piece], piece: _Piece) -> bool:
        first, last = request[0], request[-1]
        near = 0 <= piece.start - last.stop <= min(GAP_BYTES, len(piece))
        fits = piece.stop - first.start <= self._longest
        return near and fits and piece.key[:2] == first.key[:2]

    def _finish(
        self, request: list[_Piece], contents: list[bytes], error: Exception | None
    ) -> None:
        with self._changed:
            for number, piece in enumerate(request):
                if error:
                    piece.error = error
                    self._drop(piece)
                else:
                    piece.content = contents[number]
                    if not piece.readers:
                        self._move(piece, AHEAD)
            self._changed.notify_all()


def _work(streams_of: Callable[[], Streams | None], network: NetSettings, closed: Event) -> None:
    """Fetch for streams until nothing is queued; a request keeps no streams alive."""
    while (streams := streams_of()) is not None and (request := streams._next_request()):
        del streams
        contents, error = [], None
        try:
            contents = _fetch(request, network, closed)
        except Exception as caught:  # whatever it is, the read that needs it raises it
            error = caught
        if (streams := streams_of()) is not None:
            streams._finish(request, contents, error)
        del streams, request, contents, error


def _fetch(request: list[_Piece], network: NetSettings, closed: Event) -> list[bytes]:
    """Return the content of each streamed piece of a request."""
    origin, start, stop = request[0].origin, request[0].start, request[-1].stop
    content = b"".join(remote.read(origin, start, stop, network, closed))
    return [content[piece.start - start : piece.stop - start] for piece in request]
