"""Data parallel whose collectives are operators of the graph: SimpleFSDP, as torchtitan's graph trainer has it.

``simple_fsdp``
    each parameter is a ``DTensor`` of which a rank has a part. A property of its layer gathers the whole wherever the
    layer reads it, and the gradient goes back to the ranks as a mean.
``simple_fsdp+tp``
    a mesh of two dimensions. Pairs of ranks split the layers of one replica (:mod:`~.tp`), and the replicas shard what
    each of a pair has.

``fsdp2`` does the same in hooks of modules, which torch keeps from Dynamo: no graph has their collectives in it
(``_dynamo_disable`` in torch/distributed/fsdp/_fully_shard/_fsdp_common.py, torch 2.13).

What was gathered in the forward pass is kept for the backward pass, unless a graph pass or a partitioner has it
gathered again. Reference: R. Zhang and others, SimpleFSDP, arXiv:2411.00284.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper, in_order, shipped_wrapper
from pytest_torchcompile.wrappers.tp import split_layers

__all__ = ["SIMPLE_FSDP", "SIMPLE_FSDP_TP"]


class _Mean(torch.autograd.Function):
    """Hands a tensor on, and divides its gradient by the number of replicas.

    By hand, because gloo cannot add up to a mean.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, replicas: int) -> torch.Tensor:
        ctx.replicas = replicas
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] / ctx.replicas, None


def _wrap_sharded(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    def wrap(inner: nn.Module) -> nn.Module:
        return _shard_parameters(inner, cell, mesh)

    return in_order(model, settings, cell, wrap)


def _wrap_sharded_split(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    split_layers(model, cell, mesh["tensor"], eager=settings is None)
    return _wrap_sharded(model, settings, cell, mesh)


def _shard_parameters(model: nn.Module, cell: Cell, mesh: Any) -> nn.Module:
    """Shard each parameter over the dimension ``data`` of a mesh, and have its layer gather it where it is read.

    Raises :class:`UsageError` for a layer that reads its parameters elsewhere.
    """
    # A parameter that two layers share stays one.
    sharded: dict[int, nn.Parameter] = {}
    for name, layer in model.named_modules():
        own = {key: value for key, value in layer._parameters.items() if value is not None}
        if not own:
            continue
        if isinstance(layer, nn.RNNBase):
            raise UsageError(f"wrapper {cell.wrapper!r} gathers a parameter where its layer reads it, and {name} of "
                             f"model {cell.model!r} is an {type(layer).__name__}, which reads a list of its own; take "
                             "fsdp2 for it")
        whole_values: dict[str, Any] = {}
        for key, value in own.items():
            whole_values[key] = _whole_value(key, value, mesh)
            if id(value) not in sharded:
                sharded[id(value)] = _sharded(value, mesh)
            layer._parameters[key] = sharded[id(value)]
        # A class of its own: properties are found before nn.Module looks among its parameters, which keep their names.
        layer.__class__ = type(type(layer).__name__, (type(layer),), whole_values)
    return model


def _sharded(value: nn.Parameter, mesh: Any) -> nn.Parameter:
    """The same parameter as a ``DTensor`` over all dimensions of the mesh."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    if not isinstance(value, DTensor):
        part = distribute_tensor(value.detach(), mesh["data"], [Shard(0)])
        return nn.Parameter(part, requires_grad=value.requires_grad)
    inner = value.placements[0]
    over_data: Any = Shard(0)
    if inner == Shard(0):
        # The other dimension, so that a rank's part is one piece of the whole. A vector has none, and stays as it is.
        over_data = Shard(1) if value.ndim > 1 else Replicate()
    part = distribute_tensor(value.full_tensor().detach(), mesh, [over_data, inner])
    return nn.Parameter(part, requires_grad=value.requires_grad)


def _whole_value(name: str, value: nn.Parameter, mesh: Any) -> property:
    """A property that gathers a parameter from the replicas: what its layer would have without them."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    replicas = mesh["data"].size()
    # How tensor parallel splits it, if it does.
    inner = tuple(value.placements) if isinstance(value, DTensor) else ()
    over_all = (Replicate(), *inner)
    gradients = (Partial(), *inner)
    split_over = mesh["tensor"] if inner else None

    def gather(layer: nn.Module) -> torch.Tensor:
        part: Any = layer._parameters[name]
        gathered = part.redistribute(placements=over_all).to_local(grad_placements=gradients)
        whole: torch.Tensor = _Mean.apply(gathered, replicas)  # type: ignore[no-untyped-call]
        if not inner:
            return whole
        return DTensor.from_local(whole, split_over, inner, run_check=False)

    return property(gather)


SIMPLE_FSDP: Wrapper = shipped_wrapper("simple_fsdp", _wrap_sharded)
SIMPLE_FSDP_TP: Wrapper = shipped_wrapper("simple_fsdp+tp", _wrap_sharded_split)
