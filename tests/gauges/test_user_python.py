"""What of a step is Python of the user's own: whose frame it is decides, not what a profiler of operators lacks."""

from __future__ import annotations

import json
import sys
import time

import pytest
import torch

from pytest_torchcompile.gauges.user_python import measure_user_python

pytestmark = pytest.mark.needs_torch
X = torch.ones(8, 8)


def test_a_users_function_is_named():
    def load():
        time.sleep(0.02)

    def step():
        load()
        return X @ X

    found = measure_user_python(step)
    assert found.share > 0.8
    assert found.function.endswith("load")
    assert found.file == __file__
    assert found.line == load.__code__.co_firstlineno


def test_the_standard_library_is_its_callers():
    rows = list(range(20000))

    def step():
        return json.loads(json.dumps(rows, indent=1))

    found = measure_user_python(step)
    assert found.share > 0.8
    assert found.function.endswith("step")


def test_torchs_own_python_is_nobodys():
    module = torch.compile(torch.nn.Linear(8, 8), backend="aot_eager")
    for _ in range(3):
        module(X)
    assert measure_user_python(lambda: module(X)).share < 0.3


def test_a_profiler_of_others_is_put_back():
    def other(frame, event, arg):
        return None

    before = sys.getprofile()
    sys.setprofile(other)
    try:
        measure_user_python(lambda: None)
        assert sys.getprofile() is other
    finally:
        sys.setprofile(before)


def test_an_error_of_the_step_is_raised_and_leaves_no_profiler():
    before = sys.getprofile()

    def step():
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        measure_user_python(step)
    assert sys.getprofile() is before
