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

__all__ = ["changed_attributes", "compile_model", "ignore_warnings", "module_attributes", "undo_changes"]


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
    if isinstance(model, type):
        # torch.compile would change the class itself, for all tests after this one.
        pytest.fail(f"{where}: the fixture `model` returned the class {model.__name__}; return an instance of it, "
                    f"{model.__name__}()", pytrace=False)
    is_module = isinstance(model, torch.nn.Module)
    if how.wrapper != "none" and not is_module:
        pytest.fail(f"{where}: the wrapper {how.wrapper!r} needs a torch.nn.Module; the fixture `model` returned "
                    f"{model!r}", pytrace=False)
    cell = how.cell(_device_of(model))
    # Looking up module:attribute puts the root folder first.
    path = list(sys.path)
    try:
        with ignore_warnings():
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
        # The rest speaks of a matrix.
        text = str(error).partition("; leave it out with a rule")[0]
        if not text.startswith(where):
            text = f"{where}: {text}"
        raise pytest.fail.Exception(text, pytrace=False) from None
    finally:
        sys.path[:] = path


def _device_of(model: Any) -> str:
    """The kind of device of the model's first parameter; the CPU without one."""
    import torch

    if isinstance(model, torch.nn.Module):
        for parameter in model.parameters():
            return parameter.device.type
    return "cpu"


Attributes = dict[Any, dict[str, Any]]
"""Of each module inside the model, what its instance holds."""
_ABSENT = object()


def module_attributes(model: Any) -> Attributes:
    """What each module inside the model holds."""
    if isinstance(model, type) or not hasattr(model, "modules"):
        return {}
    return {module: dict(vars(module)) for module in model.modules()}


def changed_attributes(model: Any, earlier: Attributes) -> Attributes:
    """What was there before, of the attributes that a wrapper set."""
    changed: Attributes = {}
    for module, now in module_attributes(model).items():
        # A module that a wrapper has added has nothing to be put back.
        before = earlier.get(module, now)
        replaced = {}
        for name, value in now.items():
            if value is not before.get(name, _ABSENT):
                replaced[name] = before.get(name, _ABSENT)
        if replaced:
            changed[module] = replaced
    return changed


def undo_changes(changed: Attributes) -> None:
    """Put back what :func:`changed_attributes` found."""
    for module, replaced in changed.items():
        for name, value in replaced.items():
            if value is _ABSENT:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value


@contextlib.contextmanager
def ignore_warnings() -> Iterator[None]:
    """Keep what torch warns of when it is imported from failing a test under ``-W error``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
