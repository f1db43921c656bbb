"""structured_values: members of enums, fields of dataclasses and entries of dicts among the arguments."""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterator
from typing import Any

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def structured_values(args: Any, kwargs: Any, choice: str) -> Any:
    """``member mode``: the next member of its enum; ``field options.scale``: another number or flag in it."""
    kind, _, name = choice.partition(" ")
    owner, _, last = name.rpartition(".")
    held: dict[str, Any] = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
    if kind == "member":
        kind_of_enum: Any = type(held[name])
        members = list(kind_of_enum)
        held[name] = members[(members.index(held[name]) + 1) % len(members)]
    else:
        held[owner] = copy.copy(held[owner])
        fields = held[owner] if isinstance(held[owner], dict) else vars(held[owner])
        old = fields[last]
        fields[last] = not old if isinstance(old, bool) else old + 1
    return tuple(held[str(place)] for place in range(len(args))), {key: held[key] for key in kwargs}


def _choices(module: Any, batch: Any) -> list[str]:
    offered = []
    for name, value in (*enumerate(batch.args), *batch.kwargs.items()):
        if isinstance(value, enum.Enum) and len(type(value)) > 1:
            offered.append(f"member {name}")
        for key in _changeable(value):
            offered.append(f"field {name}.{key}")
    return offered


def _changeable(value: Any) -> Iterator[str]:
    """The numbers and flags of a dataclass or a dict."""
    fields: dict[Any, Any] = {}
    if isinstance(value, dict):
        fields = value
    elif hasattr(value, "__dataclass_fields__"):
        # One with slots or frozen is copied no other way than by its own methods; it is left out.
        fields = getattr(value, "__dict__", {})
    for key, each in fields.items():
        if isinstance(key, str) and type(each) in (bool, int, float):
            yield key


MUTATION = Mutation("structured_values", "members of enums, fields of dataclasses and dicts", "arguments", _choices,
                    structured_values)
