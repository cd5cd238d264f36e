"""Settings of JAX that change results, of a program that imported JAX before us."""

from lockstep.errors import LockstepError

# Settings that JAX may have got where we could not leave out its variables, and those that are
# not recorded because they are usual. Other values of `NEEDED` break our programs or rounding.
NEEDED = {
    "jax_enable_x64": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
}
USUAL = NEEDED | {
    "jax_default_prng_impl": "threefry2x32",
    "jax_disable_jit": False,
    "jax_disable_most_optimizations": False,
    "jax_enable_custom_prng": False,
    "jax_random_seed_offset": 0,
    "jax_threefry_partitionable": True,
}


def check_settings(who: str) -> None:
    """Check how JAX was set up by a program that imported it before us."""
    for name, value in other_settings().items():
        if name in NEEDED:
            raise LockstepError(
                f"{who}: jax.config.{name} is {value}, expected {NEEDED[name]}, for which its "
                f"programs are written; `jax.config.update({name!r}, {NEEDED[name]!r})` sets it"
            )


def other_settings() -> dict[str, str]:
    """Return which settings of JAX that change results are not as usual, and what they are."""
    import jax

    settings = {name: value for name, value in jax.config.values.items() if name in USUAL}
    plain = {name: getattr(value, "value", value) for name, value in settings.items()}  # of an enum
    return {name: str(value) for name, value in plain.items() if value != USUAL[name]}
