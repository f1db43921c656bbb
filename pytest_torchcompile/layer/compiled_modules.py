"""What torch.compile and maybe_compile return: the original behind it, the modules whose state it runs on.

maybe_compile returns a second object for the same model, whose call is compiled. It has the class of the model (a
subclass with the same name) and *the same* ``__dict__``: parameters, buffers, submodules, hooks and attributes are not
copied but one, whichever of the two they are set or read through, and ``state_dict`` has the model's own keys. Methods
that call ``self(...)`` (``generate``) run compiled through that object, and eagerly through the model.

What maybe_compile can make no such object of, it refuses before it does anything.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import torch
from torch import nn

from pytest_torchcompile.layer.config import CompileConfig

__all__ = [
    "JoinedModules", "Unregistered", "compiled_module_of", "compiled_part", "is_compiled_module", "join_modules",
    "modules_of", "original_of", "refuse_mistaken", "refuse_unusable",
]

M = TypeVar("M", bound=nn.Module)
_DEPTH: Final = 3
"""So many objects deep a callable is searched for modules: a partial of a method of an object, say."""


def original_of(model: Callable[..., Any]) -> Callable[..., Any]:
    """The module or function that was given to torch.compile; ``model`` itself if it never was.

    ``_orig_mod`` of a compiled module and ``_torchdynamo_orig_callable`` of a compiled function: torch 2.8 to 2.15
    (``torch/_dynamo/eval_frame.py``).
    """
    # Compiled again and again: nobody nests deeper, and an object may answer to any name.
    for _ in range(8):
        inside = getattr(model, "_orig_mod", None)
        if not callable(inside):
            inside = getattr(model, "_torchdynamo_orig_callable", None)
        if not callable(inside):
            break
        model = inside
    return model


def modules_of(call: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a callable runs on: itself, or what a function, method or partial holds on to."""
    return list(dict.fromkeys(_modules_behind(call, _DEPTH)))


def compiled_part(call: Callable[..., Any]) -> str:
    """What of a callable runs compiled at present, as the end of a sentence; empty if nothing does.

    A module that is compiled in place has ``_compiled_call_impl`` (torch 2.8 to 2.15); allowlists of maybe_compile use
    it too.
    """
    return next(_compiled_parts(call, type(call).__name__, _DEPTH), "")


def _compiled_parts(value: Any, name: str, depth: int) -> Iterator[str]:
    if callable(value) and original_of(value) is not value:
        yield name
    elif isinstance(value, nn.Module):
        for inner, part in value.named_modules():
            if vars(part).get("_compiled_call_impl") is not None or original_of(part) is not part:
                if inner:
                    yield f"{inner} in {name}"
                else:
                    yield f"{name}, in place"
    elif depth:
        for held in _objects_held(value):
            yield from _compiled_parts(held, f"{type(held).__name__} in {name}", depth - 1)


def _modules_behind(value: Any, depth: int) -> Iterator[nn.Module]:
    if callable(value):
        value = original_of(value)
    if isinstance(value, nn.Module):
        yield value
    elif depth:
        for held in _objects_held(value):
            yield from _modules_behind(held, depth - 1)


def _objects_held(value: Any) -> Iterator[Any]:
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
    owner = getattr(value, "__self__", None)
    if owner is not None:
        yield owner
    function = getattr(value, "__func__", value)
    code = getattr(function, "__code__", None)
    if code is None:
        # An instance of a class with a call of its own.
        if not isinstance(value, (type, types.ModuleType)) and hasattr(value, "__dict__"):
            yield from vars(value).values()
        return
    yield from function.__defaults__ or ()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            # Not filled yet.
            continue
    for name in code.co_names:
        if name in function.__globals__:
            yield function.__globals__[name]


class JoinedModules(nn.Module):
    """A model, other modules and loose tensors as one module, so that one snapshot serves all of them."""

    def __init__(self, modules: list[nn.Module], loose: list[torch.Tensor]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.training = not modules or any(module.training for module in modules)
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
    candidates: list[nn.Module] = []
    for each in (model, *others):
        if each is not None:
            candidates += modules_of(each)
    for module in candidates:
        # What is inside of another one is in its state.
        if not any(module in known.modules() for known in modules):
            modules.append(module)
    known: set[int] = set()
    for module in modules:
        known.update(map(id, module.parameters()))
        known.update(map(id, module.buffers()))
    more = [tensor for tensor in loose if id(tensor) not in known]
    if len(modules) == 1 and not more:
        return modules[0]
    return JoinedModules(modules, more)


def compiled_module_of(
    model: M, call: Callable[..., Any], compile_copy: Callable[[Any], Any], recipe: Callable[[], tuple[Any, ...]],
    on_dropped: Callable[[], object],
) -> M:  # fmt: skip
    """Return the second object for ``model``, whose call is ``call``.

    ``compile_copy(copy)`` makes one of a copy, for ``copy.copy`` and ``copy.deepcopy``; ``recipe()``, a function and
    its arguments, makes one where a pickle is loaded. ``on_dropped`` is called when the object is gone.
    """
    cls: Any = type(model)

    def call_compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    def copy_shallow(self: Any) -> Any:
        return compile_copy(copy.copy(model))

    def copy_deep(self: Any, memo: Any) -> Any:
        return compile_copy(copy.deepcopy(model, memo))

    def reduce(self: Any, protocol: Any) -> Any:
        return recipe()

    def original(self: Any) -> M:
        return model

    body = {
        "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__,
        "__call__": call_compiled, "__copy__": copy_shallow, "__deepcopy__": copy_deep, "__reduce_ex__": reduce,
        # The name under which torch.compile keeps the original; other tools look for it.
        "_orig_mod": property(original),
        _MARK: True,
    }  # fmt: skip
    made = type(cls)(cls.__name__, (Unregistered, cls), body)
    # Not by its __init__ nor __setattr__, which are the user's.
    second = object.__new__(made)
    object.__setattr__(second, "__dict__", model.__dict__)
    # At exit nothing has to be undone, and modules may be half gone.
    weakref.finalize(second, on_dropped).atexit = False
    return second  # type: ignore[no-any-return]


_MARK: Final = "_torchcompile_made"


def is_compiled_module(model: object) -> bool:
    """Whether maybe_compile made it."""
    kinds = (type(model), *type(model).__mro__)
    return any(_MARK in vars(kind) for kind in kinds)


def refuse_mistaken(cfg: Any, logger: Any) -> None:
    """Raise TypeError for what is no config or no logger."""
    if not isinstance(cfg, CompileConfig):
        hint = "; CompileConfig.from_dict makes one of a dict" if isinstance(cfg, Mapping) else ""
        raise TypeError(f"maybe_compile: cfg is of type {type(cfg).__name__}; expected a CompileConfig{hint}")
    # Asked for `warning`, because a tensor has a `log` too.
    if logger is not None and not callable(getattr(logger, "warning", None)):
        raise TypeError(f"maybe_compile: logger is of type {type(logger).__name__}; expected a logging.Logger or None "
                        "(the sample batch is the argument after it)")


def refuse_unusable(model: Any, cfg: CompileConfig, sample_batch: Any) -> None:
    """Raise ValueError for a model, or a config, that cannot be used."""
    if cfg.min_speedup is not None and sample_batch is None:
        raise ValueError(f"min_speedup={cfg.min_speedup:g} is measured on a sample batch, and maybe_compile was given "
                         "none; give it sample_batch, or leave min_speedup out")
    if is_compiled_module(model) or hasattr(model, "_torchdynamo_orig_callable"):
        raise ValueError(f"{type(model).__name__} is compiled already; give maybe_compile the original "
                         "(a compiled module keeps it as _orig_mod)")
    if not isinstance(model, nn.Module):
        if not isinstance(model, (types.FunctionType, types.MethodType)):
            raise ValueError(f"an object of type {type(model).__name__} cannot be compiled; expected a module "
                             "or a function")
        if cfg.allowlist or cfg.blocklist:
            raise ValueError(f"allowlist and blocklist choose parts of a module, and {model.__name__} is a function")


class Unregistered:
    """First base of the classes that the layer makes: the user's ``__init_subclass__`` does not hear of them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Nothing: a registry of model classes must not have them."""
