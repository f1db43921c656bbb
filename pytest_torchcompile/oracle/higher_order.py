"""Operators of a higher order: ``torch.cond`` and ``while_loop`` in a run that is watched.

They are given functions, and a dispatch mode that does not say otherwise is refused them. Their functions run under
the mode too, so that their operators are watched, widened and rounded like all others.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_torchcompile.errors import Unavailable

__all__ = ["refused_backward", "run_higher_order"]

_IN_TORCH: Final = "torch/_higher_order_ops/"


def run_higher_order(
    mode: TorchDispatchMode, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run it as eager does, and each function that it is given under ``mode``, which is left already."""

    def watched(value: Any) -> Any:
        return _under_mode(mode, value) if callable(value) and not isinstance(value, torch.Tensor) else value

    return operator(*map(watched, args), **{name: watched(value) for name, value in kwargs.items()})


def refused_backward(mode: object, error: Exception) -> Unavailable | None:
    """What to say where torch has no gradients of such an operator under ``mode``, though it has them without.

    The functions of ``torch.cond`` have to return tuples there: outside of a mode its own compile makes tuples of what
    they return (``torch/_higher_order_ops/cond.py``, torch 2.13).
    """
    if not isinstance(mode, TorchDispatchMode):
        return None
    files = [frame.f_code.co_filename.replace("\\", "/") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not any(_IN_TORCH in file for file in files):
        return None
    return Unavailable(
        "torch has no gradients of an operator such as torch.cond while each operator is watched, as a comparison does "
        f"({type(error).__name__}: {error}); have its functions return a tuple, `(x,)`, or take phase inference"
    )


def _under_mode(mode: TorchDispatchMode, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return run
