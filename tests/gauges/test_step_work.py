"""What a step computes and moves, counted by hand beside; the roof; and the peaks that are kept in a file."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pytest_torchcompile import zoo
from pytest_torchcompile.gauges import machine_peaks as peaks_module
from pytest_torchcompile.gauges.machine_peaks import MachinePeaks, machine_peaks
from pytest_torchcompile.gauges.step_work import OperatorWork, StepWork, measure_work, roof_of

pytestmark = pytest.mark.needs_torch
N = 1000
FOUR = 4 * N
PEAKS = MachinePeaks("cpu", bandwidth=1e9, call_seconds=1e-6, products={"float32": 1e10})


def test_a_row_of_cheap_operators_is_one_group():
    """sin, times two, plus x: three reads and writes, of which fusion leaves one of each; x is read once."""
    x = torch.randn(N)
    work = measure_work(lambda: x.sin() * 2 + x)
    assert (work.calls, work.groups) == (3, 1)
    assert work.bytes == 2 * FOUR + 2 * FOUR + 3 * FOUR
    assert work.least_bytes == work.fused_bytes == 2 * FOUR
    assert work.flops == 3 * N


def test_a_library_call_ends_a_group_and_reads_from_memory():
    """relu, product, relu: what the product takes and returns is stored."""
    x, w = torch.randn(50, 20), torch.randn(20, 30)
    work = measure_work(lambda: torch.relu(torch.relu(x) @ w))
    product = next(operator for operator in work.operators if operator.library)
    assert (product.name, product.flops) == ("mm", 2 * 50 * 20 * 30)
    assert work.groups == 2
    taken, made, weight = 4 * 50 * 20, 4 * 50 * 30, 4 * 20 * 30
    assert work.least_bytes == taken + weight + made
    assert work.fused_bytes == 2 * taken + (taken + weight + made) + 2 * made


@pytest.mark.parametrize("call", [
    lambda x: x.t().reshape(-1)[3:], lambda x: torch.empty(9), lambda x: x.view(-1).expand(3, x.numel()),
])
def test_views_and_allocations_are_no_work(call):
    assert measure_work(lambda: call(torch.randn(1, 40))).calls <= 1


def test_an_embedding_reads_the_rows_that_it_returns():
    table, ids = torch.randn(10_000, 8), torch.tensor([3, 5])
    assert measure_work(lambda: torch.nn.functional.embedding(ids, table)).bytes == 2 * (2 * 8 * 4) + 16


def test_flops_of_a_training_step_are_those_of_torch():
    """But for attention on a CPU, which torch's counter does not know."""
    model, ids = zoo.mini_gpt(), zoo.token_batch(B=2, S=8)

    def step():
        zoo.lm_loss(model(ids), ids).backward()

    work = measure_work(step)
    attention = sum(operator.flops for operator in work.operators if "scaled_dot_product" in operator.name)
    assert attention > 0
    with FlopCounterMode(display=False) as counter:
        step()
    assert sum(operator.flops for operator in work.operators if operator.library) - attention == \
        counter.get_total_flops()
    assert work.to_dict()["flops"] == work.flops


@pytest.mark.parametrize(("flops", "least", "seconds", "bound"), [
    (10**10, 10**6, 1.0, "compute"), (10**6, 10**9, 1.0, "memory"),
])
def test_the_roof_is_the_longer_of_both(flops, least, seconds, bound):
    work = StepWork([OperatorWork("mm", "float32", 1, flops, least, library=True)], least)
    roof = roof_of(work, PEAKS)
    assert (roof.seconds, roof.bound, roof.device) == (seconds, bound, "cpu")


# ---------------------------------------------------------------------------------------------------------- peaks
@pytest.fixture
def counted(tmp_path, monkeypatch):
    """A file for peaks, and how often they were measured."""
    calls = []

    def measured(name, value):
        def measure(*given):
            calls.append(name)
            return value

        return measure

    monkeypatch.setenv("PYTEST_TORCHCOMPILE_PEAKS", str(tmp_path / "folder" / "peaks.json"))
    monkeypatch.setattr(peaks_module, "_measure_bandwidth", measured("bandwidth", 2e10))
    monkeypatch.setattr(peaks_module, "_measure_call", measured("call", 1e-6))
    monkeypatch.setattr(peaks_module, "_measure_product", measured("product", 3e10))
    return calls


def test_peaks_are_measured_once_and_kept(counted, tmp_path):
    assert machine_peaks().products_per_second("float32") == 3e10
    assert machine_peaks().products_per_second("float32") == 3e10
    assert machine_peaks().bandwidth == 2e10
    assert counted == ["bandwidth", "call", "product"]
    machine_peaks().products_per_second("bfloat16")
    (kept,) = json.loads((tmp_path / "folder" / "peaks.json").read_text()).values()
    assert kept["products"] == {"float32": 3e10, "bfloat16": 3e10}


@pytest.mark.parametrize("content", ["no json", "[1]", "{}"])
def test_a_file_that_is_none_is_written_anew(counted, tmp_path, content):
    path = tmp_path / "folder" / "peaks.json"
    path.parent.mkdir()
    path.write_text(content)
    assert machine_peaks().bandwidth == 2e10
    assert len(json.loads(path.read_text())) == 1


def test_without_a_place_to_write_they_are_measured_each_time(counted, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYTEST_TORCHCOMPILE_PEAKS", str(tmp_path / "file" / "peaks.json"))
    assert machine_peaks().bandwidth == machine_peaks().bandwidth == 2e10
    assert counted == ["bandwidth", "call"] * 2


def test_this_machine_has_peaks(tmp_path, monkeypatch):
    """Really measured: positive, whatever the machine does beside."""
    monkeypatch.setenv("PYTEST_TORCHCOMPILE_PEAKS", str(tmp_path / "peaks.json"))
    peaks = machine_peaks()
    assert peaks.bandwidth > 1e7
    assert peaks.call_seconds > 0
    assert peaks.products_per_second("float32") > 1e7
    # A dtype that has no product is taken for float32.
    assert peaks.products_per_second("bool") == peaks.products["float32"]
