"""Merges large messages on the host, one slice of an array at a time.

So a device needs one more copy of the params, and not one for each peer; the host needs an array of
it, and the messages' own bytes, which are on disk.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from lockstep.optim.optimizer import Tree
from lockstep.programs.placement import DeviceGroup
from lockstep.programs.train_step import Programs
from lockstep.wire import spool

PART = 2**22  # elements that are merged at once


def merge_parts(
    programs: Programs, group: DeviceGroup, messages: Sequence[Tree], weight: np.ndarray
) -> Tree:
    """Return what the messages of all peers become together, on a device group.

    Args:
      programs: Programs of an optimizer that has `merge`.
      group: The devices.
      messages: A message of each peer; of an absent one anything.
      weight: Their weights, integers [peer].
    """
    assert programs.optimizer.merge is not None
    aggregate = programs.optimizer.merge.aggregate
    leaves = zip(*map(jax.tree.leaves, messages), strict=True)
    merged = [group.put_owned(_merge(aggregate, rows, weight)) for rows in leaves]
    return jax.tree.unflatten(jax.tree.structure(programs.form.like), merged)


def _merge(
    aggregate: Callable[[Sequence[np.ndarray], np.ndarray], np.ndarray],
    rows: Sequence[np.ndarray],
    weight: np.ndarray,
) -> np.ndarray:
    """Merge one array of the messages."""
    merged = np.empty(rows[0].shape, rows[0].dtype)
    flat, rows = merged.reshape(-1), [np.asarray(row).reshape(-1) for row in rows]
    for first in range(0, len(flat), PART):
        part = slice(first, first + PART)
        flat[part] = aggregate([row[part] for row in rows], weight)
        spool.drop_pages(rows)
    return merged
