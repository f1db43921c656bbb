"""What the command line names of a matrix: its nearest cell or check is told, whoever looks the file up."""

from __future__ import annotations

import pytest

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.plugin.outside import Named, named_parts

CELL = "net-eager-default-auto-none"


@pytest.fixture
def matrix(tmp_path):
    """A matrix below pytest's root folder, so that pytest looks it up."""
    (tmp_path / "models.py").write_text("def net(): ...\ndef batch(): ...\n")
    (tmp_path / "m.yaml").write_text("version: 1\nmodels: {net: {factory: 'models:net', inputs: 'models:batch'}}\n"
                                     "axes: {backend: [eager]}\n")
    return load_matrix(tmp_path / "m.yaml")


@pytest.mark.parametrize(("typed", "text"), [
    ("m.yaml::net-eagr-default-auto-none", f"not found: m.yaml::net-eagr-default-auto-none: the matrix has no cell "
                                           f"'net-eagr-default-auto-none'; did you mean '{CELL}'?"),
    (f"m.yaml::{CELL}::compile", f"not found: m.yaml::{CELL}::compile: the matrix has no check 'compile'; did you "
                                 "mean 'compiles'?"),
    (f"m.yaml::{CELL}::compiles::x", f"not found: m.yaml::{CELL}::compiles::x: expected MATRIX::CELL::CHECK"),
])
def test_a_typo_has_its_nearest_name(matrix, tmp_path, typed, text):
    with pytest.raises(UsageError) as raised:
        named_parts([typed], matrix, "m.yaml", tmp_path, tmp_path)
    assert str(raised.value).startswith(text)


def test_cells_by_an_axis_of_ones_own(repo):
    """`-k` takes no "=", and the ids have one; they stay as reports know them."""
    repo.matrix("version: 1\naxes: {backend: [eager], hidden: [8, 16]}\nchecks: [compiles]\n"
                "models: {net: {factory: 'models:net', inputs: 'models:batch', dims: {B: 4}}}\n")
    result = repo.run("--collect-only", "-q", "-k", "hidden-16")
    assert [line for line in result.outlines if "::" in line] == [
        "matrix/default.yaml::net-eager-default-auto-none-hidden=16::compiles"]


@pytest.mark.parametrize("typed", ["m.yaml", f"m.yaml::{CELL}", f"m.yaml::{CELL}::compiles"])
def test_what_is_there_is_left_to_pytest(matrix, tmp_path, typed):
    assert named_parts([typed, "tests/a.py::x"], matrix, "m.yaml", tmp_path, tmp_path) == ([typed, "tests/a.py::x"],
                                                                                           Named())
