"""Packs for burn_p2p and from it: a reader written from its source alone.

Golden values are what burn_p2p's own worker wrote of the same module, under torch 2.13.
"""

import hashlib
import json
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from parts.burn_p2p.python.lockstep_worker import pack_files

FORMAT = "burn-p2p-python-flattened-parameter-pack-v1"
FIELDS = {  # of its manifest, with their types; it ignores all others
    "format": str,
    "model_schema_hash": str,
    "layout_hash": str,
    "parameter_count": int,
    "values_f32_le": str,
}
# Of the module Small, and of others.
LAYOUT = "torch-layout-f4a76b97bee0716501cab88f89df27dd5181f52f9a3909a5fcadd1234b4e6129"
VALUES = "68531257643c5437989361dfae1ae24b374d507f27f8b8663df379557e31b976"
WITHOUT_STATISTICS = "torch-layout-5d9b421cdbdb8ae4e639551bd463f63c6a1a55238d32fc69c5f40d7133b2215e"
TWO_MODULES = "torch-layout-9fe3093bbcc09c75eae150866745f88e7829812145ecc7720e96344a5be3bb5b"


class Flattened(NamedTuple):
    """What a reader has of a pack."""

    schema: str
    layout: str
    values: list[float]


def read(folder: Path) -> Flattened:
    """A pack as burn_p2p reads it: five fields, one file, a length that is checked, 4-byte values.

    Raises:
        ValueError: what it refuses.
    """
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for name, kind in FIELDS.items():
        if type(manifest.get(name)) is not kind:
            raise ValueError(f"decode: {name}")
    if manifest["format"] != FORMAT:
        raise ValueError("unsupported format")
    data = (folder / manifest["values_f32_le"]).read_bytes()
    if len(data) != 4 * manifest["parameter_count"]:
        raise ValueError("byte length")
    values = [struct.unpack("<f", data[at : at + 4])[0] for at in range(0, len(data), 4)]
    return Flattened(manifest["model_schema_hash"], manifest["layout_hash"], values)


def write(folder: Path, given: Flattened) -> None:
    """A pack as burn_p2p writes it: the five fields alone."""
    folder.mkdir()
    (folder / "values.f32le").write_bytes(b"".join(struct.pack("<f", x) for x in given.values))
    found = (FORMAT, given.schema, given.layout, len(given.values), "values.f32le")
    (folder / "manifest.json").write_text(json.dumps(dict(zip(FIELDS, found, strict=True))))


class Small(torch.nn.Module):
    """Floats of two kinds, a scalar, integers and statistics; values are quarters, from 0 on."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = torch.nn.Embedding(5, 4), torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 2).to(torch.bfloat16)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        floats = [t for _, t in sorted(self.state_dict().items()) if t.is_floating_point()]
        for tensor, at in zip(floats, (0, 20, 22, 30, 34, 38, 42, 46), strict=True):
            values = torch.arange(at, at + tensor.numel()) / 4
            tensor.copy_(values.reshape(tensor.shape))


def test_the_hash_of_a_layout_is_that_of_burn_p2ps_worker(packs):
    assert packs.layout_hash(packs.layout_of(Small(), None).tensors) == LAYOUT
    without = packs.layout_of(Small(), {"exclude_globs": ["norm.running_*"]})
    assert packs.layout_hash(without.tensors) == WITHOUT_STATISTICS
    two = {"modules": {"b": torch.nn.Linear(2, 1), "a": torch.nn.Linear(1, 2)}}
    assert packs.layout_hash(packs.layout_of(two, None).tensors) == TWO_MODULES
    with pytest.raises(ValueError, match="names without a dot"):
        packs.layout_of({"modules": {"a.b": Small()}}, None)
    with pytest.raises(TypeError, match="a state of type int"):
        packs.layout_of(3, None)


def test_what_our_worker_writes_burn_p2p_reads_value_by_value(packs, tmp_path):
    packs.write(tmp_path, packs.layout_of({"model": Small()}, None), "schema", None)
    assert hashlib.sha256((tmp_path / "values.f32le").read_bytes()).hexdigest() == VALUES
    assert read(tmp_path) == Flattened("schema", LAYOUT, [at / 4 for at in range(47)])
    manifest = json.loads((tmp_path / "manifest.json").read_bytes())
    assert manifest.keys() - FIELDS.keys() == {
        "state_dict_filter",
        "included_keys",
        "excluded_float_keys",
        "ignored_non_float_keys",
        "values_sha256",  # the only one that is ours
    }


def test_what_our_end_writes_burn_p2p_reads_value_by_value(tmp_path):
    values = np.array([0.1, -0.0, 1e-45, -3.4e38], np.float32)  # a denormal too
    facts = {"model_schema_hash": "schema", "layout_hash": LAYOUT}
    pack_files.write(tmp_path / "pack", [values], facts)
    found = read(tmp_path / "pack")
    assert found[:2] == ("schema", LAYOUT)
    assert np.array(found.values, np.float32).tobytes() == values.tobytes()


def test_what_burn_p2p_writes_both_our_ends_read(packs, tmp_path):
    """Without the fields that its worker adds, and without a hash of values."""
    folder, values = tmp_path / "pack", [1 + at / 4 for at in range(47)]
    write(folder, Flattened("schema", LAYOUT, values))
    found = pack_files.read(folder, LAYOUT, "schema", 47)
    np.testing.assert_array_equal(found, values)
    module = Small()
    packs.load(folder, packs.layout_of(module, None), "schema")
    packs.write(tmp_path / "again", packs.layout_of(module, None), "schema", None)
    assert read(tmp_path / "again") == read(folder)
    assert module.head.weight.dtype == torch.bfloat16 and int(module.norm.num_batches_tracked) == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"format": "v2"},
        {"parameter_count": 46},
        {"parameter_count": True},
        {"values_f32_le": "../values.f32le"},
        {"values_sha256": "0" * 64},
        {"model_schema_hash": "another"},
    ],
)
def test_a_pack_that_is_not_as_its_manifest_says_is_refused(tmp_path, changed):
    folder = tmp_path / "pack"
    write(folder, Flattened("schema", LAYOUT, [1.0] * 47))
    manifest = json.loads((folder / "manifest.json").read_bytes()) | changed
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="is|bytes"):
        pack_files.read(folder, LAYOUT, "schema", 47)
