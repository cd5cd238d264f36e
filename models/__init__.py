"""Model architectures, one file each; a model's file name is its key.

Adding one is adding `models/<name>.py` and one line below. The file gives:

    Config        frozen dataclass; `Config.from_hf(dict)` and `config.to_hf(dtype) -> dict`
    Model         the Flax NNX module; the layers' params are stacked on axis 0
    init          (config, seed) -> params, a nested dict of float32 arrays
    apply         (config, params, tokens_BT, *, scan, dtype, attention) -> logits_BTV, float32
    NAMES         Flax path -> (Hugging Face tensor name, whether it is stored transposed)
    TIED          tensors a file may hold twice: name -> the tensor it must equal
    IGNORED       names of tensors that old files hold and nobody needs: a regular expression
    STACKED       the top-level groups of params whose leaves lead with a layer axis

Nothing here imports anything from `pipeline/`.
"""

import importlib
from types import ModuleType

_FILES = {"llama": "llama"}  # model_type of config.json -> file


class ModelError(ValueError):
    """A config that no model here can hold; its message is one line."""


def get(model_type: object) -> ModuleType:
    """Returns the module for a config.json's `model_type`, whatever stands there.

    Raises:
      ModelError: no model here has that type.
    """
    if not isinstance(model_type, str) or model_type not in _FILES:
        known = ", ".join(sorted(_FILES))
        raise ModelError(f"model_type is {model_type!r}, expected one of: {known}")
    return importlib.import_module(f"models.{_FILES[model_type]}")
