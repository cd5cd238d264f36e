"""Simulated time: seconds that a peer's tokens and bytes take at the speeds of `[links]`."""

from collections.abc import Collection, Mapping, Sequence

from lockstep.errors import LockstepError
from lockstep.tables.links import Links, Topology


def arrivals(
    links: Links,
    receivers: Sequence[int],
    tokens: Mapping[int, int],
    sizes: Mapping[int, int],
    overlapped: float = 0.0,
    merged: int | None = None,
) -> dict[int, float]:
    """Return the seconds from the round's start until each peer's message is at every receiver.

    A peer trains, then uploads once: tokens / tokens_per_second + latency + 8 bytes / (10^6 mbps).

    - broadcast: Each receiver downloads the others' messages one after the other as they become
      available, so that a slow downlink delays everything behind it.
    - hub: A hub merges the messages, and each receiver downloads the result: another latency, and
      its bytes at the slowest downlink.
    - ring: Senders sum parts of their messages around a ring, each at its own place in it, in
      2 (senders - 1) hops of latency + bytes / senders at the slowest link. All begin when the
      last has trained, so all messages arrive together.

    A message may travel while its sender trains a first share of the next round, taken to be as
    many tokens as the round's own. That share is counted once, here, beside the message, and not
    in the next round: with all of it, a peer's time is the longer of the two, not their sum. In a
    run's first round, beside which nothing travels, it is not counted. `overlapped` is the share, 0
    to 1; 0 where peers wait for messages (`Optimizer.overlapped`).

    The senders, with `tokens` to train on and a message of `sizes` bytes, are receivers too. A hub
    sends `merged` bytes, by default as many as the largest message has.
    """
    training = {peer: tokens[peer] / _speed(links, "tokens_per_second", peer) for peer in sizes}
    if links.topology == "ring":
        start = max(((1.0 - overlapped) * seconds for seconds in training.values()), default=0.0)
        end = start + _around(links, sizes)
        return {peer: max(end, training[peer]) for peer in sorted(sizes)}
    own = {peer: own_seconds(links, peer, tokens[peer], size) for peer, size in sizes.items()}
    sent = {peer: (1.0 - overlapped) * train + send for peer, (train, send) in own.items()}
    if links.topology == "hub" and sizes:
        size = max(sizes.values()) if merged is None else merged
        download = max(
            _speed(links, "latency_seconds", peer)
            + _transfer(size, _speed(links, "download_mbps", peer))
            for peer in receivers
        )
        return {peer: max(sent[peer] + download, training[peer]) for peer in sorted(sizes)}
    arrived = {peer: max(sent[peer], training[peer]) for peer in sizes}
    queue = sorted(sent, key=lambda peer: (sent[peer], peer))
    by_speed: dict[float, set[int]] = {}  # the receivers of each downlink speed
    for receiver in receivers:
        by_speed.setdefault(_speed(links, "download_mbps", receiver), set()).add(receiver)
    for mbps, group in sorted(by_speed.items()):  # the slowest first
        if _downloaded(arrived, queue, sent, sizes, mbps, group):
            break
    return dict(sorted(arrived.items()))


def traffic(topology: Topology, sizes: Collection[int], peers: int) -> tuple[float, float]:
    """Return the bytes that all `peers` together send over links in a round, and that they receive.

    `sizes` are those of the senders' messages; see `arrivals` for the topology.
    """
    total = sum(sizes)
    if topology == "ring":
        around = 2 * (len(sizes) - 1) / len(sizes) * total if sizes else 0
        return around, around
    if topology == "hub":
        return total, peers * max(sizes, default=0)
    return total, total * (peers - 1)


def own_seconds(links: Links, peer: int, tokens: int, size: int) -> tuple[float, float]:
    """Return a peer's simulated seconds to train on `tokens` tokens and to send `size` bytes."""
    upload = _speed(links, "latency_seconds", peer)
    upload += _transfer(size, _speed(links, "upload_mbps", peer))
    return tokens / _speed(links, "tokens_per_second", peer), upload


def _around(links: Links, sizes: Mapping[int, int]) -> float:
    """Return the seconds of a sum around the ring of all senders, in the order of their numbers."""
    ring = sorted(sizes)
    hops = [
        _speed(links, "latency_seconds", peer)
        + _transfer(
            max(sizes.values()) / len(ring),
            min(_speed(links, "upload_mbps", peer), _speed(links, "download_mbps", next_peer)),
        )
        for peer, next_peer in zip(ring, [*ring[1:], *ring[:1]], strict=True)
    ]
    return 2 * (len(ring) - 1) * max(hops, default=0.0)


def _downloaded(
    arrived: dict[int, float],
    queue: Sequence[int],
    sent: Mapping[int, float],
    sizes: Mapping[int, int],
    mbps: float,
    receivers: set[int],
) -> bool:
    """Raise `arrived` to the time when all `receivers` of one downlink speed have each message.

    A receiver skips only its own message. Before that it is as far as one that downloads
    everything; afterwards it is ahead. So one pass over the messages serves all receivers of a
    speed, where a pass for each would take n^2 steps with n peers.

    Returns:
      Whether quicker receivers can be no later than these with any message.
    """
    with_all, latest_without = 0.0, None  # free after all messages so far; after all but its own
    ahead = len(receivers)  # receivers that have not come to their own message yet
    all_bound = True
    for peer in queue:
        transfer, before = _transfer(sizes[peer], mbps), with_all
        with_all = max(with_all, sent[peer]) + transfer
        ahead -= peer in receivers
        if latest_without is not None:
            latest_without = max(latest_without, sent[peer]) + transfer
        if ahead:
            arrived[peer] = max(arrived[peer], with_all)
        else:
            if latest_without is not None:
                arrived[peer] = max(arrived[peer], latest_without)
            all_bound &= arrived[peer] >= with_all
        if peer in receivers:
            latest_without = max(before, latest_without or 0.0)
    return all_bound


def speeds(links: Links, peers: int) -> tuple[float, ...]:
    """Return the simulated tokens per second of each of `peers` peers."""
    return tuple(_speed(links, "tokens_per_second", peer) for peer in range(peers))


def check_seconds(links: Links, verifier: int, peer: int, *, tokens: int, size: int) -> float:
    """Return the simulated seconds until a verifier has a peer's state and recomputed its step.

    The step has `tokens` tokens, and the state `size` bytes. By a real clock it takes none: checks
    are made while the round waits.
    """
    if not links.computed:
        return 0.0
    mbps = min(_speed(links, "upload_mbps", peer), _speed(links, "download_mbps", verifier))
    fetch = _speed(links, "latency_seconds", peer) + _transfer(size, mbps)
    return fetch + tokens / _speed(links, "tokens_per_second", verifier)


def load_seconds(links: Links, peer: int, *, size: int) -> float:
    """Return the simulated seconds that a joining peer takes to fetch params and shared state.

    It fetches from many others at once, so its own downlink is the limit. By a real clock it takes
    none: a peer that joins has the params already when its round begins.
    """
    if not links.computed:
        return 0.0
    mbps = _speed(links, "download_mbps", peer)
    return _speed(links, "latency_seconds", peer) + _transfer(size, mbps)


def _transfer(size: float, mbps: float) -> float:
    return size * 8 / (mbps * 1e6)


def _speed(links: Links, name: str, peer: int) -> float:
    value: float | Sequence[float] = getattr(links, name)
    if isinstance(value, int | float):
        return value
    if peer >= len(value):
        raise LockstepError(
            f"[links] {name}: {len(value)} numbers, expected one for each peer, {peer} included"
        )
    return value[peer]
