"""Model architectures, one file each; a model's file name is its key.

Adding one takes a file `models/<name>.py` and a line below (docs/how-to/add-a-model.md). It gives:

    Config        frozen dataclass, a `models.config.HfConfig`
    Model         the Flax NNX module; the layers' params are stacked on axis 0
    init          (config, seed) -> params, a nested dict of float32 arrays
    features      (config, params, tokens_BT, *, scan, dtype, attention, remat, positions_BT,
                  sequences_BT) -> x_ND, in dtype
    head          (config, params) -> the kernel [D, V] whose product with features is the logits
    apply         as features -> logits_BTV, float32
    NAMES         Flax path -> (Hugging Face tensor name, whether it is stored transposed); a name
                  with {expert} is one of the leaf's second axis, after the layers'
    TIED          tensors a file may hold twice: name -> the tensor it must equal
    IGNORED       names of tensors that files hold and nobody needs: a regular expression; what it
                  matches as (?P<beyond>...) is a layer, and must not be one of the model's own
    STACKED       the top-level groups of params whose leaves lead with a layer axis

It may also give:

    first_layers  (config) -> {group: which layer its first is}, of those in STACKED; 0 if not said
    FLOAT32       paths of params that are stored in float32, whatever the others are stored in
    BALANCE       paths of params that balance experts, which no gradient moves: in its place stands
                  how many choices fell on each expert

Nothing here imports anything from `pipeline/`.
"""

import importlib
from types import ModuleType

_FILES = {  # model_type of config.json -> file
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}


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
