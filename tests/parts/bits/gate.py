"""A stranger's statement of a dispute, for the table of tests/gate."""

from pathlib import Path

import numpy as np

from parts.bits import statement
from parts.bits.operation import RecordedOperation, hash_of
from parts.bits.record import BitsRecord
from tests.gate.cases import BOMB, DEVICE, PIPE, SPARSE
from tests.gate.folders import ALONE, IRREGULAR, MOST, TENSORS, FolderRow


def _disputed(folder: Path) -> None:
    """Two claims of what the negative of an array is."""
    x, types = np.ones(4, np.float32), (("float32", (4,)),) * 2
    form = {"what": "neg", "place": "", "primitive": "neg", "settings": "{}", "types": types}
    of_a_run = {"key": "0" * 64, "of": "step", "round": 1, "peer": 0, "machine": {}}
    operations = (
        RecordedOperation(**form, operands=(hash_of(x),), results=(hash_of(found),))
        for found in (x, -x)
    )
    one, other = (BitsRecord(**of_a_run, operations=(operation,)) for operation in operations)
    statement.write(folder / "it.safetensors", (one, other), 0, ([x], [-x]))


FOLDERS = [
    FolderRow(
        "`bits judge`: a statement",
        _disputed,
        "it.safetensors",
        lambda folder, out: statement.judge(folder / "it.safetensors"),
        {PIPE: IRREGULAR, DEVICE: IRREGULAR, SPARSE: MOST, **ALONE, BOMB: TENSORS},
    )
]
