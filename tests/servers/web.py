"""Servers on the loopback interface, for as long as a test needs them, honest or not."""

import json
import re
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Literal, Self
from urllib.parse import parse_qsl, unquote, urlsplit

PIECE_BYTES = 2**14  # written at once where a server is slow
LOOK_SECONDS = 0.02  # between two looks whether a client has gone


@dataclass
class Answer:
    """What is about to be sent.

    Attributes:
      status: with 0 the body alone is sent, which is no HTTP.
      reason: what follows the status; None: the usual words.
      headers: by name.
      body: what follows them, whatever Content-Length says.
      path: what was asked for.
      whole: where the body is a file or a range of one, the file.
      name: under which the body's bytes are counted; None: they are not.
      before: bytes that are sent before it.
      then: what becomes of the connection; "close" and "reset" end it, in order or with an error,
        "stall" leaves it open and sends nothing, "flood" sends the body over and over.
      pause: seconds between two bytes of the body.
    """

    status: int
    headers: dict[str, str]
    body: bytes | memoryview
    path: str
    whole: bytes | memoryview = b""
    name: str | None = None
    reason: str | None = None
    before: bytes = b""
    then: Literal["keep", "close", "reset", "stall", "flood"] = "keep"
    pause: float = 0.0


@dataclass(kw_only=True)
class Served:
    """What every server here has.

    Attributes:
      faults: what goes wrong: each is given what is asked, as "GET /path?query", and the answer,
        and returns the answer that is sent (misbehaviour.py).
      seen: what was asked: method, path and Authorization.
      refuse: answers requests whose "METHOD /path" match: (pattern, status); with the request's
        own Authorization in its words.
      sent: bytes of the bodies of downloads, by the file's name.
      bytes_per_second: of one download; None: as fast as it goes.
      address: of the server.
      tls: of https://; None: http://.
    """

    faults: list[Callable[[str, Answer], Answer]] = field(default_factory=list)
    seen: list[tuple[str, str, str | None]] = field(default_factory=list)
    refuse: tuple[str, int] | None = None
    sent: dict[str, int] = field(default_factory=dict)
    bytes_per_second: float | None = None
    address: str = ""
    tls: ssl.SSLContext | None = None
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    handler: ClassVar[type["Handler"]]

    @contextmanager
    def serving(self) -> Iterator[Self]:
        """Serves on a free port."""
        with serving(self.handler, self) as self.address:
            yield self


class Handler(BaseHTTPRequestHandler):
    """A request, taken apart, and an answer in one call."""

    protocol_version = "HTTP/1.1"  # or each request would be a connection
    disable_nagle_algorithm = True  # or each answer would wait 40 ms for the client's word
    served: Served

    def log_message(self, *_: object) -> None:
        pass

    @property
    def place(self) -> str:
        """The path, as it is meant."""
        return unquote(urlsplit(self.path).path)

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def refused(self) -> bool:
        """Notes what is asked, and refuses it where that is said of it."""
        said, refuse = self.headers.get("Authorization"), self.served.refuse
        self.served.seen.append((self.command, self.path, said))
        if refuse is None or not re.search(refuse[0], f"{self.command} {self.path}"):
            return False
        self.say(refuse[1], f"we do not like {said}, that is {(said or 'x').split()[-1]}")
        return True

    def say(self, status: int, words: str) -> None:
        """Sends a status and why, as such a server words it."""
        self.answer(status, f"{words}\n".encode(), Content_Type="text/plain")

    def answer(self, status: int, content: bytes | dict | list = b"", **headers: str) -> None:
        """Sends it; `X_Some_Header="..."`. Content-Length may say more than is sent."""
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers = {"Content_Type": "application/json"} | headers
        self.send(Answer(status, _dashed(headers), content, self.path))

    def send_file(self, name: str, content: bytes | memoryview, **headers: str) -> None:
        """Sends a file, or the range of it that is asked for; counts the bytes under the name."""
        body = content = memoryview(content)
        status, said, size = 200, {"Accept-Ranges": "bytes"} | _dashed(headers), len(content)
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(asked[1]), min(int(asked[2] or size), size - 1)
            if first > last:
                self.answer(416, Content_Range=f"bytes */{size}")
                return
            status, body = 206, content[first : last + 1]
            said["Content-Range"] = f"bytes {first}-{last}/{size}"
        self.send(Answer(status, said, body, self.path, content, name))

    def send(self, answer: Answer) -> None:
        """Sends an answer, or what the server's faults make of it."""
        answer.headers = {"Content-Length": str(len(answer.body))} | answer.headers
        for fault in list(self.served.faults):
            answer = fault(f"{self.command} {unquote(self.path)}", answer)
        self.wfile.write(answer.before)
        if answer.status:
            self.send_response(answer.status, answer.reason)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
        if self.command != "HEAD" or not answer.status:
            self._write(answer)
            if int(answer.headers.get("Content-Length", 0)) > len(answer.body):
                self.close_connection = True
        self._end(answer)

    def _write(self, answer: Answer) -> None:
        rate = 1 / answer.pause if answer.pause else self.served.bytes_per_second
        piece_bytes = len(answer.body) or 1
        if rate is not None:
            piece_bytes = 1 if answer.pause else PIECE_BYTES
            # what lies in the system's own buffers has been sent, and is lost with a client
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIECE_BYTES)
        began = time.monotonic()
        for start in range(0, len(answer.body), piece_bytes):
            if self.server.stopping.is_set():
                return
            piece = answer.body[start : start + piece_bytes]
            self._count(answer, len(piece))  # before a client may look; some goes even on failure
            self.wfile.write(piece)
            if rate is not None:
                time.sleep(max(0.0, began + (start + len(piece)) / rate - time.monotonic()))

    def _count(self, answer: Answer, count: int) -> None:
        if answer.name is not None:
            with self.served.lock:
                self.served.sent[answer.name] = self.served.sent.get(answer.name, 0) + count

    def _end(self, answer: Answer) -> None:
        if answer.then == "keep":
            return
        self.close_connection = True
        if answer.then == "reset":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.rfile.close()  # or the socket would stay open, and end in order
            self.connection.close()
        while answer.then == "flood" and not self.server.stopping.is_set():
            self.wfile.write(answer.body)
            self._count(answer, len(answer.body))
        while answer.then == "stall" and not self.server.stopping.is_set():
            if select.select([self.connection], [], [], LOOK_SECONDS)[0]:
                return  # it has gone, or it asks for more, which it will not get


def _dashed(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


@contextmanager
def serving(handler: type[Handler], served: Served) -> Iterator[str]:
    """Serves on a free port; yields the address."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128
        stopping = threading.Event()

        def handle_error(self, *_: Any) -> None:
            """A client that was killed is no news."""

    bound_handler = type("Bound", (handler,), {"served": served})
    server = Server(("127.0.0.1", 0), bound_handler)
    if served.tls is not None:
        server.socket = served.tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http{'s' * bool(served.tls)}://127.0.0.1:{server.server_port}"
    finally:
        server.stopping.set()
        server.shutdown()
        thread.join()
        server.server_close()
