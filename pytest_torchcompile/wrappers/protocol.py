"""What a wrapper is: a way to run a model, eagerly or compiled, as if it were the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.subject import resolve
from pytest_torchcompile.wrappers import WRAPPERS
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["Settings", "Wrap", "Wrapper", "load"]

Settings = dict[str, Any]
"""The keyword arguments of ``torch.compile``."""
Wrap = Callable[..., Callable[..., Any]]
"""``wrap(model, settings, cell)``, and for several ranks ``wrap(model, settings, cell, mesh)``."""


@dataclass(frozen=True)
class Wrapper:
    """One value of the axis ``wrapper``."""

    name: str
    wrap: Wrap
    """``wrap(model, settings, cell)`` returns what is called in place of the model: compiled with
    ``torch.compile(**settings)``, or, where ``settings`` is None, its eager twin in the same wrapping.
    The model's parameters keep their names.

    With several ranks it is given a ``DeviceMesh`` too, whose dimensions are :attr:`axes`; which process group is
    behind it, a real or a fake one, is not its business. Each rank calls it at the same time."""
    ranks: int = 1
    """Processes that a cell needs at least."""
    unit: str | None = None
    """The narrowest dtype that the wrapper brings in, if it is narrower than the model's: rounding is
    measured in it."""
    partial: bool = False
    """Does part of the model stay eager on purpose?"""
    axes: tuple[str, ...] = ("data",)
    """Dimensions of the mesh. Along ``data`` each rank is a replica with a batch of its own, and gradients of
    parameters are averages over all of them; along others the ranks work on one batch together. Of two dimensions the
    last is 2 ranks wide."""
    settle: Callable[[nn.Module], None] | None = None
    """Called before the model's state is put back: undoes what a forward without a backward leaves."""
    whole: Callable[[Callable[..., Any]], AbstractContextManager[Any]] | None = None
    """Given what ``wrap`` returned: inside of it the model's parameters and their gradients are those of one process.
    Needed only where they are neither whole nor of the class ``DTensor``."""
    alike: bool = True
    """Does every rank run the same program?"""
    owned: Callable[[Callable[..., Any]], Iterable[nn.Parameter]] | None = None
    """Given what ``wrap`` returned: the parameters whose gradients this rank computes. None: all of them."""

    def shape(self, ranks: int) -> tuple[int, ...]:
        """Sizes of the mesh' dimensions."""
        return (ranks,) if len(self.axes) == 1 else (ranks // 2, 2)


def load(name: str, root: Path, where: str) -> Wrapper:
    """Return the wrapper that a value of the axis names (:class:`~.wrapping.Wrapping`).

    The attribute of a ``module:attribute`` is a :class:`Wrapper`, or a function to be its ``wrap``; a function's ranks
    are replicas.
    Raises :class:`UsageError`, starting with ``where``, if there is none, or if it is made for other ranks.
    """
    try:
        wrapping = Wrapping.read(name)
    except ValueError as mistake:
        raise UsageError(f"{where}: {mistake}") from None
    entry = WRAPPERS.get(wrapping.name)
    found = resolve(wrapping.name if entry is None else entry.target, root, where, Wrapper)
    if not isinstance(found, Wrapper):
        return Wrapper(wrapping.name, found, ranks=wrapping.ranks)
    if wrapping.ranks % found.ranks or (found.ranks == 1) != (wrapping.ranks == 1):
        plain = name.partition("*")[0]
        raise UsageError(f"{where}: wrapper {wrapping.name!r} is made for {found.ranks} rank(s), and the matrix gives "
                         f"it {wrapping.ranks}; write {plain}{f'*{found.ranks}' if found.ranks > 1 else ''}")
    return replace(found, ranks=wrapping.ranks)
