"""Partitioner: what splits a joint graph into forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pytest_torchcompile.errors import InstrumentError
from pytest_torchcompile.state.random_operators import node_draws

__all__ = ["partition_function"]

_TAG = "partitioner_tag"
_IS_FORWARD = "is_forward"


def partition_function(recompute: bool) -> Callable[..., Any]:
    """Torch's partitioner: one that computes cheap values again in the backward, or one that keeps all.

    Private: ``min_cut_rematerialization_partition`` and ``default_partition`` of torch/_functorch/partitioners.py
    (torch 2.8 to 2.15). Raises InstrumentError where they are missing.
    """
    try:
        from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
    except ImportError as error:
        raise InstrumentError(f"torch {torch.__version__} has no partitioners where the toolkit looks for them "
                              f"({error}); please report it with this version") from None
    if recompute:
        return min_cut_rematerialization_partition

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = default_partition(joint, *args, **kwargs)
        _drop_draws_of_forward(backward)
        return forward, backward

    return partition


def _drop_draws_of_forward(backward: fx.GraphModule) -> None:
    """Take random numbers out of a backward graph that the forward has drawn, and that nothing there reads.

    With ``torch._inductor.config.fallback_random`` fx takes a draw for something that must run
    (``Graph.eliminate_dead_code`` in torch/fx/graph.py, torch 2.13). ``default_partition`` copies the draws that need
    no input, so they would be drawn twice. The tag of a node says which half it is of (torch 2.8 to 2.15).
    """
    for node in reversed(backward.graph.nodes):
        if node_draws(node) and not node.users and node.meta.get(_TAG) == _IS_FORWARD:
            backward.graph.erase_node(node)
    backward.recompile()
