"""Texts, seconds and cache answers of compiles."""

from __future__ import annotations

import pytest

from pytest_torchcompile.ledger.records import Compile, Text
from pytest_torchcompile.ledger.stages import cache_answers, seconds_by_stage, seconds_in, texts_by_stage


def compile_of(**more):
    """A compile with some facts."""
    return Compile("f", "net.py", 1, "0/0", "first", **more)


def test_texts_by_stage():
    """Those of one compile, in order."""
    texts = [Text("0/0", "dynamo", "a"), Text("0/1", "dynamo", "b"), Text("0/0", "code", "c"), Text("0/0", "code", "d")]
    assert texts_by_stage(texts, "0/0") == {"dynamo": ["a"], "code": ["c", "d"]}
    assert texts_by_stage(texts, "9/9") == {}


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


def test_seconds_add_up():
    """Over several compiles."""
    compiles = [compile_of(seconds_in={"dynamo": 1.0}), compile_of(seconds_in={"dynamo": 0.5, "aot": 2.0})]
    assert seconds_by_stage(compiles) == {"dynamo": 1.5, "aot": 2.0}


def test_cache_answers_are_counted():
    """Of all compiles together."""
    compiles = [compile_of(caches=("aot miss", "fx miss")), compile_of(caches=("aot hit",)), compile_of()]
    assert cache_answers(compiles) == {"aot miss": 1, "fx miss": 1, "aot hit": 1}
