"""Seconds of single kernels: each call has its own, what they compute is unchanged, and nothing is left behind."""

from __future__ import annotations

import time
from itertools import cycle

import pytest
import torch

from pytest_torchcompile.errors import InstrumentError
from pytest_torchcompile.explain import capture, explain
from pytest_torchcompile.explain.explanation import Explanation
from pytest_torchcompile.explain.explanation_text import explanation_lines
from pytest_torchcompile.explain.page import explanation_page
from pytest_torchcompile.explain.roofline import KernelRoof, Roofline
from pytest_torchcompile.gauges.machine_peaks import MachinePeaks
from pytest_torchcompile.ledger import observe
from pytest_torchcompile.lowering import kernel_timing
from pytest_torchcompile.lowering.kernel_records import KernelCall
from pytest_torchcompile.lowering.kernel_timing import KernelTimer
from pytest_torchcompile.lowering.kernel_watch import KernelWatch

pytestmark = pytest.mark.needs_torch
PEAKS = MachinePeaks("cpu", bandwidth=1e9, products={"float32": 1e10})
TIMED = KernelRoof("cpp_fused", "forward", 10**3, 10**6, 1e-3, "memory", counted=False, measured=2e-3)


@torch.library.custom_op("kernel_timing::nap", mutates_args=())
def nap(x: torch.Tensor, milliseconds: int) -> torch.Tensor:
    """A kernel that is slow on purpose."""
    time.sleep(milliseconds / 1e3)
    return x + 1


@nap.register_fake
def _(x: torch.Tensor, milliseconds: int) -> torch.Tensor:
    return torch.empty_like(x)


def naps(x: torch.Tensor) -> torch.Tensor:
    """Two calls of one kernel, the second ten times as long, among generated kernels."""
    return nap(nap(x.sin(), 3).cos(), 30).exp()


@pytest.fixture(scope="module")
def timed():
    """The calls with their seconds; what came of a clocked step, and of a plain one."""
    watch, timer, x, outputs = KernelWatch(), KernelTimer(), torch.randn(4, 8), []
    with observe(keep_texts=True) as seen, watch.taken(seen), timer.taken():
        compiled = torch.compile(naps)
        plain = compiled(x)
    codes = [text.text for text in seen.texts if text.stage == "code"]
    calls = timer.timed(watch.calls(seen.texts), codes, lambda: outputs.append(compiled(x)))
    return calls, outputs, plain, compiled(x), timer


def test_each_call_of_a_kernel_has_its_own_seconds(timed):
    calls = timed[0]
    assert all(call.seconds is not None for call in calls)
    short, long = (call.seconds for call in calls if call.name == "kernel_timing.nap.default")
    assert 0.003 <= short < long
    assert long >= 0.03
    assert max(call.seconds for call in calls if "nap" not in call.name) < long


def test_a_clocked_step_computes_the_same(timed):
    _calls, outputs, plain, after, timer = timed
    assert len(outputs) >= 4
    for output in [*outputs, after]:
        assert torch.equal(output, plain)
    for module in timer.modules.values():
        assert module.module.call is module.current is module.original


def test_a_call_that_the_code_does_not_have_stays_untimed(timed):
    known = next(iter(timed[4].modules.values()))
    unknown = KernelCall("cpp_fused_nowhere_0", "pointwise", "0/0", 0)
    assert KernelTimer({known.code: known}).timed([unknown], [known.code], lambda: None)[0].seconds is None
    assert KernelTimer().timed([unknown], [known.code], lambda: None)[0].seconds is None


def test_the_loader_is_put_back():
    from torch._inductor.codecache import PyCodeCache

    before = vars(PyCodeCache)["load_by_key_path"]
    with pytest.raises(KeyError), KernelTimer().taken():
        raise KeyError
    assert vars(PyCodeCache)["load_by_key_path"] is before


def test_a_torch_without_the_loader_costs_the_seconds_alone(monkeypatch):
    from torch._inductor.codecache import PyCodeCache

    monkeypatch.delattr(PyCodeCache, "load_by_key_path")
    lacks = pytest.raises(InstrumentError, match=r"PyCodeCache\.load_by_key_path.*kernels can't be timed")
    with lacks, KernelTimer().taken():
        pass


def test_every_kernel_of_an_explanation_is_timed(head_explained):
    assert head_explained.lost == []
    assert [call.name for call in head_explained.kernels if call.seconds is None] == []


@pytest.fixture(scope="module")
def head_explained():
    """A product and a softmax, with their backward pass."""
    from pytest_torchcompile import zoo

    return explain(zoo.tiny_head(), torch.randn(4, 64))


def test_what_cannot_be_timed_is_said():
    explained = Explanation("net", "2.13.0", "", kernels=[KernelCall("mm", "library", "0/0", 0)])
    capture._time_kernels(explained, KernelTimer(), None)
    assert explained.lost == ["seconds of single kernels on a GPU: a call returns before its kernel is done"]
    capture._time_kernels(explained, KernelTimer(), lambda: 1 / 0)
    assert "seconds of single kernels: ZeroDivisionError: division by zero" in explained.lost[1]
    assert explained.kernels[0].seconds is None


# ------------------------------------------------------------------------------------------------ a busy machine
def stretched(monkeypatch, lengths):
    """A clock on which steps take these seconds, in turn."""
    passed, given = [0.0], cycle(lengths)
    monkeypatch.setattr(kernel_timing.time, "perf_counter", lambda: passed[0])

    def step():
        passed[0] += next(given)

    return step


def test_a_steady_load_is_told():
    """Its timings are all alike, so that their spread shows nothing."""
    explained = Explanation("net", "2.13.0", "", others_load="other processes kept 1.0 of 2 processors busy")
    assert explained.busy == ("while kernels were timed other processes kept 1.0 of 2 processors busy: their "
                              "microseconds may be too long, so explain it again when it is quiet")
    assert explained.busy in explanation_lines(explained)


@pytest.mark.parametrize(("lengths", "quiet"), [
    ([0.01, 0.0101, 0.0102], True), ([0.01, 0.01, 0.03], False), ([0.0001], True),
])
def test_a_busy_machine_is_told(monkeypatch, lengths, quiet):
    """By the rule that `worth` has: how much longer the longest of a round is, in most rounds."""
    timer = KernelTimer()
    timer.timed([], [], stretched(monkeypatch, lengths))
    explained = Explanation("net", "2.13.0", "", unrest=timer.unrest)
    assert bool(explained.busy) is not quiet
    lines = [*explanation_lines(explained), *Roofline((TIMED,), PEAKS, explained.busy).lines()]
    warned = [line for line in lines if "this machine was busy while kernels were timed" in line]
    assert len(warned) == (0 if quiet else 2)
    assert ("was busy while kernels were timed" in explanation_page(explained)) is not quiet
