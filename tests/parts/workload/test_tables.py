"""A stranger's [workload] is run where its reader says so, and a command never."""

import pytest

from lockstep.errors import RequestError
from parts.workload.tables import workload_of
from pipeline.runfile import Runtime, strangers
from pipeline.runfile.strangers_values import Use
from tests.pipeline.runfile.edited_run import DATA, LOCAL, edited

PINNED = ("pins", {"data": "ab" * 32, "checkpoint": "ab" * 32})
COMMAND = {"factory": "torch_classifier:Classifier", "inner": "command", "command": ["touch", "x"]}
OF_WORKLOAD = (
    ("model.LLM.architecture", "HfAuto"),
    ("model.LLM.checkpoint", "Ephemeral"),
    (DATA, "Dummy"),
)
DILOCO = {"outer_learning_rate": 0.7, "outer_momentum": 0.9, "nesterov": True, **LOCAL}


@pytest.mark.parametrize("use", Use)
@pytest.mark.parametrize(
    ("workload", "consents", "named"),
    [
        (COMMAND, (), "workload.factory"),
        (COMMAND, ("workload.factory",), "workload.command"),
        ({"factory": "subprocess:run"}, (), "workload.factory"),
        ({"factory": "torch_classifier:Classifier"}, ("workload.factory",), None),
    ],
)
def test_a_workload_is_run_where_its_reader_says_so_and_a_command_never(
    workload, consents, named, use
):
    optimizer = {"DiLoCo": DILOCO | {"inner": "Workload"}} if "inner" in workload else None
    more = (("model.LLM.optimizer", optimizer),) if optimizer else ()
    document = edited(PINNED, *OF_WORKLOAD, *more, ("workload", workload))
    taken = dict.fromkeys(consents, lambda factory: "")
    if named is None:
        run = strangers.read(document, "run.json", use, Runtime(), taken)
        assert workload_of(run).factory == workload["factory"]
        return
    with pytest.raises(RequestError, match=f"run.json: {named} is "):
        strangers.read(document, "run.json", use, Runtime(), taken)
