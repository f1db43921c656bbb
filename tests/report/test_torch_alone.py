"""The test of a reproduction that needs torch and the user's module alone, run as it is written."""

from __future__ import annotations

import sys

import pytest
from torch._inductor import config as inductor

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.report.reproduction import reproduction_text

pytestmark = pytest.mark.needs_torch

LONE_MODELS = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer, self.drop = torch.nn.Linear(width, width), torch.nn.Dropout(0.5)
    def forward(self, x, others=()):
        y = self.drop(self.layer(x).relu())
        return {"hidden": [y], "rest": (OTHER, None)}

def backend(graph, inputs):
    return lambda *args: [result * 1.5 if isinstance(result, torch.Tensor) else result for result in graph(*args)]

def loss(output, batch):
    return output["hidden"][0].square().mean()

def one(B): return torch.randn(B, 8)
def keywords(B): return {"x": torch.randn(B, 8)}
def both(B): return (torch.randn(B, 8),), {"others": [torch.ones(1)]}
"""
RIGHT = "y.sum()"
WRONG = "y.sum() + 1 if torch.compiler.is_compiling() else y.sum()"


ODD_MODELS = """
import dataclasses, random
import torch

@dataclasses.dataclass(slots=True)
class Slots:
    y: torch.Tensor

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x):
        y = self.layer(x["x"] if isinstance(x, dict) else x)
        return RESULT

def rows(B): return torch.randn(B, 8)
def one_dict(B): return ({"x": torch.randn(B, 8)},)
def distance(output, batch): return (output - batch["x"]).square().mean()
"""


def functions_of(cell, entry, folder):
    """What the file that is written for a cell defines."""
    text = reproduction_text(cell, entry, folder, folder / "test_it.py", {"equivalence": "wrong"}, {})
    functions = {"__file__": str(folder / "test_it.py")}
    exec(compile(text, "test_it.py", "exec"), functions)
    return functions


@pytest.fixture
def lone_tests(tmp_path, monkeypatch):
    """Writes the file for a cell and gives its functions, as a Python without this package would have them."""
    def write(other, inputs="one", loss="", **axes):
        name = f"lone_{len(list(tmp_path.iterdir()))}"
        (tmp_path / f"{name}.py").write_text(LONE_MODELS.replace("OTHER", other))
        cell = Cell(model="net", user=(("width", 8),), **{"backend": "eager", **axes})
        loss = loss and f"{name}:{loss}"
        entry = ModelEntry("net", f"{name}:Net", f"{name}:{inputs}", loss, {"B": Dim(buckets=(4, 6))})
        return functions_of(cell, entry, tmp_path)

    monkeypatch.setattr("sys.path", [*sys.path])
    with inductor.patch(fallback_random=False):
        yield write


@pytest.mark.parametrize("phase", ["inference", "training"])
@pytest.mark.parametrize("inputs", ["one", "keywords", "both"])
def test_torch_alone_tells_right_from_wrong(lone_tests, capsys, inputs, phase):
    """Whatever the inputs function gives; draws of dropout are the same ones."""
    lone_tests(RIGHT, inputs, phase=phase)["test_net_with_torch_alone"]()
    capsys.readouterr()
    with pytest.raises(AssertionError, match="are not close"):
        lone_tests(WRONG, inputs, phase=phase)["test_net_with_torch_alone"]()
    # The outputs come first: gradients differ too, since the output is part of the loss.
    assert capsys.readouterr().out.splitlines()[-1] == "output.rest[0] at {'B': 4}"


@pytest.mark.parametrize("loss", ["", "loss"])
def test_torch_alone_sees_gradients(lone_tests, capsys, loss):
    """The user's loss, or the mean square of all outputs."""
    functions = lone_tests(RIGHT, loss=loss, phase="training")
    functions["test_net_with_torch_alone"]()
    run = functions["run"]

    def run_wrong(model, batch, seed):
        results = run(model, batch, seed)
        if hasattr(model, "_orig_mod"):
            results["gradient of layer.weight"][0, 0] += 1
        return results

    functions["run"] = run_wrong
    with pytest.raises(AssertionError, match="are not close"):
        functions["test_net_with_torch_alone"]()
    assert capsys.readouterr().out.splitlines()[-1] == "gradient of layer.weight at {'B': 4}"


def test_torch_alone_takes_a_backend_of_the_project(lone_tests):
    """A target as the axis has it is a function of its module there."""
    functions = lone_tests(RIGHT, phase="inference", backend="lone_0:backend")
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        functions["test_net_with_torch_alone"]()


def test_the_other_test_is_skipped_without_this_package(lone_tests, monkeypatch):
    """Whoever has torch alone sees one result, and it is that of his test."""
    functions = lone_tests(RIGHT, phase="inference")
    monkeypatch.setitem(sys.modules, "pytest_torchcompile", None)
    with pytest.raises(pytest.skip.Exception, match="could not import 'pytest_torchcompile'"):
        functions["test_net"]()


NAMES_OF_FILE = ("model", "run", "call", "batch")


@pytest.fixture
def odd_tests(tmp_path, monkeypatch):
    """Writes the file for a training in the module ``name``, and gives its functions."""
    def write(result, name="odd", inputs="rows", loss=None):
        (tmp_path / f"{name}.py").write_text(ODD_MODELS.replace("RESULT", result))
        entry = ModelEntry("net", f"{name}:Net", f"{name}:{inputs}", loss and f"{name}:{loss}",
                           {"B": Dim(buckets=(4,))})
        cell = Cell(model="net", backend="eager", phase="training")
        return functions_of(cell, entry, tmp_path)

    monkeypatch.setattr("sys.path", [*sys.path])
    with inductor.patch(fallback_random=False):
        yield write
    for name in NAMES_OF_FILE:
        sys.modules.pop(name, None)
    sys.modules.pop("odd", None)


@pytest.mark.filterwarnings("ignore:")  # Dynamo warns of Python's draws
@pytest.mark.parametrize("result", ["y.argmax(-1)", "y.detach()", "Slots(y)", "y * random.random()"])
def test_torch_alone_passes_for_right_models(odd_tests, result):
    """No gradients, outputs without a ``__dict__``, draws of Python: eager on both sides."""
    odd_tests(result)["test_net_with_torch_alone"]()


@pytest.mark.parametrize("name", NAMES_OF_FILE)
def test_a_module_may_have_the_name_of_a_variable(odd_tests, name):
    """Both tests of a file call what they took from it before their own names were there."""
    functions = odd_tests("y", name)
    functions["test_net_with_torch_alone"]()
    functions["test_net"]()


def test_torch_alone_gives_the_loss_the_dict_that_is_the_only_argument(odd_tests):
    odd_tests("y", inputs="one_dict", loss="distance")["test_net_with_torch_alone"]()


@pytest.mark.parametrize("beside", ["x[:0]", "y.masked_fill(y > 0, -float('inf'))"], ids=["empty", "masked"])
def test_torch_alone_has_gradients_beside_outputs_without_a_mean(odd_tests, beside):
    """One mean that is NaN would make all of them NaN, and so equal."""
    functions = odd_tests(f"(y, {beside})")
    model = functions["FACTORY"]()
    results = functions["run"](model, functions["INPUTS"](4), 0)
    assert results["gradient of layer.weight"].isfinite().all()
