"""The task next_line by drawn questions: `python -m benchmarks.next_line`.

Prints one JSON line for each of some seeds of the questions (a run has seed 0), for the default
run's export and for the weights that its training began with: shares of right answers with their
95 % intervals. Fresh weights know nothing, so they must be at chance, 0.25: otherwise lengths,
indentation or places would give the answers away. Without context, a model has to choose by the
choices alone; what it gains there, it does not know from the text.
"""

import argparse
import json
import time
from pathlib import Path

from pipeline import runfile
from pipeline.stage import devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("params/run.toml"))
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--questions", type=int, default=500)
    chosen = parser.parse_args()
    run = runfile.load(chosen.run)
    devices.prepare(run)

    import jax

    from lockstep.programs.placement import device_groups
    from lockstep.transcript.trees import load_nested
    from parts.tasks import next_line, next_line_task, task_model
    from pipeline.scores import wilson
    from pipeline.weights import exported

    folder, shards = chosen.data / "export", chosen.data / "shards"
    read = exported.read(folder)
    fresh = load_nested(chosen.data / "init" / "params.safetensors")
    groups = device_groups(jax.devices(), 1)
    model = task_model.from_folder(read, folder, (), run.evaluate.batch_size)
    texts = list(next_line_task.documents(run, shards, read.tokenizer))
    for seed in range(chosen.seeds):
        drawn = next_line.questions(texts, seed)
        asked = next_line_task.ask(drawn, model, chosen.questions)
        for name, params in (("export", read.params), ("fresh weights", fresh)):
            placed = model._replace(params_on={group: group.put(params) for group in groups})
            began = time.perf_counter(), time.process_time()
            scores = next_line_task.scores_of(asked, placed.log_likelihoods(asked.requests))
            wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
            found = next_line_task.metrics(asked.questions, scores)
            alone = next_line_task.Scores(scores.alone_NC, scores.alone_NC)
            found["alone"] = next_line_task.metrics(asked.questions, alone)["acc"]
            line = {"benchmark": "next_line", "weights": name, "seed": seed}
            line |= {"questions": len(asked.questions)}
            for metric, (share, _) in found.items():
                ends = wilson(share, len(asked.questions))
                line[metric] = [round(number, 3) for number in (share, *ends)]
            tokens = sum(len(before) + len(after) for before, after in asked.requests)
            line |= {"tokens": tokens, "seconds": round(wall, 1), "cpu_seconds": round(cpu, 1)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
