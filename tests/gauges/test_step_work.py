"""What a step computes and moves, counted by hand beside; the roof; and the peaks that are kept in a file."""

from __future__ import annotations

import json
from dataclasses import replace

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


def test_a_bag_reads_the_rows_of_its_numbers():
    table, ids = torch.randn(10_000, 8), torch.tensor([[3, 5, 7]])
    work = measure_work(lambda: torch.nn.functional.embedding_bag(ids, table))
    (bag,) = [operator for operator in work.operators if "embedding_bag" in operator.name]
    # Beside them its numbers, where each bag begins, and what it returns: 8 numbers, and some more of its own.
    assert 3 * 8 * 4 + 3 * 8 < bag.bytes < 400


ROWS, WIDTH = 4096, 32
ROW = 4 * WIDTH
AT = torch.tensor([5])


def _masked(rows, x):
    rows[rows[:, 0] > 0] = x


@pytest.mark.parametrize(("put", "read", "written"), [
    (lambda rows, x: rows.index_copy_(0, AT, x), ROW + 8, ROW),
    (lambda rows, x: rows.index_put_((AT,), x), ROW + 8, ROW),
    (lambda rows, x: rows.index_put_((AT, AT), x[0, :1]), 4 + 8, 4),
    (lambda rows, x: rows.index_put_((AT,), x, accumulate=True), ROW + 8 + ROW, ROW),
    (lambda rows, x: rows.index_add_(0, AT, x), ROW + 8 + ROW, ROW),
    (lambda rows, x: rows.index_fill_(0, AT, 3.0), 8, ROW),
    (lambda rows, x: rows.scatter_(0, AT[None], x[:, :1]), 4 + 8, 4),
    (lambda rows, x: rows.scatter_add_(0, AT[None], x[:, :1]), 4 + 8 + 4, 4),
    (lambda rows, x: rows[7:8].copy_(x), ROW, ROW),
    (lambda rows, x: rows[7:9].zero_(), 0, 2 * ROW),
])
def test_what_is_written_into_a_part_is_as_large_as_its_source(put, read, written):
    """A row of a cache: the rest of the cache is neither read nor written, and nothing is computed of it."""
    rows, x = torch.zeros(ROWS, WIDTH), torch.randn(1, WIDTH)
    work = measure_work(lambda: put(rows, x))
    assert work.bytes == work.least_bytes == work.fused_bytes == read + written
    assert work.flops == written // 4


def test_a_mask_writes_as_much_as_is_true():
    rows = torch.zeros(ROWS, WIDTH)
    rows[[3, 5]] = 1
    work = measure_work(lambda: _masked(rows, torch.tensor(2.0)))
    (put,) = [operator for operator in work.operators if operator.name == "index_put_"]
    assert put.bytes == 2 * ROW + ROWS + 4


def test_a_cache_that_is_read_after_one_row_was_written():
    """All of it was given, but for that row, which is nothing beside it."""
    rows, x = torch.zeros(ROWS, WIDTH), torch.randn(1, WIDTH)

    def step():
        rows.index_copy_(0, AT, x)
        return rows.sum()

    assert measure_work(step).least_bytes == ROWS * ROW + 2 * ROW + 8 + 4


def test_memory_of_the_steps_own_is_not_given():
    """It is filled part by part, and never has to be read back."""
    x = torch.randn(4, WIDTH)

    def step():
        both = torch.empty(8, WIDTH)
        both[:4].copy_(x)
        both[4:].copy_(x)
        return both * 2

    assert measure_work(step).least_bytes == 4 * ROW + 8 * ROW


@pytest.mark.parametrize(("take", "share"), [
    (lambda x: x.chunk(4, 0), 1), (lambda x: x.chunk(4, 1), 1), (lambda x: x.unbind(0)[:16], 0.25),
    (lambda x: (x[:32], x[16:48]), 0.75), (lambda x: (x[:, :4], x[:, 2:8]), 0.25),
    (lambda x: (x[:32], x[:32].t()), 0.5), (lambda x: (x[:1].expand(64, WIDTH),), 1 / 64),
    (lambda x: x.view(4, 16, WIDTH)[:, :, :16].chunk(2, 2), 0.5),
])
def test_views_of_one_tensor_are_read_once_each(take, share):
    """Their union: neither the largest alone, nor what they share twice."""
    x = torch.randn(64, WIDTH)
    work = measure_work(lambda: [part.sum() for part in take(x)])
    assert work.least_bytes == 64 * ROW * share + 4 * len(take(x))


def test_a_view_without_equal_distances_is_told_low():
    """A least must not be more than what was read: of two such views the larger counts."""
    x = torch.randn(4, 8, 16)
    work = measure_work(lambda: [x[:, :2, :3].sum(), x[:, 4:6, 8:10].sum()])
    assert work.least_bytes == 4 * 2 * 3 * 4 + 2 * 4


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
    assert peaks.functions > 1e6
    assert peaks.products_per_second("float32") > 1e7
    # A dtype that has no product is taken for float32.
    assert peaks.products_per_second("bool") == peaks.products["float32"]


def test_functions_are_held_against_their_own_peak():
    """A chain of tanh moves little and computes much: what its bytes take is no time that it can be done in."""
    def chain():
        x = torch.ones(1000)
        for _ in range(10):
            x = x.tanh()
        return x

    def arithmetic():
        x = torch.ones(1000)
        for _ in range(10):
            x = x * 2
        return x

    peaks = replace(PEAKS, functions=1e6)
    roof = roof_of(measure_work(chain), peaks)
    assert (roof.bound, roof.seconds) == ("functions", pytest.approx(0.01))
    assert roof_of(measure_work(arithmetic), peaks).bound == "memory"
    # Where no peak of them is known, as on a GPU, nothing is counted.
    assert roof_of(measure_work(chain), PEAKS).bound == "memory"


def test_float32_convolutions_of_a_gpu_have_the_peak_of_tf32():
    """They take what half of bfloat16's peak says, and products of matrices float32's own."""
    work = StepWork([OperatorWork("convolution", "float32", 1, 10**11, 0, library=True),
                     OperatorWork("mm", "float32", 1, 10**10, 0, library=True)])
    peaks = MachinePeaks("a GPU", 1e12, products={"float32": 1e10, "bfloat16": 1e11}, takes_tf32=True)
    roof = roof_of(work, peaks)
    assert (roof.seconds, roof.flops_per_second) == (2.0 + 1.0, 5e10)
    peaks.takes_tf32 = False
    assert roof_of(work, peaks).seconds == 11.0
