"""A server on the loopback interface, for as long as a test needs it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit


class Handler(BaseHTTPRequestHandler):
    """A request, taken apart, and an answer in one call."""

    protocol_version = "HTTP/1.1"  # or each request would be a connection
    disable_nagle_algorithm = True  # or each answer would wait 40 ms for the client's word

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
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self, status: int, content: bytes | dict | list = b"", **headers: str) -> None:
        """Sends it; `X_Some_Header="..."`. Content-Length may say more than is sent."""
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers = {"Content_Type": "application/json"} | headers
        self.send_response(status)
        for name, value in ({"Content_Length": str(len(content))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
            if int(headers.get("Content_Length", len(content))) > len(content):
                self.close_connection = True


@contextmanager
def serving(handler: type[Handler]) -> Iterator[str]:
    """Serves on a free port; yields the address."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """A client that was killed is no news."""

    server = Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
