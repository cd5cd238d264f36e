"""`lockstep check` looks at Ray where peers are actors of a cluster."""

from types import SimpleNamespace

import parts.carrier
from pipeline.preflight.row import Mark
from tests.pipeline.preflight.looks import check_lacking, looks, said, written


def test_ray_that_is_not_installed_is_a_row_that_fails(tmp_path, monkeypatch):
    check_lacking(monkeypatch, tmp_path, "[runtime] carrier", "ray", runtime__carrier="ray")


def test_a_cluster_without_room_for_the_peers_is_a_row_that_fails(tmp_path, monkeypatch):
    short = "[runtime.ray]: room for 1 of 2 peers"
    cluster = SimpleNamespace(shortage_of=lambda count, _: short if count == 2 else None)
    monkeypatch.setattr(parts.carrier, "ray_actors", cluster, raising=False)
    rows = looks(written(tmp_path, runtime__carrier="ray"), tmp_path)
    assert short in said(rows, Mark.FAILS)["Ray"]
