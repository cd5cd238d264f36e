"""What a peer's process does on request: Psyche's operations of a sidecar, and a round's others.

    operation        arguments                                    gives
    create           run, model, first_step, columns; params,     environment
                       shared state
    hyperparameters  none                                         optimizer, inner_steps, wire
    compile          imprecise; rows                              nothing, and a step is compiled
    align            step, hash                                   its state's hash
    train            step, count, imprecise, keep, hash; rows     its state's hash; loss, message,
                                                                    and its state
    optimize         step, peers, sequences; messages             params' hash
    extract          what: params, shared, own, new; hash         arrays or their hash
    restore          its own state, or none to begin anew         nothing
    recompute        step, count; a state, rows                   state's hash; message
    forward          rows                                         each row's loss
    exit             none                                         nothing, and the process ends

What stands after the semicolon are arrays: the leaves of a tree, in the order of JAX. The values
before it are a table of `ANSWERS` (answers.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from pipeline import runfile
from pipeline.carrier.answers import Created, Hashed, Hyperparameters, Nothing, Optimized
from pipeline.carrier.frames import FrameError, RequestHeader
from pipeline.optim.optimizer import Tree
from pipeline.programs.language_model import programs_of
from pipeline.programs.placement import device_groups, of_each_process
from pipeline.programs.replica import Replica
from pipeline.programs.train_step import Work
from pipeline.runfile.table import Table
from pipeline.stage import devices, lock
from pipeline.wire.commitment import tree_hash


class Outcome(NamedTuple):
    """What a request gives: values, as a header has them, and arrays."""

    values: dict[str, Any] = {}
    arrays: Sequence[np.ndarray] = ()


class _Gives(NamedTuple):
    """What an operation gives: one of `ANSWERS`, and arrays."""

    values: Table = Nothing()
    arrays: Sequence[np.ndarray] = ()


def leaves(tree: Tree) -> list[np.ndarray]:
    """Return a tree's arrays, on the host."""
    return [np.asarray(leaf) for leaf in jax.device_get(jax.tree.leaves(tree))]


def tree_of(arrays: Sequence[np.ndarray], like: Tree, name: str) -> Tree:
    """Return arrays in the structure of `like`.

    Raises:
      FrameError: They are not the leaves of such a tree.
    """
    return trees_of(arrays, {name: like})[name]


def trees_of(arrays: Sequence[np.ndarray], like: Mapping[str, Tree]) -> dict[str, Tree]:
    """Return arrays as several trees, which follow each other.

    Raises:
      FrameError: They are not the leaves of such trees.
    """
    trees, at = {}, 0
    for name, tree in like.items():
        size = len(jax.tree.leaves(tree))
        trees[name] = _tree(arrays[at : at + size], tree, name)
        at += size
    if len(arrays) > at:
        raise FrameError(f"{len(arrays)} arrays, expected {at}")
    return trees


def _tree(arrays: Sequence[np.ndarray], like: Tree, name: str) -> Tree:
    expected = jax.tree.leaves(like)
    found, wanted = ([f"{x.dtype}{[*x.shape]}" for x in some] for some in (arrays, expected))
    if found != wanted:
        pairs = zip([*found, "nothing"], [*wanted, "nothing"], strict=False)
        first, other = next(pair for pair in pairs if pair[0] != pair[1])
        raise FrameError(f"{name}: {first}, expected {other}")
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


class Operations:
    """A peer's state in its process, and what is done with it.

    Args:
      run: The whole run.
      model: The model's `config.json`.
      first_step: Rounds trained by the run that this one extends.
      columns: Columns of the data's rows.
    """

    def __init__(self, run: runfile.Run, model: dict, first_step: int, columns: tuple):
        self.run, self.programs = run, programs_of(run, model, first_step, columns)
        parts = self.programs.parts
        self.group = device_groups(of_each_process(jax.devices(), parts), parts)[0]
        own, shared = jax.eval_shape(self.programs.optimizer.init, self.programs.task.shapes)
        self.like = {"params": self.programs.task.shapes, "shared": shared, "own": own}
        self.replica: Replica
        self.own: Tree = None
        self.done: set[str] = set()  # operations that this process has compiled the programs of
        self.do: dict[str, Callable[[dict, list[np.ndarray]], _Gives]] = {
            "create": self._create,
            "hyperparameters": self._hyperparameters,
            "compile": self._compile,
            "align": self._align,
            "train": self._train,
            "optimize": self._optimize,
            "extract": self._extract,
            "restore": self._restore,
            "recompute": self._recompute,
            "forward": self._forward,
        }

    def handle(self, request: RequestHeader, arrays: list[np.ndarray]) -> Outcome:
        """Do what a request asks for.

        Raises:
          FrameError: There is no such operation, or its arguments are wrong.
        """
        if request.operation not in self.do:
            raise FrameError(f"operation {request.operation!r}, expected one of {[*self.do]}")
        try:
            with self._compiling_alone(request.operation):
                given = self.do[request.operation](request.values, arrays)
        except KeyError as error:
            raise FrameError(f"{request.operation} without {error}, expected it") from error
        # of a peer's several processes, the first answers for all
        first = jax.process_index() == 0
        return Outcome(given.values.model_dump(mode="json"), given.arrays if first else ())

    @contextmanager
    def _compiling_alone(self, operation: str) -> Iterator[None]:
        """The first process of a host compiles what the others then find in the shared folder."""
        folder = jax.config.jax_compilation_cache_dir
        if operation in self.done or not folder or jax.process_index():
            yield  # a peer's other processes compile with their first, which waits for them
        else:
            patience = self.run.runtime.answer_seconds
            with lock.hold(Path(folder) / f".{operation}.lock", patience):
                yield
        self.done.add(operation)

    # ---- Operations ----

    def _create(self, values: dict, arrays: list[np.ndarray]) -> _Gives:
        del values
        like = {"params": self.like["params"], "shared state": self.like["shared"]}
        params, shared = trees_of(arrays, like).values()
        self.replica = Replica.put(self.programs, self.group, params, shared)
        return _Gives(Created(environment=devices.describe(jax.process_count())))

    def _hyperparameters(self, values: dict, arrays: list[np.ndarray]) -> _Gives:
        del values, arrays
        llm = self.run.llm.model_dump(mode="json", include={"optimizer", "lr_schedule"})
        steps, wire = self.programs.optimizer.inner_steps, self.programs.layout_of_messages
        return _Gives(Hyperparameters(**llm, inner_steps=steps, wire=wire))

    def _compile(self, values: dict, arrays: list[np.ndarray]) -> _Gives:
        replica = self._replica(imprecise=values["imprecise"])
        replica.compile_step(self.own, self._work({"count": 0}, arrays))
        self.done |= {"train", "recompute"}  # which need wait for nobody now
        return _Gives()

    def _align(self, values: dict, arrays: list[np.ndarray]) -> _Gives:
        del arrays
        self.own = self.replica.align(self.own, values["step"])
        return _Gives(Hashed(hash=self._hash(self.own) if values["hash"] else None))

    def _train(self, values: dict, arrays: list[np.ndarray]) -> _Gives:
        replica = self._replica(imprecise=values["imprecise"])
        result = replica.step(self.own, self._work(values, arrays), values["step"])
        self.own = result.own
        kept = self._copied(self.own) if values["keep"] else []
        state = self._hash(self.own) if values["hash"] else None
        message, loss = self.group.fetch((result.message, result.loss))
        return _Gives(Hashed(hash=state), [*leaves(loss), *leaves(message), *kept])

    def _optimize(self, values: dict, arrays: list[np.ndarray]) -> _Gives:
        like, peers = self.programs.form.like, values["peers"]
        size = len(jax.tree.leaves(like))
        messages = {
            peer: tree_of(arrays[n * size : (n + 1) * size], like, "message")
            for n, peer in enumerate(peers)
        }
        given = dict(zip(peers, values["sequences"], strict=True))
        count, step = self.run.peers.count, values["step"]
        self.replica = self.replica.receive(messages, given, count, step)
        return _Gives(Optimized(params=self._hash(self.replica.params)))

    def _extract(self, values: dict, arrays: list[np.ndarray]) -> _Gives:
        del arrays
        trees: dict[str, Callable[[], Tree]] = {
            "params": lambda: self.replica.params,
            "shared": lambda: self.replica.shared,
            "own": lambda: self.own,
            "new": self.replica.new_own,
        }
        tree = trees[values["what"]]()
        if values["hash"]:
            return _Gives(Hashed(hash=self._hash(tree)))
        return _Gives(Hashed(hash=None), self._copied(tree))

    def _restore(self, values: dict, arrays: list[np.ndarray]) -> _Gives:
        del values
        if arrays:
            self.own = self.group.put(tree_of(arrays, self.like["own"], "own state"))
        else:
            self.own = self.replica.new_own()
        return _Gives()

    def _recompute(self, values: dict, arrays: list[np.ndarray]) -> _Gives:
        count = len(jax.tree.leaves(self.like["own"]))
        own = self.group.put(tree_of(arrays[:count], self.like["own"], "own state"))
        work = self._work(values, arrays[count:])
        result = self.replica.step(own, work, values["step"])
        message = leaves(self.group.fetch(result.message))
        return _Gives(Hashed(hash=self._hash(result.own)), message)

    def _forward(self, values: dict, arrays: list[np.ndarray]) -> _Gives:
        del values
        (rows_BW,) = arrays
        rows_BW = self.group.put_rows(rows_BW, axis=0)
        losses = self.programs.measure(self.replica.params, rows_BW)
        return _Gives(arrays=leaves(self.group.fetch(losses)))

    # ---- What they need ----

    def _hash(self, tree: Tree) -> str:
        return tree_hash(self.group.fetch(tree))

    def _copied(self, tree: Tree) -> list[np.ndarray]:
        """A tree's arrays, apart from the device's buffers: the next step overwrites a state."""
        return [np.array(leaf) for leaf in leaves(self.group.fetch(tree))]

    def _work(self, values: dict, arrays: list[np.ndarray]) -> Work:
        (rows_MBW,) = arrays
        return Work(rows_MBW, values["count"])

    def _replica(self, *, imprecise: bool) -> Replica:
        if not imprecise:
            return self.replica
        return replace(self.replica, programs=self.programs.imprecise)
