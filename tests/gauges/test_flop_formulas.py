"""FLOPs by hand beside those that are told: convolutions with groups, products of integers, linear algebra."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_torchcompile.explain import explain
from pytest_torchcompile.explain.roofline import Roofline, kernel_roofs
from pytest_torchcompile.gauges.flop_formulas import flop_formula
from pytest_torchcompile.gauges.machine_peaks import MachinePeaks
from pytest_torchcompile.gauges.step_work import measure_work

pytestmark = pytest.mark.needs_torch
PEAKS = MachinePeaks("cpu", bandwidth=1e9, call_seconds=1e-6, products={"float32": 1e10})
N = 24


def flops_of(work, name):
    return sum(operator.flops for operator in work.operators if operator.name == name)


CONVOLUTIONS = [
    lambda: nn.Conv2d(16, 32, 3, padding=1), lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16),
    lambda: nn.Conv2d(16, 32, 3, padding=1, groups=4), lambda: nn.ConvTranspose2d(16, 32, 3, stride=2),
    lambda: nn.ConvTranspose2d(16, 32, 3, stride=2, groups=4),
]


def _given():
    return torch.randn(2, 16, 8, 8, requires_grad=True)


@pytest.mark.parametrize("make", CONVOLUTIONS)
def test_a_convolution_and_its_two_gradients(make):
    """Each weight is multiplied once for each place: of the output, or, where it is transposed, of the input."""
    module = make()
    once = 2 * 2 * 8 * 8 * module.weight.numel()
    work = measure_work(lambda: module(_given()).sum().backward())
    assert flops_of(work, "convolution") == once
    assert flops_of(work, "convolution_backward") == 2 * once
    assert work.uncounted == ()


@pytest.mark.parametrize("make", CONVOLUTIONS)
def test_kernels_count_a_convolution_once(make):
    """Its copy into another layout, which Inductor names by it, computes nothing."""
    module = make()
    once = 2 * 2 * 8 * 8 * module.weight.numel()
    explained = explain(module, _given(), train=True)
    roofs = kernel_roofs(explained, PEAKS)
    assert sum(roof.flops for roof in roofs if roof.stage == "forward" and roof.counted) == once
    assert sum(roof.flops for roof in roofs if roof.stage == "backward" and roof.counted) == 2 * once
    for kernel in explained.kernels:
        if kernel.source and kernel.stage == "forward":
            assert {operator.target for operator in kernel.operators} == {"copy"}


def test_nodes_of_one_name_in_two_graphs_are_told_apart():
    """Forward and backward have an ``mm`` each, of other sizes."""
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = nn.Linear(8, 64, bias=False), nn.Linear(64, 2, bias=False)

        def forward(self, x):
            return self.narrow(self.wide(x).tanh())

    explained = explain(Two(), torch.randn(4, 8), train=True)
    forward = [roof.flops for roof in kernel_roofs(explained, PEAKS) if roof.stage == "forward" and roof.counted]
    assert forward == [2 * 4 * 8 * 64, 2 * 4 * 64 * 2]


def test_a_product_of_integers():
    first, second = (torch.ones(size, dtype=torch.int8) for size in ((32, 16), (16, 8)))
    assert flops_of(measure_work(lambda: torch._int_mm(first, second)), "_int_mm") == 2 * 32 * 16 * 8


def _positive():
    matrix = torch.randn(3, N, N)
    return matrix @ matrix.mT + N * torch.eye(N)


@pytest.mark.parametrize(("compute", "name", "flops"), [
    (torch.linalg.inv, "linalg_inv_ex", 3 * 2 * N**3), (torch.linalg.cholesky, "linalg_cholesky_ex", 3 * N**3 // 3),
    (torch.linalg.det, "_linalg_det", 3 * 2 * N**3 // 3),
    (lambda matrix: torch.linalg.solve(matrix, torch.ones(3, N, 5)), "_linalg_solve_ex",
     3 * (2 * N**3 // 3) + 2 * 3 * N * N * 5),
    (lambda matrix: torch.linalg.solve_triangular(matrix, torch.ones(3, N, 5), upper=True), "linalg_solve_triangular",
     3 * N * N * 5),
])
def test_linear_algebra(compute, name, flops):
    """By the leading terms of the textbook, for each matrix of a batch."""
    matrix = _positive()
    work = measure_work(lambda: compute(matrix))
    assert flops_of(work, name) == flops
    assert work.uncounted == ()


@pytest.mark.parametrize(("compute", "name"), [
    (torch.linalg.svdvals, "_linalg_svd"), (torch.linalg.eigvalsh, "_linalg_eigh"), (torch.fft.rfft, "_fft_r2c"),
])
def test_what_nobody_counts_is_said(compute, name):
    matrix = _positive()
    assert measure_work(lambda: compute(matrix)).uncounted == (name,)


def test_a_kernel_that_nobody_counts_is_marked():
    explained = explain(torch.linalg.svdvals, _positive(), train=False)
    lines = list(Roofline(tuple(kernel_roofs(explained, PEAKS)), PEAKS).lines())
    assert any("_linalg_svd" in line and "(computes more: FLOPs not known, or sizes open)" in line for line in lines)


def test_attention_on_a_cpu_has_the_formula_of_flash_attention():
    name = "_scaled_dot_product_flash_attention_for_cpu"
    shape = (2, 4, 16, 8)
    formula = flop_formula(getattr(torch.ops.aten, name))
    assert formula(shape, shape, shape, out_val=shape) == 2 * (2 * 2 * 4 * 16 * 16 * 8)
