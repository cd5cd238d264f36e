"""Fused attention is never replaced by another in silence; on a CPU it is refused."""

import pytest

from lockstep.errors import LockstepError
from pipeline.language_model import cudnn
from tests import tiny
from tests.errors import refused

FUSED = {"peers__attention": "cudnn", "peers__precision": "bfloat16", "peers__scan_layers": True}


def test_it_is_refused_where_it_cannot_run():
    run = tiny.parsed(**FUSED)
    with refused("attention", '"cudnn"', '"matmul"'):
        cudnn.check(run, tiny.MODEL)


def test_nothing_is_compiled_where_nobody_asks():
    cudnn.check(tiny.parsed(), {})


def test_a_program_without_the_kernel_is_found_out(monkeypatch):
    monkeypatch.setattr(cudnn.jax, "default_backend", lambda: "gpu")
    other = tiny.parsed()
    monkeypatch.setattr(cudnn, "_compiled", lambda run, hf_config: _compiled(other, tiny.MODEL))
    run = tiny.parsed(**FUSED)
    with pytest.raises(LockstepError, match="XLA compiled no call of __cudnn"):
        cudnn.check(run, tiny.MODEL)


_compiled = cudnn._compiled
