"""Forged publications, every hash, key and card of which their author made agree."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import jax
import pytest

from pipeline.publication import layout
from pipeline.weights import hf
from pipeline.wire.commitment import tree_hash
from tests.pipeline.publication.published_run import (
    TRANSCRIPT,
    add,
    change_json,
    change_round,
    change_tensors,
    flip,
    forge,
    refusal,
    rounds_sha256,
)


def other_weights(folder: Path) -> None:
    """Of another run, as stage export would write them."""
    config, params = hf.read_folder(folder)
    hf.write_folder(folder, config, jax.tree.map(lambda x: 1.01 * x, params), "float32")


def other_weights_and_their_hash(folder: Path) -> None:
    other_weights(folder)
    found = tree_hash(hf.read_folder(folder)[1])
    change_json(f"{TRANSCRIPT}/snapshots/00006/state.json", lambda s: s.update(params=found))(
        folder
    )


def other_rate(tables: dict) -> None:
    tables["model"]["LLM"]["lr_schedule"]["Cosine"]["base_lr"] = 4e-3


def other_seed(folder: Path) -> None:
    """The run file and the transcript's header say another seed of the fresh weights."""

    def change(tables: dict) -> None:
        tables["model"]["LLM"]["checkpoint"]["Init"]["seed"] = 1

    change_json(layout.RUN, change)(folder)
    change_json(f"{TRANSCRIPT}/header.json", lambda header: change(header["run"]))(folder)


def change_token(tensors: dict) -> None:
    tensors["rows"] = tensors["rows"].copy()
    tensors["rows"][:, 3] = (tensors["rows"][:, 3] + 1) % 64


def new_transcript_hash(folder: Path) -> None:
    """The verdict is of the rounds as they are."""
    found = rounds_sha256(folder)
    change_json(layout.VERDICT, lambda v: v.update(transcript=found, sample_seed=found))(folder)


def change_commitment(folder: Path) -> None:
    """One message of the first window, which is not published, is committed to as another."""
    change_round(folder, 2, lambda e: e["evidence"]["messages"]["0"].update(commitment="ab" * 32))
    new_transcript_hash(folder)


def change_card(folder: Path, pattern: str, said: str) -> None:
    path = folder / "README.md"
    text, count = re.subn(pattern, said, path.read_text(), count=1)
    assert count
    path.write_text(text)


def better_loss(folder: Path) -> None:
    change_json(layout.EVALUATED, lambda e: e.update(held_out_loss=1.0))(folder)
    change_card(folder, "(held_out_loss\n +value:) [0-9.]+", r"\1 1.0")


def better(name: str, value: object) -> Callable[[Path], None]:
    """Another number in evaluate.json, and on the card if it is there."""

    def changed(folder: Path) -> None:
        change_json(layout.EVALUATED, lambda e: e.update({name: value}))(folder)
        with suppress(AssertionError):
            change_card(folder, f"(type: {name}\n +value:) [0-9.]+", rf"\1 {value}")

    return changed


def no_loss(folder: Path) -> None:
    names = ("held_out_loss", "perplexity", "bits_per_byte")
    change_json(layout.EVALUATED, lambda e: e.update(dict.fromkeys(names)))(folder)


def without_results(folder: Path) -> None:
    change_card(folder, "(?s)model-index:.*?---\n", "---\n")


def fewer_rows(tensors: dict) -> None:
    for name, array in tensors.items():
        tensors[name] = array[:2]


def append(path: Path, data: bytes) -> None:
    path.write_bytes(path.read_bytes() + data)


FORGED = {
    "weights of another run": (
        other_weights,
        "the weights: params of hash ",
    ),
    "weights of another run, with their hash in the transcript": (
        other_weights_and_their_hash,
        "round 6, params: the params do not follow from the window's messages",
    ),
    "another model in config.json": (
        change_json("config.json", lambda c: c.update(rms_norm_eps=1e-3)),
        "config.json: ",
    ),
    "a changed round": (change_commitment, "round 2, decision: does not follow from the evidence"),
    "a changed token": (
        change_tensors(ROWS_FILE, change_token),
        ", message: sent ",
    ),
    "a changed payload": (flip(f"{TRANSCRIPT}/payloads/00004.bin"), "proof/transcript: round "),
    "a changed state": (
        flip(f"{TRANSCRIPT}/snapshots/00003/params.safetensors"),
        "round 3, snapshot: ",
    ),
    "a verdict that was refused": (
        change_json(
            layout.VERDICT,
            lambda v: v["findings"].append(
                {"round": 2, "peer": 1, "kind": "message", "detail": "d", "applied": True}
            ),
        ),
        "proof/verdict.json: accepted is True, expected False, which follows from",
    ),
    "a verdict that replayed more": (
        change_json(layout.VERDICT, lambda v: v.update(windows=9)),
        "proof/verdict.json: windows is 9, expected 4",
    ),
    "a verdict whose honest repeats loosen a fixed tolerance": (
        change_json(
            layout.VERDICT,
            lambda v: v.update(
                method="tolerance", why_not_bitwise="because", tolerance=0.4, repeats=0.1
            ),
        ),
        "proof/verdict.json: tolerance is 0.4, expected 0.05, which follows from",
    ),
    "a run file with another learning rate": (
        change_json(layout.RUN, other_rate),
        "round 0, header: its run differs from the auditor's own",
    ),
    "other fresh weights": (
        other_seed,
        "proof/transcript: params before the first round of hash ",
    ),
    "a better loss on the card": (
        lambda folder: change_card(folder, "(held_out_loss\n +value:) [0-9.]+", r"\1 1.0"),
        "README.md: held_out_loss of held_out is 1.0 in its model-index, expected ",
    ),
    "a better perplexity on the card": (
        lambda folder: change_card(folder, "(type: perplexity\n +value:) [0-9.]+", r"\1 1.05"),
        "README.md: perplexity of held_out is 1.05 in its model-index, expected ",
    ),
    "a better loss on the card, twice said": (
        lambda folder: change_card(folder, "(held_out_loss\n( +)value:)", r"\1 1.0\n\2value:"),
        "README.md: its front matter is not as the stages export and report write",
    ),
    "another name of the perplexity on the card": (
        lambda folder: change_card(folder, "name: perplexity per token", "name: MMLU, accuracy"),
        "README.md: perplexity of held_out has another name in its model-index, expected ",
    ),
    "a score that nobody measured on the card": (
        lambda folder: change_card(folder, "type: held_out\n", "type: mmlu\n"),
        "README.md: held_out_loss of mmlu is ",
    ),
    "a better loss, on the card too": (
        better_loss,
        "proof/evaluate.json: held_out_loss is 1.0000, expected ",
    ),
    "a better perplexity, on the card too": (
        better("perplexity", 1.05),
        "proof/evaluate.json: perplexity is 1.0500, expected ",
    ),
    "more tokens": (
        better("tokens", 10**9),
        "proof/evaluate.json: tokens is 1000000000, expected 60 as measured here",
    ),
    "more sequences": (
        better("sequences", 10**6),
        "proof/evaluate.json: sequences is 1000000, expected 4 as measured here",
    ),
    "bits per byte without a tokenizer": (
        better("bits_per_byte", 1.0),
        "README.md: no bits_per_byte of held_out in its model-index, expected it as in proof/",
    ),
    "a text for a perplexity": (
        better("perplexity", "a" * 3000),
        "proof/evaluate.json: perplexity is ",
    ),
    "no loss though something was held out": (
        no_loss,
        "README.md: held_out_loss of held_out is ",
    ),
    "no loss, nor on the card": (
        lambda folder: (no_loss(folder), without_results(folder)),
        "proof/evaluate.json: held_out_loss is null, expected ",
    ),
    "fewer held-out sequences": (
        change_tensors(layout.HELD_OUT, fewer_rows),
        "proof/evaluate.json: ",
    ),
    "other held-out sequences than the first": (
        change_tensors(layout.HELD_OUT, lambda t: t.update(indices=t["indices"] + 1)),
        "proof/held_out.safetensors: 4 sequences up to 4, expected at most the first 4",
    ),
    "messages of nobody": (
        lambda folder: append(folder / TRANSCRIPT / "payloads/00004.bin", bytes(10**6)),
        "payloads/00004.bin: 100",
    ),
    "payloads that no drawn window needs": (
        add(f"{TRANSCRIPT}/payloads/00001.bin"),
        "payloads/00001.bin: a file that no drawn window needs, expected none",
    ),
}


@pytest.mark.parametrize("case", FORGED)
def test_what_contradicts_itself_is_not_verified_though_all_hashes_agree(folder, case):
    change, said = FORGED[case]
    change(folder)
    forge(folder)
    assert said in refusal(folder)


@pytest.mark.soak  # compiles another program
def test_another_learning_rate_in_the_transcript_too_is_found_by_the_replay(folder):
    change_json(layout.RUN, other_rate)(folder)
    change_json(f"{TRANSCRIPT}/header.json", lambda header: other_rate(header["run"]))(folder)
    forge(folder)
    assert ", message: sent " in refusal(folder)
