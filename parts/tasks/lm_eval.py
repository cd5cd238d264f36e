"""`lockstep` as a model of lm-evaluation-harness: an exported folder in its command line and API.

    python -m parts.tasks.lm_eval run --model lockstep --model_args pretrained=data/export --tasks T

    import lm_eval, parts.tasks.lm_eval
    lm_eval.simple_evaluate("lockstep", "pretrained=data/export", tasks=["arc_easy"])

lm_eval finds no models of other packages by itself, so this module registers it as it is imported.
"""

import sys
from pathlib import Path

import jax
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model

from lockstep.errors import LockstepError
from lockstep.machine.jax_settings import check_settings
from lockstep.programs.placement import device_groups
from parts.tasks import task_model
from parts.tasks.lm_eval_model import LmEvalModel
from pipeline.weights import exported

BATCH_SIZE = 32  # as `[evaluate] batch_size`


@register_model("lockstep")
class LockstepModel(LmEvalModel):
    """An exported folder, computed by JAX on all devices that it sees.

    Args:
      pretrained: The folder.
      batch_size: Requests that are computed at once; "auto": 32.
      max_batch_size: The same, where batch_size is "auto".
      device: Of no effect, since lm_eval's command line always names one; `JAX_PLATFORMS` chooses.
      seed: Seed of texts that a task samples.

    Raises:
      LockstepError: The folder is no export, or has no tokenizer; or JAX is set to 64 bits.
    """

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        device: str | None = None,
        seed: int = 0,
    ):
        try:
            size = max_batch_size or BATCH_SIZE if batch_size == "auto" else int(batch_size)
        except ValueError:
            raise LockstepError(f"batch_size is {batch_size}, expected a number or auto") from None
        check_settings("lm_eval --model lockstep")
        folder = Path(pretrained)
        read = exported.read(folder)
        params_on = {group: group.put(read.params) for group in device_groups(jax.devices(), 1)}
        super().__init__(task_model.from_folder(read, folder, params_on, size), seed)


def main() -> None:
    """Run lm_eval's command line, with this model among the others."""
    try:
        cli_evaluate()
    except LockstepError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
