"""Outer steps in NumPy and float64, as their papers have them: of one parameter, merge by merge."""

import numpy as np


def nesterov(state, d, rate, momentum):
    """The step of theta, and m."""
    m = momentum * state + d
    return -rate * (d + momentum * m), m


def delayed_nesterov(state, d, rate, momentum, every):
    """`state` is m, the pseudogradients since it changed, and how many merges were before."""
    m, gathered, merges = state
    gathered = [*gathered, d]
    move = d / every
    if (merges + 1) % every == 0:
        m = momentum * m + np.sum(gathered, axis=0) / every
        move = move + momentum * m
        gathered = []
    return -rate * move, (m, gathered, merges + 1)


def age_factor(age, alpha, cutoff):
    return 0.0 if age >= cutoff else (1 + np.cos(np.pi * age / cutoff)) / 2 * np.exp(-alpha * age)


def adam(state, d, rate, betas, eps):
    """`state` is both moments, and how many merges were before."""
    m, v, count = state
    m = betas[0] * m + (1 - betas[0]) * d
    v = betas[1] * v + (1 - betas[1]) * d**2
    count += 1
    unbiased = m / (1 - betas[0] ** count), v / (1 - betas[1] ** count)
    return -rate * unbiased[0] / (np.sqrt(unbiased[1]) + eps), (m, v, count)


def turned(d, m, keep, shrink, shrink_most, turn, trust):
    """A pseudogradient, corrected by the momentum."""
    long, reach = np.linalg.norm(d), np.linalg.norm(m)
    if not reach:
        return d
    u, v = d / long, m / reach
    c, conf = np.sum(u * v), long / (long + trust * reach)
    if c >= keep:
        return d
    if c < 0:
        return d - min(shrink * -c * conf, shrink_most) * c * long * v
    share = min(turn * (1 - c) * conf, 1)
    between = (1 - share) * u + share * v
    return long * between / np.linalg.norm(between)


def heloco(state, g, rate, momentum):
    m = momentum * state + (1 - momentum) * g
    return -rate * (g + momentum * m), m
