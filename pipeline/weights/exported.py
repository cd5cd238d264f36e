"""An exported Hugging Face folder, read back as a model that computes.

Shapes in names: B sequences of T tokens, N = B * T, D width, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from lockstep.errors import LockstepError
from lockstep.same_bits.evaluation import same_bits
from lockstep.same_bits.products import Product, product_of
from models.architecture import Architecture, Params
from models.config import HfConfig
from models.parts import Cache
from pipeline.runfile.tables import Peers
from pipeline.tokens.tokenizer_files import SETTINGS, TOKENIZER, load_tokenizer
from pipeline.weights import hf, text_settings
from pipeline.weights.text_settings import TextSettings


class Exported(NamedTuple):
    """An exported Hugging Face folder, read back as a model that computes.

    Attributes:
      hf_config: Its config.json.
      architecture, config, params: The model, with params in float32.
      apply: apply(params, tokens_BT) -> logits_BTV.
      features: features(params, tokens_BT, ...) -> x_ND, the inputs of the head.
      head: head(params) -> kernel_DV.
      cache: cache(first_B, length), an empty cache, as `Architecture.cache`.
      next_logits: next_logits(params, tokens_BT, cache) -> logits_BV of what follows, cache; its
        params as `params_to_write`.
      scan: Whether layers run as a loop.
      product: How matrices are multiplied where it computes by rules; None as compiled.
      tokenizer: Its tokenizer, or None without tokenizer.json.
      texts: What its files say of texts.
    """

    hf_config: dict[str, Any]
    architecture: Architecture
    config: HfConfig
    params: Params
    apply: Callable[[Params, jax.Array], jax.Array]
    features: Callable[..., jax.Array]
    head: Callable[[Params], jax.Array]
    cache: Callable[[Any, int], Cache]
    next_logits: Callable[[Params, jax.Array, Cache], tuple[jax.Array, Cache]]
    scan: bool
    product: Product | None
    tokenizer: Tokenizer | None
    texts: TextSettings

    def by_rules(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function as this exported model computes: by `same_bits`' rules, or as it is."""
        return same_bits(function, self.product) if self.product else function

    @property
    def params_to_write(self) -> Params:
        """The exported params as `next_logits` takes them: by layer, unless layers loop."""
        return self.params if self.scan else self.architecture.by_layer(self.params)

    @property
    def context(self) -> int:
        """The largest number of tokens that the exported model takes."""
        return self.config.max_position_embeddings

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a text of the exported model."""
        return self.texts.ends

    @property
    def beginning(self) -> int | None:
        """The token that begins a text of the exported model or, if none does, ends one."""
        first = self.texts.beginning
        if first is not None and first >= self.config.vocab_size:
            raise LockstepError(
                f"{hf.CONFIG} or {SETTINGS}: found {first} as the token that begins a text, "
                f"expected one below vocab_size ({self.config.vocab_size})"
            )
        return first


def read(folder: Path, peers: Peers | None = None) -> Exported:
    """Read an exported Hugging Face folder.

    It computes as a run's `[peers]` say, by rules or not; by default compiled and unrolled.
    """
    hf_config, params = hf.read_folder(folder)
    path = folder / TOKENIZER
    tokenizer = load_tokenizer(path) if path.exists() else None
    texts = text_settings.read(folder, hf_config, tokenizer)
    return computing(hf_config, params, tokenizer, texts, folder / hf.CONFIG, peers)


def computing(
    hf_config: dict[str, Any],
    params: Params,
    tokenizer: Tokenizer | None,
    texts: TextSettings,
    where: object,
    peers: Peers | None = None,
) -> Exported:
    """Return a model that computes as its export will, while it may still be in training.

    Errors call its config.json `where`; `peers` are as in `read`.
    """
    scan = peers is not None and peers.scan_layers
    architecture, config = hf.model_of(hf_config, where)
    settings = {"scan": scan, "dtype": jnp.dtype("float32")}
    return Exported(
        hf_config,
        architecture,
        config,
        params,
        apply=partial(architecture.apply, config, **settings),
        features=partial(architecture.features, config, **settings),
        head=partial(architecture.head, config),
        cache=partial(architecture.cache, config, dtype=settings["dtype"]),
        next_logits=partial(architecture.next_logits, config),
        scan=scan,
        product=product_of(peers.bits, peers.product_bits) if peers else None,
        tokenizer=tokenizer,
        texts=texts,
    )
