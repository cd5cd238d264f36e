"""Local steps of a `TorchWorkload` by several processes or GPUs, each with a share of the rows.

    inner = "command"
    command = ["torchrun", "--standalone", "--nproc-per-node=4", "-m",
               "lockstep_worker.data_parallel"]

The steps are those of the mean gradient over all rows. The class has an `inner_optimizer`, and its
`loss` calls the model it is given. Each process begins with the same model and state.
"""

import importlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lockstep_torch import bits, bound_model
from torch.nn.parallel import DistributedDataParallel

from . import jobs, packs, rows, state_blob


def main() -> None:
    """Take the steps of a job; the first process writes where they led to."""
    job = json.loads(Path(os.environ["BURN_P2P_DILOCO_JOB_MANIFEST"]).read_text())
    device = torch.device(
        f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    )
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    module, _, name = job["factory"].partition(":")
    workload = getattr(importlib.import_module(module), name)(job["config"])
    bits.seed_generators(job["model_seed"])  # so that what does not travel is the same everywhere
    model = workload.model().to(device)
    layout = packs.layout_of(model, job["state_dict_filter"], by_gradient=True)
    packs.load(job["base_parameter_pack_path"], layout, job["model_schema_hash"])
    optimizer = workload.inner_optimizer(model)
    rates = jobs.Rates(optimizer, job)
    if (state := jobs.given_state(job)) is not None:
        optimizer.load_state_dict(state_blob.decoded(state))
    parallel = DistributedDataParallel(model.train())
    losses = take(job, workload, parallel, optimizer, rates, device)
    if dist.get_rank() == 0:
        written = job["state_dict_filter"]
        packs.write(job["output_parameter_pack_path"], layout, job["model_schema_hash"], written)
        jobs.state_path(job).write_bytes(state_blob.encoded(optimizer.state_dict()))
        result = {
            "steps_completed": len(losses),
            "metrics": {"loss": sum(losses) / len(losses)},
            "inner_optimizer_state_path": str(jobs.state_path(job)),
            "inner_optimizer_state_encoding": state_blob.ENCODING,
        }
        Path(job["result_manifest_path"]).write_text(json.dumps(result))
    dist.destroy_process_group()


def take(
    job: dict,
    workload: Any,
    model: Any,
    optimizer: torch.optim.Optimizer,
    rates: jobs.Rates,
    device: torch.device,
) -> list[float]:
    """The loss of each step; a process without a row of it computes with one that counts nothing.

    Args:
        job: of job.json.
        workload: the user's object.
        model: its model, in `DistributedDataParallel`.
        optimizer: of the model's parameters.
        rates: of the optimizer.
        device: of this process.
    """
    rank, world, losses = dist.get_rank(), dist.get_world_size(), []
    bits.seed_generators(job["seed"] + rank)
    for step in range(job["num_inner_steps"]):
        rates.set(step)
        whole = jobs.step_rows(job, step)
        count = len(next(iter(whole.values())) if isinstance(whole, dict) else whole)
        first, end = count * rank // world, count * (rank + 1) // world
        mine = rows.cut(whole, first, end) if end > first else rows.cut(whole, 0, 1)
        optimizer.zero_grad()
        loss, counted = bound_model.parts(workload.loss(model, bound_model.on_device(mine, device)))
        weight = (end - first if counted is None else counted) if end > first else 0
        total = torch.tensor(float(weight), device=device)
        dist.all_reduce(total)
        share = weight if counted is None else float(end > first)  # a sum has its weight in it
        loss = loss * share / torch.where(total == 0, 1, total)
        (loss * world).backward()  # data parallel takes the mean over processes
        optimizer.step()
        whole_loss = loss.detach().clone()
        dist.all_reduce(whole_loss)
        losses.append(float(whole_loss))
    return losses


if __name__ == "__main__":
    main()
