"""Simulated time: what a peer's speed and links, from `[links]`, make of its tokens and bytes."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from pipeline.errors import LockstepError

PerPeer = float | Sequence[float]  # one number for all peers, or one for each


class Links(Protocol):
    """The `[links]` table; each value is one number, or a list with one number per peer."""

    @property
    def tokens_per_second(self) -> PerPeer: ...
    @property
    def latency_seconds(self) -> PerPeer: ...
    @property
    def upload_mbps(self) -> PerPeer: ...
    @property
    def download_mbps(self) -> PerPeer: ...


def arrivals(
    links: Links, receivers: Sequence[int], tokens: Mapping[int, int], sizes: Mapping[int, int]
) -> dict[int, float]:
    """Return the seconds from the round's start until each peer's message is at every receiver.

    A peer trains, then uploads once; each receiver downloads the others' messages one after the
    other as they become available, so that a slow downlink delays everything behind it.

    Args:
      links: The `[links]` table.
      receivers: The peers that need the messages, the senders among them.
      tokens: Tokens that each sender trains on.
      sizes: Bytes of each sender's message.
    """
    sent = {
        peer: tokens[peer] / _of(links, "tokens_per_second", peer)
        + (_of(links, "latency_seconds", peer) + _transfer(size, _of(links, "upload_mbps", peer)))
        for peer, size in sizes.items()
    }
    arrived = dict(sent)
    for receiver in receivers:
        mbps, free = _of(links, "download_mbps", receiver), 0.0
        for peer in sorted(sent, key=lambda peer: (sent[peer], peer)):
            if peer != receiver:
                free = max(free, sent[peer]) + _transfer(sizes[peer], mbps)
                arrived[peer] = max(arrived[peer], free)
    return dict(sorted(arrived.items()))


def check_seconds(links: Links, verifier: int, peer: int, *, tokens: int, size: int) -> float:
    """Return the seconds until a verifier has fetched a peer's state and taken its step.

    Args:
      links: The `[links]` table.
      verifier: Who takes the step again.
      peer: Whose state it fetches.
      tokens: Tokens of the step.
      size: Bytes of the state.
    """
    return _fetch(links, verifier, peer, size) + tokens / _of(links, "tokens_per_second", verifier)


def load_seconds(links: Links, peer: int, *, size: int) -> float:
    """Return the seconds in which a peer that joins fetches the params, from many others at once:
    its own downlink is what limits it.

    Args:
      links: The `[links]` table.
      peer: Who joins.
      size: Bytes of the params and of what the optimizer shares.
    """
    mbps = _of(links, "download_mbps", peer)
    return _of(links, "latency_seconds", peer) + _transfer(size, mbps)


def _fetch(links: Links, receiver: int, sender: int, size: int) -> float:
    mbps = min(_of(links, "upload_mbps", sender), _of(links, "download_mbps", receiver))
    return _of(links, "latency_seconds", sender) + _transfer(size, mbps)


def _transfer(size: int, mbps: float) -> float:
    return size * 8 / (mbps * 1e6)


def _of(links: Links, name: str, peer: int) -> float:
    value = getattr(links, name)
    if isinstance(value, int | float):
        return value
    if peer >= len(value):
        raise LockstepError(
            f"[links] {name}: {len(value)} numbers and a peer {peer}, expected one for each peer"
        )
    return value[peer]
