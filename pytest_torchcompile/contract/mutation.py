"""A mutation: one thing that a caller may do otherwise in a call. To add one: a file in ``mutations/``, its name here.

Its function is run by the fuzzer and copied into the scripts that it prints, so it uses ``torch`` and Python alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

from pytest_torchcompile.errors import UsageError, nearest

__all__ = ["NAMES", "Kind", "Mutation", "Offered", "chosen_names", "in_order", "mutation"]

Kind = Literal["inputs", "arguments", "around", "module", "call"]
"""What its function changes, and how it is called:

``inputs``: ``act(tensors, choice)`` changes a list of the batch's tensors in place;
``arguments``: ``act(args, kwargs, choice)`` returns other ``(args, kwargs)``;
``around``: ``act(choice, device)`` returns a context manager that the forward is run in;
``module``: ``act(model, choice)`` changes the module before the call, for good;
``call``: ``act(model, compile, choice)`` returns the module that is called and what calls it; ``compile`` is None on
the eager side.
"""

Offered = Mapping[str, Iterable[str]]
"""By mutation the choices that a program has, the simplest first."""

NAMES: Final = (
    "memory_format", "strides", "aliasing", "empty_batch", "requires_grad", "frozen", "grad_mode", "autocast",
    "torch_settings", "backend_options", "dtypes", "special_values", "python_values", "structured_values",
    "module_change", "inner_autocast", "hooks", "second_copy", "thread",
)  # fmt: skip
"""All mutations, in the order in which those of one kind are applied, each to what the one before it has left.

Sizes and training are fields of the calls.
"""


@dataclass(frozen=True)
class Mutation:
    """One dimension of what a caller may do."""

    name: str
    help: str
    kind: Kind
    choices: Callable[[Any, Any], list[str]]
    """``choices(module, batch)``: what there is to choose from for a program, the simplest first; empty: nothing."""
    act: Callable[..., Any]


@cache
def mutation(name: str) -> Mutation:
    """The mutation of that name; loads torch."""
    loaded: Mutation = importlib.import_module(f"pytest_torchcompile.contract.mutations.{name}").MUTATION
    return loaded


def in_order(changes: Mapping[str, str]) -> list[tuple[Mutation, str]]:
    """The mutations of a call with their choices, as they are applied, in whatever order they were named."""
    return [(mutation(name), changes[name]) for name in sorted(changes, key=NAMES.index)]


def chosen_names(names: Iterable[str] | None) -> tuple[str, ...]:
    """Those mutations that are on, all for None. Raises UsageError for a name that is none."""
    if names is None:
        return NAMES
    chosen = tuple(names)
    for name in chosen:
        if name not in NAMES:
            raise UsageError(f"{name!r} is no mutation of the contract; {nearest(name, NAMES)}")
    return chosen
