"""Model architectures, one file each; a model's file name is its key.

Adding one is adding `models/<name>.py` and its name below (docs/how-to/add-a-model.md). The file
holds an `Architecture` (models/architecture.py) of the same name. Nothing here imports anything
from `pipeline/`, and other Flax programs can use it as it stands:

    from models.llama import llama

    config = llama.Config.from_hf(json.loads(Path("config.json").read_text()))
    params = llama.init(config, seed=0)
    logits_BTV = llama.apply(config, params, tokens_BT, scan=True, dtype=jnp.float32)

Budget: 2,170 lines of Python.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.architecture import Architecture

MODELS = ("deepseek_v2", "deepseek_v3", "llama", "mistral", "qwen2", "qwen3")


class ModelError(ValueError):
    """A config that no model here supports; its message is one line."""


def wrong(key: str, value: object, expected: str) -> ModelError:
    """Return the error of a model config's key with a value of another kind than was expected."""
    return ModelError(f"{key} is {value!r}, expected {expected}")


def get(model_type: object) -> "Architecture":
    """Return the architecture for the `model_type` of a config.json.

    Raises:
      ModelError: No model here has that type.
    """
    if model_type not in MODELS:
        raise wrong("model_type", model_type, f"one of: {', '.join(MODELS)}")
    return getattr(importlib.import_module(f"{__name__}.{model_type}"), model_type)
