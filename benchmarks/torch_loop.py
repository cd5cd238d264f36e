"""The loop that `benchmarks.workload` compares with: torch, a user's model and loss, nothing else.

It runs in a worker's Python, with one JSON text: `factory`, `config`, `rows` (a .npy of
int32 [N, T]), `micro_batch`, `threads`, `seed`. For each line of its input it takes a step and
prints the seconds of it: of a gradient alone, or with `adamw` by clipping and AdamW too.
"""

import importlib
import json
import sys
import time

import numpy as np
import torch


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    module, _, name = settings["factory"].partition(":")
    workload = getattr(importlib.import_module(module), name)(settings["config"])
    model = workload.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.1)
    rows = torch.from_numpy(np.load(settings["rows"]).astype(np.int64))

    def step(adamw: bool) -> None:
        optimizer.zero_grad()
        for batch in rows.split(settings["micro_batch"]):
            loss = workload.loss(model, batch)
            if isinstance(loss, tuple):
                loss = loss[0] / loss[1]  # all rows have one length, so they count alike
            loss = loss * (len(batch) / len(rows))
            loss.backward()
            float(loss.detach())
        if adamw:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    for line in sys.stdin:
        started = time.perf_counter()
        step(line.strip() == "adamw")
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
