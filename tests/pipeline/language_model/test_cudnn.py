"""Fused attention is never replaced by another in silence; on a CPU it is refused."""

import pytest

from lockstep.errors import LockstepError
from pipeline import runfile
from pipeline.language_model import cudnn
from tests import tiny

FUSED = {"peers__attention": "cudnn", "peers__precision": "bfloat16", "peers__scan_layers": True}


def a_run(**changes: object) -> runfile.Run:
    return runfile.parse(tiny.run_document("nowhere", **changes).unwrap(), "run.toml")


def test_it_is_refused_where_it_cannot_run():
    run = a_run(**FUSED)
    with pytest.raises(LockstepError, match='attention = "cudnn", expected "matmul" on a cpu'):
        cudnn.check(run, tiny.MODEL)


def test_nothing_is_compiled_where_nobody_asks():
    cudnn.check(a_run(), {})


def test_a_program_without_the_kernel_is_found_out(monkeypatch):
    monkeypatch.setattr(cudnn.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cudnn, "_compiled", lambda run, hf_config: _compiled(a_run(), tiny.MODEL))
    run = a_run(**FUSED)
    with pytest.raises(LockstepError, match="XLA compiled no call of __cudnn"):
        cudnn.check(run, tiny.MODEL)


_compiled = cudnn._compiled
