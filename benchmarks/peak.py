"""What a machine can do at most: FLOP per second of matrix products, measured and published."""

import time

# Dense bfloat16, sums in float32, of one device by JAX's `device_kind`. NVIDIA's data sheets of
# H100 (SXM and PCIe), H200 and A100, which give twice the first three, with sparsity; that of H100
# SXM to the digit from the table of the H100 white paper. Read 2026-11-23.
PUBLISHED = {
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
}


def published_flops() -> float | None:
    """bfloat16 FLOP per second of all devices by their data sheet; None if it is not known."""
    import jax

    devices = jax.devices()
    of_one = PUBLISHED.get(devices[0].device_kind)
    return of_one and of_one * len(devices)


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
