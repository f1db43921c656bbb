"""What a wrapper is: a way to run a model, eagerly or compiled, as if it were the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.subject import resolve
from pytest_torchcompile.wrappers import WRAPPERS

__all__ = ["Settings", "Wrap", "Wrapper", "load"]

Settings = dict[str, Any]
"""The keyword arguments of ``torch.compile``."""
Wrap = Callable[[nn.Module, "Settings | None", Cell], Callable[..., Any]]


@dataclass(frozen=True)
class Wrapper:
    """One value of the axis ``wrapper``."""

    name: str
    wrap: Wrap
    """``wrap(model, settings, cell)`` returns what is called in place of the model: compiled with
    ``torch.compile(**settings)``, or, where ``settings`` is None, its eager twin in the same wrapping.
    The model's parameters keep their names."""
    ranks: int = 1
    """Processes that a cell needs."""
    unit: str | None = None
    """The narrowest dtype that the wrapper brings in, if it is narrower than the model's: rounding is
    measured in it."""
    partial: bool = False
    """Does part of the model stay eager on purpose?"""


def load(name: str, root: Path, where: str) -> Wrapper:
    """Return the wrapper of that name: a key of :data:`WRAPPERS`, or ``module:attribute``.

    The attribute is a :class:`Wrapper`, or a function ``wrap(model, settings, cell)``.
    Raises :class:`UsageError`, starting with ``where``, if there is none.
    """
    if name not in WRAPPERS and ":" not in name:
        raise UsageError(f"{where}: no wrapper {name!r}; {nearest(name, WRAPPERS)}, "
                         "or one of your own as module:attribute")
    found = resolve(WRAPPERS.get(name, name), root, where, Wrapper)
    return found if isinstance(found, Wrapper) else Wrapper(name, found)
