"""Forged losses, held-out sequences, scores and cards: what stands beside the transcript."""

from pathlib import Path

import pytest

from lockstep.files import sha256_file
from parts.publication import layout
from pipeline.recheck import outputs
from tests.parts.publication.forged.changes import better, change_card
from tests.parts.publication.published_run import change_json, change_tensors, forge, refusal

pytestmark = pytest.mark.long


def no_loss(folder: Path) -> None:
    names = ("held_out_loss", "perplexity", "bits_per_byte")
    for file in (outputs.EVALUATED, outputs.RESULTS):
        change_json(file, lambda e: e.update(dict.fromkeys(names)))(folder)


def fewer_rows(tensors: dict) -> None:
    for name, array in tensors.items():
        tensors[name] = array[:2]


MEASURED = {
    "a better loss": (
        better("held_out_loss", 1.0), "proof/evaluate.json: held_out_loss is 1.0000, expected "),
    "a better perplexity": (
        better("perplexity", 1.05), "proof/evaluate.json: perplexity is 1.0500, expected "),
    "bits per byte without a tokenizer": (
        better("bits_per_byte", 1.0),
        "proof/evaluate.json: bits_per_byte is 1.0000, expected null"),
    "no loss though something was held out": (
        no_loss, "proof/evaluate.json: held_out_loss is null, expected "),
    "fewer held-out sequences": (
        change_tensors(outputs.HELD_OUT, fewer_rows),
        "proof/held_out.safetensors: lacks 2 sequences"),
    "other held-out sequences than the seed draws": (
        change_tensors(outputs.HELD_OUT, lambda t: t.update(indices=t["indices"] + 1)),
        "proof/held_out.safetensors: "),
    "a smaller standard error": (
        better("held_out_stderr", 0.001),
        "proof/evaluate.json: held_out_stderr is 0.0010, expected "),
    "scores in one file of the two": (
        change_json(outputs.EVALUATED, lambda e: e.update(tasks={"mmlu": {"acc": 0.99}})),
        "proof/results.json: the numbers differ from those in proof/evaluate.json"),
    "a base model that the run did not begin with": (
        change_json(outputs.SOURCE, lambda s: s.update(repo_id="meta/large", commit="ab" * 20)),
        "proof/source.json: repo_id is 'meta/large', expected None as in proof/run.json"),
    "a pin of other data": (
        change_json(outputs.RUN, lambda r: r["pins"].update(data="ab" * 32)),
        "proof/made/download.json: [pins.data] is "),
    "other token ids where a text begins": (
        change_json("generation_config.json", lambda g: g.update(bos_token_id=3)),
        "generation_config.json: "),
    "other tables than the run file's in a made file": (
        change_json(layout.made("train"), lambda m: m["tables"]["peers"].update(count=9)),
        "proof/made/train.json: [peers] is "),
}  # fmt: skip


CARDS = {
    "a better loss": (
        ("(held_out_loss\n +value:) [0-9.]+", r"\1 1.0"),
        "README.md: held_out_loss of held_out is 1.0"),
    "a better loss, twice said": (
        ("(held_out_loss\n( +)value:)", r"\1 1.0\n\2value:"),
        "README.md: cannot read its front matter"),
    "another name of the perplexity": (
        ("name: perplexity per token", "name: MMLU, accuracy"),
        "README.md: perplexity of held_out is named"),
    "a score that nobody measured": (
        ("type: held_out\n", "type: mmlu\n"), "README.md: held_out_loss of mmlu is "),
    "no results": (("(?s)model-index:.*?---\n", "---\n"), "README.md: "),
    "a word of praise": (
        ("\n## Data\n", "\nAudited by an independent lab; MMLU 91.2.\n\n## Data\n"),
        "README.md: line ",
    ),
    "another commit than the list's": (
        ("(source is that of commit `)[0-9a-f]{7}", r"\g<1>0000000"), "README.md: expected "),
    "no commit, where the list has one": (
        (r"Stated by whoever published it: .*\n\n", ""), "README.md: expected "),
    "a word at the end": (("\\Z", "trust me\n"), "README.md: line "),
}  # fmt: skip


@pytest.mark.parametrize("case", CARDS)
def test_a_card_of_which_a_word_was_changed_is_not_verified(folder, case):
    (pattern, said), expected = CARDS[case]
    change_card(folder, pattern, said)
    forge(folder, card=False)
    assert expected in refusal(folder)


def test_a_commit_that_the_list_does_not_state_is_a_line_that_no_stage_wrote(folder):
    change_json(layout.MANIFEST, lambda said: said.update(commit=None))(folder)
    assert refusal(folder).startswith("README.md: sha256 ")


def test_a_card_of_other_weights_is_not_verified(folder):
    text = (folder / "README.md").read_text()
    weights = sha256_file(folder / "model.safetensors")
    (folder / "README.md").write_text(text.replace(weights, "0" * 64))
    forge(folder, card=False)
    said = refusal(folder)
    assert said.startswith("README.md: ") and f"model.safetensors, expected {weights[:12]}" in said
