"""Leaves that eager's own error settles have the numbers of the long way, and nothing wrong is settled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Leaf, Limits, Recording, Reference, compare, problem, record, reference
from pytest_torchcompile.oracle.estimate import Estimate
from pytest_torchcompile.oracle.judging import judge_numbers, judge_values, new_leaf
from pytest_torchcompile.oracle.leaf_judge import LeafJudge
from pytest_torchcompile.oracle.leaf_state import LeafValues
from pytest_torchcompile.oracle.measurement import measure_alone
from pytest_torchcompile.oracle.noise_levels import _bin_medians, levels_of, levels_of_rows
from pytest_torchcompile.oracle.settling import settle

pytestmark = pytest.mark.needs_torch


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


def settled(leaf: Leaf, eager: torch.Tensor, compiled: torch.Tensor, expected: Reference) -> Leaf | None:
    settling = settle([LeafValues(leaf.name, leaf.kind, eager, compiled)], expected, Limits()).get(leaf.name)
    return settling.leaf if settling is not None and settling.is_settled else None


def both_ways(eager: torch.Tensor, compiled: torch.Tensor, expected: Reference) -> tuple[Leaf | None, Leaf]:
    leaf = new_leaf("output", "value", eager)
    return settled(leaf, eager, compiled, expected), judge_numbers(leaf, eager, compiled, expected, Limits())


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
    """What ``_bin_medians`` makes at once, row by row."""
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
    all_counts = []
    for case in range(60):
        count, width = (5, 40, 3000)[case % 3], (1, 6, 60)[case // 3 % 3]
        rows, columns = (torch.randint(0, width, (count,)) for _ in range(2))
        columns[0] = 0
        counts = torch.bincount(rows * 65 + columns, minlength=64 * 65).view(64, 65)
        all_counts.append(counts)
    medians = _bin_medians(torch.stack(all_counts))
    for case, counts in enumerate(all_counts):
        assert medians[case].tolist() == long_row_medians(counts.tolist()), case


def test_leaves_whose_noise_is_of_many_sizes_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tables of all other leaves in the group would be as wide as theirs."""
    tables = []

    def counted(counts: torch.Tensor) -> torch.Tensor:
        tables.append(counts.shape)
        return _bin_medians(counts)

    torch.manual_seed(0)
    values = torch.randn(64, 40, dtype=torch.float64)
    values[7, 1] = 1e-300
    noise = values * 2.0**-24 * torch.rand(64, 40, dtype=torch.float64)
    alone = [levels_of(*pair) for pair in zip(values, noise, strict=True)]
    monkeypatch.setattr("pytest_torchcompile.oracle.noise_levels._bin_medians", counted)
    together = measure_alone(levels_of_rows(values, noise))
    assert sum(rows for rows, _, _ in tables) == 64
    assert max(rows * bins for rows, _, bins in tables) < 10_000
    for one, other in zip(alone, together, strict=True):
        assert (one.top, one.typical, one.relative) == (other.top, other.typical, other.relative)
        assert torch.equal(one.by_bin, other.by_bin)


def test_the_default_device_is_the_users() -> None:
    """What is made for the measuring is on the CPU, or where the leaves are."""
    unsettled, wide = many_values(1000, 1, shorter=60)
    before = settle(unsettled, wide, Limits())
    torch.set_default_device("meta")
    try:
        after = settle(unsettled, wide, Limits())
    finally:
        torch.set_default_device(None)
    assert after == before


def cancelled(x: torch.Tensor) -> torch.Tensor:
    return (x + 1e4) - 1e4


def test_a_leaf_that_eager_is_far_from_is_measured_after_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """What eager's error says of it is no measure."""
    offered = []

    def counted(name: str, *given: Any) -> Leaf:
        if name == "output":
            offered.append(wide.estimates["output"].offered)
        return judge_values(name, *given)

    monkeypatch.setattr("pytest_torchcompile.oracle.leaf_judge.judge_values", counted)
    batch = Batch.of(torch.linspace(0.5, 1.5, 1000))
    eager = record(cancelled, None, batch, train=False)
    compiled = record(lambda x: cancelled(x + 2.0**-11), None, batch, train=False)
    wide = reference(cancelled, batch, train=False, draw=False)
    (output,) = (leaf for leaf in compare(eager, compiled, wide) if leaf.name == "output")
    assert 0 not in offered
    assert output.rms
    assert output.draws == wide.draws + 1 > 1


# --------------------------------------------------------------------------------------------------------- many at once
ROWS = 8


def many_values(
    length: int, draws: int, dtype: torch.dtype = torch.float32, shorter: int = 0
) -> tuple[list[LeafValues], Reference]:
    """Leaves of sizes from 2**-12 to 2**9, each rounded twice and drawn for some times.

    ``shorter``: by so much each is shorter than the one before.
    """
    torch.manual_seed(length)
    wide = Reference(record(lambda x: x, None, Batch.of(torch.zeros(1)), train=False))
    wide.kind, wide.estimates = "float64", {}
    unsettled = []
    eps = torch.finfo(dtype).eps
    for row in range(ROWS):
        name = f"leaf {row}"
        exact, size = torch.randn(length - row * shorter, dtype=torch.float64), 8.0 ** (row - ROWS // 2)
        eager, compiled, *drawn = (rounded_at_random(exact, eps) * size for _ in range(2 + draws))
        estimate = wide.estimates[name] = Estimate(exact * size)
        for value in drawn:
            estimate.add(value)
            estimate.offered += 1
        unsettled.append(LeafValues(name, "value", eager.to(dtype), compiled.to(dtype)))
    return unsettled, wide


@pytest.mark.parametrize("draws", [0, 1, 5])
@pytest.mark.parametrize(("length", "shorter"), [(1, 0), (7, 0), (1000, 0), (1000, 60), (65_536, 4000), (200_000, 0)])
def test_many_leaves_have_the_numbers_of_each_alone(length: int, shorter: int, draws: int) -> None:
    unsettled, wide = many_values(length, draws, shorter=shorter)
    found = settle(unsettled, wide, Limits())
    alone = {}
    for each in unsettled:
        alone |= settle([each], wide, Limits())
    count = 0
    for each in unsettled:
        name = each.name
        settling, by_itself = found[name], alone[name]
        long = judge_values(name, each.kind, each.eager, each.compiled, wide, Limits())
        assert settling.is_settled == by_itself.is_settled
        assert settling.expected_size == pytest.approx(by_itself.expected_size)
        estimate = wide.estimates[name]
        assert settling.is_near == estimate.is_near(each.eager)
        assert settling.is_calm == (estimate.is_steady or estimate.is_cancelled if draws else None)
        assert settling.apart == pytest.approx(float((each.eager - each.compiled).abs().amax()), rel=1e-5)
        if not settling.is_settled:
            continue
        count += 1
        for number in ("rms", "bias", "peak", "grain"):
            assert getattr(settling.leaf, number) == pytest.approx(getattr(long, number), rel=2e-3), (name, number)
        for text in ("index", "eager", "compiled", "expected", "draws", "against", "blind"):
            assert getattr(settling.leaf, text) == getattr(long, text), (name, text)
    # Of one element little is settled: zero may pass for it.
    assert count >= (ROWS if length > 7 else 0)


@pytest.mark.parametrize("draws", [0, 1, 5])
@pytest.mark.parametrize("fault", [break_one, shift_all, lose_one, nan_one])
@pytest.mark.parametrize("shorter", [0, 120])
def test_the_leaf_with_a_fault_is_not_settled_and_its_neighbours_are(fault, draws: int, shorter: int) -> None:
    unsettled, wide = many_values(3000, draws, shorter=shorter)
    before = settle(unsettled, wide, Limits())
    fault(unsettled[7].compiled)
    found = settle(unsettled, wide, Limits())
    wrong = found.pop("leaf 7", None)
    assert wrong is None or not wrong.is_settled
    for name, settling in found.items():
        assert settling == before[name]
        assert settling.is_settled


def test_jumps_that_a_draw_has_seen_count_as_noise() -> None:
    """As of a unit that noise turns on: by the largest draw of the element, as the long way has it."""
    unsettled, wide = many_values(3000, 4)
    chosen = unsettled[7]
    estimate = wide.estimates["leaf 7"]
    jumped = estimate.value.clone()
    jumped[5] += 0.01 * float(estimate.value.abs().amax())
    estimate.add(jumped)
    estimate.offered += 1
    chosen.compiled[5] = jumped[5].float()
    settling = settle([chosen], wide, Limits())["leaf 7"]
    leaf = settling.leaf
    long = judge_values(chosen.name, chosen.kind, chosen.eager, chosen.compiled, wide, Limits())
    assert settling.is_settled
    assert leaf.peak == pytest.approx(long.peak, rel=1e-3)
    # Means count it as one; here it counts as what it is.
    assert leaf.rms is not None
    assert long.rms is not None
    assert leaf.rms >= long.rms * 0.999


def test_eager_beside_what_is_expected_goes_the_long_way() -> None:
    """Where its error is more than what draws show, it is no draw."""
    unsettled, wide = many_values(3000, 2)
    moved = [replace(each, eager=each.eager * (1 + 2.0**-12)) for each in unsettled]
    assert not any(settling.is_settled for settling in settle(moved, wide, Limits()).values())
    # Nor is it told to be far off there: the long way may measure from eager.
    far = [replace(each, compiled=each.compiled * 1.5) for each in unsettled]
    assert all(settling.is_far_off for settling in settle(far, wide, Limits()).values())
    moved_and_far = [replace(each, eager=each.eager * (1 + 2.0**-12)) for each in far]
    found = settle(moved_and_far, wide, Limits()).values()
    assert all(settling.leaf.far_off for settling in found)
    assert not any(settling.is_far_off for settling in found)


def test_leaves_of_several_lengths_and_dtypes() -> None:
    unsettled, wide = many_values(500, 0)
    others, more = many_values(300, 0, torch.bfloat16)
    renamed = []
    for each in others:
        other = replace(each, name=f"other {each.name}")
        wide.estimates[other.name] = more.estimates[each.name]
        renamed.append(other)
    whole = LeafValues("whole", "value", torch.arange(3), torch.arange(3) + 1)
    wide.estimates["whole"] = Estimate(torch.arange(3))
    found = settle([*unsettled, whole, *renamed], wide, Limits())
    assert len(found) == 2 * ROWS
    assert {settling.leaf.draws for settling in found.values()} == {1}


def test_what_one_draw_leaves_in_place_a_further_one_may_move() -> None:
    """Then a second eager run is asked again."""
    unsettled, wide = many_values(300, 1)
    chosen, name = unsettled[3], unsettled[3].name
    judge = LeafJudge(wide, Limits(), Recording())
    judge.first_leaf(LeafValues(name, "value", chosen.eager, chosen.compiled))
    judge._settle([name])
    assert judge._states[name].is_calm
    estimate = wide.estimates[name]
    jumped = estimate.value.clone()
    jumped[5] += 0.1 * float(jumped.abs().amax())
    estimate.add(jumped)
    estimate.offered += 1
    judge._settle([name])
    assert not judge._states[name].is_calm


class Complex(torch.nn.Module):
    """All parameters are complex, and the gradient of the bias is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 16, dtype=torch.complex64))
        self.bias = torch.nn.Parameter(torch.randn(16, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ self.weight + self.bias
        hidden = hidden - hidden.mean(0)
        return hidden * hidden.abs()


def test_complex_gradients_of_noise() -> None:
    torch.manual_seed(0)
    model, batch = Complex(), Batch.of(torch.randn(64, 8, dtype=torch.complex64))
    eager = record(model, model, batch)
    moved = {name: gradient * (1 + 2.0**-23) for name, gradient in eager.gradients.items() if gradient is not None}
    leaves = compare(eager, replace(eager, gradients=moved), reference(model, batch, draw=False))
    found = {leaf.name: leaf for leaf in leaves}
    assert not any(map(problem, leaves))
    assert not found["gradient of bias"].decided
    assert found["gradient of weight"].decided
