"""The optimizer that a run file names."""

from collections.abc import Collection
from typing import Any

import jax.numpy as jnp

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.optim.ada_distro import ada_distro
from pipeline.optim.adamw import adamw
from pipeline.optim.distro import distro
from pipeline.optim.muon import muon
from pipeline.optim.optimizer import Optimizer, Schedule


def build(
    choice: runfile.Optimizer,
    learning_rate: Schedule,
    overlap: int,
    stacked: tuple[str, ...],
    groups: Collection[str],
) -> Optimizer:
    """The optimizer of `model.LLM.optimizer`.

    Args:
      choice: the variant, with its settings.
      learning_rate: by step.
      overlap: rounds that messages travel while the next ones are computed.
      stacked: top-level groups of the params whose leaves carry a leading layer axis.
      groups: all top-level groups of the params.

    Raises:
      LockstepError: the optimizer's engine does not exist (yet), or it names another group.
    """
    match choice:
        case runfile.OptimizerDistro():
            return distro(learning_rate, **_compression(choice, overlap, stacked))
        case runfile.OptimizerAdaDistro():
            _check_groups(choice, ("step_scale", "topk_of", "untransformed"), groups)
            return ada_distro(
                learning_rate,
                **_compression(choice, overlap, stacked),
                second_moment_decay=choice.second_moment_decay,
                update=choice.update,
                step_scale=choice.step_scale,
                topk_of=choice.topk_of,
                untransformed=choice.untransformed,
                removed=choice.removed,
            )
        case runfile.Dense() if overlap:
            raise LockstepError(
                f"[peers] overlap = {overlap}, expected 0 with {runfile.variant_name(choice)}: its "
                "peers wait for all gradients"
            )
        case runfile.OptimizerAdamW():
            return adamw(learning_rate, **_dense(choice))
        case runfile.OptimizerMuon():
            _check_groups(choice, ("step_scale",), groups)
            return muon(
                learning_rate,
                **_dense(choice),
                momentum=choice.momentum,
                step_scale=choice.step_scale,
                stacked=stacked,
            )
        case _:
            raise LockstepError(
                f"{runfile.variant_name(choice)}: this release cannot train with it, expected "
                "model.LLM.optimizer.Distro, AdaDistro, AdamW or Muon"
            )


def _dense(choice: runfile.Dense) -> dict[str, Any]:
    """What both dense optimizers are told."""
    return {
        "betas": choice.betas,
        "eps": choice.eps,
        "weight_decay": choice.weight_decay,
        "clip_grad_norm": choice.clip_grad_norm,
    }


def _compression(
    choice: runfile.Compressing, overlap: int, stacked: tuple[str, ...]
) -> dict[str, Any]:
    """What both kinds of DisTrO are told."""
    return {
        "compression_decay": choice.compression_decay,
        "compression_topk": choice.compression_topk,
        "compression_chunk": choice.compression_chunk,
        "quantize_1bit": choice.quantize_1bit,
        "value_dtype": jnp.bfloat16,  # as in Psyche
        "weight_decay": choice.weight_decay or 0.0,
        "clip_grad_norm": choice.clip_grad_norm,
        "overlap": overlap,
        "stacked": stacked,
    }


def _check_groups(
    choice: runfile.Optimizer, keys: tuple[str, ...], groups: Collection[str]
) -> None:
    for key in keys:
        for group in getattr(choice, key):
            if group not in groups:
                raise LockstepError(
                    f"{runfile.variant_name(choice)}.{key}: {group} is no group of this model's "
                    f"params, expected some of {', '.join(sorted(groups))}"
                )
