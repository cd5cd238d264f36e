"""cuDNN's fused attention: if the run file asks for it, XLA must have compiled it."""

import jax
import jax.numpy as jnp

import models
from lockstep.errors import LockstepError
from pipeline import runfile

KERNEL = "__cudnn$fmha"  # prefix of XLA's calls of cuDNN's fused multi-head attention


def check(run: runfile.Run, hf_config: dict) -> None:
    """Check that cuDNN's kernel is what is compiled, if `[peers] attention` asks for it.

    Raises:
      LockstepError: It cannot run here, or XLA compiles something else.
    """
    if run.peers.attention != "cudnn":
        return
    check_device(run)
    if KERNEL not in _compiled(run, hf_config):
        raise LockstepError(
            f'[peers] attention = "cudnn": XLA compiled no call of {KERNEL}, expected one; '
            'choose "matmul", or another version of JAX'
        )


def check_device(run: runfile.Run) -> None:
    """Check that cuDNN's kernel could run here.

    Raises:
      LockstepError: There is no NVIDIA GPU, or the run is in another precision.
    """
    platform, precision = jax.default_backend(), run.peers.precision
    if platform != "gpu" or precision != "bfloat16":
        raise LockstepError(
            f'[peers] attention = "cudnn", expected "matmul" on a {platform} in {precision}: '
            "the fused kernel needs an NVIDIA GPU and bfloat16"
        )


def _compiled(run: runfile.Run, hf_config: dict) -> str:
    """Return one layer compiled forward and backward by cuDNN, with the run's shapes: quick."""
    model = models.get(hf_config["model_type"])
    shape = model.Config.from_hf(hf_config).shortened(1)
    params = model.shapes(shape)
    tokens_BT = jax.ShapeDtypeStruct((run.peers.micro_batch, run.llm.max_seq_len), jnp.int32)

    def total(params: dict, tokens_BT: jax.Array) -> jax.Array:
        attention, dtype = run.peers.attention, jnp.dtype(run.peers.precision)
        logits = model.apply(shape, params, tokens_BT, scan=False, dtype=dtype, attention=attention)
        return logits.sum()

    return jax.jit(jax.grad(total)).lower(params, tokens_BT).compile().as_text()
