"""The page of a finished run: what it says, and that it needs nothing but itself."""

import base64
import io
import json
import re
from html.parser import HTMLParser
from itertools import combinations

import matplotlib
import numpy as np
import pytest
from huggingface_hub import ModelCard
from PIL import Image

from pipeline import report, runfile
from pipeline.pages import plots
from pipeline.pages.report_page import _data, chances
from pipeline.stage.artifacts import Paths
from tests.pipeline.finished_run import CAUGHT, LIAR, PEERS, SHARDS, finish

VOID = {"meta", "img", "br"}
PNGS = {f"loss_by_{x}.png" for x in ("step", "tokens", "bytes", "time")}
PNGS |= {"learning_rate.png", "traffic.png"}


class Page(HTMLParser):
    """A page as its tags, checked for being closed in order, and its visible text."""

    def __init__(self, html: str):
        super().__init__()
        self.html, self.open, self.tags, self.words = html, [], [], []
        self.feed(html)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes nothing at {self.getpos()}"

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict]:
        return [attrs for name, attrs in self.tags if name == tag]


def make(root, *, drawn=True, **choices):
    """Run the stage; not `drawn`, plots are empty, where only the text is read."""
    run_file = finish(root, **choices)
    paths = Paths("report", run_file, root)
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:
            patch.setattr(plots, "_png", lambda *_: b"")
        report.run(runfile.load(run_file), paths)
    return paths


def page_of(paths) -> Page:
    return Page((paths.out("report") / "report.html").read_text())


@pytest.fixture(scope="module")
def accepted(tmp_path_factory):
    return make(tmp_path_factory.mktemp("accepted"))


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    nobody = {"round": 0, "peer": None, "kind": "snapshot", "detail": "another hash"}
    nobody |= {"applied": True, "bundle": None}
    return make(tmp_path_factory.mktemp("refused"), findings=(LIAR, nobody))


@pytest.fixture(scope="module")
def unmeasured(tmp_path_factory):
    method = {"not_comparable": "jax is 'B' here, was 'A' in training", "replayed_windows": []}
    root = tmp_path_factory.mktemp("unmeasured")
    return make(root, held_out=False, text=None, method=method)


def test_page_fetches_nothing(accepted):
    page = page_of(accepted)
    assert not {"script", "link", "iframe", "base", "object"} & {tag for tag, _ in page.tags}
    for tag, attrs in page.tags:
        for name, value in attrs.items():
            if name in ("src", "srcset", "href", "background", "poster"):
                assert value.startswith("data:image/png;base64,"), (tag, name)
    style = re.search(r"<style>(.*?)</style>", page.html, re.S)[1]
    assert "url(" not in style and "@import" not in style
    assert not re.search(r"https?:|(src|href)=\"//", page.html)


def test_plots_are_embedded_and_lie_beside_the_page(accepted):
    pictures = [
        base64.b64decode(img["src"].split(",")[1], validate=True)
        for img in page_of(accepted).all("img")
    ]
    files = {path.name: path.read_bytes() for path in accepted.out("report").glob("*.png")}
    assert files.keys() == PNGS
    assert sorted(pictures) == sorted(files.values())
    for png in pictures:
        image = Image.open(io.BytesIO(png))
        image.load()
        assert image.width == round(plots.SIZE[0] * plots.DPI)  # a phone still shows it legibly
        assert np.asarray(image.convert("L")).std() > 5


def test_the_page_is_named_by_the_key_that_names_the_training_everywhere(accepted):
    page = page_of(accepted)
    assert accepted.key in page.text
    for tag in ("title", "h1"):
        (heading,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.html, re.S)
        assert accepted.keys.key("train") in heading
        assert accepted.keys.key("report") not in heading


SAID = {  # on a page, and in the words for its pictures
    "accepted": [
        "Accepted The audit found nothing wrong in 40 rounds",
        *("8.317 → 5.617", "2.312", "275.1", "34.0 kB", "0.136", "162,816"),
        "plain data parallelism sends 8.0 MB, 235 times as much",
        "Compared: bit for bit.",
        "peer 3 40 39 1",  # messages, applied, late
        "LLM.optimizer.Distro.compression_topk 32",
        "Source s3://bucket/tokens?... SHA-256 of the source da7ada7a",
        "To train on 1,000,000 tokens Used 163,840 tokens, 16.4 %: 640 sequences of 256",
        "Held out 50,000 tokens",
        "the transcript's own hash; whoever wrote the whole transcript",
        "next_line 400 0 acc 0.3100 0.267 to 0.357 0.25 above chance",
        "next_line 400 0 acc_mutual_info 0.4500 0.402 to 0.499 0.25 above chance",
    ],
    "refused": [
        "no weights were exported : peer 2 in round 12 (message); the transcript in",
        "peer 2 12 message yes sent 0123",
        "lockstep replay data/verdict/bundles/00011-00020-peer-02",
        "Policy applied: a finding that was applied to the params refuses the export.",
        *("8.317 → 5.8", "at the end of training", "refused.json"),
    ],
    "unmeasured": [
        "Evaluation: there is nothing to measure.",
        "Not available: there are no exported weights, or no tokenizer.",
        "not comparable here, which shows nothing and accuses nobody: jax is 'B' here, was 'A'",
        f"seed {'5eed' * 16} , the transcript's",
    ],
}
NOT_SAID = {
    "accepted": ["log_level", "secret"],  # what changes no result, and nobody's business
    "refused": ["Accepted", "lockstep verify", "Shares of right answers, with"],
    "unmeasured": ["Shares of right answers"],
}


@pytest.mark.parametrize("name", SAID)
def test_what_a_page_says(name, request):
    text = page_of(request.getfixturevalue(name)).text
    assert [said for said in SAID[name] if said not in text] == []
    assert [said for said in NOT_SAID[name] if said in text] == []


def test_every_image_says_in_words_what_it_shows(accepted, unmeasured):
    alts = {img["alt"] for img in page_of(accepted).all("img")}
    assert len(alts) == len(PNGS)
    for words in (
        *("held-out loss from 8.32 to 5.8", "sent 34.0 kB"),
        "learning rate by step, 0.0008 at first, at most 0.016, 0.0016 at the end.",
    ):
        assert any(words in alt for alt in alts), words
    page = page_of(unmeasured)
    assert page.text.count("not measured") == 3 and "<h2>Tasks</h2>" not in page.html
    assert not any("held-out loss from" in img["alt"] for img in page.all("img"))


def test_tokens_are_counted_as_the_run_took_them(accepted):
    """With labels beside the inputs, and nothing held out but by default, which is not measured."""
    rounds = [{"round": {"data_index": 0, "batch_size": 10}}]
    run = runfile.load(accepted.run)
    nothing = run.held_out.model_copy(update={"sequences": 0})
    shards = SHARDS | {"columns": ["inputs", "labels"], "held_out_by_default": True}
    told = dict(_data(run.model_copy(update={"held_out": nothing}), shards, rounds))
    assert told["To train on"] == "525,000 tokens" and "Held out" not in told
    told = dict(_data(run, shards, rounds))
    assert (told["To train on"], told["Held out"][:6]) == ("500,000 tokens", "25,000")
    again = run.model_copy(update={"peers": run.peers.model_copy(update={"passes": 2})})
    mixed = SHARDS | {"parts": [{"weight": 0.5}] * 2}  # of which one may be small
    used = [dict(_data(*x, rounds))["Used"] for x in ((run, SHARDS), (again, SHARDS), (run, mixed))]
    assert [text.endswith("none twice") for text in used] == [True, False, False]


def test_page_says_how_weights_card_and_proof_belong_together(accepted):
    text = page_of(accepted).text
    made = json.loads(accepted.made("train").read_text())["files"]
    assert f"transcript's rounds {made['transcript/rounds.jsonl']['sha256']}" in text
    assert text.index("names the weights and the rounds") < text.index("lockstep verify FOLDER")


def test_what_a_model_or_a_liar_wrote_stays_text(accepted, refused):
    assert "&lt;b&gt;&amp;\ufffd[31m" in page_of(accepted).html
    assert "its replay gives &lt;4567&gt;" in page_of(refused).html


def test_page_of_an_accepted_run_names_who_was_caught_and_ejected(tmp_path):
    text = page_of(make(tmp_path, drawn=False, findings=(CAUGHT,))).text
    assert (
        "Accepted 1 liar caught and ejected in 40 rounds: peer 2 in round 12 (commitment)." in text
    )
    assert "peer 2 12 commitment no sent 0123" in text
    assert "ejected peer 2 in round 12 late peer 3 (1 message)" in text


def test_page_names_the_peers_of_a_fault_that_several_commit(tmp_path):
    faults = '[{ kind = "stale", peer = [1, 2], rounds = [4, 5] }]'
    text = page_of(make(tmp_path, drawn=False, edits={"schedule": faults})).text
    assert "stale by peers 1 and 2 in rounds 4 to 5." in text


def grid_of(page: Page) -> dict[str, list[str]]:
    """The table of windows: a row for each peer."""
    table = page.html.split('<table class="grid">')[1].split("</table>")[0]
    rows = re.findall(r'<tr><th scope="row">([a-z 0-9]+)</th>(.*?)</tr>', table)
    return {name: re.findall(r'<td class="([a-z-]+)">', row) for name, row in rows}


def test_grid_shows_what_was_done_with_each_window(refused):
    no, yes, bad = "not-replayed", "replayed", "found"
    assert grid_of(page_of(refused)) == {
        "peer 0": [no, no, yes, no],
        "peer 1": [no, no, no, yes],
        "peer 2": [no, bad, no, no],
        "peer 3": [yes, no, no, no],
        "the transcript": [bad, no, no, no],
    }


def test_windows_are_those_between_snapshots_that_are_kept_whole(tmp_path):
    windows = [(0, 1, 20), (1, 21, 40)]
    replayed = [
        {"window": window, "first": first, "last": last, "peer": peer}
        for window, first, last in windows
        for peer in range(PEERS)
    ]
    changes = {"windows": len(replayed), "replayed_windows": replayed, "drawn_windows": 2}
    edits = {"keep_every": "2"}
    page = page_of(make(tmp_path, drawn=False, method=changes, edits=edits))
    assert grid_of(page) == {f"peer {peer}": ["replayed"] * 2 for peer in range(PEERS)}
    assert page.text.count("1–20") == page.text.count("21–40") == 1
    assert "25 % for a peer that lies in 1 window, 44 % in 2 windows." in page.text


def test_same_data_give_the_same_bytes_whatever_matplotlibrc_says(accepted):
    folder = accepted.out("report")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    settings = {"lines.linewidth": 9, "savefig.dpi": 30, "axes.titlesize": 30, "svg.hashsalt": "x"}
    with matplotlib.rc_context(settings):
        report.run(runfile.load(accepted.run), accepted)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("drawn", [1, 2, 6])
def test_chances_are_no_more_than_those_of_all_samples(drawn):
    cells = [(w, p) for w in range(3) for p in range(2)]
    samples = [*combinations(cells, drawn)]
    found = dict(chances({"windows": len(cells), "drawn_windows": drawn}, 3))
    assert found.keys() == {1, 2, 3}
    for lies, least in found.items():
        false = {(w, 0) for w in range(lies)}
        caught = sum(bool(false & set(sample)) for sample in samples) / len(samples)
        assert least == pytest.approx(1 - (1 - drawn / len(cells)) ** lies)
        assert least == pytest.approx(caught) if lies == 1 else least <= caught


def test_the_model_card_has_the_results_in_the_hubs_form(accepted, refused):
    card = ModelCard.load(accepted.out("report") / "README.md")
    assert card.data.library_name == "transformers"
    results = {(one.dataset_type, one.metric_type): one for one in card.data.eval_results}
    acc = results["next_line", "acc"]
    assert (acc.metric_value, acc.dataset_args) == (0.31, {"num_few_shot": 0})
    low, high = acc.metric_args["interval_95"]
    assert low < 0.31 < high and acc.metric_args["chance"] == 0.25
    assert acc.dataset_revision == "5e" * 32
    assert results["held_out", "bits_per_byte"].metric_value == 2.312
    own = (accepted.out("export") / "README.md").read_text().split("---\n", 2)[2]
    before, after = own.split("## Verdict")
    assert card.text.startswith(before) and card.text.endswith(f"## Verdict{after}")
    assert "| next_line | 400 | 0 | acc | 0.3100 | 0.267 to 0.357 | 0.25 |" in card.text
    assert not (refused.out("report") / "README.md").exists()
