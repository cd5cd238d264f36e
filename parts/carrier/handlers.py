"""The operations of a peer's process, computed with JAX: a method for each row of `OPERATIONS`."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from lockstep.optim.optimizer import Tree
from lockstep.programs.local_training import Work
from lockstep.programs.placement import device_groups, spread_over_processes
from lockstep.programs.replica import Replica, RoundMerge
from lockstep.transcript.trees import is_blob, tree_hash
from parts.carrier import requests
from parts.carrier.requests import OPERATIONS, FrameError, Outcome, PeerRequest
from pipeline import runfile
from pipeline.stage import devices
from pipeline.stage.keys import OUT
from pipeline.subject import programs_of, subject_of

COMPUTED_BY = {"config", "model", "workload", "peers", "links", "runtime"}  # of the run file
SHARDS_VARIABLE = "LOCKSTEP_SHARDS"  # variable with the folder of rows that are names of files
ROWS = object()  # stands for an array of any form: the rows of a step


def tables_for_a_process(run: runfile.Run) -> dict:
    """Return the tables of a run file by which a peer's process computes.

    Without `[peers] seed`, which draws who trains on what, witnesses and verifies: unless gradients
    are seeded by it too.
    """
    drawn_by = None if subject_of(run).draws else {"peers": {"seed"}}
    return run.model_dump(mode="json", include=COMPUTED_BY, exclude=drawn_by)


def leaves(tree: Tree) -> list[np.ndarray]:
    """Return a tree's arrays for a request's answer, on the host."""
    return [np.asarray(leaf) for leaf in jax.device_get(jax.tree.leaves(tree))]


def trees_of(arrays: Sequence[np.ndarray], like: Mapping[str, Tree]) -> dict[str, Tree]:
    """Return arrays that a request brings as several trees, which follow each other."""
    trees, offset = {}, 0
    for name, tree in like.items():
        size = len(jax.tree.leaves(tree))
        trees[name] = _tree(arrays[offset : offset + size], tree, name)
        offset += size
    if len(arrays) > offset:
        raise FrameError(f"{len(arrays)} arrays, expected {offset}")
    return trees


def _tree(arrays: Sequence[np.ndarray], like: Tree, name: str) -> Tree:
    if like is ROWS and arrays:
        return arrays[0]
    wanted_leaves = jax.tree.leaves(like)
    actual, expected = ([_form(x) for x in xs] for xs in (arrays, wanted_leaves))
    if actual != expected:
        pairs = zip([*actual, "nothing"], [*expected, "nothing"], strict=False)
        first, other = next(pair for pair in pairs if pair[0] != pair[1])
        raise FrameError(f"{name}: {first}, expected {other}")
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


def _form(array: np.ndarray) -> str:
    if array is ROWS:
        return "an array"
    return "bytes" if is_blob(array) else f"{array.dtype}{[*array.shape]}"


class Operations:
    """The handlers of operations: a peer's state in its process, and what is done with it.

    The arguments are those of `requests.Create`. Operation NAME is done by method `_NAME`, which
    takes the operation's table and then its trees.
    """

    def __init__(self, run: runfile.Run, model: dict, first_step: int, columns: tuple):
        self.run, self.programs = run, programs_of(run, model, first_step, columns)
        self.programs.steps.by.shards = Path(os.environ.get(SHARDS_VARIABLE, OUT["download"]))
        parts = self.programs.parts
        self.group = device_groups(spread_over_processes(jax.devices(), parts), parts)[0]
        own, shared = jax.eval_shape(self.programs.optimizer.init, self.programs.task.shapes)
        # trees like those that requests bring, by their names in `OPERATIONS`
        self.like = {"params": self.programs.task.shapes, "shared state": shared}
        self.like |= {"own state": own, "rows": ROWS}
        self.replica: Replica
        self.own: Tree = None
        self.before: list[np.ndarray] = []  # what it owned before its last step, where peers verify

    def handle(self, request: PeerRequest) -> Outcome:
        """Do in the peer's process what a request asks for."""
        trees = trees_of(request.arrays, self._like(request))
        outcome = getattr(self, f"_{request.operation}")(request.values, *trees.values())
        # of a peer's several processes, the first answers for all
        return outcome if jax.process_index() == 0 else Outcome(outcome.values)

    def _like(self, request: PeerRequest) -> dict[str, Tree]:
        """Return trees like those that a handled request brings, by the names that errors give."""
        if isinstance(request.values, requests.Optimize):
            names = [f"message of peer {peer}" for peer in request.values.peers]
            return dict.fromkeys(names, self.programs.form.like)
        if isinstance(request.values, requests.Restore):
            return {"own state": self.like["own state"]} if request.arrays else {}
        if isinstance(request.values, requests.Create):
            created = {name: self.like[name] for name in ("params", "shared state")}
            more = len(request.arrays) > len(jax.tree.leaves(created))
            return created | ({"rows to count": ROWS} if more else {})
        names = [name.partition(" [")[0] for name in OPERATIONS[request.operation].arrays]
        return {name: self.like[name] for name in names}

    # ---- Operations ----

    def _create(
        self, _: requests.Create, params: Tree, shared: Tree, *to_count: np.ndarray
    ) -> Outcome:
        for rows_NW in to_count:
            self.programs.steps.by.rows_to_count = rows_NW
        self.replica = Replica.put(self.programs, self.group, params, shared)
        environment = devices.describe(jax.process_count()) | self.programs.steps.by.environment
        return Outcome(requests.Created(environment=environment))

    def _compile(self, args: requests.Compile, rows_MBW: np.ndarray) -> Outcome:
        replica = self._replica(args.broken)
        replica.compile_step(self.own, Work(rows_MBW, 0))
        return Outcome()

    def _align(self, args: requests.Align) -> Outcome:
        self.own = self.replica.align(self.own, args.step)
        return Outcome(self._hashed(self.own, args.hash))

    def _train(self, args: requests.Train, rows_MBW: np.ndarray) -> Outcome:
        replica = self._replica(args.broken)
        self.before = self._copied(self.own) if args.hash else []
        result = replica.step(self.own, Work(rows_MBW, args.count), args.step)
        self.own = result.own
        own = self._copied(self.own) if args.keep else []
        state = self._hashed(self.own, args.hash)
        message, loss = self.group.fetch((result.message, result.loss))
        return Outcome(state, [*leaves(loss), *leaves(message), *own])

    def _optimize(self, args: requests.Optimize, *messages: Tree) -> Outcome:
        peers = args.peers
        if len(args.sequences) != len(peers):
            raise FrameError(f"sequences: {len(args.sequences)}, expected {len(peers)}")
        by_peer, sequences = (
            dict(zip(peers, values, strict=True)) for values in (messages, args.sequences)
        )
        merge = RoundMerge(by_peer, sequences, args.step, sequences)
        self.replica = self.replica.receive(merge, self.run.peers.count)
        return Outcome(requests.Optimized(params=self._hash(self.replica.params)))

    def _extract(self, args: requests.Extract) -> Outcome:
        if args.what == "before":  # it is on the host, and its hash was given with the step before
            return Outcome(self._hashed(None, False), self.before)
        trees: dict[str, Callable[[], Tree]] = {
            "params": lambda: self.replica.params,
            "shared": lambda: self.replica.shared,
            "own": lambda: self.own,
            "new": self.replica.new_own,
        }
        tree = trees[args.what]()
        return Outcome(self._hashed(tree, args.hash), [] if args.hash else self._copied(tree))

    def _restore(self, _: requests.Restore, *own: Tree) -> Outcome:
        self.own = self.group.put(own[0]) if own else self.replica.new_own()
        return Outcome()

    def _recompute(self, args: requests.Recompute, own: Tree, rows_MBW: np.ndarray) -> Outcome:
        result = self.replica.step(self.group.put(own), Work(rows_MBW, args.count), args.step)
        message = leaves(self.group.fetch(result.message))
        return Outcome(self._hashed(result.own), message)

    def _forward(self, _: requests.Forward, rows_BW: np.ndarray) -> Outcome:
        rows_BW = self.group.rows(rows_BW, axis=0)
        losses = self.programs.steps.measure(self.replica.params, rows_BW)
        return Outcome(arrays=leaves(self.group.fetch(losses)))

    # ---- What they need ----

    def _hash(self, tree: Tree) -> str:
        return tree_hash(self.group.fetch(tree))

    def _hashed(self, tree: Tree, wanted: bool = True) -> requests.Hashed:
        return requests.Hashed(hash=self._hash(tree) if wanted else None)

    def _copied(self, tree: Tree) -> list[np.ndarray]:
        """Return copies of a tree's arrays for an answer: the next step overwrites the device's."""
        return [np.array(leaf) for leaf in leaves(self.group.fetch(tree))]

    def _replica(self, broken: int | None) -> Replica:
        return replace(self.replica, programs=self.programs.broken(broken))
