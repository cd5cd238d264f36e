"""What goes wrong: a read goes on where it stopped, or says in one line why not."""

from lockstep.errors import LockstepError
from pipeline.net import remote
from pipeline.net.transfers.stream import Streams
from pipeline.runfile import Network
from tests.pipeline.net.stream.far import cut, refused, rested, true


def test_a_broken_connection_goes_on_where_it_stopped(far):
    origin, broken = far.put("a", 10_000), []

    def fault(url: str, at: int) -> None:
        if at in (3_000, 7_000) and at not in broken:
            broken.append(at)
            cut()

    far.fault = fault
    assert Streams(Network(attempts=2)).read([(origin, 0, 10_000)]) == [far.files["a"]]
    assert far.asked == [("a", 0, 10_000), ("a", 3_000, 10_000), ("a", 7_000, 10_000)]


def test_an_answer_that_ends_early_counts_as_broken(far, monkeypatch):
    origin = far.put("a", 10_000)
    monkeypatch.setattr(
        remote, "read_once", lambda o, a, b, *_: far.read_once(o, a, min(b, a + 4_000))
    )
    assert Streams(Network(attempts=2)).read([(origin, 0, 10_000)]) == [far.files["a"]]
    far.files["a"] = far.files["a"][:8_000]
    message = refused(Streams(Network(attempts=2)), (origin, 0, 10_000))
    assert message == (
        "a: the answer ended early, expected 2000 more bytes within 2 attempts; run again to resume"
    )


def test_more_bytes_than_asked_for_are_an_error(far, monkeypatch):
    origin = far.put("a", 10_000)
    monkeypatch.setattr(remote, "read_once", lambda o, a, b, *_: far.read_once(o, a, b + 1))
    assert refused(Streams(Network()), (origin, 10, 500)) == (
        "a: 1 bytes more than requested, expected them up to offset 500"
    )
    assert len(far.asked) == 1


def test_what_fails_in_the_background_is_tried_again_by_the_read(far):
    origin, streams = far.put("a", 10_000), Streams(Network(attempts=2))
    works, far.fault = far.fault, cut
    wanted = [(origin, 0, 10_000)]
    streams.expect(wanted)
    rested(streams)
    assert len(far.asked) == 2 and streams.held_bytes == 0
    assert "a: cut, expected 10000 more bytes within 2 attempts" in refused(streams, *wanted)
    assert len(far.asked) == 4
    far.fault = works
    assert streams.read(wanted) == true(far, wanted)


def test_what_a_reader_refuses_is_not_tried_again(far):
    origin, other = far.put("a", 10_000), far.put("b", 10_000)

    def fault(url: str, at: int) -> None:
        if url == "a":
            raise LockstepError("a: changed while it was read")

    far.fault = fault
    streams = Streams(Network())
    assert refused(streams, (other, 0, 500), (origin, 0, 500)) == "a: changed while it was read"
    assert far.asked.count(("a", 0, 500)) == 1
    assert streams.read([(other, 0, 500)]) == true(far, [(other, 0, 500)])
    rested(streams)
    assert all(piece.readers == 0 for piece in streams._pieces.values())
