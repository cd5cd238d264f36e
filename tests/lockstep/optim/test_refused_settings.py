"""A setting that cannot be is named."""

import jax.numpy as jnp
import pytest

from lockstep.optim.compressed.ada_distro import normalized
from lockstep.optim.compressed.compressor import Compressor
from lockstep.optim.compressed.distro import CompressedMomentum, demo, distro
from lockstep.optim.dense import adamw, sgd
from lockstep.optim.directions import StepDirection
from lockstep.optim.local.local_steps import fedavg, outer_sgd
from lockstep.optim.local.sparta import sparta
from lockstep.optim.local.streaming import streaming_diloco
from lockstep.optim.optimizer import Optimizer
from lockstep.optim.transform import alone
from tests.lockstep.optim.optimizers import make


def streaming(**changes) -> Optimizer:
    settings = {"inner_steps": 4, "fragments": 2, "delay": 1, "mixing": 0.0} | changes
    return streaming_diloco(sgd(1), outer_sgd(1), **settings)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: demo(1, 0.9, 0, 8, 0, alone), "compression_topk is 0, expected an integer"),
        (lambda: demo(1, 0.9, 4, 0, 0, alone), "compression_chunk is 0, expected an integer"),
        (lambda: demo(1, 1.5, 4, 8, 0, alone), "compression_decay is 1.5, expected a number"),
        (lambda: demo(1, 0.9, 4, 8, -1, alone), "weight_decay is -1, expected a number from 0"),
        (
            lambda: demo(1, 0.9, 4, 8, 0, alone).init({"w": jnp.ones((0, 4))}),
            r"params\['w'\] has the shape \(0, 4\), expected elements",
        ),
        (lambda: Compressor(4, 8, True, topk_of={"w": 0}), r"topk_of\['w'\] is 0, expected an"),
        (lambda: distro(CompressedMomentum(1, Compressor(4, 8, True), 0.9), 3), "overlap is 3"),
        (lambda: normalized(None, 1.0), "second_moment_decay is 1.0, expected a number from 0,"),
        (lambda: StepDirection("signs"), "update is 'signs', expected one of sign, rms, orth"),
        (
            lambda: adamw(1, betas=(0.9, 0.95), eps=1e-8, weight_decay=1, clip_grad_norm=-1.0),
            "clip_grad_norm is -1.0, expected a number from 0",
        ),
        (
            lambda: sparta(sgd(1), inner_steps=1, share=0.0, seed=0),
            "share is 0.0, expected a number above 0, at most 1",
        ),
        (
            lambda: sparta(sgd(1), inner_steps=1, share=0.1, seed=0, selector="all"),
            "selector is 'all', expected one of random, shuffled, partitioned",
        ),
        (lambda: fedavg(sgd(1), inner_steps=0), "inner_steps is 0, expected an integer from 1"),
        (lambda: streaming(inner_steps=5), "inner_steps is 5, expected a multiple of 2"),
        (lambda: streaming(delay=2), "delay is 2, expected an integer from 0, below 2"),
        (lambda: streaming(mixing=1.0), "mixing is 1.0, expected a number from 0, below 1"),
        (
            lambda: fedavg(make("fedavg"), inner_steps=2),
            "inner looks ahead, expected no overlap and no local steps within",
        ),
        (lambda: sgd(1, nesterov=True), "nesterov is True, expected false without momentum"),
        (lambda: adamw(1, betas=(0.9, 1.0), eps=0, weight_decay=0), r"betas\[1\] is 1.0, exp"),
    ],
)
def test_a_setting_that_cannot_be_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
