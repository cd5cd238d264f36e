"""A small exported folder with a tokenizer, which `transformers` loads as well."""

from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer

from lockstep.files import write_json
from models.llama import llama
from pipeline.weights import hf
from tests import tiny
from tests.pipeline import trained_run

END, CONTEXT = 0, 48
WORDS = ("de", "ef", "def", "\u0120x", "(x", "re")  # \u0120 is a space
MERGES = [("d", "e"), ("e", "f"), ("de", "f"), ("\u0120", "x"), ("(", "x"), ("r", "e")]
HF_CONFIG = tiny.MODEL | {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "bos_token_id": END,
    "eos_token_id": END,
}


def make_tokenizer() -> Tokenizer:
    """Byte-level: the end of text, all bytes, a few merged tokens."""
    return trained_run.make_tokenizer(["<|endoftext|>"], WORDS, MERGES)


@cache
def make_params() -> dict:
    """Random params; so large that the likeliest token is far from the next one."""
    shapes = jax.eval_shape(partial(llama.init, llama.Config.from_hf(HF_CONFIG), 0))
    draw = np.random.default_rng(0).normal
    return jax.tree.map(lambda leaf: draw(0, 0.25, leaf.shape).astype(np.float32), shapes)


def write(folder: Path) -> Path:
    """The folder, with all that `transformers` needs."""
    folder.mkdir(parents=True)
    hf.write_folder(folder, HF_CONFIG, make_params(), "float32")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    named = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|endoftext|>")
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", said | named)
    return folder
