"""The model of `lockstep new`: a folder, a name on the hub, or a named size of fresh weights."""

from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.tables.validation import choices, meant
from parts.new.data_tables import beside
from pipeline.net.errors import is_path
from pipeline.preflight.model import StartingModel, described, look
from pipeline.weights import hf

FRESH = "init:"
_LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def _llama(vocabulary: int, width: int, inner: int, layers: int, heads: int, **more: Any) -> dict:
    return _LLAMA | {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 2048,
        **more,
    }


SIZES = {  # Llamas by their number of parameters, which a test counts
    "2m": _llama(4096, 128, 352, 4, 4, max_position_embeddings=256),  # of params/run.toml
    "134m": _llama(32000, 768, 2048, 12, 12),
    "1.1b": _llama(32000, 2048, 5632, 22, 32, num_key_value_heads=4),  # TinyLlama's shape
    "1.2b": _llama(32000, 2048, 5504, 22, 16),  # of params/paper/distro-1.2b.toml
}


def model_named(name: str, root: Path) -> StartingModel:
    """Return the model that `--model` names; the config of one on the hub is fetched into data/."""
    if name.startswith(FRESH):
        size = name.removeprefix(FRESH)
        if size not in SIZES:
            known = choices(SIZES, size)
            raise LockstepError(f"--model {name}: expected {FRESH} and one of {known}")
        return _fresh(SIZES[size], f"fresh weights of the size {size}", None)
    expected = f"a folder, {FRESH}SIZE or a model on the hub{meant(beside(name), name)}"
    files = look(name, None, root, "--model", expected)
    config, commit = files.config(), files.commit
    where = name if commit is not None or is_path(name) else f"./{name}"  # no name on the hub
    tokenizer = where if files.has_tokenizer else None
    if not any(file.endswith(".safetensors") for file in files.names):
        label = f"fresh weights by the {hf.CONFIG} of {name}, which has no weights"
        model = _fresh(config, label, tokenizer)
    elif commit is None:
        checkpoint = {"Hub": {"repo_id": where}}
        model = described(checkpoint, config, tokenizer, f"the folder {name}", where)
    else:
        checkpoint = {"Hub": {"repo_id": name, "revision": commit}}
        label = f"{name} on the hub at its commit of today"
        model = described(checkpoint, config, tokenizer, label, name)
    return model._replace(revision=commit)


def _fresh(config: dict[str, Any], label: str, tokenizer: str | None) -> StartingModel:
    full = hf.model_of(config, "--model")[1].to_hf()
    own = {key: value for key, value in config.items() if key in full and full[key] == value}
    checkpoint = {"Init": {"seed": 0, "config": own}}
    return described(checkpoint, own, tokenizer, label, "--model")
