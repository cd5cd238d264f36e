"""The optimizer that a run file names."""

import jax.numpy as jnp

from pipeline import config
from pipeline.errors import LockstepError
from pipeline.optim.adamw import adamw
from pipeline.optim.distro import distro
from pipeline.optim.optimizer import Optimizer, Schedule


def build(
    choice: config.Optimizer, learning_rate: Schedule, overlap: int, stacked: tuple[str, ...]
) -> Optimizer:
    """The optimizer of `model.LLM.optimizer`.

    Args:
      choice: the variant, with its settings.
      learning_rate: by step.
      overlap: rounds that messages travel while the next ones are computed.
      stacked: top-level groups of the params whose leaves carry a leading layer axis.

    Raises:
      LockstepError: the optimizer's engine does not exist (yet).
    """
    match choice:
        case config.OptimizerDistro():
            return distro(
                learning_rate,
                compression_decay=choice.compression_decay,
                compression_topk=choice.compression_topk,
                compression_chunk=choice.compression_chunk,
                quantize_1bit=choice.quantize_1bit,
                value_dtype=jnp.bfloat16,  # as in Psyche
                weight_decay=choice.weight_decay or 0.0,
                clip_grad_norm=choice.clip_grad_norm,
                overlap=overlap,
                stacked=stacked,
            )
        case config.OptimizerAdamW() if overlap:
            raise LockstepError(
                f"[peers] overlap = {overlap}, expected 0 with model.LLM.optimizer.AdamW: its "
                "peers wait for all gradients"
            )
        case config.OptimizerAdamW():
            return adamw(
                learning_rate,
                betas=choice.betas,
                eps=choice.eps,
                weight_decay=choice.weight_decay,
                clip_grad_norm=choice.clip_grad_norm,
            )
        case _:
            raise LockstepError(
                f"{config.variant_name(choice)}: this release cannot train with it, expected "
                "model.LLM.optimizer.Distro or model.LLM.optimizer.AdamW"
            )
