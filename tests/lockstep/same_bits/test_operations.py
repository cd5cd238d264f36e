"""Each operation of JAX, of each type, has the same bits everywhere by rules, or is refused."""

import jax
import numpy as np
import pytest

from lockstep.same_bits import rules
from lockstep.same_bits.evaluation import same_bits, without_rule
from tests import tiny
from tests.lockstep.same_bits import operations

DEVICES = {"all_gather", "sharding_constraint"}  # where arrays lie on several
NARROW = [dtype for dtype in operations.TYPES if dtype != "float16"]  # all that old CPUs have
LISTED = rules.ONE_WAY | rules.OF_INTEGERS | rules.RULES.keys()


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], frozenset[str]]:
    """What has no rule in each example, by the example and its type."""
    with jax.enable_x64(True):
        return {
            (name, dtype): refused
            for dtype in operations.TYPES
            for name, refused in operations.outcomes(dtype).items()
        }


def test_each_operation_of_each_type_is_in_a_list_or_refused(outcomes):
    taken = {
        (name.partition(" ")[0], dtype) for name, dtype in outcomes if not outcomes[name, dtype]
    }
    assert {name for name, _ in taken} == LISTED - DEVICES
    assert {name for name, dtype in taken if dtype in operations.INTEGERS} >= rules.OF_INTEGERS
    assert "complex64" not in {dtype for _, dtype in taken}
    for name in rules.RULES.keys() - rules.ONE_WAY:
        floats = {dtype for found, dtype in taken if found == name} - {*operations.INTEGERS}
        assert floats <= rules.RULED | ({"float16", "float64"} if name == "scatter-add" else set())


def test_what_is_refused_is_named_with_its_types(outcomes):
    named = {
        key: {line.partition(" at ")[0] for line in refused} for key, refused in outcomes.items()
    }
    assert named["erf", "float16"] == {"erf of float16"}
    assert "fft of complex64" in named["fft", "complex64"]
    assert named["pure_callback", "int32"] == {"pure_callback of int32"}
    assert "random_wrap of uint32 and key<rbg>" in named["random_bits (rbg)", "uint32"]
    assert named["dot_general (to float32)", "int8"] == {"dot_general of int8 and float32"}
    equal = named["scatter (of equal places)", "float32"]
    assert equal == {"scatter to places that may be equal of float32 and int32"}
    for name in ("sort (unstable)", "rng_bit_generator", "rng_uniform", "reduce"):
        assert all(refused for (found, _), refused in outcomes.items() if found == name), name


@pytest.mark.parametrize(
    "types, settings",
    [
        pytest.param(["int32", "float32"], ["AVX"], marks=pytest.mark.release, id="two types"),
        pytest.param(operations.TYPES, ["AVX2"], marks=pytest.mark.soak, id="all types"),
        pytest.param(NARROW, ["AVX", "SSE4_2"], marks=pytest.mark.soak, id="without float16"),
    ],
)
def test_what_is_taken_has_the_same_bits_with_other_instructions(types, settings):
    def hashes(instructions):
        flags = f"--xla_allow_excess_precision=false --xla_cpu_max_isa={instructions}"
        done = tiny.python("-m", "tests.lockstep.same_bits.operations", *types, XLA_FLAGS=flags)
        assert done.returncode == 0, done.stderr
        return dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())

    expected = hashes("AVX512")
    assert {name.partition(" ")[0] for name in expected} == {*types} - {"complex64"}
    for instructions in settings:
        found = hashes(instructions)
        assert {name for name in expected if expected[name] != found[name]} == set(), instructions


def test_a_function_that_is_called_as_ours_is_evaluated_by_rules():
    def same_bits_of(function):
        def same_bits(x):
            return function(x)

        return jax.jit(same_bits)

    found = without_rule(same_bits_of(jax.lax.erf), np.ones(3, np.float32))
    assert {name.partition(" at ")[0] for name in found} == {"erf of float32"}


@pytest.mark.parametrize("dtype", operations.INTEGERS[1:])
def test_programs_of_integers_alone_have_floats_whatever_the_first_integer_is(dtype):
    first = np.array([-3, 5]).astype(dtype)
    found = same_bits(lambda n: n.astype(np.float32) * np.float32(0.1))(first)
    np.testing.assert_array_equal(found, first.astype(np.float32) * np.float32(0.1))


def test_a_key_alone_is_an_argument():
    key = jax.random.key(3)
    drawn = same_bits(lambda key: jax.random.uniform(key, (4,)))(key)
    np.testing.assert_array_equal(drawn, jax.random.uniform(key, (4,)))
