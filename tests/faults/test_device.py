"""Planted faults on another device: where they run, and what can't."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.faults import CASES, selftest
from pytest_torchcompile.faults.judged_case import run_case

pytestmark = pytest.mark.needs_torch


def on(case, device):
    """The case on that device."""
    return replace(case, program=replace(case.program, device=device))


def test_models_and_batches_go_to_the_device():
    """On the meta device nothing is computed, but placed."""
    case = on(CASES[0], "meta")
    assert {p.device.type for p in case.program.build_model().parameters()} == {"meta"}
    assert {t.device.type for batch in case.program.make_calls() for t in batch.tensors()} == {"meta"}


def test_what_would_end_the_gpu_is_not_run_there():
    """With the reason; on a CPU it is."""
    strict = [case for case in CASES if case.program.cpu_only]
    assert {case.name for case in strict} >= {"error of eager lost"}
    for case in strict:
        found = run_case(on(case, "cuda"))
        assert (found.verdict, found.text) == ("unavailable", case.program.cpu_only)
        assert found.ok


def test_a_device_that_is_not_here():
    """One line, before anything is run."""
    with pytest.raises(UsageError, match=r"^--compile-selftest-device: torch \S+ can't use 'nowhere' here: "):
        selftest.selftest("dtype", print, "nowhere")
