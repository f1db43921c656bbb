"""Calls in which nothing rounds: counts, and numbers that are picked. Noise may not change them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_torchcompile import CompileConfig, compare
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle.estimate import Estimate
from pytest_torchcompile.oracle.exact_calls import adds_whole_numbers, picks_one
from pytest_torchcompile.oracle.noise import Wide
from pytest_torchcompile.oracle.operator_rounding import operator_facts
from pytest_torchcompile.oracle.recorder import record
from pytest_torchcompile.oracle.reference_runs import reference
from pytest_torchcompile.oracle.tape import Tape

pytestmark = pytest.mark.needs_torch
aten = torch.ops.aten


class FromTheThird(nn.Module):
    """Lets through what comes from the third marked row on. Noise would have that count below three, or above."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x, marked):
        gate = marked.cumsum(0) >= 3
        return self.lin(x) * gate[:, None]


class OneRowMore(torch.autograd.Function):
    """The gradient of one row, a third too large."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        factors = torch.ones(len(gradient), 1)
        factors[3] = 1.3
        return gradient * factors


def backend_behind(function):
    """A compiler that puts a function behind each output."""

    def compile_graph(graph, example):
        def run(*inputs):
            return tuple(function.apply(out) if out.requires_grad else out for out in graph(*inputs))

        return run

    return compile_graph


@pytest.mark.parametrize(("backend", "is_right"), [(backend_behind(OneRowMore), False), ("aot_eager", True)])
def test_a_count_at_its_threshold_excuses_nothing(backend, is_right):
    torch.manual_seed(0)
    x, marked = torch.randn(12, 8), (torch.rand(12) < 0.7).float()
    found = compare(FromTheThird(), [(x, marked)], CompileConfig(enabled=True, backend=backend), locate=False)
    assert found.ok is is_right
    assert not any("excused" in text for text in found.notes)


WHOLE, HALVES = torch.arange(12.0).reshape(3, 4), torch.full((3, 4), 0.5)
WHICH = torch.zeros(3, 4, dtype=torch.int64)


@pytest.mark.parametrize(("operator", "args", "kwargs", "is_exact"), [
    (aten.cumsum.default, (WHOLE, 0), {}, True),
    (aten.sum.dim_IntList, (WHOLE, [1]), {}, True),
    (aten.mm.default, (WHOLE, WHOLE.t()), {}, True),
    (aten.addmm.default, (WHOLE[:, :3], WHOLE, WHOLE.t()), {"beta": 2}, True),
    (aten.scatter_add.default, (WHOLE, 0, torch.zeros(3, 4, dtype=torch.int64), WHOLE), {}, True),
    (aten.add.Tensor, (WHOLE, torch.ones(4, dtype=torch.int64)), {}, True),
    (aten.mul.Tensor, (WHOLE, -3), {}, True),
    (aten.floor_divide.default, (WHOLE, torch.full((4,), 3.0)), {}, True),
    (aten.remainder.Scalar, (WHOLE, 3), {}, True),
    (aten.floor_divide.default, (WHOLE, torch.full((4,), 0.1)), {}, False),
    # A factor that is no whole number, though the result is one.
    (aten.add.Tensor, (WHOLE * 10, WHOLE * 10), {"alpha": 0.1}, False),
    (aten.mul.Tensor, (WHOLE * 10, 0.1), {}, False),
    (aten.add.Tensor, (HALVES, HALVES), {}, False),
    # One element of the result, or of what it was made from.
    (aten.add.Tensor, (WHOLE, torch.tensor([1.0, 1.0, 1.0, 1.5])), {}, False),
    # It overwrites what it has read.
    (aten.add_.Tensor, (WHOLE.clone(), WHOLE), {}, False),
    # One of the numbers that are given, whatever they are; the sum of these rounds.
    (aten.scatter_reduce.two, (HALVES / 3, 0, WHICH, WHOLE / 3, "amax"), {}, True),
    (aten.index_reduce.default, (HALVES / 3, 0, WHICH[0, :3], WHOLE / 3, "amin"), {}, True),
    (aten.scatter_reduce.two, (HALVES / 3, 0, WHICH, WHOLE / 3, "sum"), {}, False),
    (aten.linalg_vector_norm.default, (WHOLE / 3, float("inf")), {}, True),
    (aten.linalg_vector_norm.default, (WHOLE / 3, 2.0), {}, False),
    # No sum, and a mean of whole numbers.
    (aten.exp.default, (torch.zeros(3),), {}, False),
    (aten.mean.dim, (WHOLE, [0]), {}, False),
    # 12 terms of up to 22 are more than the 256 that bfloat16 counts to, and 2**24 is where float32 stops counting.
    (aten.sum.default, (2 * WHOLE.bfloat16(),), {}, False),
    (aten.sum.default, (torch.ones(3, dtype=torch.bfloat16),), {}, True),
    (aten.mul.Tensor, (torch.full((2,), 4096.0), torch.full((2,), 4096.0)), {}, False),
    (aten.add.Tensor, (torch.full((2,), float("inf")), torch.ones(2)), {}, False),
    (aten.add.Tensor, (torch.ones(0), torch.ones(0)), {}, False),
    (aten.add.Tensor, (torch.ones(2, device="meta"), torch.ones(2, device="meta")), {}, False),
    (aten.mul.Tensor, (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64)), {}, False),
])  # fmt: skip
def test_which_calls_round_nothing(operator, args, kwargs, is_exact):
    about = operator_facts(operator)
    found = picks_one(about, args) or adds_whole_numbers(about, args, kwargs, operator(*args, **kwargs))
    assert found is is_exact


def test_the_coarsest_call_of_an_operator_counts():
    """Of two calls with the same shapes one rounds: then noise is drawn for both."""
    for second, unit in ((WHOLE, 0.0), (WHOLE / 3, 2.0**-24)):
        with Tape() as tape:
            WHOLE.cumsum(0)
            second.cumsum(0)
        (rounding,) = [each for (name, _), each in tape.roundings.items() if name == "cumsum"]
        assert rounding.unit == unit


class Attention(nn.Module):
    """A softmax over the edges of each node, written by hand. Its backward asks which edge had the largest value."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x, node):
        value = (x * self.scale).sum(-1)
        largest = torch.zeros(5).scatter_reduce(0, node, value, "amax", include_self=False)
        share = (value - largest[node]).exp()
        return share / torch.zeros(5).scatter_add(0, node, share)[node]


NODES = torch.tensor([0, 1, 1, 2, 2, 2, 3, 4, 4, 4])


class LargestByHand(torch.autograd.Function):
    """As :class:`Attention`, of an operator that nobody knows: the noise of its forward pass is not in its backward."""

    @staticmethod
    def forward(ctx, x):
        largest = (x * 1.5).sort().values[-1]
        ctx.save_for_backward(x, largest)
        return largest

    @staticmethod
    def backward(ctx, gradient):
        x, largest = ctx.saved_tensors
        chosen = (x * 1.5 == largest).to(x.dtype)
        return gradient * 1.5 * chosen / chosen.sum()


class Unknown(nn.Module):
    """Its gradients are NaN in every run with noise."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return LargestByHand.apply((x * self.scale).sum(-1))


def reference_of(model, *args):
    batch, tape = Batch.of(args), Tape()
    record(model, model, batch, mode=tape)
    return reference(model, batch, tape=tape)


def test_what_asks_for_the_largest_value_has_noise():
    torch.manual_seed(0)
    found = reference_of(Attention(), torch.randn(10, 8), NODES)
    assert (found.kind, found.why) == ("float64", "")
    estimate = found.estimates["gradient of scale"]
    assert estimate.brink is None
    assert bool((estimate.spread > 0).all())


def test_what_noise_makes_nan_of_is_measured_by_disturbed_inputs():
    torch.manual_seed(0)
    found = reference_of(Unknown(), torch.randn(10, 8))
    assert found.kind == "float64-inputs"
    assert "noise makes NaN of gradient of scale" in found.why
    estimate = found.estimates["gradient of scale"]
    assert estimate.brink is None
    assert bool((estimate.spread > 0).all())


class NaNGradient(torch.autograd.Function):
    """A compiler whose gradients are no numbers."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


@pytest.mark.parametrize(("backend", "is_right"), [(backend_behind(NaNGradient), False), ("aot_eager", True)])
@pytest.mark.parametrize(("model", "rest"), [(Attention, (NODES,)), (Unknown, ())])
def test_nan_of_noise_excuses_no_nan(model, rest, backend, is_right):
    torch.manual_seed(0)
    found = compare(model(), [(torch.randn(10, 8), *rest)], CompileConfig(enabled=True, backend=backend), locate=False)
    assert found.ok is is_right, str(found)


def test_a_draw_that_is_no_number_counts_as_the_usual_noise():
    """Two of three draws have NaN in one element: as if that element had moved by as much as the others."""
    estimate = Estimate(torch.full((64,), 1.0, dtype=torch.float64))
    for number in range(3):
        drawn = torch.full((64,), 1.0 + 2.0**-20, dtype=torch.float64)
        if number:
            drawn[5] = float("nan")
        estimate.add(drawn)
    usual = float(estimate.spread[4])
    assert float(estimate.spread[5]) == pytest.approx(usual, rel=0.5)
    assert estimate.brink.nonzero().tolist() == [[5]]


@torch.library.custom_op("pytest_torchcompile_tests::rows_before", mutates_args=())
def rows_before(counts: torch.Tensor) -> torch.Tensor:
    """Where the rows of each expert begin, from floating counts: an operator that nobody knows."""
    return (counts.cumsum(0) - counts).long()


@rows_before.register_fake
def _(counts):
    return torch.empty_like(counts, dtype=torch.int64)


class Experts(nn.Module):
    """Rows sorted by expert, counted by ``histc`` as transformers counts them, and handed to the experts."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x, expert):
        rows = x[expert.argsort(stable=True)]
        counts = torch.histc(expert.float(), bins=3, min=0, max=2)
        starts = rows_before(counts).tolist()
        ends = [*starts[1:], len(x)]
        parts = [rows[start:end] @ weight for start, end, weight in zip(starts, ends, self.weights, strict=True)]
        return torch.cat(parts)


class FirstRows(nn.Module):
    """So many rows as a count says."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x, marked):
        return x[: int(marked.sum().item())] @ self.weight


EXPERT = torch.tensor([0, 1, 1, 2, 0, 2, 2, 1, 0, 1])


@pytest.mark.parametrize(("model", "rest"), [(Experts, EXPERT), (FirstRows, (EXPERT > 0).float())])
def test_what_counts_hands_on_no_noise(model, rest):
    """Nothing but the products rounds: the noise of every leaf is a few roundings, and no row goes elsewhere."""
    torch.manual_seed(0)
    found = reference_of(model(), torch.randn(10, 8), rest)
    while found.draws < 8:
        assert found.more()
    assert found.kind == "float64"
    for name, estimate in found.estimates.items():
        if estimate.continuous:
            assert estimate.odd == 0
            assert float(estimate.spread.norm()) < 1e-5 * float(estimate.value.norm()), name


@pytest.mark.parametrize("operator", [
    lambda x: torch.searchsorted(WHOLE.flatten(), x), lambda x: torch.bucketize(x, WHOLE.flatten()),
    torch.nonzero, lambda x: torch.unique(x, return_inverse=True)[1], lambda x: torch.isin(x, WHOLE),
    lambda x: x.count_nonzero(), lambda x: torch.histc(x, 4, 0, 12), lambda x: torch.equal(x, x.clone()),
])  # fmt: skip
def test_what_decides_by_equal_numbers_is_given_them_as_they_are(operator):
    """Also in a float64 model, of which the tape's units are not used."""
    for dtype in (torch.float32, torch.float64):
        given = WHOLE.flatten().to(dtype)
        expected = operator(given)
        with Wide(torch.float64, None, factor=1.0, unit=2.0**-24, accumulator=2.0**-24):
            noisy = operator(given.double())
        assert torch.equal(torch.as_tensor(noisy), torch.as_tensor(expected).to(torch.as_tensor(noisy).dtype))


@torch.library.custom_op("pytest_torchcompile_tests::sort", mutates_args=())
def sort(x: torch.Tensor) -> torch.Tensor:
    """Not what its name says: a third of it, which rounds."""
    return x / 3


def test_an_operator_of_a_library_is_not_known_by_its_bare_name():
    facts = operator_facts(torch.ops.pytest_torchcompile_tests.sort.default)
    assert (facts.name, facts.exact) == ("pytest_torchcompile_tests::sort", False)
    assert operator_facts(aten.sort.default).exact


def test_numbers_are_looked_at_until_a_call_rounds(monkeypatch):
    """To look at them is to wait for a GPU, and the layers of a model call the same operators on the same shapes."""
    asked = []

    def is_asked(about, args, kwargs, result):
        asked.append(about.name)
        return adds_whole_numbers(about, args, kwargs, result)

    monkeypatch.setattr("pytest_torchcompile.oracle.tape.adds_whole_numbers", is_asked)
    with Tape() as tape:
        for values in (WHOLE, WHOLE, WHOLE / 7, WHOLE, WHOLE / 7):
            values.cumsum(0)
        WHOLE.cumsum(1)
        # A coarser call of the same operator on the same shape is another matter.
        (WHOLE / 7).bfloat16().cumsum(0)
    assert asked.count("cumsum") == 5
    assert {key[1][1]: each.unit for key, each in tape.roundings.items() if key[0] == "cumsum"} == {0: 2.0**-8, 1: 0.0}
