"""The optimizers and variants that `benchmarks.convergence` compares."""

from typing import NamedTuple


class Case(NamedTuple):
    """An optimizer with its settings.

    label: what a reader calls it.
    optimizer: the table of [model.LLM.optimizer].
    settings: keys of that table; for a kind of DisTrO, what is left out is as in the default run.
    base_lr: the middle of the first grid.
    local_steps: of a round; with the same tokens there are fewer rounds.
    """

    label: str
    optimizer: str
    settings: dict
    base_lr: float
    local_steps: int = 1


ADAMW = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip_grad_norm": 1.0}
STEP_SCALE = {"layers": 0.075, "lm_head": 2.0}
MUON = ADAMW | {"momentum": 0.95, "step_scale": STEP_SCALE}
# AdaDistro as DisTrO but for what a variant names
PLAIN: dict = {}
MOMENT = {"second_moment_decay": 0.95, "clip_grad_norm": 0.0}
FULL = MOMENT | {
    "compression_decay": 0.95,
    "update": "orthogonal",
    "step_scale": STEP_SCALE,
}


def _variant(label: str, settings: dict, base_lr: float = 2e-3) -> Case:
    return Case(label, "AdaDistro", settings, base_lr)


# tuned, and trained with several seeds
MAIN = {
    "adamw": Case("AdamW, gradients sent whole", "AdamW", ADAMW, 1.5e-3),
    "muon": Case("Muon, steps by group, gradients sent whole", "Muon", MUON, 3.2e-2),
    "distro": Case("DisTrO, topk 32, signs", "Distro", PLAIN, 2e-3),
    "ada-distro": Case("AdaDistro, topk 32, signs", "AdaDistro", FULL, 3.2e-2),
}

# one change each, of DisTrO or of AdaDistro, trained once with the learning rate of MAIN's
VARIANTS = {
    "decay-0.95": _variant("DisTrO, decay 0.95", {"compression_decay": 0.95}),
    "decay-0.9": _variant("DisTrO, decay 0.9", {"compression_decay": 0.9}),
    "removed-0.2": _variant("DisTrO, removing 0.2 of what was sent", {"removed": 0.2}),
    "removed-0.2-decay-0.9": _variant(
        "DisTrO, removing 0.2, decay 0.9", {"removed": 0.2, "compression_decay": 0.9}
    ),
    "rms": _variant("DisTrO, mean over its rms instead of signs", {"update": "rms"}),
    "orthogonal": _variant("DisTrO, orthogonal updates of layers", {"update": "orthogonal"}),
    "embed-untransformed": _variant("DisTrO, embeddings without DCT", {"untransformed": ["embed"]}),
    "ends-untransformed": _variant(
        "DisTrO, embeddings and head without DCT", {"untransformed": ["embed", "lm_head"]}
    ),
    "norms-whole": _variant("DisTrO, norms sent whole", {"topk_of": {"norm": 64}}),
    "second-moment": _variant("DisTrO, gradients over their second moment", MOMENT),
    "head-2": _variant("DisTrO, the head's steps doubled", {"step_scale": {"lm_head": 2.0}}),
    "steps-by-group": _variant(
        "DisTrO, AdaDistro's steps by group", {"step_scale": STEP_SCALE}, 3.2e-2
    ),
    "topk-128": _variant("DisTrO, topk 128", {"compression_topk": 128}),
    "skip-zero-blocks": _variant("DisTrO, blocks of zeros not sent", {"skip_zero_blocks": True}),
    "values": _variant("DisTrO, values in bfloat16", {"quantize_1bit": False}),
    "ada-signs": _variant("AdaDistro with signs", FULL | {"update": "sign"}, 3.2e-2),
    "ada-no-moment": _variant(
        "AdaDistro without second moment",
        {k: v for k, v in FULL.items() if k not in MOMENT} | {"clip_grad_norm": 1.0},
        3.2e-2,
    ),
    "ada-no-scale": _variant("AdaDistro, equal steps", FULL | {"step_scale": {}}, 2e-3),
    "ada-decay-0.999": _variant(
        "AdaDistro, decay 0.999", FULL | {"compression_decay": 0.999}, 3.2e-2
    ),
    "ada-topk-8": _variant("AdaDistro, topk 8", FULL | {"compression_topk": 8}, 3.2e-2),
}

# Settings of the papers, but for 10 local steps where these have 15 to 500, and an outer momentum
# of 0.5 where these have 0.9: 200 steps are few, and 20 outer ones too few for 0.9 (DiLoCo: 5.91)
OUTER = {"outer_learning_rate": 0.7, "outer_momentum": 0.5, "nesterov": True}
LOCAL = {"inner_steps": 10, "inner": {"AdamW": ADAMW}}
DILOCO = LOCAL | OUTER
FOUR_BITS = {"quantize": "int4", "quantize_block": 256, "error_feedback": 0.95}
FEW = {
    "outer_learning_rate": 1.0,
    "error_feedback": 0.95,
    "compression_topk": 128,
    "compression_chunk": 64,
}
FRAGMENTS = {"fragments": 2, "delay": 1, "mixing": 0.5}
PLACES = LOCAL | {"inner_steps": 1, "seed": 0}
SGD = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0}

# tuned, and trained with one seed
STRATEGIES = {
    "sgd": Case("SGD, gradients sent whole", "SGD", SGD, 0.2),
    "fedavg": Case("FedAvg", "FedAvg", LOCAL, 3e-3, 10),
    "diloco": Case("DiLoCo", "DiLoCo", DILOCO, 1.5e-3, 10),
    "diloco-4-bits": Case("DiLoCo, 4 bits", "DiLoCo", DILOCO | FOUR_BITS, 1.5e-3, 10),
    "streaming-diloco": Case(
        "Streaming DiLoCo, 2 fragments", "StreamingDiLoCo", DILOCO | FRAGMENTS, 1.5e-3, 5
    ),
    "sparseloco": Case(
        "SparseLoCo, 128 of 4,096", "SparseLoCo", LOCAL | FEW, 3e-3, 10
    ),
    "sparta": Case("SPARTA, a tenth each step", "SPARTA", PLACES | {"share": 0.1}, 1.5e-3),
    "sparta-diloco": Case(
        "SPARTA-DiLoCo, a tenth each step", "SPARTADiLoCo",
        PLACES | OUTER | {"share": 0.05, "outer_every": 20}, 1.5e-3,
    ),
}  # fmt: skip

CASES = MAIN | STRATEGIES | VARIANTS
