"""Rounds of `simulate` beside plain training of as many tokens: one jitted, scanned loop of optax.

The plain loop is what data parallelism on one device comes to: each of its steps takes the
gradients of as many micro-batches as there are peers, of the size of theirs, and updates the params
once by AdamW. A round of local steps has as many of these steps. It is as compiled, also beside
rounds by rules in layouts "each" and "rounds", of which the last is one program for many rounds.

Shapes in names: S steps, P micro-batches of a step, B sequences of T tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.accelerator.extent import DOTS, Extent, attempt, judged
from benchmarks.simulate import OPTIMIZERS
from benchmarks.sizes import SIZES
from lockstep import simulate
from lockstep.programs.loss import cross_entropy
from lockstep.simulation.planning import MOST_ROUNDS
from models.llama import llama

GOALS = {"distro": 0.8}  # of plain training; of methods with whole gradients or local steps:
GOAL = 0.9
WARM = 2  # rounds
SPENT = 0.8  # of a share of time: what follows the last block comes on top
BLOCK, MOST = 32 * 1024, 20  # tokens of a peer in rounds that are timed together, and rounds


def simulated(extent: Extent, work: Path) -> Iterator[dict]:
    """Rounds of each optimizer, of models of each size."""
    del work
    end = perf_counter() + extent.seconds
    first = extent.simulated[0]  # the smallest, which waits for launches
    cases = [(first, name, layout) for name in extent.in_blocks for layout in ("rounds", "each")]
    cases += [(size, name, None) for size in extent.simulated for name in extent.optimizers]
    cases = extent.mine(cases)
    for place, (size, name, layout) in enumerate(cases):
        names = {"size": size, "optimizer": name, "peers": extent.peers}
        names |= {"by_rules_in_layout": layout} if layout else {}
        share = SPENT * (end - perf_counter()) / (len(cases) - place)
        yield attempt(names, partial(_measure, extent, size, name, layout, perf_counter() + share))


class EnoughError(Exception):
    """A case has had its time, with blocks left."""


def _measure(extent: Extent, size: str, name: str, layout: str | None, end: float) -> dict:
    """Blocks of rounds and of plain steps by turns, one at least, and no more after `end`.

    Before a clock is read the devices have done all that they were given, so that a block has as
    many rounds of device time whether or not a round begins before the last one is read.
    """
    model, peers = SIZES[size], extent.peers
    precision = "bfloat16" if model.width >= 512 else "float32"
    table = OPTIMIZERS[name]
    settings = next(iter(table.values())) if isinstance(table, dict) else {}
    steps = settings.get("inner_steps", 1)
    tokens_of_a_peer = steps * model.batch * model.length
    block = min(max(1, BLOCK // tokens_of_a_peer), MOST)
    rules = {"bits": "everywhere", "product_bits": 8, "layout": layout} if layout else {}
    warm, block = (MOST_ROUNDS,) * 2 if layout == "rounds" else (WARM, block)
    config = llama.Config.from_hf({"model_type": "llama"} | model.config)
    attention = extent.attention(precision)
    fused = {"scan": True, "attention": attention, "remat": DOTS} if attention == "cudnn" else {}
    options = {"scan": False} | fused
    features = partial(llama.features, config, dtype=jnp.dtype(precision), **options)

    def loss_fn(params: dict, tokens_BT: jax.Array, rng: jax.Array | None) -> jax.Array:
        head = llama.head(config, params)
        return cross_entropy(features(params, tokens_BT), head, tokens_BT).mean()

    params = jax.device_get(llama.init(config, 0))
    rng = np.random.default_rng(0)
    shape = steps, peers, model.batch, model.length
    tokens_SPBT = rng.integers(model.vocabulary, size=shape, dtype=np.int32)
    plain = _plain(loss_fn, params, tokens_SPBT, precision)
    rows = rng.integers(model.vocabulary, size=(64 * model.batch, model.length), dtype=np.int32)
    seconds: dict[str, list[float]] = {"round": [], "plain": []}
    done, began = 0, 0.0

    def after(row: dict[str, float]) -> None:
        """After a block of rounds, as many plain steps."""
        nonlocal done, began
        done += 1
        if done < warm or (done - warm) % block:
            return
        _drain()
        if done > warm:
            seconds["round"].append((perf_counter() - began) / block)
        started = perf_counter()
        for _ in range(block):
            plain()
        _drain()
        seconds["plain"].append((perf_counter() - started) / block)
        began = perf_counter()
        if len(seconds["round"]) == extent.repeats or (seconds["round"] and began > end):
            raise EnoughError

    for _ in range(2):  # compiles, and warms up
        plain()
    with suppress(EnoughError):
        simulate(
            loss_fn,
            params,
            rows,
            optimizer=table,
            peers=peers,
            steps=warm + (extent.repeats + 1) * block,  # a block is computed ahead
            batch_size=model.batch,
            micro_batch=model.batch,
            dtype=precision,
            on_round=after,
            show_progress=False,
            **rules,
        )
    of_round, of_plain = (median(times) for times in seconds.values())
    how = f", by rules in layout {layout}" if layout else ""
    goal, ratio = GOALS.get(name, GOAL), round(of_plain / of_round, 3)
    met = None if jax.default_backend() == "cpu" else ratio >= goal
    tokens = peers * tokens_of_a_peer
    return {
        "precision": precision,
        "attention": attention,
        "local_steps": steps,
        "tokens_of_a_round": tokens,
        "rounds_of_a_block": block,
        "milliseconds": {
            part: [round(1e3 * at, 3) for at in times] for part, times in seconds.items()
        },
        "tokens_per_second": round(tokens / of_round),
        "plain_tokens_per_second": round(tokens / of_plain),
    } | judged(f"simulate, {size}, {name}, {peers} peers{how}: of plain training", ratio, goal, met)


def _plain(
    loss_fn: Callable, params: dict, tokens_SPBT: np.ndarray, precision: str
) -> Callable[[], None]:
    """A call takes the steps of a round, without waiting for them."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, b2=0.95))
    peers = tokens_SPBT.shape[1]

    def loss(params: dict, tokens_BT: jax.Array) -> jax.Array:
        cast = jax.tree.map(lambda leaf: leaf.astype(precision), params)
        return loss_fn(cast, tokens_BT, None) / peers

    def step(state: tuple, tokens_PBT: jax.Array) -> tuple[tuple, jax.Array]:
        params, opt_state = state

        def add(sums: tuple, tokens_BT: jax.Array) -> tuple[tuple, None]:
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(params, tokens_BT)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        (value, grads), _ = jax.lax.scan(add, zeros, tokens_PBT)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    steps = jax.jit(partial(jax.lax.scan, step), donate_argnums=0)
    device = jax.devices()[0]
    held = jax.device_put(((params, tx.init(params)), tokens_SPBT), device)

    def call() -> None:
        nonlocal held
        held = steps(*held)[0], held[1]

    return call


def _drain() -> None:
    """Waits until each device has done all that it was given before."""
    jax.block_until_ready([jax.device_put(0.0, device) + 1.0 for device in jax.devices()])
