"""A bound on the connections that the trainer has open with whoever knows no key.

ZeroMQ accepts all that come, and each costs a descriptor, and memory for one frame, until its
handshake ends. Here the oldest of too many are cut off; a peer that is among them connects again.
"""

import socket
import threading
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from parts.carrier.secret import Place

EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_MONITOR_STOPPED


class Door:
    """Watches, in a thread, the connections that others make to a socket.

    Args:
      listening: The socket, before it is bound.
      most: How many connections may be open over which no peer has said anything.
    """

    def __init__(self, listening: zmq.Socket, most: int):
        self.listening, self.most, self.port = listening, most, 0
        self._open: dict[int, None] = {}  # descriptors, the oldest first
        self._known: dict[Place, int] = {}  # ... over which a peer's process spoke last
        self._lock = threading.Lock()
        address = f"inproc://door-{id(self)}"
        listening.monitor(address, EVENTS)
        self._events = listening.context.socket(zmq.PAIR)
        self._events.rcvhwm = 0  # ZeroMQ's thread must never wait for this one
        self._events.connect(address)
        self._thread = threading.Thread(target=self._watch, name="door", daemon=True)
        self._thread.start()

    def bound(self, port: int) -> None:
        """Take note of the port: only connections to it are ever cut off."""
        self.port = port

    def heard(self, place: Place, descriptor: int) -> None:
        """Take note of the connection over which a peer's process spoke."""
        with self._lock:
            self._known[place] = descriptor

    def close(self) -> None:
        """Stop watching."""
        self.listening.disable_monitor()
        self._thread.join()
        self._events.close()

    def _watch(self) -> None:
        while (said := recv_monitor_message(self._events))["event"] != zmq.EVENT_MONITOR_STOPPED:
            descriptor = said["value"]
            with self._lock:
                self._open.pop(descriptor, None)
                self._known = {p: d for p, d in self._known.items() if d != descriptor}
                if said["event"] == zmq.EVENT_ACCEPTED:
                    self._open[descriptor] = None
                    if len(self._open) > self.most:
                        self._cut_off_some()

    def _cut_off_some(self) -> None:
        peers = set(self._known.values())
        strangers = [descriptor for descriptor in self._open if descriptor not in peers]
        for descriptor in strangers[: max(0, len(strangers) - self.most)]:
            del self._open[descriptor]
            _cut_off(descriptor, self.port)


def _cut_off(descriptor: int, port: int) -> None:
    """End a connection of ZeroMQ's, if the descriptor is still that of one to this port."""
    with suppress(OSError):
        theirs = socket.socket(fileno=descriptor)
        try:
            if theirs.getsockname()[1] == port:
                theirs.shutdown(socket.SHUT_RDWR)
        finally:
            theirs.detach()  # ZeroMQ closes it
