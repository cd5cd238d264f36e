"""Fresh weights: drawn from a seed, the same bits on every machine."""

from typing import Any

import jax
import numpy as np

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree
from lockstep.same_bits.evaluation import same_bits
from models.architecture import Architecture


def fresh_params(model: Architecture, config: Any, seed: int) -> Tree:
    """Return a model's fresh params, float32, as `Architecture.init` draws them, by rules.

    On a CPU, since no other kind of device was tried.

    Raises:
      LockstepError: JAX was told to have none.
    """
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise LockstepError(
            f"JAX_PLATFORMS is {jax.config.jax_platforms!r}, expected it to name cpu too: "
            "fresh weights are drawn there"
        ) from error
    with jax.default_device(cpu):
        return same_bits(lambda _: model.init(config, seed))(np.int32(0))
