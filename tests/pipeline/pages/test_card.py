"""The model card: true to what the stages left, enough to do the run again, and plain text."""

import re
import tomllib

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from lockstep import __version__
from lockstep.files import read_json, sha256_file
from models.llama import llama
from pipeline import runfile
from pipeline.pages import card
from pipeline.stage.keys import Keys
from tests.pipeline.finished_run import CAUGHT
from tests.pipeline.trained_run import make

SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
EVIL = "/data/`a` | <img src=x> [b](javascript:c) ``` \n---\n# d\u202e"


def text_of(paths) -> str:
    return (paths.out("export") / "README.md").read_text()


def toml_of(text: str) -> str:
    return re.search(r"(?ms)^(`{3,})toml\n(.*?)^\1$", text)[2]


def tokens_of(text: str) -> list:
    """The body's tokens as a Markdown parser with tables sees them, all in one row."""
    body = text.split("---\n", 2)[2]
    parsed = MarkdownIt("commonmark", {"html": True}).enable("table").parse(body)
    return [inner for token in parsed for inner in [token, *(token.children or ())]]


def cells(text: str) -> dict[str, str]:
    """The tables' rows: the first cell and the rest."""
    rows = re.findall(r"(?m)^\| (.*?) \| (.*) \|$", text)
    return dict(rows)


@pytest.fixture(scope="module")
def accepted(tmp_path_factory):
    return make(tmp_path_factory.mktemp("accepted"), tokenizer=SPECIAL)


# ---- What it says ----


def test_front_matter_is_what_the_hub_expects(accepted):
    data = ModelCard(text_of(accepted)).data.to_dict()
    assert data == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["lockstep", "llama", "distro"],
    }


def test_the_run_is_stated(accepted):
    text, folder = text_of(accepted), accepted.out("export")
    said = cells(text)
    for name, value in {
        "architecture": "`LlamaForCausalLM`",
        "parameters": "2,000,000",
        "hidden_size": "`16`",
        "max_position_embeddings": "`32`",
        "initial weights": "`Init`: fresh weights, seed 0",
        "SHA-256 of the initial weights": f"`{'ab' * 32}`",
        "SHA-256 of model.safetensors": f"`{sha256_file(folder / 'model.safetensors')}`",
        "source": "`/data/tokens`",
        "SHA-256 of the source": f"`{'cd' * 32}`",
        "train split": "100 tokens in 1 file",
        "held-out split": "100 tokens in 1 file",
        "peers": "4",
        "rounds": "6",
        "tokens": "2,944, in sequences of 32",
        "sent per peer and round": "34.0 kB, 0.136 bits per parameter",
        "received per peer and round": "102.0 kB",
        "sent per peer, total": "204.0 kB",
        "plain data parallelism sends": "8.0 MB per peer and round, 235 times as much",
        "held-out, before the first round": "5.9000",
        "held-out, after the last round": "5.1250",
        "held-out, measured on": "2 of 3 held-out sequences, standard error 0.250",
        "held-out, how much is new": (
            "not known how much of the held-out text stands in the train text"
        ),
        "chance": "5.7038",
        "verdict": "accepted: no findings",
        "compared": "bit for bit",
        "rounds audited": "6",
        "windows replayed": "2 of 8",
        "findings": "0",
        "seed of the sample": "`5eed`, the auditor's own",
        "late": "peer 3 (1 message)",
        "jax": "`0.0`",  # of the training, before that of the export
        "xla_flags": "`--xla_a=1`",
    }.items():
        assert said[name] == value, name
    assert "`compression_topk = 4`" in said["optimizer"] and "`Distro`" in said["optimizer"]
    assert "`base_lr = 0.002`" in said["learning rate"] and "`Cosine`" in said["learning rate"]
    for stage in ("download", "convert", "train", "witness", "export"):
        assert said[stage] == f"`{accepted.keys.key(stage)}`"
    assert f"Lockstep {__version__}" in text and "Put them back in" not in text
    made = read_json(accepted.root / accepted.keys.made("train"))
    assert said["numpy"] == f"`{made['environment']['numpy']}`"


def test_losses_and_hashes_are_those_of_the_files(accepted):
    said, trained = cells(text_of(accepted)), accepted.out("train")
    lines = (trained / "transcript/rounds.jsonl").read_text().splitlines()
    assert said["training, first round"] == f"{yaml.safe_load(lines[0])['loss']:.4f}"
    assert said["training, last round"] == f"{yaml.safe_load(lines[-1])['loss']:.4f}"
    rounds = sha256_file(trained / "transcript/rounds.jsonl")
    assert said["SHA-256 of the transcript's rounds"] == f"`{rounds}`"
    shards = accepted.out("download") / "shards.json"
    assert said["SHA-256 of shards.json"] == f"`{sha256_file(shards)}`"
    for file in read_json(shards)["files"]:
        assert said[f"`{file['path']}`"] == f"{file['tokens']} | `{file['sha256']}`"


def test_the_run_file_in_it_has_the_same_keys_and_loads(accepted, tmp_path):
    again = tmp_path / "run.toml"
    again.write_text(toml_of(text_of(accepted)))
    for stage in ("download", "convert", "train", "witness", "export"):
        assert Keys(again).key(stage) == accepted.keys.key(stage)
    Keys(again).key("report")  # which needs every table
    free = {"evaluate", "runtime", "pins"}
    found, run = runfile.load(again), runfile.load(accepted.run)
    assert found.model_dump(exclude=free) == run.model_dump(exclude=free)
    assert (found.pins.data, found.pins.checkpoint, found.pins.tasks) == ("cd" * 32, "ab" * 32, "")


def test_what_cannot_change_the_export_does_not_change_the_card(accepted, tmp_path):
    changes = {"evaluate__prompt": "another", "runtime__keep_steps": 9}
    assert text_of(make(tmp_path, tokenizer=SPECIAL, **changes)) == text_of(accepted)


def test_the_code_in_it_runs(accepted, monkeypatch, capsys):
    monkeypatch.chdir(accepted.root)
    exec(re.search(r"(?s)```python\n(.*?)```", text_of(accepted))[1], {})
    assert capsys.readouterr().out.startswith("A")


def test_it_says_which_versions_of_transformers_compute_another_function(tmp_path, monkeypatch):
    monkeypatch.setattr(llama.Config, "caveat", "Some do not.")
    assert "\n\nSome do not.\n\n## Model\n" in text_of(make(tmp_path))


def test_without_tokenizer_and_held_out_text_it_says_so(tmp_path):
    text = text_of(make(tmp_path, held_out=False))
    assert "without a tokenizer" in text and "AutoTokenizer" not in text
    said = cells(text)
    assert said["held-out, before the first round"] == "not measured"
    assert said["held-out, after the last round"] == "not measured"
    assert "held-out split" not in said


GCS = {"checkpoint": "Gcs", "bucket": "b", "prefix": "p", "sha256": ""}
BUCKET = "`Gcs`: `gs://b/p`"
HUB = {"checkpoint": "Hub", "repo_id": "o/n", "revision": "main", "commit": "c0", "sha256": ""}


@pytest.mark.parametrize(
    ("source", "named", "base"),
    [
        (HUB, "`Hub`: `o/n`, commit `c0`", "o/n"),
        (HUB | {"repo_id": "./o", "commit": None}, "`Hub`: `./o`", None),  # a folder
        (GCS | {"manifest_generation": 17}, f"{BUCKET}, generation 17 of its manifest", None),
        (GCS | {"manifest_generation": None}, BUCKET, None),
    ],
)
def test_the_initial_weights_are_named_and_only_the_hubs_are_a_base_model(
    tmp_path, source, named, base
):
    text = text_of(make(tmp_path, source=source))
    assert cells(text)["initial weights"] == named
    assert ModelCard(text).data.base_model == base


def test_an_extended_run_names_the_one_before(tmp_path):
    source = {"checkpoint": "Run", "key": "0123456789ab", "sha256": "ef" * 32}
    text = text_of(make(tmp_path, source=source))
    assert cells(text)["initial weights"] == "`Run`: the final state of run `0123456789ab`"
    assert "extends run `0123456789ab`, which must be reproduced first" in text


def test_what_is_not_comparable_comes_with_its_reason_and_faults_are_named(tmp_path):
    why = "xla_flags is '--dump=/home/me/x' here, was '' in training"
    fault = {"kind": "sign_flip", "peer": 1, "rounds": [2, 3]}
    text = text_of(
        make(
            tmp_path,
            bitwise=False,
            verdict={"not_comparable": why, "replayed_windows": []},
            faults__schedule=[fault, {"kind": "stale", "peer": [0, 2], "rounds": [4, 4]}],
        )
    )
    expected = "`xla_flags is '--dump=...' here, was '' in training`"
    assert cells(text)["compared"] == f"not comparable where it was audited: {expected}"
    assert cells(text)["verdict"].startswith("not comparable here")
    assert "to test the audit:\n`sign_flip` by peer 1 in rounds 2 to 3;" in text
    assert "\n`stale` by peers 0 and 2 in rounds 4 to 4." in text
    assert "results may differ" in text


def test_who_was_caught_and_discarded_is_named(tmp_path):
    said = {"findings": [CAUGHT], "ejected": {"2": 12}, "dropped": {"1": 3}}
    text = text_of(make(tmp_path, verdict=said | {"sample_seed_of": "transcript"}))
    rows = cells(text)
    decided = "accepted: 0 of 1 finding got into the params (policy applied)"
    assert rows["verdict"] == decided
    assert rows["ejected"] == "peer 2 in round 12"
    assert rows["dropped out"] == "peer 1 in round 3"
    assert "12 | commitment | `sent 0123, its replay gives <4567>`" in rows["peer 2"]
    assert "1 liar caught and ejected" in text
    assert "whoever wrote the whole transcript" in rows["seed of the sample"]


def test_labels_are_no_tokens_and_arrays_have_words(tmp_path, monkeypatch):
    render, seen = card.render, []
    monkeypatch.setattr(card, "render", lambda facts: seen.append(facts) or render(facts))
    folder = make(tmp_path).out("export")  # where it was built is no more
    for said, more in (("50 ", {"columns": ["inputs", "labels"]}), ("100 words", {"rows": 0})):
        rows = cells(render(seen[0]._replace(folder=folder, shards=seen[0].shards | more)))
        assert rows["train split"].startswith(said)


def test_of_many_token_files_some_are_listed(tmp_path):
    text = text_of(make(tmp_path, shards=card.LISTED + 4))
    assert text.count("`train/") == card.LISTED
    assert "\n5 more files are listed in `shards.json`.\n" in text  # with the held-out one
    assert cells(text)["train split"].endswith("tokens in 44 files")


# ---- What it does not say ----


def test_equal_exports_elsewhere_have_equal_cards_and_no_folder_of_the_machine(accepted, tmp_path):
    again = make(tmp_path, tokenizer=SPECIAL)
    assert text_of(again) == text_of(accepted)
    assert str(tmp_path) not in text_of(again)
    flags = {"xla_flags": "--xla_dump_to=/home/me/dump --xla_b='/home/me' --xla_c=2"}
    text = text_of(make(tmp_path / "flags", environment=flags))
    assert "/home/me" not in text
    assert cells(text)["xla_flags"] == "`--xla_dump_to=... --xla_b='...' --xla_c=2`"


def test_credentials_of_addresses_are_left_out(tmp_path):
    url = "https://alice:hunter2@host.org/a.ds?X-Signature=c0ffee#t0ken"
    source = HUB | {"repo_id": url}
    location = {"Local": {"path": url}}
    text = text_of(make(tmp_path, source=source, read=url, model__LLM__data_location=location))
    for secret in ("hunter2", "c0ffee", "t0ken", "alice"):
        assert secret not in text
    assert text.count("https://host.org/a.ds?...") == 3
    assert "Put them back in" in text


def test_what_a_user_wrote_is_neither_markup_nor_yaml(tmp_path):
    source = HUB | {"repo_id": EVIL, "commit": EVIL}
    paths = make(tmp_path, source=source, read=EVIL, model__LLM__data_location={"Local": EVIL})
    text = text_of(paths)
    assert ModelCard(text).data.base_model is None  # which the hub would refuse
    tokens = tokens_of(text)
    kinds = {token.type for token in tokens}
    assert not kinds & {"html_inline", "html_block", "image", "link_open", "hr"}
    assert sum(token.tag == "h1" and token.nesting == 1 for token in tokens) == 1
    shown = re.sub(r"\s", " ", EVIL).replace("\u202e", "\ufffd")
    spans = [token.content for token in tokens if token.type == "code_inline"]
    assert spans.count(shown) == 3  # read, start, commit
    assert "\u202e" not in text
    assert tomllib.loads(toml_of(text))["model"]["LLM"]["data_location"]["Local"] == EVIL


def test_tables_are_tables(accepted):
    lines = text_of(accepted).splitlines()
    tokens = tokens_of(text_of(accepted))
    rows = [line for line in lines if line.startswith("|") and not line.startswith("|---")]
    assert sum(token.type == "tr_open" for token in tokens) == len(rows)
    assert not any("{{" in line or "{%" in line for line in lines)
