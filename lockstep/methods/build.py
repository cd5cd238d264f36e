"""The optimizer and the learning rate that a run file names."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial, singledispatch
from typing import Any, NamedTuple

import jax.numpy as jnp

from lockstep.errors import LockstepError
from lockstep.methods import optimizer_table as tables
from lockstep.methods import outer_table
from lockstep.methods import schedule_table as schedule
from lockstep.optim import schedules
from lockstep.optim.adamw import adamw
from lockstep.optim.aggregation.aggregate import EQUAL_MEAN, AggregateFn, equally, mean
from lockstep.optim.aggregation.rules import RULES
from lockstep.optim.compressed.ada_distro import ada_distro
from lockstep.optim.compressed.compressor import Compressor
from lockstep.optim.compressed.distro import CompressedMomentum, distro
from lockstep.optim.local.decoupled import decoupled_diloco
from lockstep.optim.local.diloco import diloco, outer_sgd
from lockstep.optim.local.fedavg import fedavg
from lockstep.optim.local.outer_steps import cgad, delayed_nesterov, heloco
from lockstep.optim.local.sparseloco import sparseloco
from lockstep.optim.local.sparta import sparta
from lockstep.optim.local.sparta_diloco import sparta_diloco
from lockstep.optim.local.streaming import streaming_diloco
from lockstep.optim.muon import muon
from lockstep.optim.optimizer import Optimizer
from lockstep.optim.quantize.half import Half
from lockstep.optim.quantize.integers import Integers
from lockstep.optim.quantize.levels import Levels
from lockstep.optim.quantize.qsgd import QSGD
from lockstep.optim.quantize.quantized import quantized
from lockstep.optim.quantize.quantizer import Quantizer
from lockstep.optim.schedules import LearningRate
from lockstep.optim.sgd import sgd
from lockstep.optim.step_direction import StepDirection
from pipeline.runfile import Peers, Run, variant_name

SCHEDULES: dict[type[schedule.ScheduleVariant], Callable[..., LearningRate]] = {
    schedule.ScheduleConstant: schedules.constant,
    schedule.ScheduleLinear: schedules.linear,
    schedule.ScheduleCosine: schedules.cosine,
    schedule.ScheduleWarmupStableDecay: schedules.warmup_stable_decay,
}

QUANTIZERS: dict[str, Callable[[Any], Quantizer]] = {  # by the elements of a block
    "bfloat16": lambda _: Half(jnp.bfloat16),
    "float16": lambda _: Half(jnp.float16),
    "int8": partial(Integers, 8),
    "int4": partial(Integers, 4),
    "qsgd8": partial(QSGD, 8),
    "qsgd4": partial(QSGD, 4),
    "two_bit": partial(Levels, 2),
    "sign": partial(Levels, 1),
}


def learning_rate_of(table: schedule.ScheduleVariant) -> LearningRate:
    """Return the schedule of `model.LLM.lr_schedule`; its keys are the function's arguments."""
    return SCHEDULES[type(table)](**dict(table))


def learning_rate_of_run(run: Run, first_step: int = 0) -> LearningRate:
    """Return a run's learning rate by step.

    `first_step` is the rounds trained by the run that this one extends, 0 for a new run.
    """
    learning_rate = learning_rate_of(run.llm.lr_schedule)
    if not first_step:
        return learning_rate
    # what Psyche calls a cold start: the first epoch after a pause
    return schedules.cold_start(learning_rate, first_step + 1, run.llm.cold_start_warmup_steps)


def _nesterov(learning_rate: float, *, momentum: float, aggregate: AggregateFn) -> Optimizer:
    nesterov = momentum > 0
    return outer_sgd(learning_rate, momentum=momentum, nesterov=nesterov, aggregate=aggregate)


OUTER_STEPS: dict[type[outer_table.OuterVariant], Callable[..., Optimizer]] = {
    outer_table.OuterNesterov: _nesterov,
    outer_table.OuterDelayedNesterov: delayed_nesterov,
    outer_table.OuterCGAD: cgad,
    outer_table.OuterHeLoCo: heloco,
}


class Setting(NamedTuple):
    """Settings of an optimizer that its table does not hold.

    Attributes:
      learning_rate: A schedule of the step, counted from 1.
      overlap: Rounds that messages travel while the next ones are computed, 0 to 2.
      stacked: Top-level groups of the params whose leaves carry a leading layer axis.
      aggregate: How the values that peers sent become one.
    """

    learning_rate: LearningRate
    overlap: int
    stacked: tuple[str, ...]
    aggregate: AggregateFn = mean

    @property
    def of_equals(self) -> AggregateFn:
        """The aggregate of gradients, whose peers count equally."""
        return EQUAL_MEAN if self.aggregate is mean else equally(self.aggregate)


def aggregate_of(peers: Peers) -> AggregateFn:
    """Return the rule of `[peers] aggregation`."""
    return RULES[peers.aggregation](peers.liars or 0)


def build(table: tables.OptimizerVariant, setting: Setting, groups: Collection[str]) -> Optimizer:
    """Return the optimizer of `model.LLM.optimizer`; `groups` are all top-level groups of params.

    Raises:
      LockstepError: The variant has no optimizer, cannot overlap, or names an unknown group.
    """
    if setting.overlap and not table.overlaps:
        raise LockstepError(
            f"[peers] overlap = {setting.overlap}, expected 0 with {variant_name(table)}: its "
            "peers wait for all messages"
        )
    named = [
        (f"{name}.{key}", group)
        for name, part in table.parts.items()
        for key in part.by_group
        for group in getattr(part, key)
    ]
    for key, group in named:
        if group not in groups:
            raise LockstepError(
                f"{key}: the model's params have no group {group}, "
                f"expected some of {', '.join(sorted(groups))}"
            )
    return optimizer_of(table, setting)


@singledispatch
def optimizer_of(table: tables.OptimizerVariant, setting: Setting) -> Optimizer:
    """Return the optimizer of a table: a function is registered below for each kind of table."""
    del setting
    *names, last = [
        kind.tag() for kind in optimizer_of.registry if issubclass(kind, tables.OptimizerVariant)
    ]
    raise LockstepError(
        f"{variant_name(table)}: this release cannot train with it, expected "
        f"{tables.OptimizerVariant.where}.{', '.join(names)} or {last}"
    )


@optimizer_of.register
def _distro(table: tables.OptimizerDistro, setting: Setting) -> Optimizer:
    return distro(_momentum(table, setting), setting.overlap)


@optimizer_of.register
def _ada_distro(table: tables.OptimizerAdaDistro, setting: Setting) -> Optimizer:
    momentum = _momentum(table, setting)
    momentum = replace(
        momentum,
        compressor=replace(
            momentum.compressor, topk_of=table.topk_of, untransformed=table.untransformed
        ),
        direction=StepDirection(table.update, table.step_scale, setting.stacked),
        removed=table.removed,
    )
    if table.second_moment_decay is None:
        return distro(momentum, setting.overlap)
    return ada_distro(momentum, table.second_moment_decay, setting.overlap)


@optimizer_of.register
def _adamw(table: tables.OptimizerAdamW, setting: Setting) -> Optimizer:
    return adamw(setting.learning_rate, **dict(table), aggregate=setting.of_equals)


@optimizer_of.register
def _muon(table: tables.OptimizerMuon, setting: Setting) -> Optimizer:
    rest = {"stacked": setting.stacked, "aggregate": setting.of_equals}
    return muon(setting.learning_rate, **dict(table), **rest)


@optimizer_of.register
def _sgd(table: tables.OptimizerSGD, setting: Setting) -> Optimizer:
    return sgd(setting.learning_rate, **dict(table), aggregate=setting.of_equals)


@optimizer_of.register
def _workload(table: tables.OptimizerWorkload, setting: Setting) -> Optimizer:
    """A workload's local steps arrive as one: where they led to is the params minus that."""
    del table, setting
    return sgd(1.0)


@optimizer_of.register
def _diloco(table: tables.OptimizerDiLoCo, setting: Setting) -> Optimizer:
    return diloco(_inner(table, setting), _outer(table, setting), inner_steps=table.inner_steps)


@optimizer_of.register
def _streaming(table: tables.OptimizerStreamingDiLoCo, setting: Setting) -> Optimizer:
    return streaming_diloco(
        _inner(table, setting),
        _outer(table, setting),
        inner_steps=table.inner_steps,
        fragments=table.fragments,
        delay=table.delay,
        mixing=table.mixing,
    )


@optimizer_of.register
def _decoupled(table: tables.OptimizerDecoupledDiLoCo, setting: Setting) -> Optimizer:
    outer = OUTER_STEPS[type(table.outer)](**dict(table.outer), aggregate=setting.aggregate)
    return decoupled_diloco(
        _inner(table, setting),
        _rounded(outer, table),
        inner_steps=table.inner_steps,
        fragments=table.fragments,
        delay=table.delay,
        adopt=table.adopt,
        mixing=table.mixing or 0.0,
    )


def _inner(table: tables.LocalSteps, setting: Setting) -> Optimizer:
    """Return the optimizer of the local steps, each of which a peer takes alone."""
    return optimizer_of(table.inner, setting._replace(aggregate=mean))


def _outer(
    table: tables.OptimizerDiLoCo | tables.OptimizerStreamingDiLoCo, setting: Setting
) -> Optimizer:
    """Return the outer SGD, with messages as the table rounds them."""
    outer = outer_sgd(
        table.outer_learning_rate,
        momentum=table.outer_momentum,
        nesterov=table.nesterov,
        aggregate=setting.aggregate,
    )
    return _rounded(outer, table)


def _rounded(outer: Optimizer, table: tables.Rounded) -> Optimizer:
    """Return an outer optimizer with messages as the table rounds them."""
    if not table.quantize:
        return outer
    quantizer = QUANTIZERS[table.quantize](table.quantize_block)
    return quantized(outer, quantizer, table.error_feedback or 0.0)


@optimizer_of.register
def _sparseloco(table: tables.OptimizerSparseLoCo, setting: Setting) -> Optimizer:
    return sparseloco(
        _inner(table, setting),
        inner_steps=table.inner_steps,
        outer_learning_rate=table.outer_learning_rate,
        error_feedback=table.error_feedback,
        topk=table.compression_topk,
        chunk=table.compression_chunk,
        stacked=setting.stacked,
        aggregate=setting.aggregate,
    )


@optimizer_of.register
def _fedavg(table: tables.OptimizerFedAvg, setting: Setting) -> Optimizer:
    inner = _inner(table, setting)
    return fedavg(inner, inner_steps=table.inner_steps, aggregate=setting.aggregate)


@optimizer_of.register
def _sparta(table: tables.OptimizerSPARTA, setting: Setting) -> Optimizer:
    return _places(table, setting)


@optimizer_of.register
def _sparta_diloco(table: tables.OptimizerSPARTADiLoCo, setting: Setting) -> Optimizer:
    sparse = _places(table, setting)
    momentum, nesterov = table.outer_momentum, table.nesterov
    outer = sgd(table.outer_learning_rate, momentum=momentum, nesterov=nesterov)
    return sparta_diloco(sparse, outer, outer_every=table.outer_every, aggregate=setting.aggregate)


def _places(table: tables.Places, setting: Setting) -> Optimizer:
    settings = {key: getattr(table, key) for key in tables.Places.model_fields}
    settings["inner"] = _inner(table, setting)
    return sparta(**settings, aggregate=setting.aggregate)


def _momentum(table: tables.Compressing, setting: Setting) -> CompressedMomentum:
    return CompressedMomentum(
        setting.learning_rate,
        Compressor(
            topk=table.compression_topk,
            chunk=table.compression_chunk,
            quantize_1bit=table.quantize_1bit,
            stacked=setting.stacked,
            skip_zero_blocks=bool(table.skip_zero_blocks),
        ),
        compression_decay=table.compression_decay,
        weight_decay=table.weight_decay or 0.0,
        clip_grad_norm=table.clip_grad_norm,
        aggregate=setting.aggregate,
    )
