"""The task of a run file: a language model of `models/`, on rows of tokens.

Shapes in names: M micro-batches of B sequences of T tokens, S = T - 1 predictions, W the length of
a row (columns.py; T for plain data), N tokens of a micro-batch, D width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from lockstep.errors import LockstepError
from lockstep.machine import memory
from lockstep.optim.balance import balanced, leave
from lockstep.optim.optimizer import Optimizer, Tree
from lockstep.programs.columns import PLAIN, UNCOUNTED, Column, Columns, split
from lockstep.programs.loss import measured, targets, weighted_cross_entropy
from lockstep.programs.task import OTHER_PRECISION
from lockstep.programs.train_step import Programs
from lockstep.same_bits.products import product_of
from pipeline import runfile
from pipeline.runfile.method import optimizer_of_run
from pipeline.weights import hf

MOST_UNROLLED = 1000  # layers: XLA takes about a second for each


def programs_of(
    run: runfile.Run,
    model: dict[str, Any],
    first_step: int = 0,
    columns: tuple[Column, ...] = PLAIN,
) -> Programs:
    """Return the programs of a run that trains a language model.

    `first_step` is the rounds trained by the run that this one extends, 0 for a new run.
    """
    task = LanguageModel(run, model, columns)
    groups = {name.split("/")[0] for name in task.model.names}
    plain = optimizer_of_run(run, groups, task.model.stacked, first_step)
    optimizer = task.balance(plain, run.peers.balance_speed)
    peers = run.peers
    programs = Programs(
        task,
        optimizer,
        wire=peers.wire,
        parts=peers.fsdp,
        lot=run.rows_of_a_step,
        product=product_of(peers.bits, peers.product_bits),
    )
    programs.check_rules(task.row, "[peers] bits =", run.faults.schedule)
    return programs


class LanguageModel:
    """Next-token prediction by a model, a config.json, on rows of tokens; a `Task`."""

    sums = False  # rows say which labels count

    def __init__(self, run: runfile.Run, hf_config: dict, columns: tuple[Column, ...] = PLAIN):
        if "sequence_ids" in columns and run.peers.attention == "cudnn":
            raise LockstepError(
                '[peers] attention = "cudnn", expected "matmul": this data packs several sequences '
                "into a row, and the fused kernel is not used with the mask that this needs"
            )
        self.run, self.hf_config, self.columns = run, hf_config, columns
        self.model, self.model_config = hf.model_of(hf_config, "model.LLM.checkpoint")
        self._check_size(run)
        self.head = partial(self.model.head, self.model_config)
        self.features: Callable[..., jax.Array] = partial(
            self.model.features,
            self.model_config,
            scan=run.peers.scan_layers,
            dtype=jnp.dtype(run.peers.precision),
            attention=run.peers.attention,
            remat=run.peers.remat,
        )

    @property
    def shapes(self) -> Tree:
        """Shapes and dtypes of the language model's params."""
        return self.model.shapes(self.model_config)

    @property
    def embedding_in_order(self) -> bool:
        """Whether the embedding's gradient is summed as in models/rows_of_table.py.

        Not by rules, which sum a scatter exactly on every machine, nor where devices share it.
        """
        as_compiled = self.run.peers.bits == "machine" and self.run.peers.fsdp == 1
        return as_compiled and jax.default_backend() == "gpu"

    @property
    def row(self) -> jax.ShapeDtypeStruct:
        """Shape and type of a row of the language model's data."""
        width = len(self.columns) * self.run.llm.max_seq_len
        return jax.ShapeDtypeStruct((width,), np.int32)

    @property
    def imprecise(self) -> "LanguageModel":
        """The same language model in the other precision, for a peer with that fault."""
        precision = OTHER_PRECISION[self.run.peers.precision]
        peers = self.run.peers.model_copy(update={"precision": precision})
        run = self.run.model_copy(update={"peers": peers})
        return LanguageModel(run, self.hf_config, self.columns)

    def weights(
        self, rows_MBW: jax.Array, count: jax.Array
    ) -> Callable[[jax.Array | int], jax.Array]:
        """Return the weights in a language model's mean over `count` rows, by micro-batch.

        Rows have equal weight; where the data has labels, all counting labels of the batch have,
        however it is cut. Without any, loss and gradient are 0.
        """
        size = rows_MBW.shape[1]
        weight_MBS = self._label_weights(rows_MBW, count)
        if weight_MBS is not None:
            return lambda micro: jax.lax.dynamic_index_in_dim(weight_MBS, micro, keepdims=False)
        # weights of the mean, so no division is left: one pass over all gradients fewer
        return lambda micro: jnp.where(micro * size + jnp.arange(size) < count, 1 / count, 0.0)

    def loss(
        self, params: Tree, rows_BW: jax.Array, weight: jax.Array, rng: jax.Array | None
    ) -> jax.Array:
        """Return the language model's weighted sum of cross-entropies."""
        x_ND, kernel_DV, rows = self._read(params, rows_BW)
        at_once = self.run.peers.head_tokens
        return weighted_cross_entropy(x_ND, kernel_DV, targets(rows), weight, at_once)

    def key(self, rows_MBW: jax.Array, step: jax.Array, local_step: jax.Array | int) -> None:
        """Return None: these language models have no dropout."""
        del rows_MBW, step, local_step

    def measure(self, params: Tree, rows_BW: jax.Array) -> jax.Array:
        """Return a language model's mean cross-entropy of each row over tokens that count: [B]."""
        return measured(*self._read(params, rows_BW))

    def balance(self, optimizer: Optimizer, speed: float) -> Optimizer:
        """Keep the optimizer from params whose gradient is the load of experts.

        Those move by `speed`, which is `[peers] balance_speed`; the optimizer moves all others.
        """
        paths: list[str] = []
        if names := self.model.balance:  # a model may have no layer with experts
            paths = [path for path in flatten_dict(self.shapes, sep="/") if path in names]
        if not paths and speed:
            raise LockstepError(
                f"[peers] balance_speed = {speed}, expected 0: no router of this model has a "
                "correction"
            )
        if paths:
            optimizer = leave(optimizer, paths)
        return balanced(optimizer, paths, speed) if speed else optimizer

    def _check_size(self, run: runfile.Run) -> None:
        """Check the least memory of a language model's step: params, and a micro-batch.

        And check that layers are few enough to be compiled one by one, if they are not scanned.
        """
        layers = self.model_config.num_hidden_layers
        if layers > MOST_UNROLLED and not run.peers.scan_layers:
            raise LockstepError(
                f"[peers] scan_layers = false, expected true for {layers:,} layers: more than "
                f"{MOST_UNROLLED:,} would be compiled one by one"
            )
        limit = run.runtime.memory_gb
        memory.check(self.shapes, "the model", limit)
        rows, length = run.peers.micro_batch, run.llm.max_seq_len
        features = jax.ShapeDtypeStruct((rows, length, self.model_config.hidden_size), np.float32)
        memory.check(features, f"[peers] micro_batch = {rows} sequences of {length} tokens", limit)
        if (tokens := run.peers.head_tokens) is not None:
            shape = min(tokens, rows * length), self.model_config.vocab_size
            logits = jax.ShapeDtypeStruct(shape, np.float32)
            memory.check(logits, f"[peers] head_tokens = {tokens}: their logits", limit)

    def _read(self, params: Tree, rows_BW: jax.Array) -> tuple[jax.Array, jax.Array, Columns]:
        """Return the language model's features, head's kernel and rows by column, for the loss."""
        rows = split(rows_BW, self.columns)
        positions, sequences = rows.position_ids, rows.sequence_ids
        x_ND = self.features(
            params,
            rows.inputs,
            positions_BT=positions,
            sequences_BT=sequences,
            embedding_in_order=self.embedding_in_order,
        )
        return x_ND, self.head(params), rows

    def _label_weights(self, rows_MBW: jax.Array, count: jax.Array) -> jax.Array | None:
        """Return each of the language model's predictions' weight in the mean over labels.

        [M, B, S]; 0 beyond the first `count` rows.
        """
        labels_MBT = split(rows_MBW, self.columns).labels
        if labels_MBT is None:
            return None
        M, B, _ = labels_MBT.shape
        real_MB = jnp.arange(M * B).reshape(M, B) < count
        counted_MBS = (labels_MBT[:, :, 1:] != UNCOUNTED) & real_MB[:, :, None]
        return counted_MBS / jnp.maximum(counted_MBS.sum(), 1)
