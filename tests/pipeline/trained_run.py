"""A run up to its verdict, made by hand in the formats of the stages: what export reads.

Nothing is trained: the params are fresh, and the numbers are chosen.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lockstep.files import write_json
from lockstep.transcript.entry import TABLES, Header
from lockstep.transcript.transcript import Writer
from lockstep.transcript.trees import save_tree
from lockstep.transcript.windows import Snapshots
from models.llama import llama
from pipeline import export, runfile
from pipeline.stage.artifacts import Paths
from tests import tiny
from tests.pipeline.finished_run import PEERS, _entry, verdict, write_metrics
from tests.pipeline.tokens.shards_folder import shards_folder

ROUNDS, LENGTH = 6, 32
SNAPSHOTS = Snapshots(0, ROUNDS, every=3)
END, PAD, VOCABULARY = 0, 1, 300
INIT = tiny.MODEL | {"vocab_size": VOCABULARY, "bos_token_id": END, "eos_token_id": END}
VERDICT = verdict(
    clock="simulated",
    audited_rounds=ROUNDS,
    windows=8,
    replayed_windows=[
        {"window": 0, "first": 1, "last": 3, "peer": 0},
        {"window": 1, "first": 4, "last": 6, "peer": 3},
    ],
    sample_seed="5eed",
    sample_seed_of="auditor",
)
ENVIRONMENT = {"platform": "cpu", "threads": "4", "xla_flags": "--xla_a=1", "jax": "0.0"}
SOURCE = {"checkpoint": "Init", "seed": 0, "sha256": "ab" * 32}


def make_tokenizer(
    special: Sequence[str] = ("<|endoftext|>", "<|pad|>"),
    words: Sequence[str] = (),
    merges: Sequence[tuple[str, str]] = (),
) -> Tokenizer:
    """Byte-level, as the Corpus provider's: special tokens, all bytes, merged tokens."""
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    tokenizer = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def write_tokenizer(folder: Path, **named: object) -> None:
    """A tokenizer in Hugging Face form; `named` are its special tokens."""
    folder.mkdir(exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast"} | named
    write_json(folder / "tokenizer_config.json", said)


def make(
    root: Path,
    *,
    verdict: dict | None = None,
    model: dict | None = None,
    companions: dict[str, object] | None = None,
    tokenizer: dict[str, object] | None = None,
    source: dict | None = None,
    read: str = "/data/tokens",
    shards: int = 1,
    held_out: bool = True,
    bitwise: bool = True,
    environment: dict[str, str] | None = None,
    **changes: object,
) -> Paths:
    """Leaves the folders that export reads, and runs it.

    Args:
      root: where `data/` is made.
      verdict, model, source, environment: take the place of entries of verdict.json, of the model's
        config.json, of source.json and of the header's environment.
      companions: what the checkpoint brought beside its weights: values by file name.
      tokenizer: the special tokens of the data's tokenizer; None: there is none.
      read: where shards.json says that its data come from.
      shards: how many files of train tokens there are.
      held_out: whether there is a held-out split.
      bitwise: of the header.
      changes: to the run file, by dotted name, as `tiny.run_document` has it.
    """
    run_file = root / "run.toml"
    root.mkdir(exist_ok=True)
    defaults = {
        "config__total_steps": ROUNDS,
        "model__LLM__max_seq_len": LENGTH,
        "model__LLM__checkpoint": {"Init": {"seed": 0, "config": INIT}},
        "peers__count": PEERS,
    }
    tiny.write_run(run_file, tiny.run_document(Path("/data/tokens"), **defaults | changes))
    run = runfile.load(run_file)
    hf_config = llama.Config.from_hf(INIT | (model or {})).to_hf()
    with Paths("download", run_file, root).building() as folder:
        files = [np.full(100 + number, END) for number in range(shards)]
        source_of_tokens = {"read": read, "sha256": "cd" * 32}
        some = files[: int(held_out)]
        shards_folder(folder, files, some, vocab=VOCABULARY, source=source_of_tokens)
        if tokenizer is not None:
            write_tokenizer(folder / "tokenizer", **tokenizer)
    with Paths("convert", run_file, root).building() as folder:
        write_json(folder / "source.json", SOURCE if source is None else source)
    paths = Paths("train", run_file, root)
    header = Header(
        key=paths.key,
        run=run.model_dump(mode="json", include=TABLES),
        model=hf_config,
        environment=ENVIRONMENT | (environment or {}),
        bitwise=bitwise,
        held_out_loss=5.9 if held_out else None,
        held_out_stderr=0.25 if held_out else None,
        held_out_rows=(2, 3) if held_out else None,
    )
    with paths.building() as folder:
        _train(folder, header, held_out)
        for name, content in (companions or {}).items():
            write_json(folder / "hf" / name, content)
    with Paths("witness", run_file, root).building() as folder:
        write_json(folder / "verdict.json", VERDICT | (verdict or {}))
    paths = Paths("export", run_file, root)
    export.run(run, paths)
    return paths


def _train(folder: Path, header: Header, held_out: bool) -> None:
    writer = Writer(folder / "transcript", SNAPSHOTS)
    writer.header(header)
    for step in range(1, ROUNDS + 1):
        writer.round(_entry(step, held_out), {peer: b"x" for peer in range(PEERS)})
    params = llama.init(llama.Config.from_hf(header.model), 0)
    for step in SNAPSHOTS.kept:
        save_tree(folder / "transcript" / "snapshots" / f"{step:05}" / "params.safetensors", params)
    write_json(folder / "hf" / "config.json", header.model)
    measured = {"held_out_loss": 5.125, "held_out_stderr": 0.25} if held_out else {}
    write_metrics(folder, **measured)
