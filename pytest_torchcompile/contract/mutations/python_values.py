"""python_values: the numbers, flags and texts among the arguments, and the order of keywords."""

from __future__ import annotations

from typing import Any

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def python_values(args: Any, kwargs: Any, choice: str) -> Any:
    """``flip causal``: the keyword ``causal`` is not what it was; ``order``: keywords the other way round."""
    kind, _, name = choice.partition(" ")
    place: Any
    if kind == "order":
        return args, dict(reversed(kwargs.items()))
    args, kwargs = list(args), dict(kwargs)
    values, place = kwargs, name
    if name.isdecimal():
        values, place = args, int(name)
    old = values[place]
    if kind == "flip":
        values[place] = not old
    elif kind == "next":
        values[place] = old + 1
    elif kind == "half":
        values[place] = old * 0.5
    elif kind == "text":
        values[place] = f"{old}_"
    else:
        values[place] = float(old) if kind == "float" else None
    return tuple(args), kwargs


def _choices(module: Any, batch: Any) -> list[str]:
    offered = []
    for name, value in (*enumerate(batch.args), *batch.kwargs.items()):
        if isinstance(value, bool):
            offered.append(f"flip {name}")
        elif isinstance(value, int):
            offered += [f"next {name}", f"float {name}"]
        elif isinstance(value, float):
            offered += [f"half {name}", f"next {name}"]
        elif isinstance(value, str):
            offered.append(f"text {name}")
        if isinstance(value, (bool, int, float, str)):
            offered.append(f"none {name}")
    if len(batch.kwargs) > 1:
        offered.append("order")
    return offered


MUTATION = Mutation("python_values", "other numbers, flags and texts; keywords in another order", "arguments", _choices,
                    python_values)
