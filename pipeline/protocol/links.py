"""Simulated time: seconds that a peer's tokens and bytes take at the speeds of `[links]`."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from pipeline.errors import LockstepError

PerPeer = float | Sequence[float]  # one number for all peers, or one for each


class LinkSpeeds(Protocol):
    """The `[links]` table; bandwidth is in megabits per second."""

    tokens_per_second: PerPeer
    latency_seconds: PerPeer
    upload_mbps: PerPeer
    download_mbps: PerPeer


def arrivals(
    links: LinkSpeeds,
    receivers: Sequence[int],
    tokens: Mapping[int, int],
    sizes: Mapping[int, int],
    overlapped: float = 0.0,
) -> dict[int, float]:
    """Return the seconds from the round's start until each peer's message is at every receiver.

    A peer trains, then uploads once: tokens / tokens_per_second + latency + 8 bytes / (10^6 mbps).
    Each receiver downloads the others' messages one after the other as they become available, so
    that a slow downlink delays everything behind it.

    A message may travel while its sender trains a first share of the next round, taken to be as
    many tokens as the round's own. That share is counted once, here, beside the message, and not
    in the next round: with all of it, a peer's time is the longer of the two, not their sum. In a
    run's first round, beside which nothing travels, it is not counted.

    Args:
      links: The `[links]` table.
      receivers: The peers that need the messages, the senders among them.
      tokens: Tokens that each sender trains on.
      sizes: Bytes of each sender's message.
      overlapped: The share, 0 to 1; 0 where peers wait for messages (`Optimizer.overlapped`).
    """
    trained = {peer: tokens[peer] / _of(links, "tokens_per_second", peer) for peer in sizes}
    sent = {
        peer: (1.0 - overlapped) * trained[peer]
        + (_of(links, "latency_seconds", peer) + _transfer(size, _of(links, "upload_mbps", peer)))
        for peer, size in sizes.items()
    }
    arrived = {peer: max(sent[peer], trained[peer]) for peer in sizes}
    queue = sorted(sent, key=lambda peer: (sent[peer], peer))
    for mbps, alike in _by_speed(links, receivers):
        if _downloaded(arrived, queue, sent, sizes, mbps, alike):
            break
    return dict(sorted(arrived.items()))


def _by_speed(links: LinkSpeeds, receivers: Sequence[int]) -> list[tuple[float, set[int]]]:
    """The receivers of each downlink's speed, the slowest first."""
    alike: dict[float, set[int]] = {}
    for receiver in receivers:
        alike.setdefault(_of(links, "download_mbps", receiver), set()).add(receiver)
    return sorted(alike.items())


def _downloaded(
    arrived: dict[int, float],
    queue: Sequence[int],
    sent: Mapping[int, float],
    sizes: Mapping[int, int],
    mbps: float,
    receivers: set[int],
) -> bool:
    """Raise `arrived` to when all of `receivers`, whose downlinks are alike, have each message.

    Each receiver skips only its own message. Before it, a receiver is as far as one that downloads
    everything; after it, it is ahead, and the last to pass is ahead by the least.

    Returns:
      Whether quicker receivers can be no later than these with any message.
    """
    with_all, latest_without = 0.0, None  # free after all messages so far; after all but its own
    ahead = len(receivers)  # that are not at their own message yet
    all_bound = True
    for peer in queue:
        took, before = _transfer(sizes[peer], mbps), with_all
        with_all = max(with_all, sent[peer]) + took
        ahead -= peer in receivers
        if latest_without is not None:
            latest_without = max(latest_without, sent[peer]) + took
        if ahead:
            arrived[peer] = max(arrived[peer], with_all)
        else:
            if latest_without is not None:
                arrived[peer] = max(arrived[peer], latest_without)
            all_bound &= arrived[peer] >= with_all
        if peer in receivers:
            latest_without = max(before, latest_without or 0.0)
    return all_bound


def check_seconds(links: LinkSpeeds, verifier: int, peer: int, *, tokens: int, size: int) -> float:
    """Return the seconds until a verifier has fetched a peer's state and recomputed its step.

    The step has so many tokens, and the state `size` bytes.
    """
    mbps = min(_of(links, "upload_mbps", peer), _of(links, "download_mbps", verifier))
    fetch = _of(links, "latency_seconds", peer) + _transfer(size, mbps)
    return fetch + tokens / _of(links, "tokens_per_second", verifier)


def load_seconds(links: LinkSpeeds, peer: int, *, size: int) -> float:
    """Return the seconds that a joining peer takes to fetch `size` bytes: params and shared state.

    It fetches from many others at once, so its own downlink is the limit.
    """
    mbps = _of(links, "download_mbps", peer)
    return _of(links, "latency_seconds", peer) + _transfer(size, mbps)


def _transfer(size: int, mbps: float) -> float:
    return size * 8 / (mbps * 1e6)


def _of(links: LinkSpeeds, name: str, peer: int) -> float:
    value: PerPeer = getattr(links, name)
    if isinstance(value, int | float):
        return value
    if peer >= len(value):
        raise LockstepError(
            f"[links] {name}: {len(value)} numbers, expected one for each peer, {peer} included"
        )
    return value[peer]
