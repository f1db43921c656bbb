"""Comparisons of an earlier run: taken for the same values and code, and made anew after every edit that matters."""

from __future__ import annotations

import itertools

import pytest

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.observation import Job
from pytest_torchcompile.plan.models import ModelEntry

pytestmark = pytest.mark.needs_torch

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(6, 8)
        self.calls = 0
        self.table = torch.tensor([1.0, 2.0])

    def forward(self, x):
        y = torch.tanh(self.up(x))
        return y * 2 + self.table.sum()

def net():
    return Net()

def batch(B):
    return torch.randn(B, 6)

def loss(output, batch):
    return output.square().mean()
"""
_numbers = itertools.count()


def run(folder, text, comparisons, checks=("equivalence", "gradients", "training_steps")):
    """One run of a cell of this model: the sections of its checks, and which comparisons were taken and made."""
    from pytest_torchcompile.run.runner import run_cell

    # A module of its own for each run: nothing of an earlier one is imported.
    name = f"known_model_{next(_numbers)}"
    (folder / f"{name}.py").write_text(text)
    entry = ModelEntry("net", f"{name}:net", f"{name}:batch", f"{name}:loss", where=f"{folder}/a.yaml:1:1",
                       dims={"B": Dim(buckets=(4, 7))})
    cell = Cell(model="net", backend="aot_eager")
    seen, _ = run_cell(Job(cell.to_dict(), entry.to_dict(), str(folder), checks, comparisons=comparisons))
    assert seen["failure"] is None
    return {check: seen["sections"][check] for check in checks}, seen.get("comparisons")


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The sections and comparisons of the model as it was at first."""
    return run(tmp_path_factory.mktemp("first"), MODEL, {})


def test_all_are_made_at_first(first):
    """Two sizes in three passes and a training. The last call of the third pass is the very last of the first."""
    _, comparisons = first
    assert comparisons["taken"] == []
    assert len(comparisons["made"]) == 6


@pytest.mark.parametrize("edit", [
    ("y = torch", "# the same\n        y = torch"), ("y = torch.tanh(self.up(x))", "z = self.up(x); y = z.tanh()"),
    ("", "def unused():\n    return 1\n"),
], ids=["a comment", "another writing", "another function"])
def test_taken_after_an_edit_that_changes_nothing(first, edit, tmp_path):
    """All of them, and the sections are the same."""
    sections, comparisons = run(tmp_path, MODEL.replace(*edit) if edit[0] else MODEL + edit[1], first[1]["made"])
    assert len(comparisons["taken"]) == 7
    assert not comparisons["made"]
    assert sections == first[0]


EDITS = {
    "another operator": ("torch.tanh(self", "torch.sin(self"),
    "another initialisation": ("self.calls = 0", "torch.nn.init.ones_(self.up.weight); self.calls = 0"),
    "another batch": ("torch.randn(B, 6)", "torch.randn(B, 6) * 2"),
    "another loss": ("output.square()", "output.abs()"),
    "a tensor that is no parameter": ("[1.0, 2.0]", "[1.0, 3.0]"),
    "eager alone": ("return y", "if not torch.compiler.is_compiling():\n            y = y * 1.01\n        return y"),
    "compiled alone": ("return y", "if torch.compiler.is_compiling():\n            y = y * 1.01\n        return y"),
    "the same numbers by other operators": ("y * 2", "(y + y)"),
    "another dtype inside": ("self.up(x)", "self.up(x).double().float()"),
    "a setting of torch": ("import torch\n", "import torch\ntorch._dynamo.config.cache_size_limit = 99\n"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_made_anew_after_an_edit_that_matters(first, edit, tmp_path):
    """None is taken, whether the edit shows in the code or in the values alone."""
    assert edit[0] in MODEL
    _, comparisons = run(tmp_path, MODEL.replace(*edit), first[1]["made"])
    assert comparisons["taken"] == []


def test_an_edit_that_shows_in_a_later_call(first, tmp_path):
    """What comes before is taken; the call itself and the passes with a training are compared."""
    text = MODEL.replace("        y = torch", "        self.calls += x.shape[0] == 7\n        y = torch")
    text = text.replace("return y", "if x.shape[0] == 7:\n            y = y * 1.5\n        return y")
    _, comparisons = run(tmp_path, text, first[1]["made"])
    assert len(comparisons["taken"]) < 4
    assert comparisons["made"]


def test_a_fault_is_found_whatever_is_known(first, tmp_path):
    """Compiled code that differs from eager has values of its own, so that nothing hides it."""
    edit = EDITS["compiled alone"]
    sections, _ = run(tmp_path, MODEL.replace(*edit), first[1]["made"])
    assert sections["equivalence"] != first[0]["equivalence"]
    from pytest_torchcompile import checks

    assert list(checks.load("equivalence").judge(sections["equivalence"], {}))


def test_nothing_is_told_unless_asked(tmp_path):
    """A run that reuses nothing keeps nothing."""
    assert run(tmp_path, MODEL, None)[1] is None


@pytest.mark.parametrize(("factor", "is_taken"), [(1.0, True), (1.5, False)], ids=["the same", "other in float64"])
def test_the_float64_run_must_be_the_same(factor, is_taken):
    """It is asked for where eager and compiled differ by rounding. What a model does in float64 alone shows there."""
    import torch

    from pytest_torchcompile.oracle.expected import Reference
    from pytest_torchcompile.oracle.known_comparisons import Basis, KnownComparisons
    from pytest_torchcompile.oracle.recording import Item, Recording
    from pytest_torchcompile.oracle.tape import Tape

    def recording(value):
        return Recording(outputs={"output": Item.of(value)}, structure="*")

    values = torch.linspace(1, 2, 16)
    eager, compiled = recording(values), recording(values * (1 + 1e-7))
    basis = Basis("call 1", [], torch.nn.Linear(2, 2), Tape(), (values,))
    first = KnownComparisons({})
    leaves = first.compare(eager, compiled, lambda: Reference(recording(values.double())), basis)
    assert len(first.made) == 1
    wide = values.double() * factor
    later = KnownComparisons(first.made)
    again = later.compare(eager, compiled, lambda: Reference(recording(wide)), basis)
    assert bool(later.taken) is is_taken
    assert (again == leaves) is is_taken
