"""The loss of a model that names none, and the check of what a user's loss returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.oracle.ownership import run_theirs
from pytest_torchcompile.state.paths import leaves_of
from pytest_torchcompile.state.tensor_values import dense_form

__all__ = ["default_loss", "left_out", "loss_of"]


def default_loss(output: Any, value: Any = None) -> torch.Tensor | None:
    """Weighted mean of y^2 + y over every floating output, averaged; ``None`` where there is none.

    The weights are fixed numbers from 0.5 to 1.5, one per element, exact in every dtype. Without
    them the mean square of a normalised output (layer norm, batch norm) would be a constant, and every
    gradient before it nothing but rounding noise. Without the linear term an output that is zero, as that of a last
    layer that begins with zeros, would have no gradient at all. Elements that are not finite (masked logits) count as
    zero. Half precision is summed in float32.
    """
    terms = []
    for _, leaf in leaves_of(output)[0]:
        if not isinstance(leaf, torch.Tensor) or not leaf.numel():
            continue
        leaf = dense_form(leaf)
        if leaf.is_floating_point() or leaf.is_complex():
            if leaf.is_complex():
                leaf = torch.view_as_real(leaf.resolve_conj())
            if leaf.dtype.itemsize < 4:
                leaf = leaf.float()
            leaf = leaf.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            terms.append(((leaf.square() + leaf) * _weights_like(leaf)).mean())
    if not terms:
        return None
    return torch.stack(terms).mean()


def loss_of(loss: Callable[[Any, Any], Any] | None, output: Any, value: Any) -> torch.Tensor | None:
    """Call the model's loss, or the default one.

    Raises:
        UsageError: a loss that is no tensor of one element.
    """
    if loss is None:
        return default_loss(output, value)
    returned = run_theirs(loss, output, value)
    if isinstance(returned, torch.Tensor) and returned.numel() == 1:
        return returned.reshape(())
    shown = type(returned).__name__
    if isinstance(returned, torch.Tensor):
        shown = f"a tensor of shape {tuple(returned.shape)}"
    name = getattr(loss, "__qualname__", repr(loss))
    raise UsageError(
        f"loss {name!r} returned {shown}, expected a tensor of one element: reduce it with .mean()"
    )


def left_out(loss: torch.Tensor, outputs: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, ...]:
    """Names of the outputs that want a gradient and get none from ``loss`` itself.

    An output that only feeds another one inside the model gets none here either: compiled, both are results of one
    function, and the gradient of each takes its own way through it. Walks the graph of the loss from its end to the
    outputs (``torch.autograd.graph.get_gradient_edge``, torch 2.1 and later).
    """
    edges: dict[tuple[Any, int], list[str]] = {}
    for name, tensor in outputs:
        if tensor.requires_grad:
            edges.setdefault(_gradient_edge(tensor), []).append(name)
    reached: set[tuple[Any, int]] = set()
    passed = set()
    waiting = [_gradient_edge(loss)]
    while waiting:
        edge = waiting.pop()
        if edge in edges:
            # Not beyond it: what only feeds this output gets no gradient of the loss itself.
            reached.add(edge)
        elif edge[0] is not None and edge[0] not in passed:
            passed.add(edge[0])
            waiting += edge[0].next_functions
    unreached: list[str] = []
    for edge, names in edges.items():
        if edge not in reached:
            unreached += names
    return tuple(unreached)


def _gradient_edge(tensor: torch.Tensor) -> tuple[Any, int]:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _weights_like(like: torch.Tensor) -> torch.Tensor:
    """32/64 to 95/64, scattered over the elements by a multiplicative hash of their position."""
    steps = torch.arange(like.numel(), device=like.device).mul_(40503)
    steps = steps.bitwise_right_shift_(4).bitwise_and_(63)
    # a table look-up, not arithmetic, so that the weights are the same numbers in every precision
    table = torch.tensor([(32 + step) / 64 for step in range(64)], dtype=like.dtype, device=like.device)
    return table[steps].view(like.shape)
