"""Each rule in NumPy and float64, as its paper has it; one parameter, rows of peers that count."""

import numpy as np


def norms(x):
    return np.sqrt((x.reshape(len(x), -1) ** 2).sum(axis=1))


def column(factor, x):
    return np.reshape(factor, (-1, *[1] * (x.ndim - 1)))


def unit(x):
    return x / np.linalg.norm(x) if np.linalg.norm(x) else x


def mean(x, weight, liars):
    return np.average(x, axis=0, weights=weight)


def peer_mean(x, weight, liars):
    return np.mean(x, axis=0)


def min_support(x, weight, liars):
    return np.mean(x, axis=0) if len(x) > liars else np.zeros_like(x[0])


def median(x, weight, liars):
    return np.median(x, axis=0)


def trimmed_mean(x, weight, liars):
    cut = min(liars, (len(x) - 1) // 2)
    return np.sort(x, axis=0)[cut : len(x) - cut].mean(axis=0)


def norm_clip(x, weight, liars):
    bound = np.median(norms(x))
    return mean(x * column(clip(norms(x), bound), x), weight, liars)


def clip(norm, bound):
    return np.where(norm > bound, bound / np.where(norm > 0, norm, 1), 1)


def centered_clip(x, weight, liars):
    centre = np.median(x, axis=0)
    for _ in range(3):
        off = x - centre
        bound = np.median(norms(off))
        centre = centre + mean(off * column(clip(norms(off), bound), x), weight, liars)
    return centre


def multi_krum(x, weight, liars):
    scores = []
    for one in range(len(x)):
        apart = sorted(((x[one] - x[other]) ** 2).sum() for other in range(len(x)) if other != one)
        scores.append(sum(apart[: len(x) - liars - 2]))
    kept = np.argsort(scores, kind="stable")[: len(x) - liars]
    return mean(x[kept], np.asarray(weight)[kept], liars)


def rda(x, weight, liars):
    direction = mean(np.array([unit(row) for row in x]), weight, liars)
    return np.average(norms(x), weights=weight) * unit(direction)


def rda_median_norm(x, weight, liars):
    direction = mean(np.array([unit(row) for row in x]), weight, liars)
    return np.median(norms(x)) * unit(direction)
