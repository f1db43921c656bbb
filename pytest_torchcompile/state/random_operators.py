"""Random operators: does a call of an operator draw random numbers? One answer, for graphs and for what is dispatched.

Torch tags operators that may draw (``torch.Tag.nondeterministic_seeded``, torch 2.8 to 2.15). Some of them do not in a
given call: attention whose dropout is 0, and dropout that is told not to train.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import fx

__all__ = ["call_draws", "node_draws"]

_DROPOUTS: Final = ("dropout_p", "dropout")
"""Arguments that are the share of what is dropped. ``native_dropout`` calls it ``p``, and may draw where it is 0."""
_TRAINING: Final = ("train", "training")


def call_draws(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call with these arguments draws random numbers; of what is no operator nobody knows: no."""
    if not _may_draw(operator):
        return False
    for place, argument in enumerate(operator._schema.arguments):
        given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
        # In a graph it may be a node, whose value is not known.
        if argument.name in _DROPOUTS and isinstance(given, (int, float)) and given == 0:
            return False
        if argument.name in _TRAINING and given is False:
            return False
    return True


# A program has some hundred operators, and calls them a thousand times each.
@cache
def _may_draw(operator: Any) -> bool:
    return isinstance(operator, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in operator.tags


def node_draws(node: fx.Node) -> bool:
    """Whether a node of a graph of ATen operators draws random numbers."""
    return node.op == "call_function" and call_draws(node.target, node.args, node.kwargs)
