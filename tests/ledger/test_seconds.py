"""Seconds of a compile's stages."""

from __future__ import annotations

import pytest

from pytest_torchcompile.ledger.decisions import seconds_in


@pytest.mark.parametrize(("metrics", "found"), [
    ({}, {}),
    ({"dynamo_cumulative_compile_time_us": 1_000_000}, {"dynamo": 1.0}),  # backend eager
    ({"dynamo_cumulative_compile_time_us": 3_000_000, "aot_autograd_cumulative_compile_time_us": 2_000_000},
     {"dynamo": 1.0, "aot": 2.0}),
    ({"dynamo_cumulative_compile_time_us": 9_000_000, "aot_autograd_cumulative_compile_time_us": 7_000_000,
      "inductor_cumulative_compile_time_us": 4_000_000, "triton_compile_time_us": None},
     {"dynamo": 2.0, "aot": 3.0, "inductor": 4.0}),
    ({"duration_us": 5_000_000, "inductor_cumulative_compile_time_us": 4_000_000,
      "triton_compile_time_us": 3_000_000}, {"aot": 1.0, "inductor": 1.0, "kernels": 3.0}),  # a backward
])  # fmt: skip
def test_seconds_of_each_stage_without_those_inside(metrics, found):
    """Torch's times are cumulative; a stage that did not run is not there."""
    assert seconds_in(metrics) == found
