"""The optimizer that a run file names."""

from pipeline import config
from pipeline.errors import LockstepError
from pipeline.optim.adamw import adamw
from pipeline.optim.distro import distro
from pipeline.optim.optimizer import Optimizer, Schedule


def build(choice: config.Optimizer, learning_rate: Schedule, stacked: tuple[str, ...]) -> Optimizer:
    """The optimizer of `model.LLM.optimizer`.

    Args:
      choice: the variant, with its settings.
      learning_rate: by step.
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
                weight_decay=choice.weight_decay or 0.0,
                clip_grad_norm=choice.clip_grad_norm,
                stacked=stacked,
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
