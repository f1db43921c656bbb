"""Compiling what the fixture ``model`` returns, and undoing what that changed in it. No torch until then."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_torchcompile.plan.markers import Combination

__all__ = ["attributes", "changes", "compile_model", "quiet", "undo"]


def compile_model(request: pytest.FixtureRequest, model: Any, how: Combination) -> Any:
    """Compile the model, or end the set-up with a text: skip what this machine cannot, fail what is wrong."""
    import torch

    from pytest_torchcompile.errors import Unavailable, UsageError
    from pytest_torchcompile.run import subject
    from pytest_torchcompile.wrappers.protocol import load

    where = f"{request.node.location[0]}:{(request.node.location[1] or 0) + 1}"
    if not callable(model):
        pytest.fail(f"{where}: the fixture `model` returned {model!r}; expected a torch.nn.Module or a function",
                    pytrace=False)
    if isinstance(model, type):  # torch.compile would change the class itself, for all tests after this one
        pytest.fail(f"{where}: the fixture `model` returned the class {model.__name__}; return an instance of it, "
                    f"{model.__name__}()", pytrace=False)
    is_module = isinstance(model, torch.nn.Module)
    if how.wrapper != "none" and not is_module:
        pytest.fail(f"{where}: the wrapper {how.wrapper!r} needs a torch.nn.Module; the fixture `model` returned "
                    f"{model!r}", pytrace=False)
    parameter = next(model.parameters(), None) if is_module else None
    cell = how.cell("cpu" if parameter is None else parameter.device.type)
    path = list(sys.path)
    try:
        with quiet():
            wrapper = load(how.wrapper, Path(request.config.rootpath), where, alone=True)
            settings = subject.compile_settings(cell, Path(request.config.rootpath), where)
            if not isinstance(how.backend, str):
                settings["backend"] = how.backend
            if how.fullgraph:
                settings["fullgraph"] = True
            return wrapper.wrap(model, settings, cell)
    except Unavailable as error:
        raise pytest.skip.Exception(str(error)) from None
    except UsageError as error:
        text = str(error).partition("; leave it out with a rule")[0]  # the rest speaks of a matrix
        raise pytest.fail.Exception(text if text.startswith(where) else f"{where}: {text}", pytrace=False) from None
    finally:
        sys.path[:] = path  # looking up module:attribute puts the root folder first


Attributes = dict[Any, dict[str, Any]]
"""Of each module inside the model, what its instance holds."""
_ABSENT = object()


def attributes(model: Any) -> Attributes:
    """What each module inside the model holds."""
    modules = model.modules() if hasattr(model, "modules") and not isinstance(model, type) else ()
    return {module: dict(vars(module)) for module in modules}


def changes(model: Any, kept: Attributes) -> Attributes:
    """What was there before, of the attributes that a wrapper set."""
    changed: Attributes = {}
    for module, now in attributes(model).items():
        before = kept.get(module, now)
        names = {name for name, value in now.items() if value is not before.get(name, _ABSENT)}
        if names:
            changed[module] = {name: before.get(name, _ABSENT) for name in names}
    return changed


def undo(changed: Attributes) -> None:
    """Put back what :func:`changes` found."""
    for module, held in changed.items():
        for name, value in held.items():
            if value is _ABSENT:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what torch warns of when it is imported from failing a test under ``-W error``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
