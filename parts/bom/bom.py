"""A CycloneDX ML-BOM of a run's export: the weights, and what they were made from.

It is made of what the stages left, so equal exports have equal ML-BOMs: its serial number follows
from the weights' key, and it has no time. All of it is stated; `lockstep verify` shows what is
proven. The library writes CycloneDX 1.7 but has no model cards (its release 11.12), so the card is
added to the document that it made. Format: https://cyclonedx.org/docs/1.7/json/.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot7
from packageurl import PackageURL

from lockstep import __version__
from lockstep.errors import LockstepError
from lockstep.files import read_json, sha256_file
from pipeline.pages.templates import without_secrets
from pipeline.scores import scores
from pipeline.stage.artifacts import METRICS, Paths, read_made
from pipeline.subject import subject_of_model
from pipeline.weights import hf

OF_A_START = ("checkpoint", "seed", "repo_id", "commit")
STATED = "stated by its author; `lockstep verify` says what of it is proven"


def document(run: Path, root: Path) -> dict[str, Any]:
    """Return the ML-BOM of a run's accepted export, as JSON has it."""
    export = Paths("report", run, root).need("export")
    paths = Paths("export", run, root)
    made = read_made(paths.made("train"))
    if why := hf.why_refused(export):
        raise LockstepError(f"{export}: {why}; expected an export that the witness accepted")
    header = read_json(paths.need("train") / "transcript" / "header.json")
    shards = read_json(paths.need("download") / "shards.json")
    key, kind = paths.keys.key("export"), ComponentType.MACHINE_LEARNING_MODEL
    weights = [
        _component(ComponentType.FILE, path.name, sha256_file(path), {})
        for path in sorted(export.glob("*.safetensors"))
    ]
    trained = _component(kind, f"lockstep-{made['key']}", None, _facts(paths, header))
    trained.version, trained.components = key, weights
    source = shards["source"]
    count = sum(file["tokens"] for file in shards["files"]) // len(shards["columns"])
    read = {"read": source["read"], "words" if "rows" in shards else "tokens": count}
    data = _component(ComponentType.DATA, "data", source["sha256"], read)
    start = read_json(paths.need("convert") / "source.json")
    of_start = {name: start[name] for name in OF_A_START if start.get(name) is not None}
    begun = _component(kind, "start", start["sha256"], of_start)
    versions = made["environment"] | {"lockstep-train": __version__}
    packages = [_package(name, version) for name, version in versions.items()]
    bom = Bom(
        serial_number=uuid5(NAMESPACE_URL, f"lockstep:{key}"),
        components=[data, begun, *packages],
        metadata=BomMetaData(component=trained),
    )
    bom.register_dependency(trained, [data, begun, *packages])
    written = json.loads(JsonV1Dot7(bom).output_as_string())
    del written["metadata"]["timestamp"]  # that of now
    parameters = _architecture(header["model"]) | {"datasets": [{"ref": "data"}]}
    unit = subject_of_model(header["model"]).loss_unit
    evaluated = paths.out("evaluate") / "evaluate.json"
    metrics = [*_metrics(read_json(evaluated), unit)] if paths.is_made("evaluate") else []
    written["metadata"]["component"]["modelCard"] = {
        "modelParameters": parameters,
        "quantitativeAnalysis": {"performanceMetrics": metrics},
    }
    return written


def _facts(paths: Paths, header: dict[str, Any]) -> dict[str, Any]:
    """Return how the weights of an ML-BOM were trained."""
    llm = header["run"]["model"]["LLM"]
    numbers = read_json(paths.out("train") / METRICS / "train.json")
    facts = {"known": STATED, "optimizer": llm["optimizer"], "schedule": llm["lr_schedule"]}
    return facts | {name: numbers[name] for name in ("rounds", "tokens")}


def _component(kind: ComponentType, name: str, sha256: str | None, facts: dict) -> Component:
    """Return a component of an ML-BOM, with facts as its properties."""
    texts = {
        f: v if isinstance(v, str) else json.dumps(v) for f, v in without_secrets(facts).items()
    }
    properties = [Property(name=f"lockstep:{fact}", value=text) for fact, text in texts.items()]
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else []
    return Component(type=kind, name=name, bom_ref=name, hashes=hashes, properties=properties)


def _package(name: str, version: str) -> Component:
    """Return a package that trained, as a component of an ML-BOM."""
    purl = PackageURL("pypi", None, name.replace("_", "-"), version)
    return Component(name=name, version=version, bom_ref=f"package-{name}", purl=purl)


def _architecture(model: dict[str, Any]) -> dict[str, Any]:
    """Return what a model card of an ML-BOM says of a language model's config; {} of others."""
    if "model_type" not in model:
        return {}
    return {
        "approach": {"type": "self-supervised"},
        "task": "text-generation",
        "architectureFamily": model["model_type"],
        "modelArchitecture": model["architectures"][0],
    }


def _metrics(evaluated: dict[str, Any], unit: str) -> Iterator[dict[str, Any]]:
    """Yield the results of stage evaluate, losses in `unit`, as metrics of an ML-BOM's card."""
    if (loss := evaluated["held_out_loss"]) is not None:
        yield {"type": f"held-out loss, {unit}", "value": f"{loss:.6f}", "slice": "held out"}
    for score in scores(evaluated["tasks"]):
        metric = {"type": score.metric, "value": f"{score.value:.6f}", "slice": score.task}
        if score.interval is not None:
            lower, upper = score.interval
            ends = {"lowerBound": f"{lower:.6f}", "upperBound": f"{upper:.6f}"}
            metric |= {"confidenceInterval": ends}
        yield metric
