"""Local steps of a `TorchWorkload` by several processes or GPUs, each with a share of the rows.

    inner = "command"
    command = ["torchrun", "--standalone", "--nproc-per-node=4", "-m",
               "lockstep_worker.data_parallel"]

The steps are those of the mean gradient over all rows. The class has an `inner_optimizer`, no inner
step or loop of its own, and its `loss` calls the model it is given. Each process begins with the
same model and state.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lockstep_torch import bits, bound_model
from torch.nn.parallel import DistributedDataParallel

from . import packs
from .rows import cut
from .torch_workload import TorchWorkload
from .worker import make_workload


def main() -> None:
    """Take the steps of a data-parallel job; the first process writes where they led to."""
    job = json.loads(Path(os.environ["BURN_P2P_DILOCO_JOB_MANIFEST"]).read_text())
    device = torch.device(
        f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    )
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    workload = make_workload(job["factory"], job["config"])
    check(workload)
    bits.seed_generators(job["model_seed"])  # so that what does not travel is the same everywhere
    model = workload.model().to(device)
    layout = packs.layout_of(model, job["state_dict_filter"], by_gradient=True)
    packs.load(job["base_parameter_pack_path"], layout, job["model_schema_hash"])
    parallel, rank = DistributedDataParallel(model.train()), dist.get_rank()
    workload.inner_step = lambda _, optimizer, rows: step(workload, parallel, optimizer, rows)
    bits.seed_generators(job["seed"] + rank)
    output = job["output_parameter_pack_path"]
    result = workload.run_inner_loop(
        model, {**job, "output_parameter_pack_path": f"{output}.{rank}"}
    )
    if rank == 0:
        packs.write(output, layout, job["model_schema_hash"], job["state_dict_filter"])
        Path(job["result_manifest_path"]).write_text(json.dumps(result))
    dist.destroy_process_group()


def check(workload: Any) -> None:
    """Refuse a class whose own steps data-parallel ones would replace."""
    usual = getattr(getattr(workload, "inner_step", None), "__func__", None)
    own = "run_inner_loop" if hasattr(type(workload), "run_inner_loop") else "inner_step"
    if usual is not TorchWorkload.inner_step or own != "inner_step":
        raise SystemExit(
            f"data_parallel: {type(workload).__name__} has its own {own}, expected the usual "
            'steps of a TorchWorkload; with inner = "worker" its own are taken, by one process'
        )


def step(workload: Any, model: Any, optimizer: torch.optim.Optimizer, rows: Any) -> float:
    """Take a step on this data-parallel process's share of the rows, and return the loss of all.

    A process whose share has no row computes with one that counts nothing.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    count = len(next(iter(rows.values())) if isinstance(rows, dict) else rows)
    first, end = count * rank // world, count * (rank + 1) // world
    own_rows = cut(rows, first, end) if end > first else cut(rows, 0, 1)
    optimizer.zero_grad()
    loss, counted = bound_model.parts(workload.loss(model, own_rows))
    weight = (end - first if counted is None else counted) if end > first else 0
    total = torch.tensor(float(weight), device=loss.device)
    dist.all_reduce(total)
    share = weight if counted is None else float(end > first)  # a sum has its weight in it
    loss = loss * share / torch.where(total == 0, 1, total)
    (loss * world).backward()  # data parallel takes the mean over processes
    optimizer.step()
    total_loss = loss.detach().clone()
    dist.all_reduce(total_loss)
    return float(total_loss)


if __name__ == "__main__":
    main()
