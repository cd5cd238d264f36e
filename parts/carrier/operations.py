"""The operations of a peer's process, computed with JAX: one method for each table."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lockstep.optim.optimizer import Tree
from lockstep.programs.placement import device_groups, of_each_process
from lockstep.programs.replica import Replica
from lockstep.programs.train_step import Work
from lockstep.tables.table import Table
from lockstep.transcript.trees import is_blob
from lockstep.wire.commitment import tree_hash
from parts.carrier import operation_tables as tables
from parts.carrier.frames import FrameError
from parts.carrier.operation_tables import Asked, Outcome
from parts.workload.choice import programs_of
from pipeline import runfile
from pipeline.stage import devices, lock

Arrays = Sequence[np.ndarray]
COMPUTED_BY = {"config", "model", "workload", "peers", "links", "runtime"}  # of the run file


def tables_for_a_process(run: runfile.Run) -> dict:
    """Return the tables of a run file by which a peer's process computes.

    Without `[peers] seed`, which draws who trains on what, witnesses and verifies: but for a
    workload, whose gradients are seeded by it.
    """
    drawn_by = None if run.workload.factory else {"peers": {"seed"}}
    return run.model_dump(mode="json", include=COMPUTED_BY, exclude=drawn_by)


def leaves(tree: Tree) -> list[np.ndarray]:
    """Return a tree's arrays, on the host."""
    return [np.asarray(leaf) for leaf in jax.device_get(jax.tree.leaves(tree))]


def trees_of(arrays: Arrays, like: Mapping[str, Tree]) -> dict[str, Tree]:
    """Return arrays as several trees, which follow each other.

    Raises:
      FrameError: The arrays are not the leaves of such trees.
    """
    trees, at = {}, 0
    for name, tree in like.items():
        size = len(jax.tree.leaves(tree))
        trees[name] = _tree(arrays[at : at + size], tree, name)
        at += size
    if len(arrays) > at:
        raise FrameError(f"{len(arrays)} arrays, expected {at}")
    return trees


def _tree(arrays: Arrays, like: Tree, name: str) -> Tree:
    expected = jax.tree.leaves(like)
    found, wanted = ([_form(x) for x in some] for some in (arrays, expected))
    if found != wanted:
        pairs = zip([*found, "nothing"], [*wanted, "nothing"], strict=False)
        first, other = next(pair for pair in pairs if pair[0] != pair[1])
        raise FrameError(f"{name}: {first}, expected {other}")
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


def _form(array: np.ndarray) -> str:
    return "bytes" if is_blob(array) else f"{array.dtype}{[*array.shape]}"


def _rows(arrays: Arrays) -> np.ndarray:
    if len(arrays) != 1:
        raise FrameError(f"rows: {len(arrays)} arrays, expected one")
    return arrays[0]


class Operations:
    """A peer's state in its process, and what is done with it; arguments as of `tables.Create`."""

    def __init__(self, run: runfile.Run, model: dict, first_step: int, columns: tuple):
        self.run, self.programs = run, programs_of(run, model, first_step, columns)
        parts = self.programs.parts
        self.group = device_groups(of_each_process(jax.devices(), parts), parts)[0]
        own, shared = jax.eval_shape(self.programs.optimizer.init, self.programs.task.shapes)
        self.like = {"params": self.programs.task.shapes, "shared": shared, "own": own}
        self.replica: Replica
        self.own: Tree = None
        self.before: list[np.ndarray] = []  # what it owned before its last step, where peers verify
        self.done: set[str] = set()  # operations that this process has compiled the programs of
        self.do: dict[type[Table], Callable[[Any, Arrays], Outcome]] = {
            tables.Create: self._create,
            tables.GetHyperparameters: self._hyperparameters,
            tables.Compile: self._compile,
            tables.Align: self._align,
            tables.Train: self._train,
            tables.Optimize: self._optimize,
            tables.Extract: self._extract,
            tables.Restore: self._restore,
            tables.Recompute: self._recompute,
            tables.Forward: self._forward,
        }

    def handle(self, asked: Asked) -> Outcome:
        """Do what a request asks for.

        Raises:
          FrameError: The arrays are not those that the operation takes.
        """
        with self._compiling_alone(asked.operation):
            outcome = self.do[type(asked.values)](asked.values, asked.arrays)
        # of a peer's several processes, the first answers for all
        return outcome if jax.process_index() == 0 else Outcome(outcome.values)

    @contextmanager
    def _compiling_alone(self, operation: str) -> Iterator[None]:
        """Let a host's first process compile; the others find the result in a shared folder."""
        folder = jax.config.jax_compilation_cache_dir
        if operation in self.done or not folder or jax.process_index():
            yield  # a peer's other processes compile with their first, which waits for them
        else:
            patience = self.run.runtime.answer_seconds
            with lock.hold(Path(folder) / f".{operation}.lock", patience):
                yield
        self.done.add(operation)

    # ---- Operations ----

    def _create(self, asked: tables.Create, arrays: Arrays) -> Outcome:
        del asked
        like = {"params": self.like["params"], "shared state": self.like["shared"]}
        params, shared = trees_of(arrays, like).values()
        self.replica = Replica.put(self.programs, self.group, params, shared)
        return Outcome(
            tables.Created(
                environment=devices.describe(jax.process_count()) | self.programs.environment
            )
        )

    def _hyperparameters(self, asked: tables.GetHyperparameters, arrays: Arrays) -> Outcome:
        del asked, arrays
        llm = self.run.llm.model_dump(mode="json", include={"optimizer", "lr_schedule"})
        steps, wire = self.programs.optimizer.inner_steps, self.programs.layout_of_messages
        return Outcome(tables.Hyperparameters(**llm, inner_steps=steps, wire=wire))

    def _compile(self, asked: tables.Compile, arrays: Arrays) -> Outcome:
        replica = self._replica(imprecise=asked.imprecise)
        replica.compile_step(self.own, Work(_rows(arrays), 0))
        self.done |= {"train", "recompute"}  # which need wait for nobody now
        return Outcome()

    def _align(self, asked: tables.Align, arrays: Arrays) -> Outcome:
        del arrays
        self.own = self.replica.align(self.own, asked.step)
        return Outcome(self._hashed(self.own, asked.hash))

    def _train(self, asked: tables.Train, arrays: Arrays) -> Outcome:
        replica = self._replica(imprecise=asked.imprecise)
        self.before = self._copied(self.own) if asked.hash else []
        result = replica.step(self.own, Work(_rows(arrays), asked.count), asked.step)
        self.own = result.own
        kept = self._copied(self.own) if asked.keep else []
        state = self._hashed(self.own, asked.hash)
        message, loss = self.group.fetch((result.message, result.loss))
        return Outcome(state, [*leaves(loss), *leaves(message), *kept])

    def _optimize(self, asked: tables.Optimize, arrays: Arrays) -> Outcome:
        like, peers = self.programs.form.like, asked.peers
        for name, numbers in (("sequences", asked.sequences), ("ages", asked.ages)):
            if len(numbers) != len(peers):
                raise FrameError(f"{name}: {len(numbers)}, expected {len(peers)}")
        trees = trees_of(arrays, {f"message of peer {peer}": like for peer in peers})
        messages = dict(zip(peers, trees.values(), strict=True))
        given, count = dict(zip(peers, asked.sequences, strict=True)), self.run.peers.count
        ages = dict(zip(peers, asked.ages, strict=True))
        self.replica = self.replica.receive(messages, given, count, asked.step, ages)
        return Outcome(tables.Optimized(params=self._hash(self.replica.params)))

    def _extract(self, asked: tables.Extract, arrays: Arrays) -> Outcome:
        del arrays
        if asked.what == "before":  # it is on the host, and its hash was given with the step before
            return Outcome(self._hashed(None, False), self.before)
        trees: dict[str, Callable[[], Tree]] = {
            "params": lambda: self.replica.params,
            "shared": lambda: self.replica.shared,
            "own": lambda: self.own,
            "new": self.replica.new_own,
        }
        tree = trees[asked.what]()
        return Outcome(self._hashed(tree, asked.hash), [] if asked.hash else self._copied(tree))

    def _restore(self, asked: tables.Restore, arrays: Arrays) -> Outcome:
        del asked
        self.own = self._put_own(arrays) if arrays else self.replica.new_own()
        return Outcome()

    def _recompute(self, asked: tables.Recompute, arrays: Arrays) -> Outcome:
        work = Work(_rows(arrays[-1:]), asked.count)
        result = self.replica.step(self._put_own(arrays[:-1]), work, asked.step)
        message = leaves(self.group.fetch(result.message))
        return Outcome(self._hashed(result.own), message)

    def _forward(self, asked: tables.Forward, arrays: Arrays) -> Outcome:
        del asked
        rows_BW = self.group.put_rows(_rows(arrays), axis=0)
        losses = self.programs.measure(self.replica.params, rows_BW)
        return Outcome(arrays=leaves(self.group.fetch(losses)))

    # ---- What they need ----

    def _put_own(self, arrays: Arrays) -> Tree:
        return self.group.put(trees_of(arrays, {"own state": self.like["own"]})["own state"])

    def _hash(self, tree: Tree) -> str:
        return tree_hash(self.group.fetch(tree))

    def _hashed(self, tree: Tree, wanted: bool = True) -> tables.Hashed:
        return tables.Hashed(hash=self._hash(tree) if wanted else None)

    def _copied(self, tree: Tree) -> list[np.ndarray]:
        """Return copies of a tree's arrays: the next step overwrites the device's buffers."""
        return [np.array(leaf) for leaf in leaves(self.group.fetch(tree))]

    def _replica(self, *, imprecise: bool) -> Replica:
        if not imprecise:
            return self.replica
        return replace(self.replica, programs=self.programs.imprecise)
