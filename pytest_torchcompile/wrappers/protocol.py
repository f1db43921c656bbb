"""What a wrapper is: a way to run a model, eagerly or compiled, as if it were the model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.loading import resolve
from pytest_torchcompile.wrappers import WRAPPERS
from pytest_torchcompile.wrappers.wrapping import Wrapping, numbers_of_ranks

__all__ = ["Settings", "Wrap", "Wrapper", "load"]

Settings = dict[str, Any]
"""The keyword arguments of ``torch.compile``."""
Wrap = Callable[..., Callable[..., Any]]
"""``wrap(model, settings, cell)``, and for several ranks ``wrap(model, settings, cell, mesh)``. One of the user's own
that has a parameter ``order`` is told the order that the matrix asks for, if it asks for one."""


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
    """Processes that a cell needs at least; :attr:`multiple` says which larger numbers it can have."""
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
    check: Callable[[], None] | None = None
    """Raises :class:`~pytest_torchcompile.errors.Unavailable` where this machine lacks what the wrapper needs beyond
    processes, devices and their transport. Asked before any of its cells is run."""
    owned: Callable[[Callable[..., Any]], Iterable[nn.Parameter]] | None = None
    """Given what ``wrap`` returned: the parameters whose gradients this rank computes. None: all of them."""

    @property
    def multiple(self) -> int:
        """Any number of ranks is one of this: the width of the last dimension of the mesh, where it has two."""
        return min(len(self.axes), 2)

    def runs_on(self, ranks: int) -> bool:
        """Whether a cell of this wrapper can have so many."""
        return ranks == 1 if self.ranks == 1 else ranks >= self.ranks and ranks % self.multiple == 0

    def shape(self, ranks: int) -> tuple[int, ...]:
        """Sizes of the mesh' dimensions."""
        return (ranks,) if len(self.axes) == 1 else (ranks // 2, 2)


def load(name: str, root: Path, where: str, alone: bool = False) -> Wrapper:
    """Return the wrapper that a value of the axis names (:class:`~.wrapping.Wrapping`).

    The attribute of a ``module:attribute`` is a :class:`Wrapper`, or a function to be its ``wrap``; a function's ranks
    are replicas. ``alone``: there is one process.
    Raises :class:`UsageError`, starting with ``where``, if there is none, if it is made for other ranks, or if it can't
    be called as a wrapper is.
    """
    try:
        wrapping = Wrapping.read(name)
    except ValueError as mistake:
        raise UsageError(f"{where}: {mistake}") from None
    entry = WRAPPERS.get(wrapping.name)
    found = resolve(wrapping.name if entry is None else entry.target, root, where, Wrapper)
    if not isinstance(found, Wrapper):
        found = Wrapper(wrapping.name, found, ranks=wrapping.ranks)
    if alone and found.ranks > 1:
        raise UsageError(f"{where}: wrapper {name!r} needs {found.ranks} processes, and a test has one; put it into a "
                         "matrix")
    if not found.runs_on(wrapping.ranks):
        plain = name.partition("*")[0]
        made_for = numbers_of_ranks(found.ranks, found.multiple) if found.ranks > 1 else "1 rank"
        raise UsageError(f"{where}: wrapper {wrapping.name!r} is made for {made_for}, and the matrix gives it "
                         f"{wrapping.ranks}; write {plain}{f'*{found.ranks}' if found.ranks > 1 else ''}")
    found = replace(found, ranks=wrapping.ranks)
    return found if entry is not None else _of_the_user(found, wrapping, where, alone)


def _of_the_user(wrapper: Wrapper, wrapping: Wrapping, where: str, alone: bool) -> Wrapper:
    """The wrapper as it will be called: with what every wrapper is given, and the order if one is asked for."""
    given = ("model", "settings", "cell", "mesh") if wrapper.ranks > 1 else ("model", "settings", "cell")
    try:
        signature = inspect.signature(wrapper.wrap)
    except (TypeError, ValueError):
        return wrapper  # written in C: the call itself will tell
    named = f"{where}: wrapper {wrapping.name!r}"
    if wrapping.order and "order" not in signature.parameters:
        raise UsageError(f"{named} is asked for the order {wrapping.order!r} and has no parameter `order` to be told "
                         f"it by; give it one, or take @{wrapping.order} off{_place(wrapper.wrap)}")
    order = {"order": wrapping.order} if wrapping.order else {}
    try:
        signature.bind(*given, **order)
    except TypeError as why:
        several = "" if "mesh" not in signature.parameters or wrapper.ranks > 1 else (
            "; a mesh is for several ranks, and " + ("a test has one process: put it into a matrix" if alone else
                                                     f"those are asked for by {wrapping.name}*2"))
        expected = ", ".join([*given, *(f"{key}={value!r}" for key, value in order.items())])
        raise UsageError(f"{named} is called as wrap({expected}), and has the parameters {signature}: "
                         f"{why}{_place(wrapper.wrap)}{several}") from None
    return replace(wrapper, wrap=functools.partial(wrapper.wrap, **order)) if order else wrapper


def _place(function: Callable[..., Any]) -> str:
    """`` (parallel.py:12)``, or nothing for what was not written as a function."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
