"""`simulate`: peers train any model with any optimizer, in the rounds that stage train takes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lockstep.machine.jax_settings import check_settings, other_settings
from lockstep.optim.optimizer import Optimizer
from lockstep.programs.local_training import HostSteps, Lots, one_by_one
from lockstep.programs.train_step import Programs
from lockstep.same_bits.products import product_of
from lockstep.simulation import arguments, examples, torch_module
from lockstep.simulation.loss_task import LossFn, LossTask, Nesting
from lockstep.simulation.result import Log, Result
from lockstep.simulation.rounds import Problem, SavedSimulation, take_rounds
from lockstep.simulation.torch_module import TorchLoss, TorchModule
from lockstep.transcript.trees import tree_hash


def simulate(  # noqa: PLR0913 - whoever calls it names them
    loss_fn: LossFn | TorchLoss,
    params: Any,
    train_data: Any,
    eval_data: Any = None,
    *,
    optimizer: str | Mapping[str, Any] | Optimizer | optax.GradientTransformation,
    peers: int,
    steps: int,
    batch_size: int,
    learning_rate: float | Mapping[str, Any] | Callable[[jax.Array], jax.Array] | None = None,
    aggregation: str = "mean",
    liars: int | None = None,
    links: Mapping[str, Any] | None = None,
    faults: Sequence[Mapping[str, Any]] = (),
    verification_percent: int = 0,
    max_round_train_time: int = 3600,
    seed: int = 0,
    shuffle: bool = True,
    micro_batch: int | None = None,
    dtype: str = "float32",
    layout: str = "each",
    bits: str = "machine",
    product_bits: int = 20,
    stacked: tuple[str, ...] = (),
    eval_every: int = 10,
    correlation_every: int | None = None,
    log_dir: str | Path | None = None,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: int = 25,
    on_round: Callable[[dict[str, float]], None] | None = None,
    show_progress: bool = True,
) -> Result:
    """Train a model with simulated peers, which exchange real bytes over simulated links.

    Rounds are those of stage train: a coordinator assigns the examples, peers take their local
    steps and send messages in the wire format, and what the bytes decode to is applied.

        def loss_fn(params, batch, rng):
            logits = batch["x"] @ params["w"] + params["b"]
            labels = batch["y"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        result = simulate(
            loss_fn, params, {"x": x, "y": y}, optimizer="diloco", peers=4, steps=20, batch_size=32
        )

    The same arguments give the same bits on the same machine, with bits="everywhere" on every one;
    `micro_batch` is among them, which otherwise depends on the memory. Peers run on all devices
    that JAX has, in turns where there are fewer. A CPU is one device, unless
    `jax.config.update("jax_num_cpu_devices", cores)` comes first: as many peers then run at the
    same time.

    Args:
      loss_fn: loss_fn(params, batch, rng) -> scalar, the mean over the examples of a batch, arrays
        with a leading axis of examples; or (sum, count), where these do not count alike. rng is a
        key of (seed, round, peer, local step), for dropout and the like, or None where the loss is
        measured. Of a torch module, loss_fn(module, batch) -> scalar tensor, or (sum, count), with
        tensors, integers in 64 bits.
      params: Any tree of floating-point arrays, such as nested dicts or a state of flax.nnx; or a
        torch module, which is trained where it is.
      train_data: Arrays of NumPy, JAX or torch with a leading axis of examples, in any tree; or a
        dataset with a length whose items are trees of one example's arrays; or factory(peer,
        num_peers, split) that returns either for a peer, with split "train". Without a factory
        peers share the examples, each of which is seen once in a pass over them. A dataset is
        read again in each pass; what it draws from the global generators of Python, NumPy and
        torch follows from the seed, the peer and the round.
      eval_data: The same, to measure the loss on; a factory is asked for split "eval" of peer 0,
        one in train_data too if eval_data is None, and may return None.
      optimizer: A name, such as "diloco", "demo", "distro", "sparta", "fedavg", "adamw" or "sgd"; a
        table of a run file, as {"DiLoCo": {"inner_steps": 10}}, with defaults for what it lacks; an
        `Optimizer`; or one of optax, as optax.adam(1e-3), on the mean of whole gradients.
      peers: Number of peers, 1 to 256.
      steps: Rounds: exchanges, each after the optimizer's inner_steps local steps.
      batch_size: Examples of a peer in each local step, also where other peers are away.
      learning_rate: A number; a schedule of a run file, as {"Cosine": {...}}; or a function of the
        round. By default the one that the optimizer's card in lockstep/methods states
        for the smallest model.
      aggregation: `[peers] aggregation` of a run file: how peers' messages become one, "mean",
        "median" or another rule that tolerates liars.
      liars: `[peers] liars`: how many peers may lie, where the rule needs it.
      links: `[links]` of a run file: upload_mbps, download_mbps, latency_seconds, and
        tokens_per_second, which are examples here; each a number, or one for each peer.
      faults: `[faults]` schedule of a run file, as [{"kind": "sign_flip", "peer": 2, "rounds": [3,
        9]}].
      verification_percent: Percentage of peers who recompute others' steps instead of training, and
        have liars ejected.
      max_round_train_time: Seconds on the links after which a round goes on without a message.
      seed: Seed of all randomness.
      shuffle: Whether examples come in random order, another in each pass over them.
      micro_batch: Examples per gradient computation; by default the largest that fits into memory,
        of batch_size, its half, and so on; of a torch module, batch_size.
      dtype: "float32"; or "bfloat16": what params and examples are cast to before loss_fn, while
        params and states stay in float32.
      layout: `[peers] layout`: "each", "shard_map", "pmap" or "vmap"; or "rounds", which with
        bits="everywhere" and without faults and verifiers computes up to 64 rounds by one program,
        on one device. A round after which a state is measured or saved ends it.
      bits: `[peers] bits`: "machine"; or "everywhere", where each operation of loss_fn and of the
        optimizer goes by a rule, and what has none is refused by its name and line.
      product_bits: `[peers] product_bits`: 20 or 8, the precision of products of matrices.
      stacked: Top-level names of params whose arrays have a leading axis of layers, for
        Muon's matrices, and the blocks of DisTrO and SparseLoCo; none with others.
      eval_every: Rounds between measurements of eval_data.
      correlation_every: Rounds between correlations of the peers' local params; None for none.
      log_dir: Where train.csv, validation.csv, correlation.csv and config.json are written.
      checkpoint_dir: Where checkpoints are kept. Called again with the same arguments after a kill,
        it goes on from the newest and ends with the same bits; with more steps it goes further.
      checkpoint_every: Rounds between checkpoints.
      on_round: Called after each round with its numbers, those of `Result.train`; for loggers.
      show_progress: Whether progress is shown.

    Raises:
      LockstepError: An argument or a setting of JAX is not what was expected, as 64 bits, or the
        loss is not finite.
    """
    inputs = dict(locals())
    check_settings("simulate")
    is_module = torch_module.is_module(params)
    if is_module:
        module = TorchModule(params, loss_fn, micro_batch or batch_size)
        initial = module.first
    else:
        nesting = Nesting(params)
        initial = nesting.nested(params)
    if isinstance(optimizer, optax.GradientTransformation):
        optimizer = inputs["optimizer"] = arguments.adopted(optimizer, initial)
    args = arguments.read_arguments(inputs, sorted(initial), torch=is_module)
    round_settings = args.round_settings(optimizer)
    data_of_peers = examples.data_of_peers(train_data, peers, seed, shuffle=shuffle)
    held_out = examples.held_out(train_data, eval_data, peers, seed)
    opt = arguments.the_optimizer(args, optimizer, learning_rate)
    if is_module:
        module.count_over(data_of_peers)
        opt, lot = one_by_one(opt), args.rows_of_a_step
        stepper = HostSteps(opt, Lots(opt.inner_steps, lot), module, seed)
        programs = Programs(module, opt, stepper, lot=lot)
    else:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), initial)
        task = LossTask(loss_fn, nesting, shapes, jnp.dtype(dtype), seed, batch_size)
        task.check(data_of_peers[0].take(np.arange(batch_size)).examples)
        product = product_of(args.bits, args.product_bits)
        programs = Programs(task, opt, lot=args.rows_of_a_step, product=product)
        row = jax.tree.map(lambda x: x[0], data_of_peers[0].take(np.arange(1)))
        programs.check_rules(row, "simulate: bits is", args.faults)
    arguments.check_signs(args.faults, programs.form)
    machine = {"device": jax.devices()[0].device_kind} | programs.steps.by.environment
    if args.bits == "everywhere":
        machine = {}
    log_folder = arguments.folder("log_dir", log_dir)
    checkpoint_folder = arguments.folder("checkpoint_dir", checkpoint_dir)
    settings = args.model_dump(mode="json") | {
        "params": tree_hash(initial),
        "examples": [data.examples.count for data in data_of_peers],
        "messages": programs.form.header.hex(),
        "environment": {"jax": jax.__version__} | other_settings() | machine,
    }
    if callable(learning_rate):
        settings["learning_rate"] = "function"
    checkpoints = SavedSimulation(checkpoint_folder, checkpoint_every, settings)
    problem = Problem(args, round_settings, programs, data_of_peers, held_out, initial)
    return take_rounds(problem, checkpoints, Log(log_folder, checkpoints.settings))
