"""AdaDistro: what made DisTrO learn as much as AdamW from the same tokens, at DisTrO's bytes."""

from dataclasses import replace

from pipeline.optim.distro import CompressedMomentum, distro
from pipeline.optim.expect import expect_kind
from pipeline.optim.optimizer import Optimizer
from pipeline.optim.second_moment import normalized


def ada_distro(
    momentum: CompressedMomentum, second_moment_decay: float, overlap: int = 0
) -> Optimizer:
    """Return DisTrO on normalized gradients, with orthogonal updates of layers and steps by group.

    With the names of `distro`, whose messages these are, v_p the factored second moment of the
    peer's gradient (`second_moment`), O(.) the nearest orthogonal matrix (`step_direction`), and G
    the group of a parameter:

        delta_p <- compression_decay * delta_p + lr(t) * g_p / sqrt(v_p);  send q_p;  remove D(q_p)
        theta   <- theta - lr(t) * scale[G] * O(D(Q(t)))        matrices of layers
        theta   <- theta - lr(t) * scale[G] * sign(D(Q(t)))     embeddings, head and norms

    Each peer normalizes by its own gradients, so params rest where normalized gradients cancel.
    That is the minimum of the mean loss where peers draw from the same data, as here; where their
    data differ, peers with small gradients count for more than in DisTrO.

    A sign moves every element by as much as every other, and a matrix of layers along all of its
    singular directions at once, noise and all; what a layer can bear is far less than what
    embeddings and head need, and the orthogonal matrix spends a layer's step evenly. benchmarks/
    RESULTS.md has what each part gains alone, and what else was tried.

    Args:
      momentum: DisTrO's settings, with the `direction` of the equations above. Its
        compression_decay is best shorter than DisTrO's 0.999, such as 0.95: normalized gradients of
        long ago are as large as today's. Gradients are clipped before they are normalized.
      second_moment_decay: Decay of v_p per round, such as 0.95.
      overlap: As of `distro`.
    """
    expect_kind(CompressedMomentum, momentum=momentum)
    return normalized(
        distro(replace(momentum, clip_grad_norm=None), overlap),
        second_moment_decay,
        momentum.clip_grad_norm,
        momentum.compressor.stacked,
    )
