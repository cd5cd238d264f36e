"""Tokens per second of generation, beside `transformers`: `python -m benchmarks.generate`.

Prints one JSON line per model and batch: an export (`data/export`), and a Llama of 30 M random
params. Both sides read the same folder, continue the same prompts with the likeliest tokens and a
cache, and have as many threads as there are cores. They take turns, and figures are medians of
them. PyTorch's threads wait for each other after every operation: on a machine that has other work,
only `--threads 1` is fair. `equal` is whether both wrote the same tokens.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks import sizes
from benchmarks.measuring import CORES, in_turns
from lockstep.machine import allocator
from pipeline import runfile
from pipeline.stage import devices

RANDOM = "30M"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--export", type=Path, default=Path("data/export"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=CORES)
    chosen = parser.parse_args()
    run = sizes.load(sizes.document(sizes.SIZES[RANDOM]))
    run = run.model_copy(update={"peers": run.peers.model_copy(update={"threads": chosen.threads})})
    allocator.tune()
    devices.prepare(run)
    with tempfile.TemporaryDirectory() as folder:
        write_random(run, Path(folder))
        for name, place in ((str(chosen.export), chosen.export), (RANDOM, Path(folder))):
            for batch in chosen.batch:
                line = {"benchmark": "generate", "model": name}
                print(json.dumps(line | measure(place, batch, chosen)), flush=True)


def write_random(run: runfile.Run, folder: Path) -> None:
    """A folder with random params, so large that one token is likelier than the next."""
    from models.llama import llama
    from pipeline.weights import hf

    hf_config = run.llm.checkpoint.config
    config = llama.Config.from_hf(hf_config | {"initializer_range": 0.05})
    hf.write_folder(folder, hf_config, llama.init(config, 0), "float32")


def measure(folder: Path, batch: int, chosen: argparse.Namespace) -> dict:
    import jax
    import numpy as np

    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    shape = batch, chosen.prompt_tokens
    prompts = np.random.default_rng(0).integers(1, vocabulary, shape).tolist()
    sides = {"ours": ours(folder, prompts, chosen), "theirs": theirs(folder, prompts, chosen)}
    written: dict[str, list] = {}
    parts = {name: lambda name=name: written.update({name: sides[name]()}) for name in sides}
    seconds = in_turns(parts, chosen.repeats, warm=2)
    speed = {name: batch * chosen.new_tokens / median(times) for name, times in seconds.items()}
    return {
        "batch": batch,
        "threads": chosen.threads,
        "prompt_tokens": chosen.prompt_tokens,
        "new_tokens": chosen.new_tokens,
        "device": jax.devices()[0].device_kind,
        "tokens_per_second": round(speed["ours"]),
        "transformers_tokens_per_second": round(speed["theirs"]),
        "times_transformers": round(speed["ours"] / speed["theirs"], 2),
        "equal": written["ours"] == written["theirs"],
    }


def ours(folder: Path, prompts: list[list[int]], chosen: argparse.Namespace) -> Callable:
    import jax

    from pipeline.language_model.text_writer import TextWriter
    from pipeline.weights.exported import read

    exported = read(folder)
    params = jax.device_put(exported.params_to_write)
    writer = TextWriter(exported, params, context=exported.context)
    return lambda: writer.write(prompts, max_new_tokens=chosen.new_tokens)


def theirs(folder: Path, prompts: list[list[int]], chosen: argparse.Namespace) -> Callable:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(chosen.threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # all texts are of one length
    input_ids = torch.tensor(prompts)
    options = {"max_new_tokens": chosen.new_tokens, "do_sample": False, "use_cache": True}
    options |= {"pad_token_id": 0, "attention_mask": torch.ones_like(input_ids)}

    def write() -> list[list[int]]:
        return model.generate(input_ids, **options)[:, input_ids.shape[1] :].tolist()

    return write


if __name__ == "__main__":
    main()
