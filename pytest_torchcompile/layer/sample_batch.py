"""The sample batch of a healthcheck, as the model is called with it. A dict may be keywords, or the one argument."""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable
from typing import Any

from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.layer.compiled_modules import original_of

__all__ = ["batch_for", "maker_by_round"]


def batch_for(model: Callable[..., Any], sample_batch: Any) -> Batch:
    """The arguments of a call; as :meth:`Batch.of`, but for a dict that is the one argument of the model.

    It is where the model takes one argument, and none of the dict's keys by its name.

    >>> batch_for(lambda batch: batch["x"], {"x": 1}).args, batch_for(lambda x: x, {"x": 1}).kwargs
    (({'x': 1},), {'x': 1})
    """
    if not _is_the_argument(model, sample_batch):
        return Batch.of(sample_batch)
    value = dict(sample_batch)
    return Batch((value,), {}, value)


def _is_the_argument(model: Callable[..., Any], sample_batch: Any) -> bool:
    if not isinstance(sample_batch, (dict, UserDict)):
        return False
    try:
        parameters = inspect.signature(_called(model)).parameters.values()
    except (TypeError, ValueError):
        # Written in C, which tells nothing.
        return False
    by_place, required = 0, 0
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or parameter.name in sample_batch:
            return False
        if parameter.kind is not parameter.KEYWORD_ONLY:
            by_place += 1
        if parameter.default is parameter.empty:
            required += 1
    return by_place >= 1 and required <= 1


def _called(model: Callable[..., Any]) -> Callable[..., Any]:
    """What has the signature: a module's ``forward``; of a wrapper that hands on whatever it gets, what is inside."""
    model = original_of(model)
    while isinstance(model, nn.Module):
        forward: Callable[..., Any] = model.forward
        inside = getattr(model, "module", None)
        if not isinstance(inside, nn.Module) or not _takes_anything(forward):
            return forward
        model = original_of(inside)
    return model


def _takes_anything(function: Callable[..., Any]) -> bool:
    """Whether it has a parameter ``*args``."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)


def maker_by_round(make: Callable[..., Any]) -> Callable[[int], Any]:
    """``make_batch`` as a function of the round, which it may not take."""
    try:
        inspect.signature(make).bind(0)
    except TypeError:
        return lambda _: make()
    except ValueError:
        # Written in C.
        return make
    return make
