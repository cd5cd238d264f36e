"""The flags of `lockstep try`: those of Psyche's `train` example, and where each goes.

Psyche has had two sets of them, and its pages show a third pair. A flag that only makes sense with
torch, CUDA or NCCL is refused in one line that says what to use instead.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from lockstep.errors import LockstepError

BOTH = "flags of Psyche's train example"
OLDER = "its older flags"
CURRENT = "its current flags"
PAGES = "flags that Psyche's pages show"
OURS = "flags of Lockstep"
UNUSED = ()  # the values of a flag that has none here
METAVAR = {int: "N", float: "X", str: "TEXT"}


class Flag(NamedTuple):
    """A flag."""

    name: str  # the flag without its dashes
    default: object  # value without the flag; a switch's is False, and a type's stands for no value
    goes_to: str  # where it goes in the run file, or what it does
    of: str = BOTH  # which program has it
    only: tuple[object, ...] | None = None  # the values that make sense here; None is all of them
    instead: str = ""  # what to use in place of another value

    @property
    def key(self) -> str:
        """The flag's name as an attribute of `parse`'s result."""
        return self.name.replace("-", "_")


FLAGS = (
    # ---- Model and data ----
    Flag("model", "emozilla/llama2-215m-init", "checkpoint.Hub: a folder, or owner/name on a hub"),
    Flag("data-path", "data", "data_location.Local: a folder of .ds, .bin or .npy files; or "
         "data_location.Preprocessed: one of Parquet files"),
    Flag("data-provider", "local", "local reads --data-path, http reads --data-url", PAGES,
         ("local", "http"), "a data server's files are --data-path"),
    Flag("data-url", str, "data_location.Hub: owner/name on the hub; .Http or .Url: an address of "
         "token files", PAGES),
    Flag("sequence-length", 2048, "max_seq_len, tokens"),
    Flag("token-size", 2, "token_size_in_bytes", BOTH, (2, 4), "token files hold no other"),
    Flag("seed", int, "shuffle.Seeded of the sequences; file order without", CURRENT),
    # ---- Batch and length ----
    Flag("micro-batch", 8, "[peers] micro_batch, sequences"),
    Flag("total-batch", 256, "[config] global_batch_size, sequences of a round"),
    Flag("total-steps", 25_000, "[config] total_steps, and the end of the schedule"),
    Flag("start-step", 1, "the first step", CURRENT, (1,),
         'checkpoint = { Run = "KEY" } in a run file goes on from a finished run, and a killed '
         "command goes on by itself"),
    # ---- Schedule and optimizer ----
    Flag("learning-rate", 4e-4, "lr_schedule.Cosine base_lr, down to a tenth of it"),
    Flag("warmup-steps", 500, "lr_schedule.Cosine warmup_steps"),
    Flag("max-grad-norm", 1.0, "clip_grad_norm; 0 is no clipping"),
    Flag("weight-decay", 0.1, "weight_decay"),
    Flag("beta1", 0.9, "optimizer.AdamW betas"),
    Flag("beta2", 0.95, "optimizer.AdamW betas"),
    Flag("eps", 1e-8, "optimizer.AdamW eps"),
    Flag("distro", False, "optimizer.Distro with [peers] overlap = 1, in place of optimizer.AdamW"),
    Flag("compression-decay", 0.999, "optimizer.Distro compression_decay"),
    Flag("compression-chunk", 64, "optimizer.Distro compression_chunk"),
    Flag("compression-topk", 4, "optimizer.Distro compression_topk"),
    Flag("distro-quantization", False, "optimizer.Distro quantize_1bit"),
    # ---- How it is computed ----
    Flag("data-parallelism", 1, "[peers] fsdp: devices that share each micro-batch and the params"),
    Flag("tensor-parallelism", 1, "devices that share each matrix", BOTH, (1,),
         "--data-parallelism spreads params over devices too"),
    Flag("grad-accum-in-fp32", False, "what is always so: gradients are summed in float32"),
    Flag("attn-implementation", str, "[peers] attention: eager and sdpa are matmul, "
         "flash-attention2 is cudnn, in bfloat16", CURRENT,
         ("eager", "sdpa", "flash-attention2"), "these are Psyche's"),
    Flag("device", "auto", "the devices that JAX finds, or the CPU", CURRENT, ("auto", "cpu"),
         "auto takes the GPUs that JAX finds, and CUDA_VISIBLE_DEVICES says which those are"),
    Flag("cpu", False, "--device cpu", OLDER),
    Flag("python", False, "[runtime] carrier = processes: the model is in a Python process of its "
         "own; the result is the same"),
    Flag("python-arch", "HfAuto", "architecture", BOTH, ("HfAuto", "hf-auto"),
         "models are those of models/, which HfAuto names"),
    Flag("optim-stats", False, "nothing, as in Psyche, which reads it and does not use it", BOTH,
         UNUSED, "loss and bytes of every round are in metrics/loss.tsv without it"),
    # ---- What is left ----
    Flag("save-path", str, "a copy of data/export, the audited Hugging Face folder", CURRENT),
    Flag("out", "data/try", "the folder of run files, and results", OURS),
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LockstepError(f"lockstep try: {message}; `lockstep try --help` lists the flags")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the value of every flag by its `key`; None for a flag that has none."""
    parser = _Parser(prog="lockstep try", usage="lockstep try [FLAG ...]", allow_abbrev=False)
    groups = {of: parser.add_argument_group(of) for of in dict.fromkeys(flag.of for flag in FLAGS)}
    for flag in FLAGS:
        group, name, default = groups[flag.of], f"--{flag.name}", flag.default
        if default is False:
            group.add_argument(name, action="store_true", help=flag.goes_to)
        elif isinstance(default, type):
            group.add_argument(name, type=default, metavar=METAVAR[default], help=flag.goes_to)
        else:
            kind, text = type(default), f"{flag.goes_to} (default {default})"
            group.add_argument(name, type=kind, default=default, metavar=METAVAR[kind], help=text)
    values = parser.parse_args(arguments)
    for flag in FLAGS:
        value = getattr(values, flag.key)
        if flag.only is not None and value not in (*flag.only, False, None):
            if not flag.only:
                raise LockstepError(f"--{flag.name}: has no use here: {flag.instead}")
            expected = " or ".join(map(str, flag.only))
            raise LockstepError(f"--{flag.name} {value}: expected {expected}; {flag.instead}")
    return values
