"""How far messages, params and states may be from their replay if bits cannot be equal.

What is accepted is learnt by the auditor, whom the trainer's word could mislead. What XLA computes
here is replayed twice in honest windows, as here and with other threads and instructions
(rounding.py), which says how far last bits carry. Anything else may compute in any way, so the
auditor repeats an honest step of its own and measures how far its own messages are from each other.
Where nothing was measured, the bounds are fixed.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import jax
import numpy as np

from lockstep.optim.optimizer import Tree
from lockstep.programs.placement import DeviceGroup, device_groups
from lockstep.programs.replica import Replica
from lockstep.transcript.entry import Entry, Header
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.trees import flatten
from lockstep.transcript.windows import Window
from pipeline import runfile
from pipeline.audit.verdict import ReplayComparison, Varied
from pipeline.stage import devices
from pipeline.start.begin import Setup
from pipeline.subject import subject_of

# The largest distance of a sent message from the replayed one (`Optimizer.compare`, or
# `Pieces.distance` where messages are not kept; then also of the params after a window,
# `distance_of_update`; and of what peers share or own then, `distance_of_state`), by the precision
# of the gradients, where nothing is learnt. Measured: docs/explanation/verification.md. In bfloat16
# it does not hold between kinds of devices: on a CPU it accused an honest run of an H200.
TOLERANCE = {"float32": 0.05, "bfloat16": 0.5}
ANOTHER_DEVICE = "device_kind is "  # how `why_not_bitwise` begins on another kind of device
# And the smallest, since two windows do not show all: honest distances have long tails, and
# codes, signs and positions differ wholly or not at all. A message scaled by 1.01 is at 0.01.
LEAST = {"float32": 0.005, "bfloat16": 0.05}
SNAPSHOTS, REPEATS = 4, 4  # after which a step is repeated, at most, and how often
MARGIN = 4  # times the largest distance among them; room for what so few do not show
MOST = 0.5  # beyond it, a lie could hide
UNRELATED = 2.0  # arrays of one size that have nothing in common are about 1 apart
STRAYS = 8  # times the median of the others: beyond it, a distance is its sender's own doing
PeersOfWindows = Sequence[tuple[Window, Sequence[int]]]


def why_not_bitwise(setup: Setup, header: Header, rounds: Iterable[Entry]) -> str | None:
    """Return why a replay of some rounds here cannot be compared bit for bit, or None.

    Raises:
      LockstepError: No machine changes the run's bits, and its header says that one did.
    """
    run = setup.run
    if not run.workload.repeats:
        return "[workload] repeats = false"
    if run.peers.bits == "everywhere":
        devices.check_by_rules(setup.environment(), header.environment, header.bitwise)
        return None
    if run.peers.layout != "each":
        return f"[peers] layout = {run.peers.named_layout} is another program than a lone peer's"
    if not header.bitwise:
        return "the training machine did not repeat a step bit for bit"
    if difference := devices.difference(setup.environment(), header.environment):
        name, here, trained = difference
        return f"{name} is {here!r} here, was {trained!r} in training"
    here = devices.environment_hash(setup.environment())
    for entry in rounds:
        for peer, message in entry.evidence.messages.items():
            if message.environment not in (None, here):
                return f"peer {peer} trained on another machine, {message.environment[:12]}"
    return None


def limit(
    run: runfile.Run, repeats: float | None, learnt: float | None = None, why: str = ""
) -> float:
    """Return the largest distance that is accepted, of a message or of what a window ends with.

    It is infinite where a step does not repeat well enough to tell a lie from an honest repeat, and
    in bfloat16 on another kind of device: nobody is accused by what the auditor's own steps do not
    show. `repeats` is the largest among an auditor's honest repeats, if there are any; `learnt` the
    largest among its honest messages, params or states of other bits, if measured; `why` bits
    cannot be compared.
    """
    fixed = TOLERANCE[run.peers.precision]
    if not run.workload.repeats:
        return math.inf
    if repeats is not None:
        return math.inf if not MARGIN * repeats <= MOST else max(fixed, MARGIN * repeats)
    if learnt is None:
        unsafe = run.peers.precision == "bfloat16" and why.startswith(ANOTHER_DEVICE)
        return math.inf if unsafe else fixed
    return min(MOST, max(LEAST[run.peers.precision], MARGIN * learnt))


def how(
    run: runfile.Run, why: str | None, exact: bool, repeats: float | None, varied: Varied | None
) -> ReplayComparison:
    """Return how replays are compared.

    `why` is why bits cannot be compared, None if they are; `exact` says whether params follow from
    messages to the bit (`Replay.merges_exactly`).
    """
    if why is None:
        return ReplayComparison()
    # A verdict may claim both; the one that the subject does not use would loosen a fixed bound.
    repeats, varied = (None, varied) if subject_of(run).varies_here else (repeats, None)
    return ReplayComparison(
        why,
        limit(run, repeats, varied and varied.distance, why),
        None if exact else limit(run, repeats, varied and varied.params, why),
        own_limits(run, varied),
        repeats,
        varied,
    )


def distance_of_update(found: Tree, expected: Tree, opening: Tree) -> float:
    """Return how far params are from the expected ones, relative to what a window changed them by.

    |found - expected| / |expected - opening|, over all elements. The expected ones are the
    auditor's, or an author's larger update would seem nearer than it is. What is not finite is
    infinitely far: a NaN would be lost in a maximum.
    """
    error, change = _far(found, expected), _far(expected, opening)
    if not error:
        return 0.0
    return error / change if change and np.isfinite([error, change]).all() else np.inf


def distance_of_state(found: Tree, expected: Tree, opening: Tree, params: Tree) -> float:
    """Return how far what peers share is from the expected: the largest of `distances_by_kind`."""
    return max(distances_by_kind(found, expected, opening, params).values(), default=0.0)


def distances_by_kind(found: Tree, expected: Tree, opening: Tree, params: Tree) -> dict[str, float]:
    """Return how far each kind of array of a state is from the expected, by a window's change.

    |found - expected| / |expected - opening|, over all arrays of a kind. These have the same
    name except for their params', like all second moments of Adam, which are much smaller
    than the first. Integers are equal, or infinitely far.
    """
    names = {n for path in flatten(params) for n in (path, path.replace("/", "."))}
    trees = flatten(found), flatten(expected), flatten(opening)
    kinds: dict[str, list[str]] = {}
    for path in trees[1]:
        kinds.setdefault(_kind(path, names), []).append(path)
    distances = {}
    for kind, paths in kinds.items():
        theirs, mine, before = ([tree[path] for path in paths] for tree in trees)
        if all(array.dtype.kind not in "iub" for array in mine):
            distances[kind] = distance_of_update(theirs, mine, before)
        else:
            distances[kind] = float(np.inf) if _far(theirs, mine) else 0.0
    return distances


def own_limits(run: runfile.Run, varied: Varied | None) -> dict[str, float] | None:
    """Return the largest distance that is accepted of what a peer owns, by its kind of arrays.

    None where nothing was learnt: what rounding left out, as codes of 8 bits do, may be another
    wholly. A kind that is seen to be such a one, by more than `LEAST`, has the limit `UNRELATED`,
    however far it was in the few windows that were seen; any other, `MARGIN` times `LEAST`. None
    hides what is planted in another.
    """
    if varied is None or varied.own is None:
        return None
    least = LEAST[run.peers.precision]
    return {
        kind: MARGIN * least if distance <= least else max(UNRELATED, MARGIN * distance)
        for kind, distance in varied.own.items()
    }


class OwnDistance(NamedTuple):
    """The distance of one kind of a peer's arrays from its replay, and the accepted distance."""

    kind: str
    distance: float
    most: float

    @property
    def ratio(self) -> float:
        """The distance as a share of the accepted one; above 1 it is a finding."""
        return self.distance / self.most

    def __str__(self) -> str:
        text = f"{self.distance:.3g} of the window's change, expected at most {self.most:.3g}"
        return f"{self.kind} at distance {text}".strip()


def furthest(distances: Mapping[str, float], limits: Mapping[str, float]) -> OwnDistance:
    """Return the kind that is furthest for its limit."""
    kinds = [OwnDistance(kind, distance, limits[kind]) for kind, distance in distances.items()]
    return max(kinds, key=lambda d: d.ratio, default=OwnDistance("", 0.0, 1.0))


def to_blame(distances: Mapping[int, float], limit: float) -> tuple[dict[int, float], list[int]]:
    """Return the peers beyond the limit: those that are to blame, and those that may not be.

    A replay computes with the params that follow from its own messages. Where a lie is in pieces
    that were not drawn, all later messages of the window differ from it, of honest peers too. So a
    peer is named where its distance is beyond the limit, and beyond `STRAYS` times the median of
    the other peers' distances.
    """
    named, astray = {}, []
    for peer, distance in distances.items():
        if distance <= limit:
            continue
        others = [other for p, other in distances.items() if p != peer]
        if others and not distance > STRAYS * median(others):
            astray.append(peer)
        else:
            named[peer] = distance
    return named, astray


def _kind(path: str, params: Collection[str]) -> str:
    """Return a path without the longest param's path in it, if there is one."""
    parts = path.split("/")
    spans = itertools.combinations(range(len(parts) + 1), 2)
    within = [(first, last) for first, last in spans if "/".join(parts[first:last]) in params]
    first, last = max(within, key=lambda span: span[1] - span[0], default=(0, 0))
    return "/".join(parts[:first] + parts[last:])


def _far(tree: Tree, other: Tree) -> float:
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return float(np.sqrt(sum(np.sum(np.square(a.astype(np.float64) - b)) for a, b in pairs)))


def repeated(setup: Setup, transcript: Transcript, present: PeersOfWindows) -> float | None:
    """Return the largest distance among honest repeats of some steps of `present`.

    None where other bits can be made here (rounding.py), and where no window is present.

    A step of one peer is repeated after each of a few snapshots, since gradients scatter more, for
    their size, the longer a model has been trained. Repeats say how far bits scatter on this
    machine, and nothing of another one.
    """
    if setup.subject.varies_here or not present or not setup.run.workload.repeats:
        return None
    group = device_groups(jax.devices(), setup.programs.parts)[0]
    chosen = present[:: -(-len(present) // SNAPSHOTS)]
    return max(_window_distance(setup, transcript, *pair, group) for pair in chosen)


def _window_distance(
    setup: Setup, transcript: Transcript, window: Window, peers: Sequence[int], group: DeviceGroup
) -> float:
    """Return the same for a window's first round, and the first peer that trains in it."""
    programs, like = setup.programs, setup.start.state
    round_ = next(transcript.window(window)).round
    peer = next((peer for peer in peers if peer in round_.assignment), None)
    if peer is None:
        return 0.0
    replica = Replica.put(programs, group, *transcript.agreed(window.opening, like))
    own = transcript.own_before(window, peer, like.own[peer])
    work = setup.work(round_.assignment[peer], round_.trainers)
    first = replica.step(group.put(own), work, round_.step).message
    repeats = (replica.compare(group.put(own), work, round_.step, first) for _ in range(REPEATS))
    return float(np.max([jax.device_get(distance) for distance, _ in repeats]))
