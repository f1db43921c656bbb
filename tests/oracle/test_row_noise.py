"""Gradients of weights, whose rows and columns differ in size, are settled without a draw; faults in them are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Leaf, Limits, Reference, problem, record
from pytest_torchcompile.oracle.judging import judge_numbers
from pytest_torchcompile.oracle.leaf_state import LeafValues
from pytest_torchcompile.oracle.measurement import measure_alone
from pytest_torchcompile.oracle.noise_levels import levels_of
from pytest_torchcompile.oracle.row_noise import _even_matrix, worst_by_rows
from pytest_torchcompile.oracle.settling import settle

pytestmark = pytest.mark.needs_torch
ROWS, COLUMNS = 600, 500
# Of the expected values; the noise of an element is about its row's size times its column's, in roundings.
SIZE = 64.0


def loud_rows() -> torch.Tensor:
    """The noise of each element: one row of sixty has twelve times as much."""
    torch.manual_seed(0)
    rows = torch.ones(ROWS, 1, dtype=torch.float64)
    rows[::60] = 12.0
    columns = torch.rand(1, COLUMNS, dtype=torch.float64).add(0.5)
    return rows * columns * 2.0**-20


def loud_blocks() -> torch.Tensor:
    """As of experts: each is loud in its own rows and columns. Where rows of one meet another's columns it is quiet."""
    noise = torch.full((ROWS, COLUMNS), 2.0**-20, dtype=torch.float64)
    noise[: ROWS // 2, : COLUMNS // 2] *= 1000
    noise[ROWS // 2 :, COLUMNS // 2 :] *= 1000
    return noise


def loud_corners() -> torch.Tensor:
    """Two small blocks are loud. Where the rows of one meet the columns of the other nothing is."""
    noise = torch.full((ROWS, COLUMNS), 2.0**-20, dtype=torch.float64)
    noise[:8, :4] *= 1000
    noise[8:16, 4:8] *= 1000
    return noise


def gradient(noise: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, Reference]:
    """Eager's and the compiled gradient: elements of one magnitude with very different noise."""
    if noise is None:
        noise = loud_rows()
    torch.manual_seed(0)
    exact = SIZE * torch.randn(ROWS, COLUMNS, dtype=torch.float64)
    eager, compiled = (exact + noise * torch.randn_like(exact) for _ in range(2))
    expected = Reference(record(lambda x: x, None, Batch.of(exact), train=False))
    expected.kind = "float64"
    return eager.float(), compiled.float(), expected


def settled(
    eager: torch.Tensor, compiled: torch.Tensor, expected: Reference, kind: str = "gradient"
) -> Leaf | None:
    leaf = Leaf("output", kind, numel=eager.numel(), dtype="float32")
    settling = settle([LeafValues(leaf.name, leaf.kind, eager, compiled)], expected, Limits())["output"]
    return settling.leaf if settling.is_settled else None


def test_loud_rows_are_no_fault() -> None:
    eager, compiled, expected = gradient()
    leaf = Leaf("output", "value", numel=eager.numel(), dtype="float32")
    by_magnitude = judge_numbers(leaf, eager, compiled, expected, Limits())
    assert by_magnitude.peak is not None
    assert by_magnitude.peak > Limits().peak
    found = settled(eager, compiled, expected)
    assert found is not None
    assert problem(found) is None
    assert found.peak is not None
    assert found.peak < 8
    assert found.index is not None
    assert found.compiled == compiled[found.index].item()


@pytest.mark.parametrize("row", ["quiet", "loud"])
def test_a_wrong_element_is_not_settled(row: str) -> None:
    """Not even in a loud row, once it is off by more than rounding makes there."""
    eager, compiled, expected = gradient()
    exact = expected.estimates["output"].value
    of_rows = (eager.double() - exact).square().mean(1).sqrt()
    number = int(of_rows.argmin() if row == "quiet" else of_rows.argmax())
    column = int((eager.double() - exact).square().mean(0).argmin())
    noise = of_rows[number] * (eager.double() - exact).square().mean(0)[column].sqrt()
    noise /= (eager.double() - exact).square().mean().sqrt()
    compiled[number, column] = exact[number, column] + 40 * max(noise, exact[number, column].abs() * 2.0**-24)
    assert settled(eager, compiled, expected) is None


@pytest.mark.parametrize(("noise", "row", "column"), [(loud_blocks, 3, 400), (loud_corners, 2, 6)],
                         ids=["experts", "corners"])  # fmt: skip
@pytest.mark.parametrize("times", [40, 300])
def test_rows_and_columns_that_tell_nothing(noise: Callable[[], torch.Tensor], row: int, column: int,
                                            times: float) -> None:
    """Their product is a thousand times the noise of the element, as eager's own errors there show."""
    eager, compiled, expected = gradient(noise())
    exact = expected.estimates["output"].value
    compiled[row, column] = exact[row, column] + times * max(noise()[row, column], SIZE * 2.0**-24)
    assert settled(eager, compiled, expected) is None


def test_more_than_256_times_the_level_is_not_believed() -> None:
    noise = loud_rows()
    noise[::60] *= 400
    eager, compiled, expected = gradient(noise)
    levels = levels_of(*(tensor.flatten() for tensor in (expected.estimates["output"].value, noise)))
    found = measure_alone(worst_by_rows(eager, compiled, expected.estimates["output"].value, levels))
    assert found is not None
    assert found[0] > 30


def test_outputs_are_not_known_to_be_products() -> None:
    assert settled(*gradient(), kind="value") is None


@pytest.mark.parametrize("piece", [COLUMNS, 7 * COLUMNS + 3, 1 << 20])
def test_rows_in_pieces(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    eager, compiled, expected = gradient()
    exact = expected.estimates["output"].value
    levels = levels_of(exact.flatten(), (eager.double() - exact).flatten())
    at_once = measure_alone(worst_by_rows(eager, compiled, exact, levels))
    monkeypatch.setattr("pytest_torchcompile.oracle.row_noise._PIECE", piece)
    in_pieces = measure_alone(worst_by_rows(eager, compiled, exact, levels))
    assert at_once is not None
    assert in_pieces is not None
    assert in_pieces[0] == pytest.approx(at_once[0])
    assert in_pieces[1] == at_once[1]


@pytest.mark.parametrize(("shape", "matrix"), [
    ((64, 64, 3, 3), (64, 576)),
    ((4, 128, 4096), (512, 4096)),
    ((32, 16), (32, 16)),
    ((512, 3), None),
    ((512,), None),
    ((), None),
])  # fmt: skip
def test_axes_are_parted_evenly(shape: tuple[int, ...], matrix: tuple[int, int] | None) -> None:
    assert _even_matrix(torch.Size(shape)) == matrix


def test_no_error_of_eager_says_nothing() -> None:
    exact = torch.ones(32, 32, dtype=torch.float64)
    levels = levels_of(exact.flatten(), torch.zeros(1024, dtype=torch.float64))
    assert measure_alone(worst_by_rows(exact.float(), exact.float(), exact, levels)) is None
