"""The file that fails as a cell did, as text."""

from __future__ import annotations

import ast

import pytest

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.observation import Judgement, Observation
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.report.reproduction import file_name, is_reproducible, reproduction_text

MODELS = """
def net(hidden, device): ...
def batch(B, hidden): ...
def other(B): ...
"""


@pytest.fixture
def written(tmp_path):
    (tmp_path / "models.py").write_text(MODELS)

    def write(inputs="models:batch", failed=None, said=None, **axes):
        cell = Cell(model="net", user=(("hidden", 8),), **axes)
        entry = ModelEntry("net", "models:net", inputs, "models:Losses.mse", {"B": Dim(buckets=(4, 8))}, "m.yaml:4:3",
                           **said or {})
        file = tmp_path / ".compile-matrix" / "repro" / file_name(cell)
        text = reproduction_text(cell, entry, tmp_path, file, failed or {"equivalence": "output: wrong"}, {"steps": 4})
        ast.parse(text)
        return text

    return write


def test_the_cell_in_plain_python(written):
    """Factory, axes, sizes, settings and loss are there, and nothing of the matrix."""
    text = written(backend="aot_eager", dynamic="static", phase="inference")
    assert "import models\n" in text
    assert "(Path(__file__).parent / '../..').resolve()" in text
    assert "\nFACTORY = models.net\n" in text
    assert "\nLOSS = models.Losses.mse\n" in text
    assert "FACTORY(hidden=8, device='cpu').to(DEVICE, DTYPE).eval()" in text
    assert "    {'hidden': 8, 'B': 4},\n    {'hidden': 8, 'B': 8},\n" in text
    assert "CompileConfig(backend='aot_eager', mode='default', dynamic=False)" in text
    assert "loss=LOSS,\n        train=False,\n" in text
    assert "steps" not in text
    assert "wrapper" not in text.partition('"""\n\n')[2]


def test_what_the_functions_take(written):
    """An axis is handed to the inputs only if they have a parameter of that name."""
    assert "    {'B': 4},\n" in written("models:other")


def test_numbers_that_python_has_no_name_for(written):
    """``.inf`` and ``.nan`` of the matrix, also inside of a list or a table, are what they were when it is run."""
    told = {"limit": float("inf"), "range": [float("-inf"), 1.5], "fill": {"value": float("nan")}}
    text = written("models:other", said={"arguments": {"factory": told, "inputs": {"top": float("inf")}}})
    call = text.partition("FACTORY(")[2].partition(").to(")[0]
    taken = eval(f"dict({call})")
    assert (taken["limit"], taken["range"]) == (float("inf"), [float("-inf"), 1.5])
    assert taken["fill"]["value"] != taken["fill"]["value"]
    assert "    {'top': float('inf'), 'B': 4},\n" in text


def test_training_steps_and_wrappers(written):
    """As many steps as the cell made, if that is what failed; the wrapper around the model."""
    text = written(failed={"training_steps": "step 2: output: wrong"}, wrapper="autocast", dtype="bfloat16")
    assert "train=True, steps=4," in text
    assert "    wrapper = load('autocast', ROOT, " in text
    assert "DEVICE, DTYPE = torch.device('cpu'), torch.bfloat16" in text
    assert "wrap=lambda model, settings: wrapper.wrap(model, settings, cell)," in text


def test_texts_that_could_end_a_string(written):
    """Quotes and backslashes of an error stay text."""
    text = written(failed={"compiles": 'raised """ at C:\\x'})
    assert "raised ''' at C:\\x" in ast.get_docstring(ast.parse(text))


def test_names_that_python_can_import():
    """Whatever an id is made of."""
    assert file_name(Cell(model="gpt.v2+x", backend="eager")) == "test_gpt_v2_x_eager_default_auto_none.py"


RAN = {"graphs": [{"runs": 1}], "error": None}


@pytest.mark.parametrize(("check", "verdict", "compiles", "expected"), [
    ("equivalence", "fail", RAN, True), ("gradients", "fail", RAN, True), ("aliasing", "fail", RAN, True),
    ("compiles", "fail", {**RAN, "error": {"type": "KeyError"}}, True), ("compiles", "fail", {"graphs": []}, True),
    ("compiles", "fail", RAN, False), ("recompiles", "fail", RAN, False), ("recompiles", "crash", {}, True),
    ("equivalence", "pass", RAN, False), ("equivalence", "error", RAN, False), ("compiles", "xfail", {}, False),
])  # fmt: skip
def test_what_compare_would_find_too(check, verdict, compiles, expected):
    """Not a graph break, a recompile, or too little coverage."""
    assert is_reproducible(check, Judgement(verdict), Observation("c", {"compiles": compiles})) is expected


def test_what_the_matrix_says_of_the_model(written):
    """Arguments are in the calls; modules that keep their modes are left alone."""
    text = written("models:other", said={"arguments": {"factory": {"name": "bert"}, "inputs": {"kind": 1}},
                                         "mode_of_modules": "keep"})
    assert "FACTORY(hidden=8, device='cpu', name='bert').to(DEVICE, DTYPE)\n" in text
    assert "    {'kind': 1, 'B': 4},\n" in text
    assert ".train()" not in text


def test_the_toolkit_with_its_passes(written):
    """As the axes have it."""
    text = written(backend="toolkit", passes="mine:fold", compiler="eager")
    settings = "passes='mine:fold', capture='joint', compiler='eager', decompositions='none', root=ROOT"
    assert f"CompileConfig(backend=Toolkit({settings}), dynamic=None, fullgraph=True)" in text


@pytest.mark.parametrize("axes", [{}, {"phase": "inference", "dtype": "bfloat16"}])
def test_nothing_of_ours_outside_the_test_that_compares(written, axes):
    """So a file in an issue runs where this package is not."""
    tree = ast.parse(written(**axes))
    for statement in tree.body:
        if getattr(statement, "name", "") != "test_net":
            assert "pytest_torchcompile" not in ast.unparse(statement).replace(ast.get_docstring(tree), "")


@pytest.mark.parametrize("axes", [{"wrapper": "autocast"}, {"backend": "toolkit", "passes": "mine:fold"}])
def test_what_torch_alone_does_not_have(written, axes):
    """Wrappers and the toolkit are ours, so such a file has one test."""
    assert "with_torch_alone" not in written(**axes)
