"""Planted faults in what no number shows: signs of zeros, addresses, what modules keep in Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from pytest_torchcompile.faults import programs as p
from pytest_torchcompile.faults.fault_parts import Case, Program, change_output, change_results, named_backend

__all__ = ["BESIDE_VALUES", "BESIDE_VALUES_KEPT", "UNSIGNED_ZEROS"]


class Halved(nn.Module):
    """Signs stay, those of zeros too. (B, 12) -> (B, 12)."""

    def forward(self, x: Tensor) -> Any:
        return x * 0.5


def signed_zeros(B: int) -> Tensor:  # noqa: N803 -- dims have capital letters
    """Every second number is -0.0. (B, 12)."""
    return torch.where(torch.arange(B * 12).view(B, 12) % 2 == 0, -0.0, torch.randn(B, 12))


_KEEPERS: weakref.WeakSet[Keeps] = weakref.WeakSet()
"""All of them, since a backend is not told which module it runs for."""


class Keeps(p.Perceptron):
    """It has things in Python that its forward leaves alone. (B, 12) -> (B, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.counted, self.listed, self.named = 0, [0], {"seen": 0}
        self.generator = torch.Generator().manual_seed(0)
        _KEEPERS.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As of every module; a copy is one more of them."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _KEEPERS.add(self)


KEEPS: Final = Program(Keeps, p.rows)


def _spoiling(change: Callable[[Keeps], object]) -> Callable[[], Any]:
    """A backend that does something to the modules when it runs."""

    def change_modules(returned: list[Any], _: object) -> list[Any]:
        for module in tuple(_KEEPERS):
            change(module)
        return returned

    return change_results(change_modules)


def _count(module: Keeps) -> None:
    module.counted += 1


def _lengthen(module: Keeps) -> None:
    module.listed.append(0)


def _rename(module: Keeps) -> None:
    module.named["seen"] += 1


def _draw(module: Keeps) -> None:
    torch.rand(1, generator=module.generator)


def _without_signs(y: Tensor) -> Tensor:
    return y + 0.0


UNSIGNED_ZEROS: Final = change_output(_without_signs)()
"""A backend, as cells name one: all zeros are positive."""


def _first_of_each_address() -> Any:
    """A backend that knows an input by its address, and hands out again what it has computed for that."""
    known: dict[tuple[int, ...], tuple[list[Tensor], list[Tensor]]] = {}

    def compile_graph(module: fx.GraphModule, example_inputs: Any) -> Any:
        def run(*arguments: Any) -> tuple[Any, ...]:
            inputs = [each for each in arguments if isinstance(each, Tensor) and not isinstance(each, nn.Parameter)]
            address = tuple(each.data_ptr() for each in inputs)
            # Held, so that nobody else is given this memory.
            _, results = known.setdefault(address, (inputs, [each.clone() for each in module(*arguments)]))
            return tuple(each.clone() for each in results)

        return run

    return compile_graph


def _reading_what_it_recorded() -> Any:
    """A backend that records its second run, and from then on reads the memory of that run's inputs."""

    def compile_graph(module: fx.GraphModule, example_inputs: Any) -> Any:
        runs: list[tuple[Any, ...]] = []

        def run(*arguments: Any) -> Any:
            runs.append(arguments)
            return module(*runs[min(len(runs), 2) - 1])

        return run

    return compile_graph


_NO_OTHER_SIGN: Final = {"zero_signs": 0.0}
_SIGNED: Final = Program(Halved, signed_zeros)

BESIDE_VALUES: Final = (
    Case("signs of zeros lost", "-0.0 becomes 0.0", _SIGNED, "value", named_backend(f"{__name__}:UNSIGNED_ZEROS"),
         check="equivalence", limits=_NO_OTHER_SIGN),
    Case("known by its address", "an input that its caller refills gives what it gave before",
         Program(Halved, p.rows_without_gradient), "value", _first_of_each_address, "output"),
    Case("inputs of the recording", "a replay reads the memory of the inputs that it was recorded with",
         Program(Halved, p.rows_without_gradient), "value", _reading_what_it_recorded, "output"),
    Case("counter counted", "an attribute of the module is one higher", KEEPS, "mutation", _spoiling(_count),
         "counted"),
    Case("list lengthened", "a list of the module has one more", KEEPS, "mutation", _spoiling(_lengthen), "listed"),
    Case("dict changed", "an entry in a dict of the module is another one", KEEPS, "mutation", _spoiling(_rename),
         "named"),
    Case("draw of the module's own generator", "it is one draw ahead", KEEPS, "rng", _spoiling(_draw), "generator"),
)

BESIDE_VALUES_KEPT: Final = (
    Case("signs of zeros kept", "nothing", _SIGNED, "", named_backend("aot_eager"), check="equivalence",
         limits=_NO_OTHER_SIGN, control=True),
    Case("inputs refilled by their caller", "nothing", Program(Halved, p.rows_without_gradient), control=True),
    Case("what modules keep", "nothing", KEEPS, control=True),
)
