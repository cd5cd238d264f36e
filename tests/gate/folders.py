"""Every command that reads a folder or a file: a good one, of which one file is spoiled."""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow
from pyarrow import parquet

from lockstep.transcript.tensorfile import TensorFile
from pipeline import runfile, sources
from pipeline.recheck import report
from pipeline.sources.text import text_files, tokenizing
from pipeline.weights import hf
from tests.gate.cases import BOMB, DEEP, DEVICE, FOLDER, LINK, PIPE, SPARSE, SURROGATE, Cells, No
from tests.pipeline.conversion import write_model
from tests.pipeline.exported import make_tokenizer
from tests.pipeline.net.token_servers import HOW
from tests.pipeline.sources.options import options

NOT_READ = No("other files and folders are not read")
COPIED = No("files may fill the disk, up to `[download] limit`")
LARGE = No("tokens may fill the disk, up to `[download] limit`")
HASHED = No("text may be large; it is hashed before it is read")
PLAIN = No("it is not compressed")
ALIKE = No("handled like the row above")
SHARD = "model-00001-of-00001.safetensors"
IRREGULAR, OUT = "not a regular file, expected one", "expected none that leads out of"
NAMED, TOO_DEEP = "lists a file named", "folders in one another, expected fewer"


@dataclass(frozen=True)
class FolderRow:
    """A command that reads a folder.

    Attributes:
      what: the command and the location.
      make: fills a new folder.
      target: the file that is spoiled.
      read: reads the folder; the second folder is for what it writes.
      cells: what becomes of each case.
    """

    what: str
    make: Callable[[Path], object]
    target: str
    read: Callable[[Path, Path], object]
    cells: Cells


# ---- What is read ----


def tokens(folder: Path) -> None:
    for name in ("a.ds", "b.ds"):
        (folder / name).write_bytes(b"1234")


def _tokens_and_tokenizer(folder: Path) -> None:
    tokens(folder)
    (folder / "tokenizer").mkdir()
    make_tokenizer().save(str(folder / "tokenizer/tokenizer.json"))


def _text(folder: Path) -> None:
    (folder / "a.txt").write_text("a text " * 100)


def _lines(packing: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        content = b'{"text": "a text"}\n' * 99
        packed = {"gz": gzip.compress, "zst": lambda data: pyarrow.compress(data, "zstd")}
        (folder / f"a.jsonl.{packing}").write_bytes(packed[packing](content))

    return make


def _column(folder: Path) -> None:
    parquet.write_table(pyarrow.table({"text": ["a text"] * 99}), folder / "a.parquet")


def _readme(folder: Path) -> None:
    (folder / "README.md").write_text("---\nconfigs: []\n---\n")


def _rows(folder: Path) -> None:
    for name in ("train.parquet", "test.parquet"):
        parquet.write_table(pyarrow.table({"inputs": [[1, 2], [3, 4]]}), folder / name)


def _model(folder: Path) -> None:
    folder.rmdir()
    write_model(folder)


def _sharded(folder: Path) -> None:
    _model(folder)
    (folder / hf.WEIGHTS).rename(folder / SHARD)
    names = dict.fromkeys(TensorFile(folder / SHARD), SHARD)
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": names}))


def _run_file(folder: Path) -> None:
    (folder / "state.toml").write_text("a = 1\n")


# ---- Who reads it ----


def download(location: Callable[[Path], runfile.data.Data]) -> Callable[[Path, Path], object]:
    def read(folder: Path, out: Path) -> object:
        return sources.fetch(location(folder), out, options(out / "store"))

    return read


def _local(folder: Path) -> runfile.data.Data:
    return runfile.data.DataLocal.model_validate({"path": str(folder), **HOW})


def _documents(folder: Path) -> runfile.data.Data:
    how = {"vocab_size": 300, "held_out_percent": 20.0, "shuffle": HOW["shuffle"]}
    return runfile.data.DataText.model_validate({"source": str(folder), **how})


def _subsets(folder: Path, out: Path) -> None:
    text_files.subsets((folder / "README.md").read_bytes(), "README.md")


def _card(folder: Path, out: Path) -> None:
    report.check_results((folder / "README.md").read_text(), None)


def _copy_tokenizer(folder: Path, out: Path) -> None:
    location = _documents(folder).model_copy(update={"tokenizer": str(folder / "tokenizer")})
    tokenizing.copy_tokenizer(location, out / "tokenizer", options(out / "store"))


def _preprocessed(folder: Path) -> runfile.data.Data:
    return runfile.data.DataPreprocessed(source=str(folder))


def _convert(folder: Path, out: Path) -> None:
    from pipeline import convert

    (folder / "tokenizer.json").unlink(missing_ok=True)
    convert._read(folder, "HfLlama", out)


def _generate(folder: Path, out: Path) -> None:
    from pipeline.language_model.continuations import Continuations
    from pipeline.language_model.sampling import GREEDY

    Continuations(folder, 1, GREEDY, 0)


def _replay(folder: Path, out: Path) -> None:
    from pipeline.audit import unchecked_bundle

    unchecked_bundle.read_run(folder, max_gb=1)


def _import(folder: Path, out: Path) -> None:
    from pipeline.runfile.psyche_import import import_psyche

    import_psyche(folder / "state.toml")


WITHIN = {PIPE: IRREGULAR, DEVICE: OUT, LINK: OUT}
TENSORS, VALUES = "expected a safetensors file", "those of aliases counted each time"
GROWS = "may write"
UNPACKS = "expected at most 200 times as many"
ONLY_BOMB = dict.fromkeys(FOLDER, ALIKE)
MISSING = {PIPE: "found no", DEVICE: "found no"}
OWN = No("the user's own file may lie elsewhere")
ALONE = {LINK: OWN, SURROGATE: No("only one file is read"), DEEP: No("only one file is read")}
BESIDE = {SURROGATE: NOT_READ, DEEP: NOT_READ}
IN_TREE = {SURROGATE: NAMED, DEEP: TOO_DEEP}
NEITHER, MOST = "found neither model.safetensors nor", "expected at most "
ROWS = [
    FolderRow(
        "`download`, `Local`: tokens", tokens, "a.ds", download(_local),
        {**WITHIN, SPARSE: LARGE, SURROGATE: NAMED, DEEP: NOT_READ, BOMB: PLAIN}),
    FolderRow(
        "`download`, `Local`: the tokenizer", _tokens_and_tokenizer, "tokenizer/tokenizer.json",
        download(_local), {**MISSING, SPARSE: MOST, LINK: OUT, **BESIDE, BOMB: GROWS}),
    FolderRow(
        "`download`, `Text`: plain text", _text, "a.txt", download(_documents),
        {**WITHIN, SPARSE: HASHED, **IN_TREE, BOMB: PLAIN}),
    FolderRow(
        "`download`, `Text`: lines in zstd", _lines("zst"), "a.jsonl.zst",
        download(_documents),
        {**WITHIN, SPARSE: HASHED, SURROGATE: NOT_READ, DEEP: TOO_DEEP, BOMB: UNPACKS}),
    FolderRow(
        "`download`, `Text`: lines in gzip", _lines("gz"), "a.jsonl.gz",
        download(_documents), ONLY_BOMB | {SPARSE: HASHED, BOMB: UNPACKS}),
    FolderRow(
        "`download`, `Text`: parquet", _column, "a.parquet", download(_documents),
        {**WITHIN, SPARSE: HASHED, **IN_TREE, BOMB: UNPACKS}),
    FolderRow(
        "`download`, `Text`: a dataset's README.md", _readme, "README.md", _subsets,
        dict.fromkeys(FOLDER, No("it comes from the hub")) | {BOMB: VALUES}),
    FolderRow(
        "`download`, `Text`: the user's tokenizer", _tokens_and_tokenizer,
        "tokenizer/tokenizer.json", _copy_tokenizer,
        {**MISSING, SPARSE: MOST, LINK: OUT, **BESIDE, BOMB: GROWS}),
    FolderRow(
        "`download`, `Preprocessed`", _rows, "train.parquet", download(_preprocessed),
        {**WITHIN, SPARSE: "expected a parquet file", **IN_TREE, BOMB: UNPACKS}),
    FolderRow(
        "`convert`, a folder: config.json", _model, "config.json", _convert,
        {**WITHIN, SPARSE: MOST, **BESIDE, BOMB: PLAIN}),
    FolderRow(
        "`convert`, a folder: weights", _model, "model.safetensors", _convert,
        {PIPE: NEITHER, DEVICE: NEITHER, SPARSE: TENSORS, LINK: OUT, **BESIDE, BOMB: TENSORS}),
    FolderRow(
        "`convert`, a folder: a shard of weights", _sharded, SHARD, _convert,
        {**WITHIN, SPARSE: TENSORS, **BESIDE, BOMB: TENSORS}),
    FolderRow(
        "`generate`: config.json", _model, "config.json", _generate,
        {PIPE: IRREGULAR, DEVICE: IRREGULAR, SPARSE: MOST, LINK: OWN, **BESIDE, BOMB: PLAIN}),
    FolderRow(
        "`generate`: the tokenizer", _model, "tokenizer.json", _generate,
        {PIPE: IRREGULAR, DEVICE: IRREGULAR, SPARSE: MOST, LINK: OWN, **BESIDE, BOMB: GROWS}),
    FolderRow(
        "`generate`: weights", _sharded, SHARD, _generate,
        {PIPE: IRREGULAR, DEVICE: IRREGULAR, SPARSE: TENSORS, LINK: OWN, **BESIDE, BOMB: TENSORS}),
    FolderRow(
        "`replay`", lambda folder: (folder / "run.json").write_text("{}"), "run.json", _replay,
        {**WITHIN, SPARSE: "expected at most 1 GB", **IN_TREE, BOMB: PLAIN}),
    FolderRow("`verify`: the card", _readme, "README.md", _card, ONLY_BOMB | {BOMB: VALUES}),
    FolderRow(
        "`import`, and `--run`", _run_file, "state.toml", _import,
        {PIPE: "not a regular file", DEVICE: "not a regular file", SPARSE: "over ", **ALONE,
         BOMB: PLAIN}),
]  # fmt: skip
