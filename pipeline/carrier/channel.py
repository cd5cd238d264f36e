"""An encrypted, authenticated way between the trainer and the processes of peers, over ZeroMQ.

Each end proves with CURVE that it knows a key of the run's secret, a file that only its owner may
read. Frames have a largest size; whoever sends a larger one is cut off.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator

from pipeline.carrier.frames import HEADER_BYTES, Buffer
from pipeline.errors import LockstepError
from pipeline.stage.artifacts import write_text

HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2000, 10_000


class Secret(NamedTuple):
    """A run's keys, in ZeroMQ's Z85.

    server, server_private: The trainer's. client, client_private: Those of its peers' processes.
    """

    server: str
    server_private: str
    client: str
    client_private: str

    @classmethod
    def new(cls) -> "Secret":
        """Return new keys."""
        server, client = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(*(key.decode() for key in (*server, *client)))

    @classmethod
    def read(cls, path: Path) -> "Secret":
        """Read the file of a run's secret.

        Raises:
          LockstepError: It is not such a file, or others may read it.
        """
        if path.stat().st_mode & 0o077:
            raise LockstepError(f"{path}: others may read it, expected mode 600: it is a secret")
        try:
            return cls(**json.loads(path.read_text()))
        except (TypeError, ValueError) as error:
            raise LockstepError(f"{path}: expected a run's secret of 4 keys") from error

    def write(self, path: Path) -> None:
        """Write the file, for its owner only."""
        mask = os.umask(0o077)
        try:
            write_text(path, json.dumps(self._asdict()) + "\n")
        finally:
            os.umask(mask)


class Hub:
    """The trainer's end: a socket that knows its peers by name.

    Args:
      address: tcp://HOST:PORT; port 0 is any free one.
      secret: The run's keys.
      frame_bytes: Size of the largest frame that a peer may send.
    """

    def __init__(self, address: str, secret: Secret, frame_bytes: int):
        self.context = zmq.Context()
        self.authenticator = ThreadAuthenticator(self.context)
        self.authenticator.start()
        self.authenticator.configure_curve_callback(credentials_provider=_Only(secret.client))
        self.socket = _prepared(self.context.socket(zmq.ROUTER), frame_bytes)
        self.socket.curve_server = True
        self.socket.curve_publickey = secret.server.encode()
        self.socket.curve_secretkey = secret.server_private.encode()
        self.socket.router_mandatory = True  # who is not there is an error, not silence
        self.socket.router_handover = True  # a process that was started again takes its name
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise LockstepError(f"{address}: {error}, expected an address to listen on") from error
        self.address = self.socket.last_endpoint.decode()

    def send(self, name: bytes, buffers: list[Buffer]) -> bool:
        """Send buffers; return whether there is somebody to send them to."""
        try:
            self.socket.send_multipart([name, *buffers], copy=False)
        except zmq.ZMQError:
            return False
        return True

    def receive(self, seconds: float) -> tuple[bytes, list[Buffer]] | None:
        """Return who sent what next, or None after so long without anything."""
        if not self.socket.poll(max(0, round(seconds * 1000))):
            return None
        name, *frames = self.socket.recv_multipart(copy=False)
        return name.bytes, [frame.buffer for frame in frames]

    def close(self) -> None:
        """Close the socket, and drop what was not sent."""
        self.authenticator.stop()
        self.context.destroy(linger=0)


class Line:
    """A process's end.

    Args:
      address: The trainer's.
      secret: The run's keys.
      name: Name of the peer.
      frame_bytes: Size of the largest frame that the trainer may send.
    """

    def __init__(self, address: str, secret: Secret, name: bytes, frame_bytes: int):
        self.context = zmq.Context()
        self.socket = _prepared(self.context.socket(zmq.DEALER), frame_bytes)
        self.socket.routing_id = name
        self.socket.curve_serverkey = secret.server.encode()
        self.socket.curve_publickey = secret.client.encode()
        self.socket.curve_secretkey = secret.client_private.encode()
        self.socket.connect(address)

    def send(self, buffers: list[Buffer]) -> None:
        """Send buffers, now or when there is a connection."""
        self.socket.send_multipart(buffers, copy=False)

    def receive(self, seconds: float) -> list[Buffer] | None:
        """Return what the trainer sent next, or None after so long without anything."""
        if not self.socket.poll(round(seconds * 1000)):
            return None
        return [frame.buffer for frame in self.socket.recv_multipart(copy=False)]

    def close(self) -> None:
        """Close the socket once what was sent is on its way, for a second at most."""
        self.context.destroy(linger=1000)


class _Only:
    """Lets in who has one public key."""

    def __init__(self, key: str):
        self.key = key.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        del domain
        return key == self.key


def _prepared(socket: zmq.Socket, frame_bytes: int) -> zmq.Socket:
    socket.maxmsgsize = max(frame_bytes, HEADER_BYTES)
    socket.linger = 0
    socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
    socket.rcvhwm = socket.sndhwm = 0  # one request at a time is the limit
    return socket
