"""What a run trains is asked of one place, which knows no part by name."""

from pipeline import runfile, subject
from pipeline.language_model.language_model_subject import LANGUAGE_MODEL
from pipeline.stage.keys import PROJECT
from tests.errors import refused

RUN = runfile.load(PROJECT / "params/run.toml")
WITH_WORKLOAD = RUN.model_copy(
    update={"workload": runfile.tables.Workload(factory="my_model:MyModel")}
)


def test_without_a_workload_a_language_model_is_trained():
    assert subject.subject_of(RUN) is LANGUAGE_MODEL
    assert subject.subject_of_model({"model_type": "llama"}) is LANGUAGE_MODEL


def test_a_workload_without_its_part_is_one_line(monkeypatch):
    monkeypatch.setattr(subject, "offered", lambda joint: [])
    assert subject.subject_of(RUN) is LANGUAGE_MODEL
    with refused("workload.factory", "my_model:MyModel", "parts/workload"):
        subject.subject_of(WITH_WORKLOAD)
