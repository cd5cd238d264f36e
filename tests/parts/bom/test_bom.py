"""The ML-BOM of an export: valid CycloneDX, the same each time, and of what the stages left."""

import json
import sys

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from lockstep.files import read_json, sha256_file
from parts.bom import bom, commands
from pipeline.stage.keys import STAGES
from tests import tiny
from tests.errors import refused

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    def make(folder):
        tiny.start(folder)
        tiny.make(folder / "run.toml", folder / "root", *STAGES)

    return tiny.in_common(tmp_path_factory, "finished", make)


def test_it_is_valid_and_the_same_each_time_and_says_what_the_stages_left(run, tmp_path):
    files = [tmp_path / "a.cdx.json", tmp_path / "b.cdx.json"]
    for file in files:
        commands.write_bom(file, run / "run.toml", run / "root")
    text, again = (file.read_text() for file in files)
    assert text == again
    assert JsonStrictValidator(SchemaVersion.V1_7).validate_str(text) is None
    found, data = json.loads(text), run / "root" / "data"
    trained = found["metadata"]["component"]
    assert found["specVersion"] == "1.7" and "timestamp" not in found["metadata"]
    assert trained["type"] == "machine-learning-model"
    [weights] = trained["components"]
    assert weights["name"] == "model.safetensors"
    [digest] = weights["hashes"]
    assert digest["content"] == sha256_file(data / "export" / "model.safetensors")
    others = {component["bom-ref"]: component for component in found["components"]}
    source = read_json(data / "shards" / "shards.json")["source"]
    assert others["data"]["hashes"] == [{"alg": "SHA-256", "content": source["sha256"]}]
    assert others["package-jax"]["purl"].startswith("pkg:pypi/jax@")
    card = trained["modelCard"]
    assert card["modelParameters"]["datasets"] == [{"ref": "data"}]
    assert card["modelParameters"]["modelArchitecture"] == "LlamaForCausalLM"
    loss = read_json(data / "evaluate" / "evaluate.json")["held_out_loss"]
    metrics = card["quantitativeAnalysis"]["performanceMetrics"]
    assert (metrics[0]["value"], metrics[0]["type"][-14:]) == (f"{loss:.6f}", "nats per token")
    evaluated = {"held_out_loss": 1.0, "tasks": []}  # of pixels
    assert next(bom._metrics(evaluated, "as it has it"))["type"] == "held-out loss, as it has it"
    depends = {one["ref"]: one.get("dependsOn", []) for one in found["dependencies"]}
    assert {"data", "start", "package-jax"} <= {*depends[trained["bom-ref"]]}


def test_a_schema_refuses_what_is_no_ml_bom(run):
    found = bom.document(run / "run.toml", run / "root")
    found["metadata"]["component"]["modelCard"]["modelParameters"]["approach"]["type"] = "guessed"
    assert JsonStrictValidator(SchemaVersion.V1_7).validate_str(json.dumps(found)) is not None


def test_without_the_library_the_line_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "parts.bom.bom")
    monkeypatch.setitem(sys.modules, "cyclonedx.model", None)
    monkeypatch.delattr("parts.bom.bom")
    with refused("cyclonedx.model", "bom"):
        commands.write_bom(tmp_path / "a.json")
