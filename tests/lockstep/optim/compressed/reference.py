"""DisTrO in NumPy float64, from the equations alone: plain loops, delta kept as it is written."""

import numpy as np


def divisor(size: int, limit: int) -> int:
    return max(n for n in range(1, limit + 1) if size % n == 0)


def basis(n: int) -> np.ndarray:
    rows = [np.cos(np.pi * (2 * np.arange(n) + 1) * k / (2 * n)) for k in range(n)]
    scale = [np.sqrt((1 if k == 0 else 2) / n) for k in range(n)]
    return np.array([s * r for s, r in zip(scale, rows, strict=True)])


def blocks_of(shape: tuple[int, ...], chunk: int) -> list[tuple[slice, ...]]:
    """The blocks of an array, in row-major order: the last two axes are cut, or a vector's one."""
    sizes = [divisor(n, chunk) for n in shape[-2:]]
    lead = [range(n) for n in shape[:-2]]
    grid = [range(0, n, s) for n, s in zip(shape[-2:], sizes, strict=True)]
    found = []
    for place in np.ndindex(*[len(axis) for axis in lead + grid]):
        at = [axis[i] for axis, i in zip(lead + grid, place, strict=True)]
        cut = [slice(a, a + s) for a, s in zip(at[len(lead) :], sizes, strict=True)]
        found.append((*at[: len(lead)], *cut))
    return found


def encode(block: np.ndarray) -> np.ndarray:
    if block.ndim == 1:
        return basis(len(block)) @ block
    return basis(block.shape[0]) @ block @ basis(block.shape[1]).T


def decode(block: np.ndarray) -> np.ndarray:
    if block.ndim == 1:
        return basis(len(block)).T @ block
    return basis(block.shape[0]).T @ block @ basis(block.shape[1])


def top(flat: np.ndarray, k: int) -> np.ndarray:
    """Places of the k largest magnitudes, the lowest place first among equals; ascending."""
    order = sorted(range(flat.size), key=lambda i: (-abs(flat[i]), i))
    return np.array(sorted(order[:k]))


class Distro:
    """All peers of a DisTrO run over one parameter.

    overlap 0 is the order of DeMo's authors: decay, gradient, compress, remove, exchange, step.
    1 and 2 are Psyche's `train` and then `optimize`: what was sent is removed one round later, by
    `generate`; `train` example: the last round's results are applied after this round's training;
    network: the results of the round before the last are applied before this round's training.
    """

    def __init__(self, theta: np.ndarray, peers: int, **settings):
        self.theta = theta.astype(np.float64)
        self.delta = np.zeros((peers, *theta.shape))
        self.own_results = np.zeros((peers, *theta.shape))  # what each peer sent last, decoded
        self.results: list[np.ndarray] = []  # each round's decoded mean of all peers' messages
        self.settings = {"scale": 1.0} | settings

    def direction(self, x: np.ndarray) -> np.ndarray:
        """The sign of the decoded mean x, times the group's scale."""
        return self.settings["scale"] * np.sign(x)

    def lookahead(self, peer: int, previous_lr: float) -> np.ndarray:
        """Where a peer takes its gradient."""
        if not self.settings["overlap"]:
            return self.theta
        return self.theta - previous_lr * self.direction(self.delta[peer])

    def round(self, grads: np.ndarray, lr: float, next_lr: float) -> list[list[np.ndarray]]:
        """Takes one round up to where the next one's gradients are taken; each peer's sent places,
        by block."""
        decay, k, chunk, one_bit, wd, max_norm, overlap = (
            self.settings[name]
            for name in ("decay", "topk", "chunk", "one_bit", "wd", "clip", "overlap")
        )
        cuts = blocks_of(self.theta.shape, chunk)
        sent: list[list[np.ndarray]] = []
        totals = [np.zeros(self.theta[cut].size) for cut in cuts]
        senders = [np.zeros(self.theta[cut].size) for cut in cuts]
        self.theta = self.theta * (1 - lr * self.settings["scale"] * wd)
        for peer, grad in enumerate(grads.astype(np.float64)):
            if max_norm:
                grad = grad * min(1.0, max_norm / (np.sqrt((grad**2).sum()) + 1e-6))
            if overlap:
                self.delta[peer] -= self.own_results[peer]
            self.delta[peer] = decay * self.delta[peer] + lr * grad
            places = []
            for number, cut in enumerate(cuts):
                coefficients = encode(self.delta[peer][cut])
                flat = coefficients.ravel()
                kept = top(flat, min(k, flat.size))
                places.append(kept)
                q = np.zeros_like(flat)
                q[kept] = flat[kept]
                self.own_results[peer][cut] = decode(q.reshape(coefficients.shape))
                signs = np.where(np.signbit(flat[kept]), -1.0, 1.0)
                totals[number][kept] += signs if one_bit else flat[kept]
                senders[number][kept] += 1
            if not overlap:
                self.delta[peer] -= self.own_results[peer]
            sent.append(places)
        mean = np.zeros_like(self.theta)
        for cut, total, count in zip(cuts, totals, senders, strict=True):
            shaped = (total / np.maximum(count, 1)).reshape(self.theta[cut].shape)
            mean[cut] = decode(shaped)
        self.results.append(mean)
        if not overlap:
            self.theta = self.theta - lr * self.direction(self.results[-1])
        elif len(self.results) > 1:
            when = lr if overlap == 1 else next_lr
            self.theta = self.theta - when * self.direction(self.results[-2])
        return sent

    @property
    def applied(self) -> np.ndarray:
        """The decoded mean whose sign the last round applied; zeros where it applied none."""
        if not self.settings["overlap"]:
            return self.results[-1]
        return self.results[-2] if len(self.results) > 1 else np.zeros_like(self.theta)
