"""What a round costs on the host is measured of rounds that send what a run sends."""

import pytest

from benchmarks import host
from lockstep.wire.message import HEADER


@pytest.mark.parametrize(
    ("place", "layout"), [*((place, None) for place in host.PLACES), ("simulate", "rounds")]
)
def test_measured_rounds_send_whole_messages(place, layout):
    line = host.measure(place, "13k", "adamw", 4, host.WARM + 3, layout)
    assert line["bytes_up"] == HEADER.size + 4 * line["parameters"]
    assert min(line["main_ms"], line["host_ms"]) > 0
