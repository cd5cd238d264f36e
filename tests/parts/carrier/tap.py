"""A bad network between a peer's process and its trainer, on loopback."""

import socket
import threading
import time
from contextlib import suppress

HARMS = {
    "spoil": lambda data, at: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
    "lose": lambda data, at: data[:at] + data[at + 1 :],
    "double": lambda data, at: data[: at + 1] + data[at:],
}

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
COMMAND = b"\x06"  # and its length, in 8 bytes


def stranger(port: int, says: bytes = b"") -> socket.socket:
    """A connection of somebody who knows no key."""
    connection = socket.create_connection(("127.0.0.1", port), 10)
    connection.sendall(says)
    return connection


class Tap:
    """TCP connections to a port here that can be cut, held back, or harmed on their way.

    harm: What befalls one byte of what passes next, by direction: up, to the trainer, or down.
    """

    def __init__(self, port: int):
        self.port, self.delay, self.dropping = port, 0.0, False
        self.harm: dict[str, str] = {}
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.open: list[socket.socket] = []
        self.count = 0
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.port), 5)
            except OSError:
                near.close()
                continue
            self.count += 1
            self.open += [near, far]
            for one, other, way in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self.pump, args=(one, other, way), daemon=True).start()

    def pump(self, one: socket.socket, other: socket.socket, way: str) -> None:
        try:
            while data := one.recv(2**16):
                time.sleep(self.delay)
                if self.dropping:  # what ZeroMQ cannot repair: the stream ends
                    break
                if harm := self.harm.pop(way, ""):
                    data = HARMS[harm](data, len(data) // 2)
                other.sendall(data)
        except OSError:
            pass
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut(self) -> None:
        for one in self.open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self.open.clear()

    def close(self) -> None:
        self.listener.close()
        self.cut()
