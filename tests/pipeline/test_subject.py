"""What a run trains is asked of one place, which knows no part by name."""

from pipeline import runfile, subject
from pipeline.language_model.subject import LANGUAGE_MODEL
from pipeline.stage.keys import PROJECT

RUN = runfile.load(PROJECT / "params/run.toml")


def test_without_a_workload_a_language_model_is_trained():
    assert subject.subject_of(RUN) is LANGUAGE_MODEL
    assert subject.subject_of_model({"model_type": "llama"}) is LANGUAGE_MODEL
