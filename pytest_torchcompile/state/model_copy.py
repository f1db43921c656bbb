"""Twins: copies of a model that share nothing with it, also where it is a function or has patched methods."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.state.tensor_forms import COMPRESSED

__all__ = ["Closure", "copy_model"]

_WITHOUT_FUNCTIONS = (bool, int, float, str, bytes, type(None), torch.Tensor)


class Closure(nn.Module):
    """A function with the modules that it reaches, as a module: ``net.weight`` is that of its variable ``net``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["function"] = function
        for name, value in _reached_values(function):
            for inner, module in _modules_in(name, value):
                if inner not in self._modules and module not in self._modules.values():
                    self._modules[inner] = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.__dict__["function"](*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Closure:
        """Raises TypeError where a module would be shared: whoever changes a copy would change the original."""
        function = self.__dict__["function"]
        other = Closure(_Copies(memo, getattr(function, "__globals__", None)).copy(function))
        ours = {id(part) for part in self.modules()}
        if any(id(part) in ours for part in other.modules()):
            raise TypeError(f"{function!r} reaches a module that can't be copied")
        return other


def copy_model(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Copy a module; ``memo`` as for ``copy.deepcopy``.

    A function in one of its attributes, such as a patched ``forward``, is copied with what it closes over: else it
    would stay bound to the original. So are hooks on parameters, such as one that clips a gradient: ``copy.deepcopy``
    leaves them out.

    Raises whatever ``copy.deepcopy`` raises.
    """
    if memo is None:
        memo = {}
    copies = _Copies(memo)
    _renew_empty_registries(module, memo)
    _copy_sparse_tensors(module, memo)
    copied: nn.Module = copies.copy(module)
    _carry_hooks(module, copied, copies)
    return copied


def _renew_empty_registries(module: nn.Module, memo: dict[int, Any]) -> None:
    """Put a new dict into ``memo`` for every empty one in a module.

    Each module has a dozen, most of them for hooks. ``copy.deepcopy`` takes longer for them than for all the rest.
    """
    for part in module.modules():
        for value in vars(part).values():
            if type(value) in (dict, OrderedDict) and not value:
                memo.setdefault(id(value), type(value)())


def _copy_sparse_tensors(module: nn.Module, memo: dict[int, Any]) -> None:
    """Put into ``memo`` a copy of every sparse parameter, and of every other tensor that is sparse by rows or columns.

    ``copy.deepcopy`` raises for them (torch 2.8 to 2.15). Of a parameter it wants the strides preserved, of another
    tensor the storage, and they have none.
    """
    for parameter in module.parameters():
        if parameter.layout is not torch.strided:
            copied = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            memo.setdefault(id(parameter), copied)
    for tensor in (*module.buffers(), *_tensors_in_attributes(module)):
        if tensor.layout in COMPRESSED and tensor.is_leaf:
            memo.setdefault(id(tensor), tensor.detach().clone().requires_grad_(tensor.requires_grad))


def _tensors_in_attributes(module: nn.Module) -> Iterator[torch.Tensor]:
    """Those in attributes of a module and of its parts, and in lists, tuples and dicts there.

    Deeper ones are not looked for: many copies are made, and to open every object takes as long as to copy it.
    """
    for part in module.modules():
        for value in vars(part).values():
            values: Iterable[Any] = (value,)
            if isinstance(value, (list, tuple)):
                values = value
            elif isinstance(value, dict):
                values = value.values()
            for each in values:
                if isinstance(each, torch.Tensor):
                    yield each


def _carry_hooks(module: nn.Module, copied: nn.Module, copies: _Copies) -> None:
    """Register the hooks of parameters with those of the copy.

    Private: ``Tensor._backward_hooks`` and ``Tensor._post_accumulate_grad_hooks`` (torch 2.8 to 2.15).
    """
    parameters = dict(copied.named_parameters())
    for name, old in module.named_parameters():
        new = parameters.get(name)
        # One that is shared has them already; one without gradients can have none.
        if new is None or new is old or not new.requires_grad:
            continue
        for hook in (getattr(old, "_backward_hooks", None) or {}).values():
            new.register_hook(copies.copy_contents(hook))  # type: ignore[no-untyped-call]
        for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
            new.register_post_accumulate_grad_hook(copies.copy_contents(hook))  # type: ignore[no-untyped-call]


def _reached_values(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function reaches by name: its closure, its globals, the object that it is a method of, its attributes."""
    if isinstance(function, functools.partial):
        yield from _reached_values(function.func)
        for number, value in enumerate(function.args):
            yield f"argument {number}", value
        yield from function.keywords.items()
    elif isinstance(function, types.MethodType):
        yield "self", function.__self__
    elif isinstance(function, types.FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not filled yet
                yield name, cell.cell_contents
        yield from _globals_of(function, set()).items()
    else:
        yield from getattr(function, "__dict__", {}).items()


def _globals_of(function: types.FunctionType, seen: set[int]) -> dict[str, Any]:
    """The global variables that a function uses, itself or in a function of its module that it calls, if they have
    state to be copied: modules, tensors, and those functions.
    """
    seen.add(id(function))
    used: dict[str, Any] = {}
    for name in _names_in(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__:
            if id(value) not in seen and (inner := _globals_of(value, seen)):
                used |= {name: value, **inner}
        elif isinstance(value, torch.Tensor) or any(True for _ in _modules_in("", value)):
            used[name] = value
    return used


def _names_in(code: types.CodeType) -> set[str]:
    names = {*code.co_names}
    # Functions and lambdas inside of it are constants of its code.
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _names_in(const)
    return names


def _modules_in(name: str, value: Any, depth: int = 3) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a value, each with a name that a module may have."""
    if isinstance(value, nn.Module):
        yield name.replace(".", "_"), value
    elif depth and isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _modules_in(f"{name}[{index}]", item, depth - 1)
    elif depth and isinstance(value, dict):
        for key, item in value.items():
            yield from _modules_in(f"{name}[{key!r}]", item, depth - 1)
    elif isinstance(value, (functools.partial, types.MethodType, types.FunctionType)) and depth:
        for inner, item in _reached_values(value):
            yield from _modules_in(inner, item, depth - 1)


def _is_settled(value: Any) -> bool:
    """Whether a copy of a value is whole as ``copy.deepcopy`` has made it: there can be no function in it."""
    return isinstance(value, _WITHOUT_FUNCTIONS) or (type(value) in (dict, OrderedDict) and not value)


class _Copies:
    """Deep copies in which functions are copied too, where they close over something. One memo for all.

    Functions of one module, the one whose globals are ``home``, share a copy of them. Dynamo looks the globals of
    functions from other modules up in the modules, so that copies would not be found.
    """

    def __init__(self, memo: dict[int, Any], home: dict[str, Any] | None = None) -> None:
        self.memo = memo
        self.home, self.new_home = home, dict(home or {})
        self.functions: dict[int, types.FunctionType] = {}
        # By id; the objects too, or an id could be given to another one.
        self.seen: dict[int, Any] = {}

    def copy(self, value: Any) -> Any:
        return self.rebind(copy.deepcopy(value, self.memo))

    def rebind(self, value: Any) -> Any:
        """Replace in a copy the functions that ``copy.deepcopy`` has left as they were."""
        if isinstance(value, types.FunctionType):
            return self.copy_function(value)
        if id(value) in self.seen:
            return value
        self.seen[id(value)] = value
        if isinstance(value, functools.partial):
            keywords = {name: self.rebind(item) for name, item in value.keywords.items()}
            return functools.partial(self.rebind(value.func), *map(self.rebind, value.args), **keywords)
        if isinstance(value, types.MethodType):
            self.rebind(value.__self__)
        elif isinstance(value, nn.Module):
            if not isinstance(value, Closure):  # which has seen to its own
                self.rebind(value.__dict__)
        elif type(value) in (dict, OrderedDict):
            # What holds no function stays: nearly everything that a module has.
            value.update({key: self.rebind(item) for key, item in value.items() if not _is_settled(item)})
        elif isinstance(value, list):
            value[:] = map(self.rebind, value)
        elif type(value) is tuple:
            return tuple(map(self.rebind, value))
        return value

    def copy_function(self, old: types.FunctionType) -> types.FunctionType:
        if id(old) in self.functions:
            return self.functions[id(old)]
        at_home, closure = old.__globals__ is self.home, old.__closure__ or ()
        used: dict[str, Any] = {}
        if at_home:
            used = _globals_of(old, set())
        if not used and not closure:
            return old
        names = self.new_home if at_home else old.__globals__
        # Filled below: what a cell holds may reach this very function.
        cells = tuple(types.CellType() for _ in closure)
        new = types.FunctionType(old.__code__, names, old.__name__, old.__defaults__, cells)
        new.__kwdefaults__, new.__qualname__ = old.__kwdefaults__, old.__qualname__
        new.__dict__.update(old.__dict__)
        self.functions[id(old)] = new
        for cell, kept in zip(cells, closure, strict=True):
            with contextlib.suppress(ValueError):  # not filled yet
                cell.cell_contents = self.copy_contents(kept.cell_contents)
        names.update({name: self.copy_contents(value) for name, value in used.items()})
        return new

    def copy_contents(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return value
        # A function that deepcopy itself has made (what torch.compile returns makes one) closes over copies already.
        for made in list(self.memo.values()):
            self.memo.setdefault(id(made), made)
        try:
            return self.copy(value)
        except Exception:  # a lock, a file, a generator of random numbers: shared
            return value
