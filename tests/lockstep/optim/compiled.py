"""An optimizer with compiled functions: op by op, XLA would compile every operation alone."""

import jax

from lockstep.optim.optimizer import Optimizer


def compiled(optimizer: Optimizer) -> Optimizer:
    names = ("init", "align", "lookahead", "accumulate", "send", "receive", "compare")
    return optimizer._replace(**{name: jax.jit(getattr(optimizer, name)) for name in names})
