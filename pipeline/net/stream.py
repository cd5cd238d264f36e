"""Tokens read from where they lie while training: by ranges, ahead of need, in bounded memory.

What is kept are exactly the ranges asked for, a long one in pieces, each under its file, version,
start and stop: who expects a range and reads it later names it in the same way. One request brings
pieces of a file that touch, or that have less between them than the second is long: so a round of
sequences in a row is a few requests, a shuffled sequence is one of its own, and at most twice the
bytes asked for are fetched. A piece counts from when it is asked for until it is forgotten.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Condition, Event, Thread

from pipeline.errors import LockstepError
from pipeline.net import remote
from pipeline.net.redact import hide
from pipeline.net.remote import Origin
from pipeline.runfile.network import Broken, Network, Patience

REQUEST_BYTES = 2**21  # at most, so that connections share a long range
GAP_BYTES = 2**14  # at most, between two pieces of a request

# Where a piece waits; one that is being fetched, or that a read holds, waits nowhere.
URGENT, LATER = "to be fetched for a read", "to be fetched ahead"
AHEAD, USED = "fetched and not read yet", "read before"

Wanted = Sequence[tuple[Origin, int, int]]
Key = tuple[str, str, int, int]


@dataclass(eq=False, slots=True)
class _Piece:
    """A range of a file: its content once it is there, or the error because of which it is not."""

    origin: Origin
    start: int
    stop: int
    content: bytes | None = None
    error: Exception | None = None
    readers: int = 0
    waits: str | None = None

    @property
    def key(self) -> Key:
        return self.origin.url, self.origin.tag or "", self.start, self.stop

    def __len__(self) -> int:
        return self.stop - self.start


class Streams:
    """Ranges of files that lie elsewhere. Any thread may ask; none keeps the process alive.

    Args:
      network: at most `connections` requests run at once, and at most `cache_bytes` are held.

    Attributes:
      held_bytes: of all pieces, those on their way included.
    """

    def __init__(self, network: Network):
        self.network, self.held_bytes = network, 0
        self._longest = max(1, min(REQUEST_BYTES, network.cache_bytes // network.connections))
        self._pieces: dict[Key, _Piece] = {}
        # Ordered sets, the oldest first.
        self._waiting: dict[str, dict[_Piece, None]] = {w: {} for w in (URGENT, LATER, AHEAD, USED)}
        self._workers = 0
        self._changed = Condition()
        self._closed = Event()
        weakref.finalize(self, self._closed.set)

    def read(self, wanted: Wanted) -> list[bytes]:
        """The bytes of these ranges, in the order asked; what is not there yet is fetched.

        Args:
          wanted: (origin, start, stop) each, in bytes.

        Raises:
          LockstepError: a range lies outside its file, or cannot be fetched.
        """
        asked = [self._cut(*range_) for range_ in wanted]
        contents: dict[Key, bytes] = {}
        held: deque[_Piece] = deque()
        with self._changed:
            try:
                there, missing = self._look(asked)
                for piece in there:  # held first, or what is fetched might displace it
                    self._hold(piece, held)
                for piece in missing:
                    make_room = partial(self._make_room, len(piece), (USED, AHEAD))
                    while held and not make_room():
                        self._take(held, contents)
                    self._wait(make_room)  # until other reads let go of what they hold
                    self._hold(self._pieces.get(piece.key) or self._add(piece), held)
                while held:
                    self._take(held, contents)
            finally:
                for piece in held:
                    self._release(piece)
        return [b"".join(contents[piece.key] for piece in pieces) for pieces in asked]

    def expect(self, wanted: Wanted) -> None:
        """Has these ranges fetched in the background, as far as there is room; returns at once.

        They displace what was read before, not what was expected and not read yet. What fails is
        asked for again by the read that needs it.
        """
        asked = [self._cut(*range_) for range_ in wanted]
        with self._changed:
            there, missing = self._look(asked)
            for piece in there:
                if piece.waits == USED:
                    self._wait_as(AHEAD, piece)
            for piece in missing:
                if not self._make_room(len(piece), (USED,)):
                    break
                self._add(piece)

    def close(self) -> None:
        """Begins no more requests; a read that waits fails."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()

    # ---- Pieces; who calls these, but for the first, has the lock ----

    def _cut(self, origin: Origin, start: int, stop: int) -> list[_Piece]:
        if not 0 <= start <= stop <= origin.size:
            raise LockstepError(
                f"{hide(origin.url)}: bytes {start} to {stop} are wanted, expected a range of its "
                f"{origin.size} bytes"
            )
        starts = range(start, stop, self._longest)
        return [_Piece(origin, at, min(at + self._longest, stop)) for at in starts]

    def _look(self, asked: list[list[_Piece]]) -> tuple[list[_Piece], list[_Piece]]:
        """Which pieces are there, and which are missing; each once, those of a file in a row."""
        pieces = {piece.key: piece for pieces in asked for piece in pieces}
        keys = sorted(pieces)
        there = [self._pieces[key] for key in keys if key in self._pieces]
        return there, [pieces[key] for key in keys if key not in self._pieces]

    def _make_room(self, size: int, displaced: tuple[str, ...]) -> bool:
        """Forgets pieces that wait as these do until `size` more bytes fit; whether they do."""
        while self.held_bytes + size > self.network.cache_bytes:
            piece = next((piece for waits in displaced for piece in self._waiting[waits]), None)
            if piece is None:
                return False
            self._forget(piece)
        return True

    def _add(self, piece: _Piece) -> _Piece:
        self._pieces[piece.key] = piece
        self.held_bytes += len(piece)
        self._wait_as(LATER, piece)
        if self._workers < self.network.connections:
            self._workers += 1
            arguments = (weakref.ref(self), self.network, self._closed)
            Thread(target=_work, args=arguments, daemon=True).start()
        return piece

    def _forget(self, piece: _Piece) -> None:
        self._wait_as(None, piece)
        del self._pieces[piece.key]
        self.held_bytes -= len(piece)

    def _wait_as(self, waits: str | None, piece: _Piece) -> None:
        if piece.waits is not None:
            del self._waiting[piece.waits][piece]
        piece.waits = waits
        if waits is not None:
            self._waiting[waits][piece] = None

    def _hold(self, piece: _Piece, held: deque[_Piece]) -> None:
        piece.readers += 1
        held.append(piece)
        if piece.waits != URGENT:
            self._wait_as(URGENT if piece.waits == LATER else None, piece)

    def _take(self, held: deque[_Piece], contents: dict[Key, bytes]) -> None:
        """Waits until the first piece held is there, takes its bytes and lets go of it."""
        piece = held[0]
        self._wait(lambda: piece.content or piece.error)
        if piece.error:
            raise piece.error
        contents[piece.key] = piece.content
        self._release(held.popleft())

    def _release(self, piece: _Piece) -> None:
        piece.readers -= 1
        if not piece.readers and piece.content:
            self._wait_as(USED, piece)
        elif not piece.readers and piece.waits == URGENT:
            self._forget(piece)
        self._changed.notify_all()

    def _wait(self, until: Callable[[], object]) -> None:
        self._changed.wait_for(lambda: self._closed.is_set() or until())
        if self._closed.is_set():
            raise LockstepError("streams closed while they are read, expected them to stay open")

    # ---- What the threads call ----

    def _next(self) -> list[_Piece]:
        """The pieces of the next request; none ends the thread."""
        with self._changed:
            request: list[_Piece] = []
            for piece in self._waiting[URGENT] or self._waiting[LATER]:
                if request and not self._goes_with(request, piece):
                    break
                request.append(piece)
            for piece in request:
                self._wait_as(None, piece)
            if not request:
                self._workers -= 1
            return request

    def _goes_with(self, request: list[_Piece], piece: _Piece) -> bool:
        first, last = request[0], request[-1]
        near = 0 <= piece.start - last.stop <= min(GAP_BYTES, len(piece))
        fits = piece.stop - first.start <= self._longest
        return near and fits and piece.key[:2] == first.key[:2]

    def _done(self, request: list[_Piece], contents: list[bytes], error: Exception | None) -> None:
        with self._changed:
            for number, piece in enumerate(request):
                if error:
                    piece.error = error
                    self._forget(piece)
                else:
                    piece.content = contents[number]
                    if not piece.readers:
                        self._wait_as(AHEAD, piece)
            self._changed.notify_all()


def _work(streams_of: Callable[[], Streams | None], network: Network, closed: Event) -> None:
    """Fetches until nothing waits; meanwhile, nothing here keeps the streams alive."""
    while (streams := streams_of()) is not None and (request := streams._next()):
        del streams
        contents, error = [], None
        try:
            contents = _fetch(request, network, closed)
        except Exception as found:  # whatever it is, the read that needs it raises it
            error = found
        if (streams := streams_of()) is not None:
            streams._done(request, contents, error)
        del streams, request, contents, error


def _fetch(request: list[_Piece], network: Network, closed: Event) -> list[bytes]:
    """The content of each piece of a request, going on where a broken connection stopped."""
    origin, start, stop = request[0].origin, request[0].start, request[-1].stop
    content, at, name = bytearray(stop - start), start, hide(origin.url)
    reader, patience = remote.open_origin(origin, network), Patience(network.attempts)
    while at < stop:
        if closed.is_set():
            raise LockstepError(f"{name}: closed while it was read, expected it to stay open")
        try:
            for data in reader.read(at, stop):
                if len(data) > stop - at:
                    raise LockstepError(
                        f"{name}: more bytes came than asked for, expected {stop - start} bytes "
                        f"from offset {start}"
                    )
                content[at - start : at - start + len(data)] = data
                at += len(data)
                if data:
                    patience.progressed()
            if at < stop:
                raise Broken("the answer ended early")
        except Broken as error:
            try:
                patience.failed(error)
            except Broken:
                said = str(error) if str(error).startswith(name) else f"{name}: {error}"
                raise LockstepError(
                    f"{said}, {network.attempts} times in a row, expected {stop - at} bytes from "
                    f"offset {at}"
                ) from None
    view = memoryview(content)
    return [bytes(view[piece.start - start : piece.stop - start]) for piece in request]
