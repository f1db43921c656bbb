"""Planted faults: the numbers are right, their form is not."""



from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from pytest_torchcompile.backends.toolkit import Toolkit, drop
from pytest_torchcompile.faults import programs as p
from pytest_torchcompile.faults.case import Case, Program
from pytest_torchcompile.faults.spoilers import output, returned, traced

__all__ = ["FORM"]

PERCEPTRON = Program(p.Perceptron, p.rows)
NAMED = Program(p.Named, p.rows)
VIEWS = Program(p.Views, p.rows)
INTEGERS = Program(p.Integers, p.integers)
IMAGES = Program(p.Convolution, p.images, ({"B": 4},))


class _Answer(NamedTuple):
    y: Tensor
    z: Tensor


def lying(change: Any) -> Program:
    """A model that returns something else while it is compiled, as ``torch.compiler.is_compiling()`` lets it."""

    class Lying(p.Named):
        def forward(self, x: Tensor) -> Any:
            found = super().forward(x)
            return change(found) if torch.compiler.is_compiling() else found

    return Program(Lying, p.rows)


def _without_autocast(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return torch.nn.functional.linear(x, w, b)


def _renamed(found: dict[str, Any]) -> dict[str, Any]:
    return {("why" if key == "y" else key): value for key, value in found.items()}


FORM: Final = (
    Case("float64 returned", "a float32 output", PERCEPTRON, "dtype", returned(lambda y: y.double())),
    Case("float32 returned", "a bfloat16 output", Program(p.Perceptron, p.rows, dtype=torch.bfloat16), "dtype",
         returned(lambda y: y.float())),
    Case("autocast lost", "float32 where autocast gives bfloat16", Program(p.Casts, p.rows), "dtype",
         traced("linear", _without_autocast, nth=0), "output[0]"),
    Case("int32 returned", "an index", INTEGERS, "dtype", traced("argmax", lambda x, dim: x.argmax(dim).int()), "best",
         alone=True),
    Case("numbers for truth values", "a comparison", INTEGERS, "dtype", traced("lt", lambda a, b: (a < b).byte()),
         "less", alone=True),
    Case("one dimension more", "a leading 1", PERCEPTRON, "shape", returned(lambda y: y[None])),
    Case("broadcast", "(B, 6) became (B, B, 6)", PERCEPTRON, "shape", returned(lambda y: y.expand(len(y), *y.shape))),
    Case("one row less", "the last row is missing", PERCEPTRON, "shape", returned(lambda y: y[:-1])),
    Case("columns first", "a matrix in the memory order of its transpose", PERCEPTRON, "stride",
         output(lambda y: y.t().contiguous().t()), alone=True),
    Case("channels_last lost", "images in contiguous memory", IMAGES, "stride", traced(
        "max_pool2d", lambda x, k, *_, **__: torch.max_pool2d(x, k).contiguous()), alone=True),
    Case("expanded output materialised", "a stride of 0 became memory", VIEWS, "stride",
         traced("expand", lambda y, *sizes: y.expand(*sizes).contiguous()), "wide"),
    Case("detached output", "one of two outputs is cut off from the loss", NAMED, "requires_grad",
         traced("linear", lambda x, w, b: torch.nn.functional.linear(x, w, b).detach(), nth=1), "z"),
    Case("everything detached", "no gradient reaches anything", PERCEPTRON, "requires_grad",
         returned(lambda y: y.detach())),
    Case("constant wants a gradient", "a detached output is attached", NAMED, "requires_grad",
         lambda: Toolkit(dynamo=drop("detach")), "still"),
    Case("key renamed", "'y' became 'why'", lying(_renamed), "structure"),
    Case("key missing", "'z' is not returned", lying(lambda found: {k: v for k, v in found.items() if k != "z"}),
         "structure"),
    Case("one output more", "a key that eager does not have", lying(lambda found: {**found, "extra": found["y"] * 2}),
         "structure"),
    Case("dict became a tuple", "the values without their names", lying(lambda found: tuple(found.values())),
         "structure"),
    Case("dict became a named tuple", "other access, same names", lying(lambda found: _Answer(found["y"], found["z"])),
         "structure"),
    Case("None instead of a tensor", "'z' is None", lying(lambda found: {**found, "z": None}), "value", where="'z'"),
    Case("another number", "n is 4, not 3", lying(lambda found: {**found, "n": 4}), "value", where="'n'", alone=True),
    Case("a tensor instead of a number", "n is a tensor", lying(lambda found: {**found, "n": torch.tensor(3)}),
         "value", where="'n'", alone=True),
)
