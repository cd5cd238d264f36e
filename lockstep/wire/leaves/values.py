"""Values at chosen positions, which the optimizer has rounded to bfloat16."""

from ml_dtypes import bfloat16

from lockstep.wire.leaves.chosen import Chosen
from lockstep.wire.leaves.leaf import Packing
from lockstep.wire.leaves.rice_coded import RiceCoded


class Values(Chosen):
    """Chosen positions, each with its value."""

    packings = {"lockstep": RiceCoded(2), "psyche": Packing(4)}

    @property
    def misfit(self) -> str | None:
        if self.raw.dtype == bfloat16:
            return None
        found = f"value_dtype is {self.raw.dtype}"
        return f"{found}, expected bfloat16: messages hold such values, or signs"
