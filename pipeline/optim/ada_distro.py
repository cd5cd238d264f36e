"""AdaDistro: what made DisTrO learn as much as AdamW from the same tokens, at DisTrO's bytes."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pipeline.optim.distro import distro
from pipeline.optim.optimizer import Optimizer, Rate
from pipeline.optim.second_moment import normalized


def ada_distro(
    learning_rate: Rate,
    *,
    second_moment_decay: float | None = 0.95,
    compression_decay: float = 0.95,
    update: str = "orthogonal",
    step_scale: Mapping[str, float] = MappingProxyType({}),
    clip_grad_norm: float | None = None,
    stacked: tuple[str, ...] = (),
    **settings: Any,
) -> Optimizer:
    """DisTrO on normalized gradients, with orthogonal updates of layers and steps by group.

    In the words of `distro`, whose messages these are, with v_p the factored second moment of the
    peer's gradient (`second_moment`), O(.) the nearest orthogonal matrix (`direction`), and G the
    group of a parameter:

        delta_p <- compression_decay * delta_p + lr(t) * g_p / sqrt(v_p);  send q_p;  remove D(q_p)
        theta   <- theta - lr(t) * step_scale[G] * O(D(Q(t)))        matrices of layers
        theta   <- theta - lr(t) * step_scale[G] * sign(D(Q(t)))     embeddings, head and norms

    Each peer normalizes by its own gradients, so params rest where normalized gradients cancel.
    That is the minimum of the mean loss where peers draw from the same data, as here; where their
    data differ, peers with small gradients count for more than in DisTrO.

    A sign moves every element by as much as every other, and a matrix of layers along all of its
    singular directions at once, noise and all; what a layer can bear is far less than what
    embeddings and head need, and the orthogonal matrix spends a layer's step evenly. benchmarks/
    RESULTS.md has what each part gains alone, and what else was tried.

    Args:
      learning_rate: of a step, the first is 1; or a number.
      second_moment_decay: of v_p, per round; None leaves gradients as they are.
      compression_decay: of delta, per round. Shorter than DisTrO's 0.999: normalized gradients of
        long ago are as large as today's.
      update: "orthogonal", "rms" or "sign".
      step_scale: factor of a group's steps; 1 where it is not named.
      clip_grad_norm: largest global L2 norm of a peer's gradient, before it is normalized.
      stacked: top-level groups of the params whose leaves carry a leading layer axis.
      settings: the rest of `distro`'s.
    """
    settings |= {"compression_decay": compression_decay, "stacked": stacked}
    settings |= {"update": update, "step_scale": step_scale}
    if second_moment_decay is None:
        return distro(learning_rate, clip_grad_norm=clip_grad_norm, **settings)
    return normalized(
        distro(learning_rate, **settings), second_moment_decay, clip_grad_norm, stacked
    )
