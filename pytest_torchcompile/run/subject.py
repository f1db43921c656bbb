"""The subject of a cell: the model under test, its batches and loss, made from a matrix entry's references.

Runs in rank processes. What is wrong with the matrix or the user's factories is a
:class:`~pytest_torchcompile.errors.UsageError` that starts with the place in the matrix; what this machine
cannot do is :class:`~pytest_torchcompile.errors.Unavailable`.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_torchcompile import dims
from pytest_torchcompile.backends import BACKENDS
from pytest_torchcompile.backends.toolkit import Toolkit
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.cell import DEFAULTS, TOOLKIT, Cell
from pytest_torchcompile.errors import RepeatedMistake, Unavailable, UsageError
from pytest_torchcompile.loading import kind_of, one_line, resolve
from pytest_torchcompile.oracle.recording import says_fork
from pytest_torchcompile.oracle.whole_step import why_no_step
from pytest_torchcompile.state.torch_state import seed_everything

if TYPE_CHECKING:
    from pytest_torchcompile.plan.matrix import ModelEntry

__all__ = ["build_model", "compile_settings", "cxx_compiler", "loss_function", "make_batch", "make_batches",
           "refuse_other_step"]

_OF_WHOLE_STEPS = ("compiles", "graph_breaks", "recompiles", "equivalence", "gradients", "aliasing", "layout", "passes")
"""The checks that judge a step with its loss and backward pass as they judge a model."""


def build_model(entry: ModelEntry, cell: Cell, root: Path, seed: int) -> torch.nn.Module:
    """Make the model of a cell: parameters drawn from ``seed``, on the cell's device and in its dtype.

    The factory is called with the cell's own (user) axes and the entry's arguments as keywords; one that has a
    parameter ``device`` is told the cell's device too. Only floating parameters and buffers change their dtype. Raises
    :class:`UsageError` if the factory cannot be called so, raises, or returns something else than a module,
    and :class:`Unavailable` if this machine lacks the device or the dtype.
    """
    device, dtype = _placement(cell, entry.where)
    factory = resolve(entry.factory, root, entry.where)
    axes = dict(cell.user) | entry.arguments_of("factory")
    # Only told to who asks for it: a factory need not know of devices, as its model is moved below.
    if "device" in _keywords_of(factory):
        axes.setdefault("device", cell.device)
    _check_keywords(factory, axes, f"{entry.where}: factory {entry.factory!r}", "axis", "axes")
    model = _call_factory(factory, axes, f"{entry.where}: factory {entry.factory!r}", seed)
    if not isinstance(model, torch.nn.Module):
        raise RepeatedMistake(f"{entry.where}: factory {entry.factory!r} returned {kind_of(model)}; "
                         "expected a torch.nn.Module (wrap a function in one)")
    model = model.to(device=device, dtype=dtype)
    # Some models train with a part frozen in evaluation; to switch all modules would undo that.
    if entry.mode_of_modules == "keep":
        return model
    return model.train(cell.phase == "training")


def make_batches(entry: ModelEntry, cell: Cell, root: Path, seed: int) -> list[tuple[dict[str, int], Batch]]:
    """Make the batches of a cell, each with its sizes: one per binding of the entry's dims.

    The inputs function is called with the sizes as keywords, and with those user axes that it names.
    Raises as :func:`build_model`.
    """
    batches = []
    for index, sizes in enumerate(dims.batch_sizes(entry.dims)):
        batches.append((sizes, make_batch(entry, cell, root, seed + index, sizes)))
    return batches


def make_batch(entry: ModelEntry, cell: Cell, root: Path, seed: int, sizes: Mapping[str, int]) -> Batch:
    """Make one batch of the given sizes; as :func:`make_batches`."""
    device, dtype = _placement(cell, entry.where)
    inputs = resolve(entry.inputs, root, entry.where)
    named = _keywords_of(inputs)
    keywords = {name: value for name, value in cell.user if name in named}
    keywords |= entry.arguments_of("inputs") | dict(sizes)
    _check_keywords(inputs, keywords, f"{entry.where}: inputs {entry.inputs!r}", "dim", "dims")
    value = _call_factory(inputs, keywords, f"{entry.where}: inputs {entry.inputs!r}", seed)
    if value is None:
        raise RepeatedMistake(f"{entry.where}: inputs {entry.inputs!r} returned None; expected a tensor, a tuple of "
                              "arguments, a dict of keyword arguments, or (args, kwargs)")
    return Batch.of(value).to(device=device, dtype=dtype)


def loss_function(entry: ModelEntry, root: Path) -> Callable[..., Any] | None:
    """Return the entry's loss function, or None if it has none."""
    if not entry.loss:
        return None
    loss: Callable[..., Any] = resolve(entry.loss, root, entry.where)
    return loss


def compile_settings(cell: Cell, root: Path, where: str) -> dict[str, Any]:
    """Return the keyword arguments of ``torch.compile`` that a cell means.

    A backend ``module:attribute`` is looked up. ``mode`` is handed only to a backend that takes modes (torch
    itself ignores it elsewhere). Raises :class:`UsageError` for a backend that cannot be looked up and
    :class:`Unavailable` if it needs a C++ compiler and there is none, or a pass of the toolkit is for another device.
    """
    settings: dict[str, Any] = {"backend": cell.backend, "dynamic": cell.torch_dynamic}
    if cell.backend == "toolkit":
        toolkit = Toolkit(**cell.toolkit, root=root)
        _refuse_other_device(toolkit, cell)
        settings |= {"backend": toolkit, "fullgraph": True}
    else:
        _refuse_toolkit_axes(cell, where)
    record = BACKENDS.get(cell.backend)
    if ":" in cell.backend:
        settings["backend"] = resolve(cell.backend, root, where)
    elif record is not None and record.modes and cell.mode != "default":
        settings["mode"] = cell.mode
    # On a GPU Triton compiles; on a CPU Inductor calls a C++ compiler for every kernel.
    if _needs_cxx(cell) and torch.device(cell.device).type == "cpu" and cxx_compiler() is None:
        raise Unavailable("no C++ compiler found; install g++ or clang")
    return settings


def _refuse_other_device(toolkit: Toolkit, cell: Cell) -> None:
    """Raise :class:`Unavailable` for a pass that is for another type of device than the cell's."""
    for each in toolkit.graph_passes:
        if each.needs_device not in ("", torch.device(cell.device).type):
            raise Unavailable(f"pass {each.name} is for device {each.needs_device}, and this cell runs on "
                              f"{cell.device}")


def refuse_other_step(cell: Cell, checks: Sequence[str], where: str) -> None:
    """Raise :class:`UsageError` where a whole step makes no sense, or nobody has looked whether it does.

    And :class:`Unavailable` where this torch can't trace one.
    """
    if why := why_no_step():
        raise Unavailable(why)
    told = f"{where}: capture 'step' is forward, loss and backward of a model in one process"
    if cell.wrapper != "none" or cell.phase != "training":
        raise UsageError(f"{told}, and this cell has wrapper {cell.wrapper!r} and phase {cell.phase!r}; write "
                         "`wrapper: none` and `phase: training`, or `capture: joint`")
    # They call the model with a loss of their own, and a step has its loss inside.
    others = [name for name in checks if name not in _OF_WHOLE_STEPS]
    if others:
        raise UsageError(f"{told}, and check {others[0]!r} runs the model by itself; leave it out, or write "
                         "`capture: joint`")


def _needs_cxx(cell: Cell) -> bool:
    if cell.backend == "toolkit":
        return cell.toolkit["compiler"] in ("inductor", "regional_inductor")
    return cell.backend == "inductor"


def _refuse_toolkit_axes(cell: Cell, where: str) -> None:
    for name in TOOLKIT:
        value = getattr(cell, name)
        if value != DEFAULTS[name]:
            raise UsageError(f"{where}: axis {name!r} is {value!r}, and backend {cell.backend!r} has no use for "
                             "it, only backend 'toolkit' has; take such cells out by the rule `- exclude: {backend: "
                             f"{cell.backend}, not: {{{name}: {DEFAULTS[name]}}}}}`, with a reason")


def _signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature, or None for a function that is written in C and has none."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _keywords_of(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters that a keyword can reach, in order; none if the signature is unknown or says ``**``."""
    signature = _signature_of(function)
    if signature is None:
        return []
    names = []
    for parameter in signature.parameters.values():
        # `*args` and what stands before a `/` have no keyword.
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            names.append(parameter.name)
    return names


def _check_keywords(function: Callable[..., Any], given: dict[str, Any], what: str, one: str,
                    many: str) -> None:
    """Raise :class:`RepeatedMistake` if the keywords do not fit the function's parameters."""
    signature = _signature_of(function)
    # Without one the call itself will tell.
    if signature is None:
        return
    keywords = _keywords_of(function)
    takes = f"it takes {', '.join(keywords)}" if keywords else "it takes no parameters"
    try:
        signature.bind(**given)
    except TypeError as error:
        # With `**` no keyword is unknown: the message below tells what is missing.
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        if not takes_any:
            for name in given.keys() - set(keywords):
                raise RepeatedMistake(f"{what} has no parameter for the {one} {name!r}; {takes}") from None
        raise RepeatedMistake(f"{what} cannot be called with the {many} {', '.join(given) or '(none)'}: "
                              f"{error}; {takes}") from None


def _call_factory(function: Callable[..., Any], keywords: dict[str, Any], what: str, seed: int) -> Any:
    """What the function returns. One that raises is called once more, alike: it may do so now and then only."""
    try:
        # Seeded last: to look the function up may have imported a module that draws numbers.
        seed_everything(seed)
        return function(**keywords)
    # These have a meaning of their own further up: skip, exit code 4, a full machine.
    except (Unavailable, UsageError, MemoryError):
        raise
    # SystemExit too: a script as a factory would else end the rank, as if it had crashed.
    except (Exception, SystemExit) as error:
        if says_fork(error):
            raise
        told = f"{what} raised {one_line(error)}"
        again = _raised_again(function, keywords, seed)
        if not again:
            raise UsageError(f"{told}; called once more, it returned") from error
        if again != one_line(error):
            raise UsageError(f"{told}; called once more, it raised {again}") from error
        raise RepeatedMistake(told) from error


def _raised_again(function: Callable[..., Any], keywords: dict[str, Any], seed: int) -> str:
    """What the function raises when it is called once more, in one line; empty where it returns."""
    try:
        seed_everything(seed)
        function(**keywords)
    except (Exception, SystemExit) as error:
        return one_line(error)
    return ""


def _placement(cell: Cell, where: str) -> tuple[torch.device, torch.dtype]:
    """The cell's device and dtype; Unavailable where a small matrix product of that dtype fails there."""
    dtype: Any = getattr(torch, cell.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{where}: torch has no dtype {cell.dtype!r}")
    try:
        device = torch.device(cell.device)
    except RuntimeError as error:
        raise UsageError(f"{where}: no device {cell.device!r}: {str(error).splitlines()[0]}") from None
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not torch.cuda.is_available():
            raise Unavailable(f"device {cell.device!r} is not here: torch.cuda.is_available() is false")
        if (device.index or 0) >= count:
            raise Unavailable(f"device {cell.device!r} is not here: this machine has {count} of them")
        if cell.dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise Unavailable(f"device {cell.device!r} does not compute in bfloat16")
    # Tried, not asked: no function of torch tells for every device which dtypes it computes in.
    mistake = _product_fails(str(device), dtype)
    if mistake is not None:
        raise Unavailable(f"device {cell.device!r} with dtype {cell.dtype} does not work here: {mistake}")
    return device, dtype


@functools.cache
def _product_fails(device: str, dtype: torch.dtype) -> str | None:
    """Why a small matrix product does not run, or None if it does."""
    try:
        ones = torch.ones(2, 2, device=device, dtype=dtype)
        torch.mm(ones, ones)
    except Exception as error:
        # Each device has its own way to say no.
        return one_line(error)
    return None


@functools.cache
def cxx_compiler() -> str | None:
    """Return the C++ compiler that Inductor will call, or None: ``$CXX``, else g++ (clang++ on macOS).

    As torch 2.8 to 2.15 (``_inductor/cpp_builder.py: cpp_compiler_search``): the whole of ``$CXX`` is the
    name of one program, and it counts if ``--version`` succeeds. Warns if the name does not tell what it is:
    Inductor then writes its precompiled header under a name that the compiler does not look for, and each
    kernel takes three times as long.
    """
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    try:
        subprocess.run([name, "--version"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    if not re.search(r"clang|gcc|g\+\+|gnu-c\+\+", name):
        warnings.warn(
            f"CXX={name}: torch knows a compiler by its name, and this one has no g++, gcc or clang in it: "
            "Inductor's precompiled header is silently off and each C++ kernel takes about 3 times as long "
            "to compile; name the real compiler", RuntimeWarning, stacklevel=2)
    return name
