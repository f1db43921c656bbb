"""What torch.compile and maybe_compile return: the original behind it, the modules whose state it runs on.

maybe_compile returns a second object for the same model, whose call is compiled. It has the class of the model (a
subclass with the same name) and *the same* ``__dict__``: parameters, buffers, submodules, hooks and attributes are not
copied but one, whichever of the two they are set or read through, and ``state_dict`` has the model's own keys. Methods
that call ``self(...)`` (``generate``) run compiled through that object, and eagerly through the model.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from pytest_torchcompile.layer.selective import Unregistered

__all__ = [
    "JoinedModules", "compiled_module_of", "compiled_part", "is_compiled_module", "join_modules", "modules_of",
    "original_of",
]

M = TypeVar("M", bound=nn.Module)


def original_of(model: Callable[..., Any]) -> Callable[..., Any]:
    """The module or function that was given to torch.compile; ``model`` itself if it never was.

    ``_orig_mod`` of a compiled module and ``_torchdynamo_orig_callable`` of a compiled function: torch 2.8 to 2.15
    (``torch/_dynamo/eval_frame.py``).
    """
    for _ in range(8):  # compiled again and again: nobody nests deeper, and an object may answer to any name
        inside = getattr(model, "_orig_mod", None)
        if not callable(inside):
            inside = getattr(model, "_torchdynamo_orig_callable", None)
        if not callable(inside):
            break
        model = inside
    return model


def modules_of(call: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a callable runs on: itself, or what a function, method or partial holds on to."""
    return list(dict.fromkeys(_modules(call, 3)))


def compiled_part(call: Callable[..., Any]) -> str:
    """What of a callable runs compiled at present, as the end of a sentence; empty if nothing does.

    A module that is compiled in place has ``_compiled_call_impl`` (torch 2.8 to 2.15); allowlists of maybe_compile use
    it too.
    """
    return next(_compiled(call, type(call).__name__, 3), "")


def _compiled(value: Any, name: str, depth: int) -> Iterator[str]:
    if callable(value) and original_of(value) is not value:
        yield name
    elif isinstance(value, nn.Module):
        for inner, part in value.named_modules():
            if vars(part).get("_compiled_call_impl") is not None or original_of(part) is not part:
                yield f"{inner} in {name}" if inner else f"{name}, in place"
    elif depth:
        for held in _held(value):
            yield from _compiled(held, f"{type(held).__name__} in {name}", depth - 1)


def _modules(value: Any, depth: int) -> Iterator[nn.Module]:
    value = original_of(value) if callable(value) else value
    if isinstance(value, nn.Module):
        yield value
    elif depth:
        for held in _held(value):
            yield from _modules(held, depth - 1)


def _held(value: Any) -> Iterator[Any]:
    """What a function can reach without being given it."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
        return
    if isinstance(value, (list, tuple)):
        yield from value
        return
    if isinstance(value, dict):
        yield from value.values()
        return
    if (owner := getattr(value, "__self__", None)) is not None:
        yield owner
    function = getattr(value, "__func__", value)
    if (code := getattr(function, "__code__", None)) is None:
        if not isinstance(value, (type, types.ModuleType)) and hasattr(value, "__dict__"):
            yield from vars(value).values()
        return
    yield from function.__defaults__ or ()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)


class JoinedModules(nn.Module):
    """A model, other modules and loose tensors as one module, so that one snapshot serves all of them."""

    def __init__(self, modules: list[nn.Module], loose: list[torch.Tensor]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.training = any(module.training for module in modules) if modules else True
        for number, tensor in enumerate(loose):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"loose{number}", tensor)
            else:
                self.register_buffer(f"loose{number}", tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the first module, the model."""
        return self.parts[0](*args, **kwargs)


def join_modules(model: Callable[..., Any], *others: Any, loose: tuple[torch.Tensor, ...] = ()) -> nn.Module:
    """One module that holds everything ``model`` and ``others`` run on, and the tensors ``loose`` that are in none.

    It is the model itself, with the names of its own parameters, where that is everything. The model comes first.
    """
    modules: list[nn.Module] = []
    for each in (model, *others):
        for module in modules_of(each) if each is not None else ():
            if not any(module in known.modules() for known in modules):
                modules.append(module)
    known = {id(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())}
    more = [tensor for tensor in loose if id(tensor) not in known]
    return modules[0] if len(modules) == 1 and not more else JoinedModules(modules, more)


def compiled_module_of(
    model: M, call: Callable[..., Any], again: Callable[[Any], Any], recipe: Callable[[], tuple[Any, ...]],
    dropped: Callable[[], object],
) -> M:  # fmt: skip
    """Return the twin of ``model`` whose call is ``call``.

    ``again(copy)`` makes the twin of a copy, for ``copy.copy`` and ``copy.deepcopy``; ``recipe()``, a function and its
    arguments, makes a twin where a pickle is loaded. ``dropped`` is called when the twin is gone.
    """
    cls: Any = type(model)
    body = {
        "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__,
        "__call__": lambda self, *args, **kwargs: call(*args, **kwargs),
        "__copy__": lambda self: again(copy.copy(model)),
        "__deepcopy__": lambda self, memo: again(copy.deepcopy(model, memo)),
        "__reduce_ex__": lambda self, protocol: recipe(),
        # the name under which torch.compile keeps the original; other tools look for it
        "_orig_mod": property(lambda self: model),
        _MARK: True,
    }  # fmt: skip
    made = type(cls)(cls.__name__, (Unregistered, cls), body)
    twin = object.__new__(made)
    object.__setattr__(twin, "__dict__", model.__dict__)
    weakref.finalize(twin, dropped).atexit = False
    return twin  # type: ignore[no-any-return]


_MARK = "_torchcompile_made"


def is_compiled_module(model: object) -> bool:
    """Whether maybe_compile made it."""
    return _MARK in vars(type(model)) or any(_MARK in vars(base) for base in type(model).__mro__)
