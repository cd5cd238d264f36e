"""Every example runs at its smallest, and says in one line what is wrong with its input."""

import csv
import gzip
import hashlib
import json
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from matplotlib import pyplot as plt

from lockstep.errors import LockstepError
from tests.errors import refused
from tests.servers.files import Files
from tests.servers.hub import Repo, running_hub
from tests.tiny import PROJECT

pytestmark = pytest.mark.long

EXAMPLES = PROJECT / "examples"
SMALLEST = ["--peers", "2", "--batch-size", "4"]


def example(name: str) -> ModuleType:
    spec = spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def column(path: str, name: str) -> list[float]:
    with open(path, newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file)]


# ---- digits ----


def test_digits(monkeypatch, capsys):
    """On pictures whose lit pixel is the digit, in the place of scikit-learn, which is 60 MB."""
    digits = np.random.default_rng(0).integers(0, 10, 1600)
    images = 16.0 * np.eye(64)[digits]
    library, datasets = ModuleType("sklearn"), ModuleType("sklearn.datasets")
    datasets.load_digits = lambda return_X_y: (images, digits)
    monkeypatch.setitem(sys.modules, "sklearn", library)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", datasets)
    example("digits").main([*SMALLEST, "--steps", "60", "--inner-steps", "10"])
    lines = capsys.readouterr().out.splitlines()
    parts = [re.match(r"(\w+) +([\d.]+)% right, ([\d,]+) bytes", line) for line in lines]
    sent = {part[1]: int(part[3].replace(",", "")) for part in parts}
    assert float(parts[0][2]) > 90
    assert sent["DiLoCo"] * 10 == pytest.approx(sent["AdamW"], rel=0.05)


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(SystemExit, match="pip install scikit-learn"):
        example("digits")


# ---- mnist ----


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


@pytest.fixture(scope="module")
def mnist_files() -> dict[str, bytes]:
    """What MNIST's files are called, with a few pictures."""
    rng, files = np.random.default_rng(0), {}
    for name, count in (("train", 16), ("t10k", 8)):
        images = rng.integers(0, 256, (count, 28, 28), np.uint8)
        labels = rng.integers(0, 10, count, np.uint8)
        files[f"{name}-images-idx3-ubyte.gz"] = gzip.compress(idx(images))
        files[f"{name}-labels-idx1-ubyte.gz"] = gzip.compress(idx(labels))
    return files


def test_mnist_from_a_folder(mnist_files, tmp_path, capsys):
    folder = tmp_path / "mnist"
    folder.mkdir()
    for name, content in mnist_files.items():  # unpacked
        (folder / name).with_suffix("").write_bytes(gzip.decompress(content))
    arguments = ["--folder", str(folder), "--steps", "2", "--inner-steps", "2", *SMALLEST]
    example("mnist").main([*arguments, "--optimizers", "diloco"])
    assert "diloco: loss " in capsys.readouterr().out
    assert len(column("logs/mnist/diloco/validation.csv", "loss")) == 2
    assert Path("logs/mnist/diloco.png").stat().st_size > 10_000


def test_mnist_is_downloaded_once(mnist_files, monkeypatch):
    mnist = example("mnist")
    known = {name: hashlib.md5(content).hexdigest() for name, content in mnist_files.items()}
    monkeypatch.setattr(mnist, "FILES", known)
    with Files(files=dict(mnist_files)).serving() as server:
        monkeypatch.setattr(mnist, "URL", server.url(""))
        train, test = mnist.read(None)
    assert (train["image"].shape, test["digit"].shape) == ((16, 28, 28), (8,))
    again, _ = mnist.read(None)  # nobody serves it any more
    assert (again["image"] == train["image"]).all()
    for file in Path("data/mnist").iterdir():
        file.unlink()
    with pytest.raises(LockstepError, match="train-images-idx3-ubyte.gz"):
        mnist.read(None)


def test_another_file_in_the_place_of_mnist_is_refused(mnist_files, monkeypatch):
    mnist = example("mnist")
    with Files(files=dict(mnist_files)).serving() as server:
        monkeypatch.setattr(mnist, "URL", server.url(""))
        with refused("train-images-idx3-ubyte.gz", "MD5"):
            mnist.read(None)
    assert not Path("data/mnist").exists()


def test_what_is_not_mnist_is_named(mnist_files, tmp_path):
    read_idx = example("mnist").read_idx
    for content in (
        b"",
        b"\0\0\x08",
        b"\0\0\x08\x01",
        b"\0\0\x0d\x01\0\0\0\0",
        idx(np.zeros(3)),
        b"\0\0\x08\xff",
    ):
        (tmp_path / "x").write_bytes(content)
        with refused("x", "IDX"):
            read_idx(tmp_path / "x")
    (tmp_path / "x").write_bytes(gzip.compress(b"pictures" * 99)[:-9])
    with refused("x"):
        read_idx(tmp_path / "x")
    with refused("y"):
        read_idx(tmp_path / "y")


# ---- text ----


def test_char_gpt(capsys):
    small = ["--length", "16", "--width", "16", "--layers", "1", "--write", "5"]
    text = str(PROJECT / "lockstep" / "errors.py")
    rounds = ["--rounds", "4", "--inner-steps", "3"]
    example("char_gpt").main(["--text", text, *small, *rounds, *SMALLEST])
    said = capsys.readouterr().out
    before, after = re.search(r"held-out loss ([\d.]+) -> ([\d.]+)", said).groups()
    assert float(after) < float(before)
    assert "\ndef " in said


@pytest.mark.soak
def test_nanogpt_diloco(monkeypatch, tmp_path, capsys):
    nanogpt = example("nanogpt_diloco")
    arguments = ["--dataset", "shakespeare", "--rounds", "2", "--inner-steps", "2"]
    arguments += ["--block-size", "16", "--eval-windows", "2"]
    monkeypatch.setitem(nanogpt.SIZES, "small", (1, 2, 16))
    with running_hub(monkeypatch, tmp_path / "home") as hub:
        repo = hub.datasets["Trelis/tiny-shakespeare"] = Repo()
        commit = repo.commit({"input.txt": b"To be, or not to be, that is the question: " * 20})
        dataset = ("Trelis/tiny-shakespeare", commit, "input.txt")
        monkeypatch.setitem(nanogpt.DATASETS, "shakespeare", dataset)
        nanogpt.main([*arguments, *SMALLEST, "--checkpoints", "kept"])
    assert any(Path("kept").iterdir())
    assert "held-out loss" in capsys.readouterr().out
    assert len(column("logs/nanogpt_diloco/train.csv", "loss")) == 2


def test_no_network_is_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refused("input.txt", "--text"):
        example("nanogpt_diloco").main(["--dataset", "shakespeare"])


# ---- the notebook, and the page ----


def test_the_page_on_simulate_runs_from_top_to_bottom():
    page = (PROJECT / "docs" / "how-to" / "simulate.md").read_text()
    code = "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    names: dict = {}
    exec(code, names)
    first, *_, last = names["diloco"].validation["loss"]
    assert last < first
    assert Path("loss.png").stat().st_size > 10_000


def test_the_example_of_exo_gyms_readme_sends_a_quarter_of_the_bytes():
    page = (PROJECT / "docs" / "how-to" / "from-exo-gym.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) == 9
    x = np.random.default_rng(0).normal(size=(640, 32)).astype(np.float32)
    data = {"x": x, "y": x.sum(axis=1)}
    names = {
        "loss": lambda params, batch, rng: ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean(),
        "params": {"w": np.zeros(32, np.float32), "rest": np.zeros(992, np.float32)},
        "train_data": data,
        "eval_data": data,
    }
    exec(code, names)
    result = names["result"]
    assert result.validation["loss"][-1] < result.validation["loss"][0]
    sent = 20 * 4 * 1024 / result.bytes_per_peer
    assert 3.8 < sent < 4


def code_of_the_notebook() -> list[dict]:
    cells = json.loads((EXAMPLES / "simulate.ipynb").read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_was_saved_without_output():
    code = code_of_the_notebook()
    assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code)


@pytest.mark.soak
def test_the_notebook_runs(monkeypatch, capsys):
    monkeypatch.setattr(plt, "show", lambda: None)
    plt.switch_backend("agg")
    names: dict = {}
    for cell in code_of_the_notebook():
        exec("".join(cell["source"]).replace("STEPS = 300", "STEPS = 30"), names)
    plt.close("all")
    assert names["STEPS"] == 30
    assert "% right" in capsys.readouterr().out
    assert names["liar"].fired["sign_flip"] >= 1
