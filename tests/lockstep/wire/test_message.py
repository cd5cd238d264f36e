"""The wire: lossless, near the entropy, and closed to bytes that are not a message."""

import json
import random
import struct
import tracemalloc
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_dtypes import bfloat16

from lockstep.optim.balance import balanced, leave
from lockstep.optim.compressed.compressor import Coefficients, Compressor
from lockstep.optim.compressed.distro import CompressedMomentum, distro
from lockstep.optim.dense import adamw
from lockstep.wire import message as wire
from lockstep.wire import rice
from pipeline.stage.keys import PROJECT
from tests.errors import refused
from tests.lockstep.optim.compiled import compiled
from tests.lockstep.transcript.test_tensorfile import same

GOLDEN = PROJECT / "tests" / "golden" / "wire.json"
PARAMS = {"embed": jnp.zeros((100, 64)), "layers": {"norm": jnp.zeros((2, 48))}}
SMALL = {"embed": jnp.zeros((20, 32)), "layers": {"norm": jnp.zeros((2, 8))}}


def optimizer(one_bit: bool):
    compressor = Compressor(5, 32, one_bit, stacked=("layers",))
    return distro(CompressedMomentum(lambda step: 0.1, compressor, 0.9))


ADAMW = adamw(lambda step: 0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
KINDS = {
    "dense": (ADAMW, "lockstep"),
    "signs": (optimizer(True), "lockstep"),
    "values": (optimizer(False), "lockstep"),
    "plain signs": (optimizer(True), "psyche"),
    "plain values": (optimizer(False), "psyche"),
}
each_kind = pytest.mark.parametrize("name", KINDS)


@cache
def message_of(name: str, small: bool = False) -> dict:
    (optimizer, _), params = KINDS[name], SMALL if small else PARAMS
    optimizer = compiled(optimizer)
    own, shared = optimizer.init(params)
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)
    own = optimizer.accumulate(grads, own, params, 1)
    return jax.device_get(optimizer.send(own, params, shared, 1)[0])


@cache
def encoded(name: str, small: bool = False) -> tuple[bytes, wire.Form]:
    form = wire.form_of(KINDS[name][0], SMALL if small else PARAMS, KINDS[name][1])
    return wire.encode(message_of(name, small), form), form


def test_arrays_sent_whole_travel_in_their_own_dtype():
    like = {
        "code": np.array([1, 255], np.uint8),
        "half": np.array([[1.0], [-2.0]], bfloat16),
        "level": np.array(1.5, np.float16),
    }
    form = wire.Form(like, dict.fromkeys(like, 0), "lockstep", 5)
    data = wire.encode(like, form)
    assert data[5] == 0
    assert data[16:].hex(" ", 2) == "01ff 803f 00c0 003e"
    same(wire.decode(data, form), like)
    other = like | {"half": like["half"].astype(np.float16)}
    with refused("form", error=wire.WireError):
        wire.decode(data, wire.Form(other, dict.fromkeys(like, 0), "lockstep", 5))
    for at, name, value in ((1, "half", np.nan), (2, "level", np.inf)):
        bad = like | {name: np.full_like(like[name], value)}
        with refused(f"array {at}", "finite", error=wire.WireError):
            wire.decode(wire.encode(bad, form), form)


@pytest.mark.parametrize(("elements", "kept"), [(8, True), (7, False)])
def test_messages_of_at_most_half_a_byte_per_param_are_kept(elements, kept):
    assert wire.Form({"w": np.zeros(1, np.float32)}, {"w": 0}, "lockstep", elements).kept == kept


def test_sizes_are_what_the_format_says():
    # embed: 4 x 2 blocks of 25 x 32 places (u16); norm: 2 x 2 blocks of 24 places (u8); 5 kept
    blocks = [(8, 2), (4, 1)]
    places = sum(n * 5 * width for n, width in blocks)
    assert len(encoded("plain signs")[0]) == 16 + places + sum(-(-n * 5 // 8) for n, _ in blocks)
    assert len(encoded("plain values")[0]) == 16 + places + sum(2 * n * 5 for n, _ in blocks)
    assert len(encoded("dense")[0]) == 16 + sum(4 * x.size for x in jax.tree.leaves(PARAMS))
    for name in ("plain signs", "plain values", "dense"):
        data, form = encoded(name)
        assert len(data) == form.bytes_most


@pytest.mark.parametrize("one_bit", [True, False])
@pytest.mark.parametrize("how", ["drawn", "at the end", "at the start", "apart", "mixed"])
def test_no_message_is_longer_than_its_form_says_and_drawn_ones_are_hardly_shorter(one_bit, how):
    """An address that is signed before the round fixes the length of what is put by it."""
    shapes = {"a": (300, 8, 4096), "b": (40, 8, 1024), "c": (7, 3, 24)}
    value = bool if one_bit else bfloat16
    rng, leaves = np.random.default_rng(0), {}
    for name, (blocks, kept, area) in shapes.items():
        drawn = [np.sort(rng.choice(area, kept, replace=False)) for _ in range(blocks)]
        ends = np.tile(np.arange(area - kept, area), (blocks, 1))
        chosen = {
            "drawn": np.array(drawn),
            "at the end": ends,
            "at the start": ends - (area - kept),
            "apart": np.tile(np.linspace(0, area - 1, kept).astype(int), (blocks, 1)),
            "mixed": np.where(np.arange(blocks)[:, None] % 2, np.array(drawn), ends),
        }[how]
        signs = rng.random((blocks, kept)) > 0.5
        leaves[name] = Coefficients(chosen.astype(np.uint16), signs.astype(value))
    form = wire.Form(leaves, {n: area for n, (_, _, area) in shapes.items()}, "lockstep", 10**6)
    size = len(wire.encode(leaves, form))
    assert size <= form.bytes_most
    if how == "drawn":
        assert form.bytes_most <= 1.09 * size


@each_kind
def test_a_message_that_is_too_long_is_not_unpacked(name, monkeypatch):
    def unpacked(*_: object, **__: object):
        raise AssertionError("expected its length to be looked at first")

    data, form = encoded(name)
    monkeypatch.setattr(np, "unpackbits", unpacked)
    long = data + bytes(form.bytes_most + 1 - len(data))
    with refused(len(long), form.bytes_most, error=wire.WireError):
        wire.decode(long, form)


@pytest.mark.parametrize("layout", ["lockstep", "psyche"])
def test_it_comes_through_which_blocks_count_as_not_sent(layout):
    compressor = Compressor(5, 32, True, stacked=("layers",), skip_zero_blocks=True)
    skipping = compiled(distro(CompressedMomentum(0.1, compressor, 0.9)))
    grads = jax.tree.map(np.ones_like, PARAMS)
    grads["embed"][25:50] = grads["embed"][75:, 32:] = 0.0
    own, shared = skipping.init(PARAMS)
    message, _ = skipping.send(skipping.accumulate(grads, own, PARAMS, 1), PARAMS, shared, 1)
    form = wire.form_of(skipping, PARAMS, layout)
    decoded = wire.decode(wire.encode(jax.device_get(message), form), form)
    same(decoded, jax.device_get(message))
    assert decoded["embed"].zero.tolist() == [2**2 + 2**3 + 2**7]
    assert decoded["layers"]["norm"].zero.tolist() == [0]


def test_example_of_the_documentation_byte_by_byte():
    like = {"w": Coefficients(np.array([[1, 3]], np.uint8), np.array([[False, True]]))}
    coded, plain = (wire.Form(like, {"w": 4}, layout, 4) for layout in ("lockstep", "psyche"))
    header = "4c 53 57 50 02 {kind} 01 00 " + GOLDEN_FORM
    assert wire.encode(like, coded).hex(" ") == header.format(kind="01") + " 00 02 50"
    assert wire.encode(like, plain).hex(" ") == header.format(kind="03") + " 01 03 02"


GOLDEN_FORM = "b6 59 9d 21 ce 74 f2 4f"


@each_kind
def test_golden_messages(name):
    golden = json.loads(GOLDEN.read_text())[name]
    like, areas = {}, {}
    for path, (index, values, area) in golden["message"].items():
        dtype = bool if "signs" in name else bfloat16 if "values" in name else np.float32
        values = np.array(values, dtype)
        sparse = area > 0
        width = np.uint8 if area <= 256 else np.uint16
        like[path] = Coefficients(np.array(index, width), values) if sparse else values
        areas[path] = area
    form = wire.Form(like, areas, KINDS[name][1], 1000)
    assert wire.encode(like, form).hex() == golden["hex"]
    same(wire.decode(bytes.fromhex(golden["hex"]), form), like)


def mutations(data: bytes, rng: random.Random):
    """Bytes changed, cut out, doubled, or put in; small and huge numbers among them."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                del data[at : at + rng.randint(1, 9)]
            case 3:
                data[at:at] = data[at : at + rng.randint(1, 9)]
            case 4:
                data[at : at + 4] = struct.pack("<I", rng.choice([0, 1, 2**31, 2**32 - 1]))
        data = data or bytearray(1)
    return bytes(data)


@pytest.mark.parametrize("count", [2_000, pytest.param(21_000, marks=pytest.mark.soak)])
@each_kind
def test_mutated_messages_never_crash_and_what_they_decode_to_encodes_alike(name, count):
    data, form = encoded(name, small=True)
    rng = random.Random(0)
    accepted = refused = 0
    for _ in range(count):
        mutated = mutations(data, rng)
        try:
            assert wire.encode(wire.decode(mutated, form), form) == mutated
            accepted += 1
        except wire.WireError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > count // 21 and accepted > count // 210


@each_kind
def test_a_claim_of_gigabytes_allocates_nothing_large(name):
    data, form = encoded(name)
    for hostile in (data[:8] + b"\xff" * 12, data[:16] + b"\xff" * 4, data[:16] + b"\0" * 10**5):
        tracemalloc.start()
        with pytest.raises(wire.WireError):
            wire.decode(hostile, form)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 10**5 + 20 * len(hostile)


def test_rice_parameters_that_no_encoder_chooses_are_refused(monkeypatch):
    _, form = encoded("values")
    parameters = rice.parameters
    with monkeypatch.context() as other:
        other.setattr(rice, "parameters", lambda *of: [r - 1 for r in parameters(*of)])
        data = wire.encode(message_of("values"), form)
    assert len(data) <= form.bytes_most
    with refused("Rice", error=wire.WireError):
        wire.decode(data, form)


@pytest.mark.parametrize("layout", ["lockstep", "psyche"])
@pytest.mark.parametrize("one_bit", [True, False])
def test_whole_arrays_stand_before_indices(layout, one_bit):
    params = PARAMS | {"load": jnp.arange(6.0).reshape(2, 3)}
    chosen = balanced(leave(optimizer(one_bit), ["load"]), ["load"], 0.1)
    own, shared = chosen.init(params)
    own = chosen.accumulate(params, own, params, 1)
    message = jax.device_get(chosen.send(own, params, shared, 1)[0])
    form = wire.form_of(chosen, params, layout)
    data = wire.encode(message, form)
    same(wire.decode(data, form), message)
    name = ("plain " if layout == "psyche" else "") + ("signs" if one_bit else "values")
    assert data[5] == wire.form_of(*KINDS[name][:1], PARAMS, layout).packing.number
    assert data[16 : 16 + 24] == np.arange(6, dtype="<f4").tobytes()
    with refused("array 0", "finite", error=wire.WireError):
        wire.decode(data[:16] + np.float32(np.nan).tobytes() + data[20:], form)


def test_gradients_are_no_messages_of_psyches():
    with refused("peers", "psyche", "lockstep"):
        wire.form_of(ADAMW, PARAMS, "psyche")


@pytest.mark.parametrize("layout", ["lockstep", "psyche"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_values_of_another_dtype_than_the_wires_are_refused(dtype, layout):
    values = distro(CompressedMomentum(0.1, Compressor(5, 32, False, dtype), 0.9))
    with refused("value_dtype", dtype, "bfloat16"):
        wire.form_of(values, SMALL, layout)
    signs = distro(CompressedMomentum(0.1, Compressor(5, 32, True, dtype), 0.9))
    assert wire.form_of(signs, SMALL, layout).packing.number in (1, 3)


def test_arrays_of_a_dtype_that_no_message_holds_are_refused():
    def send(own, params, shared, step):
        return jax.tree.map(lambda x: x.astype(jnp.int32), params), own

    with refused("int32", "float32", "uint8"):
        wire.form_of(ADAMW._replace(send=send), SMALL, "lockstep")
