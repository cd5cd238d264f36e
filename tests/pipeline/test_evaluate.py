"""Evaluation of a tiny exported folder: what is measured is what was exported."""

import math
from functools import partial

import jax
import numpy as np
import pytest
from tokenizers import decoders

from lockstep.programs.columns import UNCOUNTED
from lockstep.programs.placement import DeviceGroup, on_groups
from pipeline import evaluate, runfile
from pipeline.language_model import held_out
from pipeline.language_model.held_out import half, mean_loss, mean_of, spread
from pipeline.language_model.language_model import programs_of
from pipeline.language_model.text_writer import TextWriter
from pipeline.stage.keys import PROJECT
from pipeline.toml_file import read_toml
from pipeline.weights import exported as exported_folder
from tests.pipeline.evaluated import END, HF_CONFIG, LENGTH, make
from tests.pipeline.exported import make_params, make_tokenizer
from tests.pipeline.tokens.shards_folder import shards_folder


@pytest.fixture
def made(tmp_path):
    return partial(make, tmp_path)


def test_held_out_loss_is_that_of_training_on_the_same_sequences(made):
    held_out = np.random.default_rng(0).integers(1, 260, 7 * LENGTH)
    paths, metrics, written = made(held_out=held_out, sequences="5", micro_batch="5")
    assert not any("[held_out]" in note for note in written["notes"])
    run = runfile.load(paths.run)
    programs = programs_of(run, HF_CONFIG)
    drawn_NT = held_out.reshape(7, LENGTH).astype(np.int32)[spread(7, 5, run.peers.seed)]
    params_on = {DeviceGroup((jax.devices()[0],)): make_params()}
    expected = mean_loss(on_groups(programs.steps.measure, params_on), drawn_NT, 5)
    assert metrics["held_out_loss"] == pytest.approx(expected.mean, abs=1e-5)
    assert metrics["held_out_stderr"] == pytest.approx(expected.stderr, rel=1e-4)
    assert metrics["perplexity"] == pytest.approx(math.exp(expected.mean), rel=1e-4)
    assert (metrics["sequences"], metrics["tokens"]) == (5, 5 * (LENGTH - 1))
    assert metrics["split_sequences"] == 7
    assert written["held_out_seen"] is None  # nobody counted it in shards that a test made


def test_rows_are_spread_over_the_whole_split_and_any_seed_draws_others():
    for seed in range(3):
        chosen = spread(10_000, 512, seed)
        assert len(set(chosen)) == 512 and (np.diff(chosen) > 0).all()
        tenths = np.bincount(chosen // 1000, minlength=10)
        assert tenths.min() > 25 and tenths.max() < 80  # 51 are expected, give or take 7
    assert [*spread(40, 512, 0)] == [*range(40)]  # all there are
    assert [*spread(10**9, 3, 7)] == [*spread(10**9, 3, 7)] != [*spread(10**9, 3, 8)]
    assert not len(spread(0, 512, 0)) and not len(spread(9, 0, 0))


@pytest.mark.parametrize(
    "borders, border", [([0], 20), ([0, 3, 18, 30], 18), ([0, 3, 39], 20), ([], 20)]
)
def test_rows_to_tune_on_and_rows_to_score_are_of_different_files(borders, border):
    halves = [half(borders, 41, rows) for rows in ("all", "scoring", "tuning")]
    assert halves == [range(41), range(border), range(border, 41)]


def test_a_run_measures_the_half_that_it_names(tmp_path):
    files = [np.full(rows * LENGTH, value) for value, rows in enumerate((3, 4), 5)]
    shards = shards_folder(tmp_path, files, files)
    found = {}
    for rows in ("all", "scoring", "tuning"):
        document = read_toml(PROJECT / "params/run.toml")
        document["model"]["LLM"]["max_seq_len"] = LENGTH
        document["held_out"]["rows"] = rows
        found[rows] = held_out.read(runfile.parse(document, "a test"), shards)
    assert [held.split_size for held in found.values()] == [7, 3, 4]
    assert (found["scoring"].rows_NW == 5).all() and (found["tuning"].rows_NW == 6).all()
    assert [*found["tuning"].indices_N] == [*range(4)]


def test_the_mean_of_rows_that_are_spread_is_that_of_the_split_within_its_standard_error():
    """A split whose first rows are easy, as those of one file are: the prefix is far off."""
    random = np.random.default_rng(0)
    split_N = np.sort(random.normal(5.0, 1.0, 2000))
    found = [mean_of(split_N[spread(len(split_N), 200, seed)]) for seed in range(40)]
    apart = [(one.mean - split_N.mean()) / one.stderr for one in found]
    assert sum(abs(z) < 2 for z in apart) >= 36  # 95 % are expected
    assert (mean_of(split_N[:200]).mean - split_N.mean()) / found[0].stderr < -5


def test_a_standard_error_is_that_of_a_mean_or_of_a_ratio_of_sums():
    losses_N, weights_N = np.array([1.0, 2.0, 4.0, 8.0]), np.array([1.0, 3.0, 2.0, 2.0])
    plain = mean_of(losses_N, documents_N=[0, 1, 2, 3])
    assert plain.mean == 3.75
    assert plain.stderr == pytest.approx(losses_N.std(ddof=1) / 2)
    assert mean_of(losses_N, np.full(4, 7.0), [0, 1, 2, 3]) == pytest.approx(plain)
    ratio = mean_of(losses_N, weights_N, [0, 1, 2, 3])
    assert ratio.mean == pytest.approx(31 / 8)
    by_hand = sum((w * (x - 31 / 8)) ** 2 for w, x in zip(weights_N, losses_N, strict=True))
    assert ratio.stderr == pytest.approx(math.sqrt(4 / 3 * by_hand) / 8)
    assert mean_of(losses_N[:1]).stderr is None
    assert mean_of(losses_N, documents_N=[7, 7, 7, 7]).stderr is None


def test_a_standard_error_is_that_of_stretches_of_the_split():
    """Neighbours that correlate by 0.64: the error by rows is half of what it is."""
    random, zs = np.random.default_rng(0), {"stretches": [], "rows": []}
    for _ in range(300):
        losses_N = np.zeros(341)
        for row in range(1, 341):
            losses_N[row] = 0.64 * losses_N[row - 1] + random.normal()
        zs["stretches"].append((found := mean_of(losses_N)).mean / found.stderr)
        zs["rows"].append(found.mean / mean_of(losses_N, documents_N=np.arange(341)).stderr)
    within = {name: np.mean(np.abs(z) < 1.96) for name, z in zs.items()}
    assert within["stretches"] > 0.9 and within["rows"] < 0.75


def test_a_standard_error_by_stretches_is_that_of_a_loop_in_float64():
    random = np.random.default_rng(1)
    losses_N, weights_N = random.normal(5, 1, 39), random.integers(0, 9, 39).astype(float)
    mean = sum(w * x for w, x in zip(weights_N, losses_N, strict=True)) / sum(weights_N)
    squares, clusters = 0.0, 0
    for first in range(0, 39, 6):  # of sqrt(39) rows, the last one shorter
        rows = range(first, min(39, first + 6))
        squares += sum(weights_N[n] * (losses_N[n] - mean) for n in rows) ** 2
        clusters += 1
    error = math.sqrt(clusters / (clusters - 1) * squares) / sum(weights_N)
    assert mean_of(losses_N, weights_N) == pytest.approx((mean, error), rel=1e-12)


def test_bits_per_byte_divides_by_the_bytes_of_the_text_that_is_predicted(made):
    tokenizer = make_tokenizer()
    text = "def f(x): return x\n\u00e9"
    ids = [*tokenizer.encode(text).ids, END]
    held_out = (ids * LENGTH)[:LENGTH]
    labels = held_out[1:]
    unseen = tokenizer.decode(held_out[:1])
    whole = tokenizer.decode(held_out, skip_special_tokens=True)
    assert END in labels and "\ufffd" not in whole
    size = len(whole.encode()) - len(unseen.encode())
    _, metrics, _ = made(tokenizer=tokenizer, held_out=held_out)
    assert metrics["bytes"] == size
    bits = metrics["held_out_loss"] * len(labels) / math.log(2)
    assert metrics["bits_per_byte"] == pytest.approx(bits / size)


def test_of_labels_only_those_that_count_are_measured(made):
    tokenizer = make_tokenizer()
    columns = ("inputs", "labels", "position_ids", "sequence_ids")
    rng = np.random.default_rng(0)
    inputs = rng.integers(1, 260, (4, LENGTH))
    labels = np.full((4, LENGTH), UNCOUNTED)
    labels[0, 5:9], labels[1, 3] = inputs[0, 5:9], inputs[1, 3]
    labels[2, 0] = 7  # which nothing predicts
    positions = np.tile(np.arange(LENGTH // 2), (4, 2))
    sequences = np.repeat([[0, 1]] * 4, LENGTH // 2, axis=1)
    rows = np.concatenate([inputs, labels, positions, sequences], axis=1)
    paths, metrics, _ = made(
        tokenizer=tokenizer, held_out=rows.ravel(), columns=columns, micro_batch="3"
    )
    # each sequence alone, in float64
    exported = exported_folder.read(paths.out("export"))
    logits = np.float64(jax.jit(exported.apply)(exported.params, inputs[:2, : LENGTH // 2]))
    losses = [
        np.log(np.exp(logits[row, place - 1]).sum()) - logits[row, place - 1, labels[row, place]]
        for row, place in np.argwhere(labels[:2] != UNCOUNTED)
    ]
    assert (metrics["sequences"], metrics["tokens"]) == (2, len(losses)) == (2, 5)
    assert metrics["held_out_loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    spelled = [tokenizer.id_to_token(token) for token in (*inputs[0, 5:9], inputs[1, 3])]
    assert metrics["bytes"] == sum(map(len, spelled))
    bits = sum(losses) / math.log(2)
    assert metrics["bits_per_byte"] == pytest.approx(bits / metrics["bytes"], rel=1e-5)


def test_text_of_temperature_zero_is_what_transformers_generates(made):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    paths, _, written = made(tokenizer=make_tokenizer(), prompt='"def f(x"')
    export = paths.out("export")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(export / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    prompt = tokenizer("def f(x", return_tensors="pt")["input_ids"]
    ids = model.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=END)[0]
    assert len(set(ids.tolist())) > 4
    assert written["text"] == tokenizer.decode(ids, skip_special_tokens=True)
    assert (paths.out("evaluate") / "sample.txt").read_bytes().decode() == written["text"]


def test_an_empty_prompt_begins_where_a_document_begins(made):
    paths, _, written = made(tokenizer=make_tokenizer(), prompt='""', max_new_tokens="4")
    exported = exported_folder.read(paths.out("export"))
    writer = TextWriter(exported, exported.params_to_write, context=LENGTH, ends=[END])
    [ids] = writer.write([[END]], max_new_tokens=4)
    assert written["text"] == make_tokenizer().decode(ids) != ""


def test_an_empty_prompt_of_a_model_without_a_beginning_is_no_text(made):
    paths, _, _ = made(tokenizer=make_tokenizer(), prompt='""', max_new_tokens="4")
    exported, notes = exported_folder.read(paths.out("export")), []
    exported = exported._replace(texts=exported.texts._replace(beginning=None))
    assert evaluate.text_sample(runfile.load(paths.run), exported, notes) is None
    assert ["prompt is empty" in note for note in notes] == [True]


def test_a_refused_export_gives_nulls_and_says_so(made):
    paths, metrics, written = made(refused=True, held_out=[1] * LENGTH)
    assert metrics.pop("tasks") == {"next_line": None}
    assert set(metrics.values()) == {None}
    assert written["text"] is None and "refused" in written["notes"][0]
    assert not (paths.out("evaluate") / "tasks").exists()
    assert (paths.out("evaluate") / "sample.txt").read_text() == ""


def test_without_a_held_out_split_there_is_a_text_but_no_loss(made, capsys):
    _, metrics, written = made(tokenizer=make_tokenizer())
    assert metrics.pop("tasks") == {"next_line": None}
    assert set(metrics.values()) == {None}
    assert written["text"].startswith("def ")
    said = capsys.readouterr().out
    assert "nothing is held out" in said


def test_fewer_sequences_than_asked_and_what_lacks_without_a_tokenizer_are_notes(made):
    _, metrics, written = made(held_out=[1, 2] * LENGTH)
    assert metrics["held_out_loss"] > 0
    assert metrics["bits_per_byte"] is metrics["bytes"] is written["text"] is None
    assert (metrics["tasks"], written["tasks"]) == ({"next_line": None}, [])
    assert written["notes"].pop(1) == "[held_out] sequences = 512, and there are 2 to measure"
    assert sum("there is no tokenizer.json" in note for note in written["notes"]) >= 2


def test_a_tokenizer_that_is_not_byte_level_gives_no_bits_per_byte():
    tokenizer = make_tokenizer()
    tokenizer.decoder = decoders.Fuse()
    notes: list[str] = []
    assert held_out.bytes_of(np.array([[1, 2]]), tokenizer, notes) is None
    assert "not byte-level" in notes[0]


def test_byte_level_among_several_decoders_is_found():
    tokenizer = make_tokenizer()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    assert held_out.bytes_of(np.array([[1, 2, END]]), tokenizer, []) == 2


def test_a_token_that_the_tokenizer_lacks_gives_no_bits_per_byte():
    notes: list[str] = []
    assert held_out.bytes_of(np.array([[1, 9999]]), make_tokenizer(), notes) is None
    assert "token 9999" in notes[0]
