"""The stage evaluate on an export and data that are made here."""

from pathlib import Path

import numpy as np

from lockstep.files import read_json, write_json
from lockstep.programs.columns import PLAIN
from pipeline import evaluate, runfile
from pipeline.stage.artifacts import Paths
from pipeline.tokens.shards import Shards, write_shards
from pipeline.weights import hf
from tests.pipeline.exported import END, make_params
from tests.pipeline.exported import HF_CONFIG as EXPORTED
from tests.pipeline.finished_run import write_run_file
from tests.pipeline.tokens.shards_folder import measure

LENGTH = 32
HF_CONFIG = EXPORTED | {"max_position_embeddings": LENGTH}


def make(
    root: Path, *, tokenizer=None, held_out=(), columns=PLAIN, refused=False, **edits: str
) -> tuple[Paths, dict, dict]:
    """Make what evaluate reads, and run it; its paths, metrics/evaluate.json and evaluate.json."""
    edits = {"max_seq_len": str(LENGTH), "max_new_tokens": "16", "temperature": "0.0"} | edits
    run_file = write_run_file(root, **edits)
    run = runfile.load(run_file)
    with Paths("download", run_file, root).building() as folder:
        train = [END] * 2 * LENGTH * len(columns)
        for split, content in (("train", train), ("held_out", held_out)):
            if len(content):
                (folder / split).mkdir()
                np.asarray(content).astype("<u4").tofile(folder / split / "00000.ds")
        shards = Shards(
            format=2,
            token_size_in_bytes=4,
            vocab_size=None,
            shuffle="DontShuffle",
            columns=columns,
            files=measure(folder, 4),
            source={},
        )
        write_shards(folder, shards)
    for stage in ("convert", "train", "witness"):  # whose results nobody reads here
        with Paths(stage, run_file, root).building():
            pass
    with Paths("export", run_file, root).building() as folder:
        if refused:
            write_json(folder / "refused.json", {"findings": []})
        else:
            hf.write_folder(folder, HF_CONFIG, make_params(), "float32")
            if tokenizer:
                tokenizer.save(str(folder / "tokenizer.json"))
    paths = Paths("evaluate", run_file, root)
    evaluate.run(run, paths)
    written = read_json(paths.out("evaluate") / "evaluate.json")
    return paths, read_json(root / "metrics" / "evaluate.json"), written
