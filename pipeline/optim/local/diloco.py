"""DiLoCo: peers take many AdamW steps by themselves, and then one together, with momentum."""

from pipeline.optim.expect import expect, expect_decay, expect_rates, expect_share
from pipeline.optim.local.local_steps import local_steps
from pipeline.optim.optimizer import Optimizer
from pipeline.optim.quantize.quantized import quantized
from pipeline.optim.quantize.quantizer import Quantizer
from pipeline.optim.sgd import sgd


def diloco(
    inner: Optimizer,
    *,
    inner_steps: int,
    outer_learning_rate: float,
    outer_momentum: float,
    nesterov: bool,
    quantizer: Quantizer | None = None,
    error_feedback: float = 0.0,
) -> Optimizer:
    """Return DiLoCo: the mean pseudogradient of the peers is the gradient of SGD with momentum.

    With the names of `local_steps`, in each round:

        inner_steps times    theta_p <- the inner optimizer's step from theta_p, on g_p at theta_p
        D       = mean over peers of theta - theta_p
        m      <- outer_momentum * m + D
        theta  <- theta - outer_learning_rate * (D + outer_momentum * m)        with Nesterov's
        theta  <- theta - outer_learning_rate * m                               without

    A message is theta - theta_p in float32, 4 bytes per parameter, or as the quantizer rounds it,
    from each peer, each round. Peers count by the sequences that they were assigned; absent ones
    do not.

    Args:
      inner: Takes the local steps: AdamW in DiLoCo, Muon in MuLoCo.
      inner_steps: Local steps of a round; DiLoCo's 500.
      outer_learning_rate: Learning rate of the outer step, constant; 0.7 in DiLoCo.
      outer_momentum: Decay of m per round, in [0, 1); DiLoCo's 0.9.
      nesterov: Whether the momentum is Nesterov's, as DiLoCo's.
      quantizer: Rounds what is sent, as of `quantized`; None sends float32.
      error_feedback: As of `quantized`.

    References:
      Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models,
        https://arxiv.org/abs/2311.08105
      Therien et al., MuLoCo: Muon is a practical inner optimizer for DiLoCo,
        https://arxiv.org/abs/2505.23725
    """
    outer = outer_sgd(outer_learning_rate, outer_momentum, nesterov, quantizer, error_feedback)
    return local_steps(inner, outer, inner_steps)


def outer_sgd(
    outer_learning_rate: float,
    outer_momentum: float,
    nesterov: bool,
    quantizer: Quantizer | None,
    error_feedback: float,
) -> Optimizer:
    """Return the step of a round, which takes pseudogradients as its gradients; as of `diloco`.

    Raises:
      ValueError: A setting is not within its bounds, or would change nothing.
    """
    expect_rates(outer_learning_rate=outer_learning_rate)
    expect_decay("outer_momentum", outer_momentum)
    outer = sgd(outer_learning_rate, momentum=outer_momentum, nesterov=nesterov, by_weight=True)
    if quantizer is not None:
        return quantized(outer, quantizer, error_feedback)
    expect_share("error_feedback", error_feedback)
    expect("error_feedback", error_feedback, lambda x: not x, "0 without a quantizer")
    return outer
