"""What maybe_compile returns: a second object for the same model, whose call is compiled.

It has the class of the model (a subclass with the same name) and *the same* ``__dict__``: parameters, buffers,
submodules, hooks and attributes are not copied but one, whichever of the two they are set or read through, and
``state_dict`` has the model's own keys. Methods that call ``self(...)`` (``generate``) run compiled through the twin,
and eagerly through the model.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from pytest_torchcompile.layer.selective import Unregistered

__all__ = ["is_twin", "twin_of"]

M = TypeVar("M", bound=nn.Module)


def twin_of(
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


_MARK = "_torchcompile_twin"


def is_twin(model: object) -> bool:
    """Whether maybe_compile made it."""
    return _MARK in vars(type(model)) or any(_MARK in vars(base) for base in type(model).__mro__)
