"""What a machine can do at most: the FLOP per second of large matrix products, measured."""

import time


def matrix_flops(precision: str) -> float:
    """FLOP per second of one large product on each device, all at once.

    Args:
      precision: dtype of the operands.
    """
    import jax
    import jax.numpy as jnp

    n = 1024 if jax.default_backend() == "cpu" else 8192
    product = jax.jit(lambda a, b: a @ b)
    operands = [
        jax.device_put((jnp.ones((n, n), precision), jnp.ones((n, n), precision)), device)
        for device in jax.devices()
    ]
    times = 8
    jax.block_until_ready([product(*pair) for pair in operands])
    began = time.perf_counter()
    jax.block_until_ready([product(*pair) for _ in range(times) for pair in operands])
    return 2 * n**3 * times * len(operands) / (time.perf_counter() - began)
