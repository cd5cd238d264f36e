"""What is wrong is said in one line that names it, with status 1; earlier results stay whole."""

import io
import shutil
import signal
import sys
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

from lockstep.errors import DivergedError
from pipeline.__main__ import main
from tests import tiny
from tests.errors import check_names

pytestmark = pytest.mark.long


class Place:
    """A tiny run in a folder, with stages run by hand."""

    def __init__(self, folder: Path):
        self.folder, self.data = folder, tiny.write_data(folder / "tokens")
        self.run_file, self.root = folder / "run.toml", folder / "root"
        self.set()

    def set(self, **changes: object) -> None:
        tiny.write_run(self.run_file, tiny.run_document(self.data, **changes))

    def make(self, *stages: str) -> None:
        tiny.make(self.run_file, self.root, *stages)

    def hf_folder(self) -> Path:
        """A Hugging Face folder, which the run file then names."""
        folder = self.folder / "model"
        self.make("convert")
        shutil.copytree(self.root / "data/init/hf", folder)
        shutil.rmtree(self.root / "data/init")
        self.set(model__LLM__checkpoint={"Hub": {"repo_id": str(folder)}})
        return folder

    def refused(self, stage: str, *named: object, file_bytes: int | None = None) -> None:
        """The stage ends with status 1 and one line that names these, and changes nothing of what
        earlier stages made.

        `file_bytes` is the largest file that can be written, as on a disk that fills up.
        """
        before = {p: tiny.contents(p) for p in self.root.glob("data/*") if p.name != "runs"}
        arguments = [stage, "--run", str(self.run_file), "--root", str(self.root)]
        if file_bytes:
            error = full_disk(file_bytes, arguments, compiled=self.folder / "compiled")
        else:
            error = ended(arguments)
        assert error.startswith("error: ")
        check_names(error, *named)
        for path, files in before.items():
            if path.is_dir() and path.name != "store":
                assert tiny.contents(path) == files, path


def ended(arguments: list[str]) -> str:
    """Return what the command says as it ends with an error; it runs in this process."""
    with pytest.MonkeyPatch.context() as patch, tiny.like_a_process():
        patch.setattr(sys, "argv", ["lockstep", *arguments])
        patch.setattr(signal, "signal", lambda *_: None)
        patch.setattr(sys, "unraisablehook", sys.unraisablehook)
        with pytest.raises(SystemExit) as caught, redirect_stderr(io.StringIO()) as printed:
            main()
    if isinstance(caught.value.code, str):  # which Python prints, for a status 1
        return caught.value.code
    assert caught.value.code in (1, DivergedError.status)
    return printed.getvalue().removesuffix("\n")


def full_disk(file_bytes: int, arguments: list[str], compiled: Path) -> str:
    """Return what the command says as it ends with status 1; it can write no larger file.

    Nor can it write a whole compiled program, so these are kept apart from other tests'; nor
    bytecode, of which Python would leave the part that it could write.
    """
    program = (
        "import resource; from pipeline.__main__ import main; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({file_bytes}, {file_bytes})); main()"
    )
    settings = {"JAX_COMPILATION_CACHE_DIR": str(compiled), "PYTHONDONTWRITEBYTECODE": "1"}
    done = tiny.python("-c", program, *arguments, **settings)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout
    return done.stderr


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path)


# ---- The run file ----


@pytest.mark.parametrize(
    ("stage", "changes", "named"),
    [
        ("train", {"peers__colour": "red"}, ["run.toml", "peers.colour"]),
        ("train", {}, ["stage convert", "lockstep convert"]),
        ("convert", {"model__LLM__checkpoint": {"Run": "01234567"}}, ["Run", "01234567"]),
    ],
)
def test_what_no_stage_can_do_is_refused_by_its_key(place, stage, changes, named):
    place.set(**changes)
    place.refused(stage, *named)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model__LLM__optimizer": "Dummy"}, ["model.LLM.optimizer.Dummy", "Distro", "AdamW"]),
        ({"model__LLM__data_type": "Finetuning"}, ["model.LLM.data_type", "Pretraining"]),
        ({"model__LLM__max_seq_len": 50_000}, ["max_seq_len", 50000, 40000]),
        ({"config__total_steps": 1000}, [2500, 4000, "total_steps", 1000]),
    ],
)
def test_what_cannot_be_trained_on_these_data_is_refused_by_its_key(place, changes, named):
    place.make("download")
    place.set(**changes)
    place.make("convert")
    place.refused("train", *named)


def test_a_tokenizer_that_does_not_fit_the_model_is_warned_of(place):
    vocabulary = {f"t{number}": number for number in range(tiny.VOCABULARY + 6)}
    (folder := place.data / "tokenizer").mkdir()
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.save(str(folder / "tokenizer.json"))
    said = tiny.make(place.run_file, place.root, "download", "convert", "train")
    assert f"has {tiny.VOCABULARY + 6} tokens, and the model {tiny.VOCABULARY}: " in said


# ---- Data ----


def test_a_token_beyond_the_vocabulary(place):
    tokens = np.fromfile(place.data / "a.ds", "<u2")
    tokens[123] = tiny.VOCABULARY
    tokens.tofile(place.data / "a.ds")
    place.make("download", "convert")
    place.refused("train", "00000.ds", 64, 123)


# ---- Folders and disk ----


def test_a_folder_that_cannot_be_made(place):
    place.root.mkdir()
    (place.root / "data").write_text("a file in the way")
    place.refused("download", place.root / "data")


@pytest.mark.parametrize("stage", ["download", "convert", "train", "export"])
def test_a_disk_that_fills_up(place, stage):
    order = ["download", "convert", "train", "witness", "export"]
    if stage != "download":
        place.make(*order[: order.index(stage)])
    place.refused(stage, "File too large", file_bytes=4096)
    assert not list(place.root.glob("data/*/made-*.json.*"))


def test_a_run_file_that_an_engine_would_not_take(place):
    document = tiny.run_document(place.data)
    del document["links"]  # a default, which DVC cannot track
    tiny.write_run(place.run_file, document)
    said = ended(["check", "--run", str(place.run_file)])
    check_names(said, place.run_file, "links", "lockstep import")


def test_a_loss_that_diverges_stops_the_run_and_keeps_a_good_checkpoint(place):
    high = {"Constant": {"base_lr": 30.0, "warmup_init_lr": 0.0, "warmup_steps": 0}}
    place.make("download", "convert")
    place.set(model__LLM__lr_schedule=high, held_out__every=1)
    place.refused("train", "diverged", "checkpoint")
    assert not (place.root / "data/trained").exists()
    (checkpoints,) = place.root.glob("data/runs/*/checkpoints")
    assert checkpoints.is_dir()


def test_what_is_not_finite_stops_the_run_where_it_arises(place):
    """A gradient overflows while the loss stays a number, and messages are signs alone."""
    init = {"seed": 0, "config": tiny.MODEL | {"num_hidden_layers": 1, "initializer_range": 1e15}}
    place.set(model__LLM__checkpoint={"Init": init})
    place.make("download", "convert")
    place.refused("train", "diverged", "gradients are nan at round 1", "no step was taken before")
    assert not (place.root / "data/trained").exists()


def test_weights_that_are_not_numbers_are_named_and_those_that_give_none_are_not_trained(place):
    weights = place.hf_folder() / "model.safetensors"
    tensors = load_file(weights)
    for value, stage, *named in (
        (np.nan, "convert", "model.safetensors", "model.norm.weight", "nan"),
        (3e38, "train", "data/init", "held-out loss"),
    ):
        tensors["model.norm.weight"][0] = value
        save_file(tensors, weights)
        place.make("download", *(["convert"] if stage == "train" else []))
        place.refused(stage, *named)
