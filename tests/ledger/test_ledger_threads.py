"""Which thread compiled, and which settings of torch it did not get."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from pytest_torchcompile import checks
from pytest_torchcompile.ledger import observe

pytestmark = pytest.mark.needs_torch

PER_THREAD = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def run_in_thread(function):
    thread = threading.Thread(target=function, name="serving")
    thread.start()
    thread.join()


@pytest.fixture(autouse=True)
def _fresh():
    """Of a cell that an earlier test ran here, this thread alone has the number of threads to compile with."""
    from torch._inductor import config

    seen = []
    run_in_thread(lambda: seen.append(config.compile_threads))
    torch.compiler.reset()
    with config.patch(compile_threads=seen[0]):
        yield
    torch.compiler.reset()


def test_the_thread_of_a_compile_is_named():
    compiled = torch.compile(lambda x: x.sin(), backend="eager")
    with observe() as seen:
        compiled(torch.ones(3))
        run_in_thread(lambda: compiled(torch.ones(3, dtype=torch.float64)))
    assert [each.thread for each in seen.compiles] == ["", "serving"]
    assert [each.missed for each in seen.compiles] == [(), ()]


@pytest.mark.skipif(not PER_THREAD, reason="settings hold in all threads before torch 2.12")
def test_a_setting_that_did_not_reach_a_thread():
    compiled = torch.compile(lambda x, n: x * n, backend="eager", dynamic=False)

    def serve():
        for number in range(2, 12):
            compiled(torch.ones(3), number)

    with torch._dynamo.config.patch(recompile_limit=64), observe() as seen:
        run_in_thread(serve)
    missed = "torch._dynamo.config.recompile_limit is 8 here, 64 where the observation began"
    assert {each.missed for each in seen.compiles} == {(missed,)}
    limit = next(each for each in seen.eager_frames if each.kind == "limit")
    assert limit.reason.endswith(f"; thread 'serving' did not get a setting: {missed}")
    section = {"compiles": [each.to_dict() for each in seen.compiles]}
    assert checks.load("compiles").remark(section) == f"thread 'serving' compiled without settings: {missed}"


def test_nothing_is_missed_where_the_settings_are_the_same():
    assert checks.load("compiles").remark({"compiles": []}) == ""
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    with observe() as seen:
        run_in_thread(lambda: compiled(torch.ones(1, 2)))
    assert not any(each.missed for each in seen.compiles)
