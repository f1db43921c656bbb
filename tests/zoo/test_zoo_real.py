"""The real architectures: each is in the matrix, and what a machine lacks is a skip with its reason."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from pytest_torchcompile.errors import Unavailable, UsageError
from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.zoo import real as zoo_real

pytestmark = pytest.mark.needs_torch
TABLES = (zoo_real.TRANSFORMERS, zoo_real.DIFFUSERS, zoo_real.TIMM, zoo_real.TORCHVISION)
REAL = load_matrix(Path(__file__).parents[2] / "matrix" / "real.yaml")


def test_the_matrix_has_every_model_of_the_tables():
    """And each by its own name."""
    assert set(REAL.models) == {name for table in TABLES for name in table}
    assert all(entry.arguments_of("factory") == {"name": name} for name, entry in REAL.models.items())
    assert len(zoo_real.TRANSFORMERS) + len(zoo_real.DIFFUSERS) >= 40


@pytest.mark.parametrize("entry", REAL.models.values(), ids=lambda entry: entry.name)
def test_three_sizes(entry):
    """One to compile, one that recompiles, one that must not."""
    listed = [dim.listed for dim in entry.dims.values() if dim.listed]
    assert listed
    assert all(len(set(sizes)) == 3 for sizes in listed)


def test_the_dozen_of_every_run_is_expected_to_pass():
    """One model of each kind, none that is known to fail, and two of them with Inductor too."""
    tox = (Path(__file__).parents[2] / "tox.ini").read_text()
    with_aot_eager, with_inductor = (
        re.findall(r"compile_cell\(model='(\w+)'\)", part) for part in tox.split("compile_cell(backend='")[1:3])
    assert len(with_aot_eager) == len(set(with_aot_eager)) == 12
    assert len(with_inductor) == 2
    assert set(with_inductor) < set(with_aot_eager)
    outcomes = {(planned.cell.model, planned.cell.backend): planned.outcome for planned in REAL.cells
                if planned.cell.phase == "inference"}
    assert [outcomes[name, "aot_eager"] for name in with_aot_eager] == ["run"] * 12
    assert [outcomes[name, "inductor"] for name in with_inductor] == ["run"] * 2


@pytest.mark.parametrize(("name", "library", "extra"), [
    ("bert", "transformers", "real"), ("unet", "diffusers", "real"),
    ("timm_vit", "timm", "real-vision"), ("tv_vit", "torchvision", "real-vision")])
def test_a_missing_library_is_a_skip(monkeypatch, name, library, extra):
    """With what to install."""
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(Unavailable, match=rf"{library} cannot be imported .*pytest-torchcompile\[{extra}\]"):
        zoo_real.build(name)


def test_a_library_without_the_model_is_a_skip(monkeypatch):
    """It is too old, or has dropped it."""
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    with pytest.raises(Unavailable, match="transformers here does not give BertModel"):
        zoo_real.build("bert")


def test_an_unknown_model_is_a_mistake():
    """With the nearest name."""
    with pytest.raises(UsageError, match=r"there is no model 'brt'.*did you mean 'bert'"):
        zoo_real.build("brt")
