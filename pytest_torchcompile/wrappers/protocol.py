"""What a wrapper is: a way to run a model, eagerly or compiled, as if it were the model.

And what wrappers share: the compile orders (a model is compiled whole before it is wrapped, after it, or block by block
inside of it), and the trial of a cell, which has one.
"""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.layer.selective import inner_blocks
from pytest_torchcompile.loading import resolve
from pytest_torchcompile.lowering.kernel_watch import KernelWatch
from pytest_torchcompile.observation import Job
from pytest_torchcompile.oracle.spread import Spread
from pytest_torchcompile.oracle.trial import Trial
from pytest_torchcompile.wrappers import WRAPPERS, multiple_of
from pytest_torchcompile.wrappers.wrapping import Wrapping, numbers_of_ranks

__all__ = ["CellTrial", "Settings", "Wrap", "Wrapper", "compile_blocks", "in_order", "load", "repeated_blocks",
           "shipped_wrapper"]

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
    spread: type[Spread] = Spread
    """How the model is spread over the ranks: a class of the wrapper's own where each rank has less than all of it."""
    check: Callable[[], None] | None = None
    """Raises :class:`~pytest_torchcompile.errors.Unavailable` where this machine lacks what the wrapper needs beyond
    processes, devices and their transport. Asked before any of its cells is run."""

    @property
    def multiple(self) -> int:
        """Any number of ranks is one of this: the width of the last dimension of the mesh, where it has two."""
        return multiple_of(self.axes)

    def runs_on(self, ranks: int) -> bool:
        """Whether a cell of this wrapper can have so many."""
        if self.ranks == 1:
            return ranks == 1
        return ranks >= self.ranks and ranks % self.multiple == 0

    def shape(self, ranks: int) -> tuple[int, ...]:
        """Sizes of the mesh' dimensions."""
        if len(self.axes) == 1:
            return (ranks,)
        return ranks // 2, 2


def shipped_wrapper(name: str, wrap: Wrap, **fields: Any) -> Wrapper:
    """The record of a wrapper of this folder, with the ranks and the mesh of its line in ``WRAPPERS``.

    ``fields`` are others of :class:`Wrapper`. Raises KeyError for a name without a line.
    """
    entry = WRAPPERS[name]
    return Wrapper(name, wrap, ranks=entry.ranks, axes=entry.axes, **fields)


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
    target = entry.target if entry is not None else wrapping.name
    wrapper = resolve(target, root, where, Wrapper)
    if not isinstance(wrapper, Wrapper):
        wrapper = Wrapper(wrapping.name, wrapper, ranks=wrapping.ranks)
    if alone and wrapper.ranks > 1:
        raise UsageError(f"{where}: wrapper {name!r} needs {wrapper.ranks} processes, and a test has one; put it into "
                         "a matrix")
    if not wrapper.runs_on(wrapping.ranks):
        # Only one of the user's own comes here: Wrapping.read() has held the ranks of ours against its line.
        made_for, star = "1 rank", ""
        if wrapper.ranks > 1:
            made_for, star = numbers_of_ranks(wrapper.ranks, wrapper.multiple), f"*{wrapper.ranks}"
        raise UsageError(f"{where}: wrapper {wrapping.name!r} is made for {made_for}, and the matrix gives it "
                         f"{wrapping.ranks}; write {name.partition('*')[0]}{star}")
    # From here on those of the cell, and no longer the least number.
    wrapper = replace(wrapper, ranks=wrapping.ranks, unit=wrapping.dtype or wrapper.unit)
    if entry is not None:
        return wrapper
    return _user_wrapper(wrapper, wrapping, where, alone)


def _user_wrapper(wrapper: Wrapper, wrapping: Wrapping, where: str, alone: bool) -> Wrapper:
    """The wrapper as it will be called: with what every wrapper is given, and the order if one is asked for."""
    given = ["model", "settings", "cell"]
    if wrapper.ranks > 1:
        given.append("mesh")
    try:
        signature = inspect.signature(wrapper.wrap)
    except (TypeError, ValueError):
        # Written in C: the call itself will tell.
        return wrapper
    named = f"{where}: wrapper {wrapping.name!r}"
    order: dict[str, str] = {}
    if wrapping.order:
        order["order"] = wrapping.order
        if "order" not in signature.parameters:
            raise UsageError(f"{named} is asked for the order {wrapping.order!r} and has no parameter `order` to be "
                             f"told it by; give it one, or take @{wrapping.order} off{_written_at(wrapper.wrap)}")
    try:
        signature.bind(*given, **order)
    except TypeError as why:
        expected = ", ".join([*given, *(f"{key}={value!r}" for key, value in order.items())])
        hint = ""
        if "mesh" in signature.parameters and wrapper.ranks == 1:
            hint = f"; a mesh is for several ranks, and those are asked for by {wrapping.name}*2"
            if alone:
                hint = "; a mesh is for several ranks, and a test has one process: put it into a matrix"
        raise UsageError(f"{named} is called as wrap({expected}), and has the parameters {signature}: "
                         f"{why}{_written_at(wrapper.wrap)}{hint}") from None
    if not order:
        return wrapper
    return replace(wrapper, wrap=functools.partial(wrapper.wrap, **order))


def _written_at(function: Callable[..., Any]) -> str:
    """`` (parallel.py:12)``, or nothing for what was not written as a function."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"


class CellTrial(Trial):
    """The trial of one cell, as the fuzzer and a check's ``measure`` see it; the runner makes it."""

    cell: Cell
    job: Job
    wrapper: Wrapper
    dims: Mapping[str, Dim]
    """The dims of the cell's model."""
    matrix: str
    """Path of the matrix file."""
    kernel_watch: KernelWatch | None
    """Has watched the run's kernels, where the check `kernels` wants them."""

    @property
    @abstractmethod
    def single(self) -> bool:
        """Whether it is run by one rank, so that no other waits for what it does."""

    @abstractmethod
    def batch(self, sizes: Mapping[str, int], seed: int) -> Batch:
        """Another batch for the cell's model, drawn with ``seed``."""

    @abstractmethod
    def compile_apart(self, hash_seed: int) -> dict[str, Any]:
        """The code that another process makes of the cell, with this ``PYTHONHASHSEED``.

        Returns ``graphs`` (:class:`~pytest_torchcompile.gauges.generated_code.GraphCode` as plain data), ``texts`` by
        key, ``stages`` (:func:`~pytest_torchcompile.gauges.generated_code.stage_keys`), and ``failure``, why it made
        none; empty where it did.
        """


def in_order(model: nn.Module, settings: Settings | None, cell: Cell, wrap: Callable[[Any], Any],
             in_place: bool = True) -> Callable[..., Any]:
    """What ``wrap(model)`` makes of the model, compiled in the order that the cell asks for; no ``settings``: eager.

    ``in_place``: a whole that is compiled before it is wrapped stays the module that it is, for wraps that work on its
    own parameters. Torch compiles no module of its own classes so, an ``nn.Sequential`` say; without it ``wrap`` is
    given what ``torch.compile`` returns. Raises :class:`~pytest_torchcompile.errors.UsageError` for ``inner_blocks`` of
    a model without any.
    """
    if settings is None:
        return wrap(model)  # type: ignore[no-any-return]
    order = Wrapping.read(cell.wrapper).order
    inner: Any = model
    if order == "inner_blocks":
        compile_blocks(model, settings, cell)
    # In place the wrap still finds its own parameters by their names.
    elif order == "compile_then_wrap" and in_place:
        model.compile(**settings)
    elif order == "compile_then_wrap":
        inner = torch.compile(model, **settings)
    wrapped = wrap(inner)
    if order == "wrap_then_compile":
        wrapped = torch.compile(wrapped, **settings)
    return wrapped  # type: ignore[no-any-return]


def repeated_blocks(model: nn.Module, cell: Cell) -> list[nn.Module]:
    """Return the direct children of the model's outermost ``nn.ModuleList``\\ s, each once.

    Raises :class:`UsageError` with the rule to paste if the model has none.
    """
    blocks = list(inner_blocks(model))
    if not blocks:
        raise UsageError(
            f"wrapper {cell.wrapper!r} works on the children of an nn.ModuleList, and model {cell.model!r} "
            "has none; leave it out with a rule:\n"
            f"  - exclude: {{model: {cell.model}, wrapper: {cell.wrapper}}}\n"
            "    reason: the model has no repeated blocks"
        )
    return blocks


def compile_blocks(model: nn.Module, settings: dict[str, Any], cell: Cell) -> None:
    """Compile each repeated block in place; blocks of one class share their compiled code."""
    for block in repeated_blocks(model, cell):
        block.compile(**settings)
