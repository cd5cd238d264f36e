"""An encrypted, authenticated way between the trainer and the processes of peers, over ZeroMQ.

Each end proves with CURVE that it has its key, one for each process of each peer, so that none can
speak as another. A message is a list of buffers. It travels as their number, and sizes and bytes in
parts of at most `PART_BYTES`, so that whoever knows no key can make the other end take no more.
"""

import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, NamedTuple, Self

import numpy as np
import zmq
from pydantic import Field, ValidationError
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from lockstep.errors import LockstepError, brief
from lockstep.files import write_text
from lockstep.tables.table import AsTuple, Table
from parts.carrier.requests import Buffer, FrameError

PART_BYTES = 2**18
MOST_BUFFERS = 2**17  # in a message
CURVE_OVERHEAD = 2**10  # of CURVE, in a part
WAITING_MESSAGES = 1000  # messages in one direction of a connection, before its sender waits
MOST_STRANGERS = 64  # connections beyond those of the peers
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2000, 10_000
HANDSHAKE_MS = 10_000
RECONNECT_SECONDS = 0.2, 2.0  # seconds before another attempt to connect: first, and at most
NEVER = 2**62
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
CONNECTION_ENDED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
KEY_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
DOOR_EVENTS = (
    zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_MONITOR_STOPPED
)
Z85 = Annotated[str, Field(pattern=r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}$")]
Place = tuple[int, int]  # a peer, and which of its processes


# ---- Keys ----


class Secret(Table):
    """The content of a file of keys, for the encrypted channel."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file of a secret of the channel."""
        if path.stat().st_mode & 0o077:
            raise LockstepError(f"{path}: others may read it, expected mode 600: it is a secret")
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"])) or "no JSON"
            raise LockstepError(f"{path}: {where}, expected the file of a run's secret") from None

    def write(self, path: Path) -> None:
        """Write the file of a secret of the channel, for its owner alone."""
        mask = os.umask(0o077)
        try:
            write_text(path, self.model_dump_json() + "\n")
        finally:
            os.umask(mask)


class PeerSecret(Secret):
    """The channel's keys that the processes of one peer need."""

    peer: Annotated[int, Field(ge=0)]
    """Number of the peer."""
    server: Z85
    """The trainer's public key."""
    private: Annotated[tuple[Z85, ...], Field(min_length=1), AsTuple]
    """Private key of each of the peer's processes."""


class TrainerSecret(Secret):
    """Key of the channel that only the trainer has."""

    private: Z85
    """Its private key."""


class Secrets:
    """The channel's keys of a run, in a folder: `trainer.json`, and `peer-N.json` for each peer.

    Each peer has `ranks` processes. Existing keys stay, since processes that were started by hand
    have them.
    """

    def __init__(self, folder: Path, count: int, ranks: int = 1):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "trainer.json"
        trainer = TrainerSecret.read(path) if path.exists() else None
        self.private = trainer.private if trainer else _new_key()
        self.public = public_of(self.private)
        self.places: dict[str, Place] = {}  # by public key
        for peer in range(count):
            for rank, private in enumerate(self._peer(peer, ranks).private):
                self.places[public_of(private)] = peer, rank
        if trainer is None:  # written last: once it exists, all do
            TrainerSecret(private=self.private).write(path)

    def path(self, peer: int) -> Path:
        """Return a peer's file of keys for the channel."""
        return self.folder / f"peer-{peer}.json"

    def _peer(self, peer: int, ranks: int) -> PeerSecret:
        path = self.path(peer)
        if path.exists():
            secret = PeerSecret.read(path)
            if (secret.peer, secret.server, len(secret.private)) == (peer, self.public, ranks):
                return secret
        new = PeerSecret(
            peer=peer, server=self.public, private=tuple(_new_key() for _ in range(ranks))
        )
        new.write(path)
        return new


def public_of(private: str) -> str:
    """Return the channel's public key of a private one."""
    return zmq.curve_public(private.encode()).decode()


def _new_key() -> str:
    return zmq.curve_keypair()[1].decode()


# ---- The two ends ----


def endpoint(address: str, least: int = 1) -> str:
    """Return the channel's tcp://HOST:PORT of an address; `least` is the lowest port."""
    match = re.fullmatch(r"(?:tcp://)?([^:/\s]+):([0-9]{1,5})", address)
    if not match or not least <= int(match[2]) < 2**16:
        raise LockstepError(f"{brief(address)}: expected HOST:PORT, a port from {least} to 65535")
    return f"tcp://{match[1]}:{int(match[2])}"


class PeerMessage(NamedTuple):
    """A message of a peer's process over the channel."""

    place: Place  # as its key says
    connection: bytes
    buffers: list[Buffer]
    flaw: str = ""  # why it is no message; empty if it is one


class Hub:
    """The trainer's end of the channel: a socket that knows its peers by their keys.

    Port 0 of the address is any free one. A peer may send messages of up to `message_bytes`.
    """

    def __init__(self, address: str, secrets: Secrets, message_bytes: int):
        address = endpoint(address, 0)
        self.secrets, self.message_bytes = secrets, message_bytes
        self.places = secrets.places
        self.connections: dict[Place, bytes] = {}  # the last one of each
        self.context = zmq.Context()
        self.authenticator = ThreadAuthenticator(self.context)
        self.authenticator.start()
        keys = frozenset(key.encode() for key in self.places)
        provider = SimpleNamespace(callback=lambda domain, key: key in keys)
        self.authenticator.configure_curve_callback(credentials_provider=provider)
        self.socket = _prepared(self.context.socket(zmq.ROUTER))
        self.socket.curve_server = True
        self.socket.curve_secretkey = secrets.private.encode()
        self.socket.router_mandatory = True  # who is not there is an error, not silence
        self.door = Door(self.socket, len(self.places) + MOST_STRANGERS)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise LockstepError(f"{address}: {error}, expected an address to listen on") from error
        self.address = self.socket.last_endpoint.decode()
        self.door.port = int(self.address.rpartition(":")[2])

    def send(self, place: Place, buffers: list[Buffer]) -> bytes | None:
        """Send buffers to a peer; return the connection, or None where the process has none."""
        connection = self.connections.get(place)
        if connection is None:
            return None
        try:
            parts = [connection, *_parts(buffers)]
            self.socket.send_multipart(parts, flags=zmq.DONTWAIT, copy=False)
        except zmq.ZMQError:
            return None
        return connection

    def receive(self, seconds: float) -> PeerMessage | None:
        """Return the next message of a peer, or None if none comes in so many seconds."""
        if not self.socket.poll(max(0, round(seconds * 1000))):
            return None
        connection, *parts = self.socket.recv_multipart(copy=False)
        place = self.places[parts[0].get("User-Id")]
        self.connections[place] = connection.bytes
        self.door.note_connection(place, parts[0].get(zmq.SRCFD))
        try:
            return PeerMessage(place, connection.bytes, _joined(parts, self.message_bytes))
        except FrameError as error:
            return PeerMessage(place, connection.bytes, [], str(error))

    def close(self) -> None:
        """Close the trainer's socket once what was sent is on its way, for a second at most."""
        self.door.close()
        self.authenticator.stop()
        self.context.destroy(linger=1000)


class Line:
    """A process's end of the channel. It connects to tcp://HOST:PORT again if a connection ends."""

    def __init__(self, address: str, secret: PeerSecret, rank: int = 0):
        self.address, self.secret, self.rank = address, secret, rank
        self.connected, self.connections = False, 0  # whether, and how many there have been
        self.since = time.monotonic()  # when it was connected, or ceased to be
        self.failures = 0  # attempts since then, and of those:
        self.turned_away = 0  # how often somebody was there, and ended the handshake
        self.context = zmq.Context()
        self._numbers = count()
        self._open()

    def _open(self) -> None:
        self.socket = _prepared(self.context.socket(zmq.DEALER))
        self.socket.immediate = True  # nothing waits for a connection that may never be
        self.socket.reconnect_ivl = -1  # ZeroMQ would not after bytes that it cannot decrypt
        self.socket.connect_timeout = HANDSHAKE_MS
        self.socket.curve_serverkey = self.secret.server.encode()
        private = self.secret.private[self.rank]
        self.socket.curve_publickey = public_of(private).encode()
        self.socket.curve_secretkey = private.encode()
        address = f"inproc://line-{next(self._numbers)}"
        self.socket.monitor(address, HANDSHAKE_FAILED | CONNECTION_ENDED | KEY_REFUSED | CONNECTED)
        self.events = self.context.socket(zmq.PAIR)
        self.events.connect(address)
        self.again: float | None = None  # when to try again
        self.opened = time.monotonic()
        self.socket.connect(self.address)

    def send(self, buffers: list[Buffer]) -> bool:
        """Send buffers to the trainer; return whether there is a connection: they may be lost."""
        self._look()
        if not self.socket.poll(0, zmq.POLLOUT):
            return False
        self.socket.send_multipart([*_parts(buffers)], flags=zmq.DONTWAIT, copy=False)
        return True

    def receive(self, seconds: float) -> list[Buffer] | None:
        """Return what the trainer sent next, or None after so long, or with a new connection."""
        until, connections = time.monotonic() + seconds, self.connections
        while True:
            self._look()
            if self.connections != connections:
                return None
            if self.socket.poll(0):
                return _joined(self.socket.recv_multipart(copy=False), NEVER)
            left = until - time.monotonic()
            if left <= 0:
                return None
            poller = zmq.Poller()
            poller.register(self.socket, zmq.POLLIN)
            poller.register(self.events, zmq.POLLIN)
            poller.poll(1000 * (left if self.connected else min(left, RECONNECT_SECONDS[0])))

    def close(self) -> None:
        """Close the process's socket once what was sent is on its way, for a second at most."""
        self.context.destroy(linger=1000)

    def _look(self) -> None:
        """Take note of what became of the channel's connection; make another in time."""
        now = time.monotonic()
        while self.events.poll(0):
            event = recv_monitor_message(self.events)["event"]
            if event == KEY_REFUSED:
                raise LockstepError(
                    f"{self.address}: the trainer does not know the key of peer "
                    f"{self.secret.peer}, expected a key of its run, from secrets/ in its folder"
                )
            if event == CONNECTED:
                self.connected, self.since, self.failures, self.turned_away = True, now, 0, 0
                self.connections += 1
            if event & HANDSHAKE_FAILED:
                self.turned_away += 1
            if event & CONNECTION_ENDED and self.again is None:
                self._ended(now)
        if not self.connected and self.again is None and now > self.opened + HANDSHAKE_MS / 1000:
            self._ended(now)
        if self.again is not None and now >= self.again:
            self.socket.disable_monitor()
            self.events.close(linger=0)
            self.socket.close(linger=0)
            self._open()

    def _ended(self, now: float) -> None:
        if self.connected:
            self.connected, self.since = False, now
        else:
            self.failures += 1
        first, longest = RECONNECT_SECONDS
        self.again = now + min(first * 2 ** min(self.failures, 10), longest)


def _parts(buffers: list[Buffer]) -> Iterator[Buffer]:
    """Return a message's buffers for the socket: how many, their sizes, their bytes in parts."""
    views = [memoryview(buffer) for buffer in buffers]
    yield struct.pack("<Q", len(views))
    sizes = struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views))
    for view in (memoryview(sizes), *views):
        yield from (view[start : start + PART_BYTES] for start in range(0, view.nbytes, PART_BYTES))


def _joined(parts: list[zmq.Frame], most: int) -> list[Buffer]:
    """Return the message's buffers that these parts make up; let go of each part that is copied."""
    parts.reverse()
    first = parts.pop().buffer
    count = int.from_bytes(first, "little")
    if len(first) != 8 or count > MOST_BUFFERS:
        raise FrameError(f"{brief(bytes(first).hex())}, expected at most {MOST_BUFFERS} buffers")
    sizes = struct.unpack(f"<{count}Q", _take_buffer(8 * count, parts))
    if sum(sizes) > most:
        raise FrameError(f"a message of {sum(sizes)} bytes, expected at most {most}")
    buffers = [_take_buffer(size, parts) for size in sizes]
    if parts:
        raise FrameError(f"{len(parts)} parts more, expected those of {count} buffers")
    return buffers


def _take_buffer(size: int, parts: list[zmq.Frame]) -> Buffer:
    """Take a message's buffer of parts from the end of a list."""
    buffer = np.empty(size, np.uint8) if size > PART_BYTES else None
    part: Buffer = b""
    for start in range(0, size, PART_BYTES):
        expected = min(PART_BYTES, size - start)
        part = parts.pop().buffer if parts else b""
        if len(part) != expected:
            raise FrameError(f"a part of {len(part)} bytes, expected {expected}")
        if buffer is not None:
            buffer[start : start + expected] = np.frombuffer(part, np.uint8)
    return part if buffer is None else buffer.data


def _prepared(socket: zmq.Socket) -> zmq.Socket:
    socket.maxmsgsize = PART_BYTES + CURVE_OVERHEAD  # holds for a stranger's handshake too
    socket.linger = 0
    socket.handshake_ivl = HANDSHAKE_MS
    socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
    socket.rcvhwm = socket.sndhwm = WAITING_MESSAGES
    return socket


# ---- Strangers ----


class Door:
    """A bound on the channel's connections that the trainer has with whoever knows no key.

    ZeroMQ accepts all that come, and each costs a descriptor, and memory for one frame, until its
    handshake ends. A thread watches the socket, which is not bound yet, and cuts off the oldest of
    more than `most` connections over which no peer has spoken; a peer among them connects again.
    """

    def __init__(self, listening: zmq.Socket, most: int):
        self.listening, self.most = listening, most
        self.port = 0  # once it is known: only connections to it are ever cut off
        self._connections: dict[int, None] = {}  # descriptors, the oldest first
        self._peers: dict[Place, int] = {}  # ... over which a peer's process spoke last
        self._lock = threading.Lock()
        address = f"inproc://door-{id(self)}"
        listening.monitor(address, DOOR_EVENTS)
        self._events = listening.context.socket(zmq.PAIR)
        self._events.rcvhwm = 0  # ZeroMQ's thread must never wait for this one
        self._events.connect(address)
        self._thread = threading.Thread(target=self._watch, name="door", daemon=True)
        self._thread.start()

    def note_connection(self, place: Place, descriptor: int) -> None:
        """Take note of the channel's connection over which a peer's process spoke."""
        with self._lock:
            self._peers[place] = descriptor

    def close(self) -> None:
        """Stop watching connections."""
        self.listening.disable_monitor()
        self._thread.join()
        self._events.close()

    def _watch(self) -> None:
        while (event := recv_monitor_message(self._events))["event"] != zmq.EVENT_MONITOR_STOPPED:
            descriptor = event["value"]
            with self._lock:
                self._connections.pop(descriptor, None)
                self._peers = {p: d for p, d in self._peers.items() if d != descriptor}
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._connections[descriptor] = None
                    if len(self._connections) > self.most:
                        self._cut_off_some()

    def _cut_off_some(self) -> None:
        peers = set(self._peers.values())
        strangers = [descriptor for descriptor in self._connections if descriptor not in peers]
        for descriptor in strangers[: max(0, len(strangers) - self.most)]:
            del self._connections[descriptor]
            _cut_off(descriptor, self.port)


def _cut_off(descriptor: int, port: int) -> None:
    """End a connection of ZeroMQ's, if the descriptor is still that of one to this port."""
    with suppress(OSError):
        connection = socket.socket(fileno=descriptor)
        try:
            if connection.getsockname()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()  # ZeroMQ closes it
