"""A machine that gives other bits is refused before it asks to take part."""

import pytest

from lockstep.errors import LockstepError
from parts.volunteers import stored_run
from parts.volunteers.lab import opening
from pipeline import runfile
from pipeline.stage.artifacts import Paths
from pipeline.start import set_up
from tests import tiny


def test_machine_takes_the_runs_first_step_as_the_lab_did(finished):
    file = finished / "000" / "run.toml"
    run, paths = runfile.load(file), Paths("train", file, finished / "000")
    with tiny.like_a_process():
        setup = set_up.read(run, paths.out("convert"), paths.out("download"))
        document = opening.document_of(setup, f"ed25519:{'0' * 64}", set_up.self_test(setup))
        stored_run._check_step(setup, document, "a store")
        other = document.model_copy(update={"self_test": "ab" * 32})
        with pytest.raises(LockstepError, match="a first step here gives .*, expected abababab"):
            stored_run._check_step(setup, other, "a store")
        stored_run._check_step(setup, document.model_copy(update={"self_test": None}), "a store")
