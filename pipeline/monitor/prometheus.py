"""The state of a training as Prometheus reads it: text over HTTP, on this machine only."""

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from pipeline.monitor import training
from pipeline.monitor.status import Members
from pipeline.monitor.training import STATES, Training

HOST, PATH = "127.0.0.1", "/metrics"
READERS = 16  # that are answered at the same time
REQUEST_SECONDS = 10.0  # from a connection to the end of its answer
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def text(seen: Training) -> str:
    """Return the numbers of a training in Prometheus's text format; what is not known is absent."""
    now, done = seen.status, seen.status.peers
    states = {f'{{state="{name}"}}': name == seen.state for name in STATES}
    roles = {f'{{role="{name}"}}': len(getattr(done, name)) for name in Members.model_fields}
    table: list[tuple[str, str, float | None | dict[str, int]]] = [
        ("state", "What the training does: 1 for one of the states.", states),
        ("round", "The last round that was taken.", now.round),
        ("rounds", "The run's last round.", now.rounds),
        ("epoch", "Epoch of the last round, from 0.", now.epoch),
        ("loss_nats", "Mean loss of the peers before the last round, per token.", now.loss),
        ("held_out_loss_nats", "Last held-out loss, per token.", now.held_out_loss),
        ("rounds_per_second", "Mean rate of rounds.", now.rounds_per_second),
        ("tokens_per_second", "Mean rate of tokens, of all peers.", now.tokens_per_second),
        ("left_seconds", "Time until the last round, at the mean rate.", now.seconds_left),
        ("message_bytes", "Sent in the last round, mean over peers.", now.message_bytes),
        ("peers", "Peers by what they did in the last round, or why they did not.", roles),
        ("disk_bytes", "Size of the work in progress.", seen.disk_bytes),
        ("disk_free_bytes", "Free space where it is.", seen.free_bytes),
        ("updated_timestamp_seconds", "When this was so, since 1970.", now.updated),
    ]
    lines = []
    for name, help_text, value in table:
        if value is not None:
            lines += [f"# HELP lockstep_{name} {help_text}", f"# TYPE lockstep_{name} gauge"]
            samples = value if isinstance(value, dict) else {"": value}
            lines += [f"lockstep_{name}{labels} {+number}" for labels, number in samples.items()]
    return "".join(f"{line}\n" for line in lines)


@contextmanager
def serving(folder: Path, port: int) -> Iterator[int]:
    """Serve the state of the training in `folder` on a port of this machine, inside the block.

    Args:
      folder: The training's work in progress.
      port: The port; 0 takes any that is free.

    Yields:
      The port.

    Raises:
      LockstepError: The port is taken.
    """
    try:
        server = _Server((HOST, port), partial(_Handler, folder))
    except OSError as error:
        raise LockstepError(
            f"[runtime] metrics_port = {port}: {error.strerror}, expected a free port; 0 serves "
            "no metrics"
        ) from error
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(socketserver.ThreadingTCPServer):  # an HTTPServer would look up the host's name
    allow_reuse_address = True
    daemon_threads = True  # a reader that waits does not keep the trainer from ending

    def __init__(self, *arguments: Any):
        self._free = threading.BoundedSemaphore(READERS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, if not too many wait already."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and end a connection that takes too long, a byte now and then included."""
        end = threading.Timer(REQUEST_SECONDS, _end, (request,))
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._free.release()

    def handle_error(self, *_: object) -> None:
        """Print nothing when a reader has gone away."""


def _end(connection: socket.socket) -> None:
    with suppress(OSError):  # it is over already
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, folder: Path, *arguments: object):
        self.folder = folder
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        if self.path != PATH:
            self.send_error(404)
            return
        try:
            body = text(training.read(self.folder)).encode()
        except (LockstepError, OSError):  # never written, as on a full disk; or the training ends
            self.send_error(503)
            return
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: standard error is for a user's mistakes."""
