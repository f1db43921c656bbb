"""Twins: copies of a model that share nothing with it, also where it is a function or has patched methods."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

__all__ = ["Closure", "twin"]


class Closure(nn.Module):
    """A function with the modules that it reaches, as a module: ``net.weight`` is that of its variable ``net``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["function"] = function
        for name, value in _reached(function):
            if isinstance(value, nn.Module) and name not in self._modules and value not in self._modules.values():
                self._modules[name] = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.__dict__["function"](*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Closure:
        return Closure(_Copies(memo).of(self.__dict__["function"]))


def twin(module: nn.Module) -> nn.Module:
    """Copy a module. A function in one of its attributes, such as a patched ``forward``, is copied with what it
    closes over: else it would stay bound to the original.

    Raises whatever ``copy.deepcopy`` raises.
    """
    copied: nn.Module = _Copies({}).of(module)
    return copied


def _reached(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function reaches by name: its closure, its globals, the object that it is a method of."""
    if isinstance(function, functools.partial):
        yield from _reached(function.func)
        yield from ((f"argument {i}", value) for i, value in enumerate(function.args))
        yield from function.keywords.items()
    elif isinstance(function, types.MethodType):
        yield "self", function.__self__
    elif isinstance(function, types.FunctionType):
        found = inspect.getclosurevars(function)
        yield from found.nonlocals.items()
        yield from found.globals.items()


class _Copies:
    """Deep copies in which functions are copied too, where they close over something. One memo for all."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self.functions: dict[int, types.FunctionType] = {}
        self.seen: set[int] = set()

    def of(self, value: Any) -> Any:
        return self.rebound(copy.deepcopy(value, self.memo))

    def rebound(self, value: Any) -> Any:
        """Replace in a copy the functions that ``copy.deepcopy`` has left as they were."""
        if isinstance(value, types.FunctionType):
            return self.function(value) if value.__closure__ else value
        if id(value) in self.seen:
            return value
        self.seen.add(id(value))
        if isinstance(value, functools.partial):
            keywords = {name: self.rebound(item) for name, item in value.keywords.items()}
            return functools.partial(self.rebound(value.func), *map(self.rebound, value.args), **keywords)
        if isinstance(value, types.MethodType):
            self.rebound(value.__self__)
        elif isinstance(value, nn.Module):
            for part in value.modules():
                self.seen.add(id(part))
                self.rebound(part.__dict__)
        elif type(value) in (dict, OrderedDict):
            value.update({key: self.rebound(item) for key, item in value.items()})
        elif isinstance(value, list):
            value[:] = map(self.rebound, value)
        elif type(value) is tuple:
            return tuple(map(self.rebound, value))
        return value

    def function(self, old: types.FunctionType) -> types.FunctionType:
        if id(old) not in self.functions:
            closure = old.__closure__ or ()
            cells = tuple(types.CellType() for _ in closure)
            new = types.FunctionType(old.__code__, old.__globals__, old.__name__, old.__defaults__, cells)
            new.__kwdefaults__, new.__qualname__ = old.__kwdefaults__, old.__qualname__
            new.__dict__.update(old.__dict__)
            self.functions[id(old)] = new
            for cell, kept in zip(cells, closure, strict=True):
                with contextlib.suppress(ValueError):  # not filled yet
                    cell.cell_contents = self.contents(kept.cell_contents)
        return self.functions[id(old)]

    def contents(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return value
        try:
            return self.of(value)
        except Exception:  # a lock, a file, a generator of random numbers: shared
            return value
