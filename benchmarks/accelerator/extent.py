"""How much a section measures: all of it on an accelerator, or as little as proves that it runs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import extract_tb
from typing import NamedTuple, TypeVar

from lockstep.errors import LockstepError
from pipeline.stage.keys import PROJECT

EVERYTHING, NOTHING = "everything_saveable", "nothing_saveable"
DOTS = "dots_with_no_batch_dims_saveable"

T = TypeVar("T")


class Gradient(NamedTuple):
    """A way to compute a gradient; `size` is one of benchmarks/sizes.py."""

    size: str
    attention: str
    scan: bool
    remat: str


class Extent(NamedTuple):
    """What sections measure; the sizes are those of benchmarks/sizes.py."""

    gradients: tuple[Gradient, ...]  # the most telling first, should time run out
    suspects: tuple[Gradient, ...]  # whose variants are timed: all of the first one's
    repeats: int  # measurements of which medians are taken
    peers: int  # of every run
    fused: bool  # whether attention is cuDNN's where there is a GPU and bfloat16
    share: str  # size whose rounds of DisTrO are taken apart
    topk: tuple[int, ...]  # for each of these
    beside: tuple[str, ...]  # what other rounds are timed, as in benchmarks/distro.py
    run: str  # size of the runs that are trained, audited, and tried in two layouts
    precisions: tuple[str, ...]  # of the runs that are audited
    rounds: int  # of such a run
    window: int  # rounds between two of its snapshots
    by_rules: str  # size of the runs whose bits are the same everywhere
    product_bits: tuple[int, ...]  # of these runs
    steps: tuple[str, ...]  # sizes whose step by rules is timed
    memory: tuple[str, ...]  # sizes whose memory is compared with the plan
    learning: int  # rounds of each optimizer
    megabytes: float  # of the text to learn, at most
    simulated: tuple[str, ...]  # sizes whose rounds of `simulate` are timed
    optimizers: tuple[str, ...]  # of these rounds
    in_blocks: tuple[str, ...]  # of those by rules, of the first size, several in one program too
    default_rounds: int  # of params/run.toml
    batches: tuple[int, ...]  # texts that are written at once
    new_tokens: int  # of each
    questions: int  # that are asked
    seconds: float = 600.0  # that a section has; the parts of learning share them
    part: int = 0  # of a section's cases, and of how many parts, where these only compile
    parts: int | None = None

    def to_compile(self, part: int, parts: int) -> "Extent":
        """The least that compiles all programs of a part of a section's cases."""
        return self._replace(part=part, parts=parts, repeats=1, default_rounds=2)

    @property
    def measures(self) -> bool:
        """Whether figures are wanted, and not only compiled programs."""
        return self.parts is None

    def mine(self, cases: Sequence[T]) -> Sequence[T]:
        """The cases of this part."""
        return cases[self.part :: self.parts]

    def attention(self, precision: str) -> str:
        """The fastest attention that there is here for runs in this precision."""
        import jax

        fused = self.fused and precision == "bfloat16" and jax.default_backend() == "gpu"
        return "cudnn" if fused else "matmul"


FULL = Extent(
    gradients=(
        Gradient("124M", "cudnn", True, EVERYTHING),
        Gradient("350M", "cudnn", True, EVERYTHING),
        Gradient("350M", "cudnn", True, DOTS),
        Gradient("350M", "cudnn", True, NOTHING),
        Gradient("350M", "matmul", True, NOTHING),
        Gradient("124M", "cudnn", True, DOTS),
        Gradient("124M", "cudnn", True, NOTHING),
        Gradient("124M", "matmul", False, EVERYTHING),
    ),
    suspects=tuple(Gradient(size, "cudnn", True, DOTS) for size in ("124M", "350M", "5M")),
    repeats=5,
    peers=4,
    fused=True,
    share="124M",
    topk=(8, 32),
    beside=("alone",),
    run="35M",
    precisions=("bfloat16", "float32"),
    rounds=4,
    window=2,
    by_rules="2M",
    product_bits=(8, 20),
    steps=("35M", "124M"),
    memory=("35M", "124M"),
    learning=100,
    megabytes=40.0,
    simulated=("5M", "124M"),
    optimizers=("distro", "diloco", "adamw"),
    in_blocks=("adamw", "distro"),
    default_rounds=200,
    batches=(1, 8, 64),
    new_tokens=128,
    questions=200,
)
TOY = Extent(
    gradients=(Gradient("toy", "matmul", True, DOTS),),
    suspects=(Gradient("toy", "matmul", True, DOTS),),
    repeats=1,
    peers=2,
    fused=False,
    share="toy",
    topk=(8,),
    beside=(),
    run="toy",
    precisions=("bfloat16",),
    rounds=2,
    window=1,
    by_rules="toy",
    product_bits=(8,),
    steps=("toy",),
    memory=("toy",),
    learning=2,
    megabytes=1.0,
    simulated=("toy",),
    optimizers=("distro",),
    in_blocks=("adamw",),
    default_rounds=2,
    batches=(2,),
    new_tokens=4,
    questions=4,
)
EXTENTS = {"full": FULL, "toy": TOY}


def attempt(names: dict, case: Callable[[], dict]) -> dict:
    """Names of a case with what it gives, or with the error that ended it.

    A case may want more memory than there is, or a kernel that is missing; the next one may not.
    """
    try:
        return names | case()
    except Exception as error:
        return names | {"error": explained(error)}


def judged(what: str, value: object, goal: object, met: bool | None) -> dict:
    """A figure for the page of a visit; `met` is None where a goal is not of this device."""
    return {"what": what, "value": value, "goal": goal, "met": met}


def explained(error: Exception) -> str:
    """One line: what went wrong, and where in this project unless the error says so."""
    if isinstance(error, LockstepError):
        return str(error)
    first = (str(error).splitlines() or [""])[0][:300]
    frames = [frame for frame in extract_tb(error.__traceback__) if str(PROJECT) in frame.filename]
    places = [f"{Path(last.filename).relative_to(PROJECT)}:{last.lineno}" for last in frames[-1:]]
    return f"{type(error).__name__}: {first} ({''.join(places)})"
