"""Leaves that eager's own error settles have the numbers of the long way, and nothing wrong is settled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Leaf, Limits, Reference, compare, problem, record, reference
from pytest_torchcompile.oracle.judging import judge_numbers, judge_values
from pytest_torchcompile.oracle.noise_levels import _row_medians
from pytest_torchcompile.oracle.settling import settle_by_eager

pytestmark = pytest.mark.needs_torch
STRICT = Limits(rms=2.0, bias=4.0, peak=8.0)


def rounded_at_random(exact: torch.Tensor, eps: float) -> torch.Tensor:
    relative, absolute = (2 * torch.rand_like(exact) - 1 for _ in range(2))
    return exact * (1 + eps * relative) + 0.1 * eps * absolute


def some_values(dtype: torch.dtype, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, Reference]:
    """Expected values, rounded twice: eager's and compiled's."""
    torch.manual_seed(0)
    exact = torch.randn(300_000, dtype=torch.float64) * torch.rand(300_000, dtype=torch.float64).mul(spread).exp()
    exact[::97] = 0.0
    eps = torch.finfo(dtype).eps
    eager, compiled = (rounded_at_random(exact, eps).to(dtype) for _ in range(2))
    expected = Reference(record(lambda x: x, None, Batch.of(exact), train=False))
    expected.kind = "float64"
    return eager, compiled, expected


def both_ways(eager: torch.Tensor, compiled: torch.Tensor, expected: Reference) -> tuple[Leaf | None, Leaf]:
    leaf = Leaf("output", "value", numel=eager.numel(), dtype=str(eager.dtype))
    short = settle_by_eager(leaf, eager, compiled, expected, Limits(), STRICT)
    return short, judge_numbers(leaf, eager, compiled, expected, Limits())


@pytest.mark.parametrize("spread", [1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_same_numbers_as_the_long_way(dtype: torch.dtype, spread: float) -> None:
    eager, compiled, expected = some_values(dtype, 1.0 if dtype == torch.float16 else spread)
    short, long = both_ways(eager, compiled, expected)
    assert short is not None
    for name in ("rms", "bias", "peak", "grain"):
        assert getattr(short, name) == pytest.approx(getattr(long, name), rel=1e-3), name
    assert short.wrong == pytest.approx(long.wrong, abs=1e-5)
    plain = {"rms": 0.0, "bias": 0.0, "peak": 0.0, "grain": 0.0, "grain_off": None, "wrong": 0.0}
    assert replace(short, **plain, blind=0) == replace(long, **plain, blind=0)
    assert abs(short.blind - long.blind) <= 3


def test_tiny_values() -> None:
    eager, compiled, expected = some_values(torch.float32)
    exact = expected.estimates["output"].value
    expected.estimates["output"].value = exact * 2.0**-30
    short, long = both_ways(eager * 2.0**-30, compiled * 2.0**-30, expected)
    assert short is not None
    assert short.rms == pytest.approx(long.rms, rel=1e-3)


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**60])
def test_what_float32_cannot_hold_goes_the_long_way(scale: float) -> None:
    eager, compiled, expected = some_values(torch.float32)
    expected.estimates["output"].value *= scale
    short, long = both_ways(eager * scale, compiled * scale, expected)
    assert short is None
    assert problem(long) is None


def break_one(compiled: torch.Tensor) -> None:
    compiled[1000] *= 1.001


def shift_all(compiled: torch.Tensor) -> None:
    compiled *= 1 + 2.0**-18


def lose_one(compiled: torch.Tensor) -> None:
    compiled[1000] = torch.inf


def nan_one(compiled: torch.Tensor) -> None:
    compiled[-1] = torch.nan


@pytest.mark.parametrize("fault", [break_one, shift_all, lose_one, nan_one])
def test_nothing_wrong_is_settled(fault) -> None:
    eager, compiled, expected = some_values(torch.float32)
    fault(compiled)
    short, long = both_ways(eager, compiled, expected)
    assert short is None
    assert problem(long) is not None


def test_eager_that_is_far_is_no_measure() -> None:
    eager, _, expected = some_values(torch.float32)
    eager *= 1.001
    short, _ = both_ways(eager, eager * (1 + 2.0**-22), expected)
    assert short is None


def test_zeros_are_not_settled() -> None:
    """Noise as large as the values: that zeros would pass is no proof."""
    eager, compiled, expected = some_values(torch.bfloat16)
    expected.estimates["output"].value = (eager.double() + compiled.double()) / 2 - eager.double()
    short, _ = both_ways(torch.zeros_like(eager), torch.zeros_like(eager), expected)
    assert short is None


def test_a_comparison_settles_and_says_the_same() -> None:
    """A clean program: no draw is made."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    batch = Batch.of(torch.randn(16, 32))
    eager = record(model, model, batch)
    moved = {name: torch.nextafter(g, torch.zeros_like(g)) for name, g in eager.gradients.items()}
    expected = reference(model, batch, draw=False)
    leaves = compare(eager, replace(eager, gradients=moved), expected)
    assert not [leaf for leaf in leaves if problem(leaf)]
    assert expected.draws == 0
    assert {leaf.draws for leaf in leaves if leaf.kind == "gradient"} == {1}


def long_row_medians(counts: list[list[int]]) -> list[int]:
    """What ``_row_medians`` makes at once, row by row."""
    loud = [sum(row[:-1]) for row in counts]
    medians = {}
    for number, row in enumerate(counts):
        if not any(row):
            continue
        low, high = number, number + 1
        while sum(loud[low:high]) < min(16, sum(loud)):
            low, high = max(0, low - 1), min(len(counts), high + 1)
        elements = [place for near in counts[low:high] for place, many in enumerate(near[:-1]) for _ in range(many)]
        medians[number] = sorted(elements)[len(elements) // 2]
    nearest = [min(medians, key=lambda row: (abs(row - number), row)) for number in range(len(counts))]
    return [medians[row] for row in nearest]


def test_usual_noise_by_magnitude() -> None:
    """In few and in many bins, with neighbours that have to lend theirs, and with elements that have no noise."""
    torch.manual_seed(0)
    for case in range(60):
        count, width = (5, 40, 3000)[case % 3], (1, 6, 60)[case // 3 % 3]
        rows, columns = (torch.randint(0, width, (count,)) for _ in range(2))
        columns[0] = 0
        counts = torch.bincount(rows * 65 + columns, minlength=64 * 65).view(64, 65)
        assert _row_medians(counts) == long_row_medians(counts.tolist()), case


def cancelled(x: torch.Tensor) -> torch.Tensor:
    return (x + 1e4) - 1e4


def test_a_leaf_that_eager_is_far_from_is_measured_after_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """What eager's error says of it is no measure: it was made, and thrown away."""
    offered = []

    def counted(name: str, *given: Any) -> Leaf:
        if name == "output":
            offered.append(wide.estimates["output"].offered)
        return judge_values(name, *given)

    monkeypatch.setattr("pytest_torchcompile.oracle.comparison.judge_values", counted)
    batch = Batch.of(torch.linspace(0.5, 1.5, 1000))
    eager = record(cancelled, None, batch, train=False)
    compiled = record(lambda x: cancelled(x + 2.0**-11), None, batch, train=False)
    wide = reference(cancelled, batch, train=False, draw=False)
    (output,) = (leaf for leaf in compare(eager, compiled, wide) if leaf.name == "output")
    assert offered[0] == 1
    assert output.rms
    assert output.draws == wide.draws + 1
