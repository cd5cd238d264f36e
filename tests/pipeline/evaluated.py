"""The stage evaluate on an export and data that are made here."""

from pathlib import Path

from lockstep.files import read_json, write_json
from lockstep.programs.columns import PLAIN
from pipeline import evaluate, runfile
from pipeline.stage.artifacts import Paths
from pipeline.weights import hf
from tests.pipeline.exported import END, make_params
from tests.pipeline.exported import HF_CONFIG as EXPORTED
from tests.pipeline.finished_run import write_run_file
from tests.pipeline.tokens.shards_folder import shards_folder

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
        train, held = [[END] * 2 * LENGTH * len(columns)], [held_out] if len(held_out) else []
        shards_folder(folder, train, held, size=4, vocab=None, columns=columns)
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
