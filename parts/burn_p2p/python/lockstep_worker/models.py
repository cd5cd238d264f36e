"""burn_p2p's methods of our worker: models that it keeps, packs and inner loops.

They are those that every host of version 2 knows, without those that merge or patch models, which a
round does here.
"""

from pathlib import Path
from typing import Any

import numpy as np
from lockstep_torch import bits

from . import frames, pack_files, packs

PACKS = ["artifact_path_io", "parameter_pack_export", "parameter_pack_import"]
INNER_LOOP = ["diloco_checkpoint_job", "exact_step_budget"]
WATCHED = 2  # of inner loops: whether they move what stays


class Models:
    """The models that a worker keeps: states that a user's object made, by their ids.

    Args:
        workload: the user's object.
        name: what errors call it.
    """

    def __init__(self, workload: Any, name: str):
        self.workload, self.name = workload, name
        self.states: dict[str, Any] = {}
        self.watched = 0  # inner loops that were seen to move nothing that stays
        self.made = 0  # states, all time: an id is never used twice
        self.by_gradient = hasattr(workload, "bind")  # what travels, as the base class has it

    def init_model(self, params: Any) -> dict:
        """Keep the state of a new model."""
        return self._keep(self._initial(params))

    def parameter_pack_plan(self, params: Any) -> dict:
        """Say what of a kept model travels."""
        custom = self._has("export_parameter_pack_path") or self._has("import_parameter_pack_path")
        state = self._initial(params)
        try:
            layout = self._layout(state, params)
        except (TypeError, ValueError) as error:
            if not custom:
                raise
            layout, problem = packs.Layout([], [], [], [], {}), {"generic_plan_error": str(error)}
            plan = {**layout.keys(), "layout_hash": None, **problem}
        else:
            plan = {**layout.keys(), "tensors": layout.tensors, "tied": layout.tied}
        return {"uses_custom_parameter_pack_hooks": custom, **plan}

    def train_window(self, params: Any) -> dict:
        """Train a kept model on some batches."""
        metrics = self._call("train_window", self._state(params), params["batches"])
        return {"metrics": frames.metrics_of(metrics)}

    def evaluate(self, params: Any) -> dict:
        """Measure a kept model on a split of the data."""
        bits.seed_generators(0)
        metrics = self._call("evaluate", self._state(params), params["split"])
        return {"metrics": frames.metrics_of(metrics)}

    def load_model_artifact(self, params: Any) -> dict:
        """Read the whole state of a model from a file, and keep it."""
        state, path = self._state(params), params["artifact_path"]
        if self._has("load_model_artifact_path"):
            updated = self.workload.load_model_artifact_path(state, path)
        else:
            updated = self._call("load_model_artifact", state, Path(path).read_bytes())
        if updated is not None:
            self.states[params["model_id"]] = updated
        return {"ok": True}

    def materialize_model_artifact(self, params: Any) -> dict:
        """Write the whole state of a kept model to a file."""
        state, path = self._state(params), params["artifact_path"]
        if self._has("materialize_model_artifact_path"):
            self.workload.materialize_model_artifact_path(state, path)
        else:
            Path(path).write_bytes(self._call("materialize_model_artifact", state))
        return {"ok": True}

    def export_parameter_pack(self, params: Any) -> dict:
        """Write the pack of a kept model."""
        self._export(self._state(params), params["parameter_pack_path"], params)
        return {"ok": True}

    def import_parameter_pack(self, params: Any) -> dict:
        """Read a pack into the state of a new model that is kept.

        What does not travel (frozen, excluded, integers) is as it begins.
        """
        path, schema = params["parameter_pack_path"], params.get("model_schema_hash")
        if self._has("import_parameter_pack_path"):
            return self._keep(self.workload.import_parameter_pack_path(params["device"], path))
        state = self._initial(params)
        packs.load(path, self._layout(state, params), schema)
        return self._keep(state)

    def run_inner_loop(self, params: Any) -> dict:
        """Take a job's local steps from a kept model.

        Every generator is seeded, so that a replay of the same job draws the same numbers.
        """
        model_id, requested = params["model_id"], params["num_inner_steps"]
        seed = params["seed"] if "seed" in params else bits.seed_of(params["batches"])
        bits.seed_generators(seed)
        job = type(params)({**params, "seed": seed})
        state, movement = self._state(params), None
        if self.by_gradient and not isinstance(state, dict):
            from lockstep_torch import module_state

            module_state.settle(state)
            if self.watched < WATCHED:
                globs = params.get("state_dict_filter")
                tensors = module_state.state_of(state, lambda name: packs.allows(globs, name))
                movement = module_state.Movement(state, tensors, of_gradient=False)
        result = self._call("run_inner_loop", state, job) or {}
        if movement is not None:
            movement.check()
            self.watched += 1
        self.states[model_id] = result.get("state", state)
        completed = int(result.get("steps_completed", requested))
        if params.get("require_exact_steps") and completed != requested:
            raise ValueError(f"run_inner_loop took {completed} steps; {requested} expected")
        path = params["output_parameter_pack_path"]
        if not Path(path, pack_files.MANIFEST).exists():
            self._export(self.states[model_id], path, params)
        state_path = result.get("inner_optimizer_state_path")
        return {
            "steps_completed": completed,
            "metrics": frames.metrics_of(result.get("metrics") or {}),
            "inner_optimizer_state_path": None if state_path is None else str(state_path),
            "inner_optimizer_state_encoding": result.get("inner_optimizer_state_encoding"),
        }

    def release_model(self, params: Any) -> dict:
        """Let go of a kept model."""
        self.states.pop(params["model_id"], None)
        return {"ok": True}

    def _has(self, name: str) -> bool:
        return callable(getattr(self.workload, name, None))

    def _call(self, name: str, *arguments: Any) -> Any:
        if not self._has(name):
            raise ValueError(f"{self.name} has no {name}")
        return getattr(self.workload, name)(*arguments)

    def _state(self, params: Any) -> Any:
        model_id = params["model_id"]
        if model_id not in self.states:
            raise ValueError(f"model {model_id!r} is not here; found {sorted(self.states)}")
        return self.states[model_id]

    def _keep(self, state: Any) -> dict:
        self.made += 1
        self.states[f"m{self.made}"] = state
        return {"model_id": f"m{self.made}"}

    def _initial(self, params: Any) -> Any:
        """A model's state of the user's object as it begins, the same each time.

        Every generator is seeded with `seed`, which burn_p2p's hosts do not send: 0 for them.
        """
        bits.seed_generators(params.get("seed", 0))
        if self._has("init") and not self._has("init_model"):
            arrays = self.workload.init(params.get("seed", 0))
            return {name: np.array(array) for name, array in arrays.items()}
        return self._call("init_model", params["device"])

    def _layout(self, state: Any, params: Any) -> packs.Layout:
        """The exchanged part of a kept model's state."""
        return packs.layout_of(state, params.get("state_dict_filter"), self.by_gradient)

    def _export(self, state: Any, path: str, params: Any) -> None:
        """Write the pack of a kept model, or have the user's object write it."""
        schema = params["model_schema_hash"]
        if self._has("export_parameter_pack_path"):
            self.workload.export_parameter_pack_path(state, path, schema)
        else:
            packs.write(path, self._layout(state, params), schema, params.get("state_dict_filter"))


METHODS = [name for name in vars(Models) if not name.startswith("_")]


def capabilities(workload: Any) -> list[str]:
    """The capabilities of burn_p2p's methods that a user's object has."""
    loops = callable(getattr(workload, "run_inner_loop", None))
    return PACKS + INNER_LOOP * loops
