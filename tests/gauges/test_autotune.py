"""Autotuning is limited and timed, on torch's own tuners."""

from __future__ import annotations

import time

import pytest
import torch
from torch._inductor import select_algorithm
from torch._inductor.runtime import coordinate_descent_tuner, triton_heuristics

from pytest_torchcompile.gauges.autotune import Autotuning, first_choices, limit_autotuning

pytestmark = pytest.mark.needs_torch


class ExternKernelCaller:
    pass


class TritonTemplateCaller:
    pass


def test_library_calls_come_first():
    """Of five choices the one that needs no compiling stays, then torch's first."""
    templates, library = [TritonTemplateCaller() for _ in range(4)], ExternKernelCaller()
    choices = [*templates, library]
    assert first_choices(choices, 3) == [library, *templates[:2]]
    assert first_choices(choices, 0) == choices
    assert first_choices(choices, 5) == choices


def test_the_selector_gets_fewer_choices_and_is_timed(monkeypatch):
    """By the method that Inductor calls for each product, in whatever way it passes the choices."""
    seen = []

    def choose(self, name, choices, input_nodes, layout):
        seen.append(choices)
        time.sleep(0.02)

    monkeypatch.setattr(select_algorithm.AlgorithmSelectorCache, "__call__", choose)
    choices = [TritonTemplateCaller() for _ in range(9)]
    with limit_autotuning(2) as found:
        select_algorithm.AlgorithmSelectorCache()("mm", choices, [], None)
        select_algorithm.AlgorithmSelectorCache()("mm", choices=choices, input_nodes=[], layout=None)
    assert seen == [choices[:2]] * 2
    assert found.seconds >= 0.04
    assert select_algorithm.AlgorithmSelectorCache.__call__ is choose
    with limit_autotuning():
        select_algorithm.AlgorithmSelectorCache()("mm", choices, [], None)
    assert seen[-1] == choices


def test_the_descent_ends_after_so_many():
    """What was timed before stays known; what is new counts as infinitely slow."""
    tried = []

    class Config:
        def __init__(self, block):
            self.kwargs, self.num_warps, self.num_stages = {"XBLOCK": block}, 4, 1

    with limit_autotuning(2):
        tuner = coordinate_descent_tuner.CoordescTuner(name="k", size_hints={"x": 64})
        times = [tuner.call_func(lambda config: tried.append(config) or 1.0, Config(block)) for block in (8, 16, 32, 8)]
    assert times == [1.0, 1.0, float("inf"), 1.0]
    assert len(tried) == 2


def test_time_within_time_counts_once():
    """A tuner that is run by another."""
    found = Autotuning()
    inner = found.timed(lambda: time.sleep(0.05))
    start = time.perf_counter()
    found.timed(lambda: (inner(), inner()))()
    assert 0.1 <= found.seconds <= time.perf_counter() - start


def test_torch_has_what_is_wrapped():
    """Else the limit would sleep: the names that the docstring gives for this torch."""
    assert "choices" in select_algorithm.AlgorithmSelectorCache.__call__.__code__.co_varnames
    assert triton_heuristics.CachingAutotuner.autotune_to_one_config
    assert triton_heuristics.CachingAutotuner.coordinate_descent_tuning
    assert coordinate_descent_tuner.CoordescTuner.call_func


@pytest.mark.filterwarnings("ignore")  # torch's advice on TF32
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_product_is_tuned_among_few(tmp_path, monkeypatch):
    """Two candidates, timed; from the second process on none, as torch keeps what it has measured."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    sizes = []
    original = select_algorithm.AlgorithmSelectorCache.__call__
    monkeypatch.setattr(select_algorithm.AlgorithmSelectorCache, "__call__", lambda self, name, choices, *a, **k: (
        sizes.append(len(choices)), original(self, name, choices, *a, **k))[1])
    a, b = torch.randn(96, 64, device="cuda"), torch.randn(64, 80, device="cuda")
    with limit_autotuning(2) as found, torch.no_grad():
        out = torch.compile(torch.mm, mode="max-autotune-no-cudagraphs")(a, b)
    assert sizes == [2]
    assert found.seconds > 0
    torch.testing.assert_close(out, a @ b, rtol=1e-2, atol=1e-2)
