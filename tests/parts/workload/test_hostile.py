"""Workers that do anything else than answer: each costs one line, and nothing of it is left."""

import gc
import os
import signal
import socket
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from lockstep import errors
from lockstep.errors import LockstepError
from parts.workload.process import child_group, messages
from parts.workload.process.messages import WorkerError
from parts.workload.python.lockstep_worker import frames
from tests.errors import refused
from tests.linear import WORST, in_time
from tests.parts.workload.fake_workers import gone, start

ANSWERS = {
    "no JSON": ("raw(sock, b'{]')", "answered '{]', expected JSON"),
    "no UTF-8": ("raw(sock, b'\\xff')", "expected JSON"),
    "empty": ("raw(sock, b'')", "a message of 0 bytes, expected 1 to 67108864"),
    "too long": (
        "sock.sendall(struct.pack('>Q', 2**62)); time.sleep(9)",
        "a message of 4611686018427387904 bytes, expected 1 to 67108864",
    ),
    "no object": ("raw(sock, b'[1]')", "found [1], expected a table"),
    "nested": ("raw(sock, b'[' * 200000)", "expected JSON"),
    "wrong id": (
        'raw(sock, b\'{"id": 7, "ok": true, "result": {}}\')',
        "answered with id 7, expected 2",
    ),
    "result no object": ("reply(sock, request, 3)", "result is 3, expected a table"),
    "NaN": ("reply(sock, request, {'loss': float('nan')})", "NaN is not a finite number"),
    "a number of 400 digits": (
        "reply(sock, request, {'loss': 10**400})",
        "... is not a finite number",
    ),
    "half an answer": (
        "sock.sendall(struct.pack('>Q', 9) + b'{'); sys.exit(0)",
        "exited with status 0",
    ),
    "exits": ("print('no room'); sys.exit(3)", "exited with status 3 (its last line is 'no room'"),
    "raises": ("raise ValueError('bad rows')", "its last line is 'ValueError: bad rows'"),
    "is killed": ("os.kill(os.getpid(), 9)", "was ended by SIGKILL (it said nothing"),
    "exits below its child": (
        "import subprocess; subprocess.Popen(['sleep', '99'], close_fds=False); "
        "os.set_inheritable(sock.fileno(), True); "
        "subprocess.Popen(['sleep', '99'], close_fds=False); os._exit(4)",
        "exited with status 4",
    ),
}


def answering(code):
    return f"def answer(sock, request):\n    {code}\nserve(answer)\n"


@contextmanager
def ended(*parts):
    """Expect the error of a worker: a line with these parts."""
    with refused("workload my_model:Model: ", *parts, error=WorkerError) as caught:
        yield caught
    assert len(str(caught.value)) <= errors.LONGEST


@pytest.mark.parametrize("name", ANSWERS)
def test_worker_that_does_not_answer_what_was_asked_is_ended_in_one_line(tmp_path, name):
    code, expected = ANSWERS[name]
    worker = start(tmp_path, answering(code))
    with ended(": gradient: ", expected):
        worker.call("gradient", {"rows": 1})
    assert not worker.running
    assert not list(worker.group.processes())
    with ended("measure: is not running since gradient: "):
        worker.call("measure", {})
    worker.close()


DRIPS = "sock.sendall(struct.pack('>Q', 999))\n    while 1: sock.sendall(b' '); time.sleep(.01)"
DOES_NOT_READ = "sock = connect(); reply(sock, receive(sock), HELLO); time.sleep(99)"


@pytest.mark.parametrize(
    ("body", "length"),
    [(answering("time.sleep(99)"), 1), (answering(DRIPS), 1), (DOES_NOT_READ, 2**25)],
)
def test_worker_that_hangs_drips_or_does_not_read_is_ended_after_its_time(tmp_path, body, length):
    worker = start(tmp_path, body)
    with ended("gradient: no answer in 0.2 s, expected one"):
        worker.call("gradient", {"text": "x" * length}, 0.2)
    assert gone(worker.group.child.pid)


def test_worker_that_answers_with_an_error_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "_secrets", {"hf_secret"})
    said = r"\n ValueError: \x1b[31mhf_secret" + "x" * 900 + r"\n Traceback line 2"
    fails = f"""
    def answer(sock, request):
        if request["method"] == "fails":
            answer = {{"id": request["id"], "ok": False, "error": "{said}"}}
            return raw(sock, json.dumps(answer).encode())
        reply(sock, request, {{"fine": True}})
    serve(answer)
    """
    with closing(start(tmp_path, fails)) as worker:
        with ended(r"fails: ValueError: \x1b[31m...", "worker.log") as caught:
            worker.call("fails", {})
        line = str(caught.value)
        assert "hf_secret" not in line and "Traceback" not in line and len(line) < 700
        assert "Traceback line 2" in (tmp_path / "worker" / "worker.log").read_text()
        assert worker.call("works", {}) == {"fine": True}


def test_request_that_is_no_json_is_not_sent(tmp_path):
    with closing(start(tmp_path, answering("reply(sock, request, {})"))) as worker:
        with ended("gradient: its params are no JSON"):
            worker.call("gradient", {"x": float("nan")})
        assert worker.call("gradient", {}) == {}


def test_worker_says_what_decides_its_bits(tmp_path):
    body = "HELLO['environment'] = {'torch': '2.13', 'threads': 2, 'numpy': None}\nserve(None)"
    with closing(start(tmp_path, body)) as worker:
        assert worker.hello.environment == {"torch": "2.13", "threads": "2", "numpy": "none"}


def saying(hello):
    return f"HELLO = {hello}\nserve(None)"


@pytest.mark.parametrize(
    ("body", "changes", "expected"),
    [
        ("time.sleep(99)", {"start_seconds": 0.5}, "start: did not connect in 0.5 s"),
        ("sock = connect(); time.sleep(99)", {"start_seconds": 4.0}, "hello: no answer in "),
        ("raise RuntimeError('no such GPU')", {}, "'RuntimeError: no such GPU'"),
        ("import not_installed", {}, "ModuleNotFoundError: No module named 'not_installed'"),
        ("", {"python": "no/such/python"}, "no/such/python: No such file or directory"),
        ("", {"config": {"x": float("inf")}}, "start: config is no JSON"),
        (saying("{**HELLO, 'protocol_version': 3}"), {}, "protocol_version is 3"),
        (saying("{**HELLO, 'protocol_version': True}"), {}, "protocol_version is true"),
        (saying("{'protocol_version': 2, 'capabilities': []}"), {}, "workload_name: missing"),
        (saying("{**HELLO, 'capabilities': 'ab'}"), {}, 'capabilities is "ab"'),
        (saying("{**HELLO, 'environment': {'a': [1]}}"), {}, "environment.a is [1]"),
    ],
)
def test_worker_that_does_not_start_or_is_another_is_ended_in_one_line(
    tmp_path, body, changes, expected
):
    with ended(expected):
        start(tmp_path, body, **changes)


def test_a_stranger_that_connects_first_is_not_the_worker(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    real, strangers = socket.create_server, []

    def listening(*args, **kwargs):
        listener = real(*args, **kwargs)
        strangers.append(socket.create_connection(listener.getsockname()))
        return listener

    monkeypatch.setattr(socket, "create_server", listening)
    with closing(start(tmp_path, answering("reply(sock, request, {'me': os.getpid()})"))) as worker:
        assert worker.call("who", {}) == {"me": worker.group.child.pid}
    assert strangers[0].recv(1) == b""  # it was hung up on
    strangers[0].close()
    with ended("did not connect in 0.3 s, and 1 others did"):
        start(tmp_path, "time.sleep(99)", start_seconds=0.3)
    strangers[1].close()


def test_a_launcher_that_starts_the_worker_as_its_child_is_let_in(tmp_path):
    launcher = tmp_path / "python"
    launcher.write_text(f'#!/bin/sh\nsetsid {sys.executable} "$@" &\nwait\n')
    launcher.chmod(0o755)
    body = answering("reply(sock, request, {'me': os.getpid()})")
    with closing(start(tmp_path, body, python=os.fspath(launcher))) as worker:
        pid = worker.call("who", {})["me"]
        assert pid != worker.group.child.pid
    assert gone(pid)


def test_worker_that_floods_its_log_costs_a_bounded_file(tmp_path, monkeypatch):
    monkeypatch.setattr(child_group, "LOG_BYTES", 2**16)
    flood = "[os.write(1, b'a' * 99 + b'\\n') for _ in range(20000)]; reply(sock, request, {})"
    with closing(start(tmp_path, answering(flood))) as worker:
        assert worker.call("gradient", {}) == {}
    log = (tmp_path / "worker" / "worker.log").read_bytes()
    assert len(log) < 2**16 + 100
    assert log.endswith(b"bytes more)\n")


def test_the_log_of_the_worker_before_is_kept_once(tmp_path):
    for said in ("first", "second", "third"):
        with pytest.raises(WorkerError):
            start(tmp_path, f"print('{said}'); sys.exit(1)")
    logs = {path.name: path.read_text() for path in (tmp_path / "worker").glob("*.log*")}
    assert logs == {"worker.log": "third\n", "worker.log.before": "second\n"}


def test_worker_that_forks_leaves_no_process(tmp_path):
    forks = """
    def answer(sock, request):
        for number in range(12):
            if os.fork() == 0:
                if number % 2:
                    os.setsid()  # out of the group and the session
                    if os.fork():
                        os._exit(0)
                for _ in range(400):
                    time.sleep(0.01)
                    if os.fork():  # as a new process each time
                        os._exit(0)
                os._exit(0)
        reply(sock, request, {})
    serve(answer)
    """
    worker = start(tmp_path, forks)
    worker.call("gradient", {})
    assert len(list(worker.group.processes())) >= 4
    worker.close()
    assert not list(worker.group.processes())


def test_worker_that_ignores_its_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("parts.workload.process.worker_process.SHUTDOWN_SECONDS", 0.1)
    stays = """
    import signal
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sock = connect()
    while True:
        reply(sock, receive(sock), HELLO)
    """
    worker = start(tmp_path, stays)
    worker.close()
    assert worker.group.child.returncode == -signal.SIGKILL
    worker.close()  # twice is fine


def test_close_does_not_wait_for_a_call_of_another_thread(tmp_path):
    worker = start(tmp_path, answering("print('here', flush=True); time.sleep(99)"))
    caught = []

    def call():
        try:
            worker.call("gradient", {})
        except WorkerError as error:
            caught.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    while not worker.group.log.last_line():
        time.sleep(0.01)
    worker.close()
    thread.join(10)
    assert not thread.is_alive()
    assert caught and caught[0].startswith(
        "workload my_model:Model: gradient: the worker was ended"
    )


def test_interrupted_call_ends_the_worker_whose_answer_would_be_the_next_calls(tmp_path):
    worker = start(tmp_path, answering("time.sleep(99)"))
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it
    gc.disable()  # what is raised in a callback of the collector is lost, and pytest has one
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            worker.call("gradient", {})
    finally:
        gc.enable()
        signal.signal(signal.SIGINT, before)
    timer.join()
    assert not worker.running
    with pytest.raises(WorkerError, match="gradient was interrupted"):
        worker.call("gradient", {})


def test_values_of_the_users_secrets_are_hidden_in_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "_secrets", set())
    with ended("its last line is '...'") as caught:
        start(tmp_path, "sys.exit(os.environ['MY_TOKEN'])", env={"MY_TOKEN": "abcdefgh1"})
    assert "abcdefgh1" not in str(caught.value)


@pytest.mark.parametrize("env", [{"": "x"}, {"A=B": "x"}, {"A": "\0"}, {"PYTHONPATH": "x"}])
def test_an_environment_that_cannot_be_is_refused(env):
    with pytest.raises(LockstepError, match="worker_env: found .*, expected"):
        child_group.environment_of((), env)


def test_length_of_a_frame_is_bounded_on_our_side_too():
    with pytest.raises(ValueError, match="expected at most"):
        frames.packed({"text": "x" * frames.LONGEST})


def test_no_process_or_thread_is_left_after_a_failed_start(tmp_path):
    before = {thread.ident for thread in threading.enumerate()}
    children = children_here()
    with pytest.raises(WorkerError):
        start(tmp_path, "sys.exit(1)")
    assert not [t for t in threading.enumerate() if t.ident not in before]
    assert children_here() <= children


def children_here() -> set[str]:
    """The processes that this one has started, and that are there."""
    folder = Path("/proc/self/task")
    return {pid for file in folder.glob("*/children") for pid in file.read_text().split()}


def test_the_last_line_of_a_worker_takes_time_in_proportion_to_what_it_said():
    with in_time():
        for text in WORST:
            messages.first_line(text * (10**6 // len(text)))
