"""Watch: what a call may write to (arguments, parameters, buffers, attributes), and what it has written."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pytest_torchcompile.batch import Batch, source_of
from pytest_torchcompile.oracle.recording import Item
from pytest_torchcompile.state.paths import attribute_tensors, tensors_of
from pytest_torchcompile.state.tensor_values import fingerprint, is_spread, same_bits, visible_strides, whole_value

__all__ = ["Watch"]

# Parameters of more elements are remembered by a fingerprint, to save memory.
_COPIED_UP_TO = 1 << 26


class Watch:
    """The tensors that a call may write to. Made before the call, asked after it."""

    def __init__(self, module: torch.nn.Module | None, before: Batch, private: Batch, sparing: bool = False) -> None:
        """``before`` is the caller's batch, ``private`` the copy that the call is given.

        ``sparing``: nobody else has the module. Its parameters are remembered by fingerprints, and gradients are taken
        as they are, not copied.
        """
        self.private = private
        self.module = module
        self.sparing = sparing
        self.parameters = [] if module is None else list(module.named_parameters())
        self.before = dict(_input_tensors(before))
        self.inputs = dict(_input_tensors(private))
        # Where the gradients of inputs arrive.
        self.sources = {name: source_of(tensor) for name, tensor in self.inputs.items()}
        remember = fingerprint if sparing else _remember_parameter
        self.memories = [remember(parameter) for _, parameter in self.parameters]
        self.devices = {tensor.device for tensor in self.inputs.values()}
        self.devices |= {tensor.device for _, tensor in (*self.parameters, *self.buffers())}
        # Reading them is collective.
        self.spread = any(is_spread(tensor) for _, tensor in self.named_tensors())

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything that a result may share memory with."""
        yield from self.inputs.items()
        yield from self.parameters
        yield from self.buffers()
        yield from self.attributes()

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As they are now."""
        if self.module is not None:
            yield from self.module.named_buffers()

    def attributes(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors in attributes of modules, as they are now; without those that are parameters or buffers too."""
        known = {id(tensor) for _, tensor in (*self.parameters, *self.buffers())}
        for name, tensor in attribute_tensors(self.module):
            if id(tensor) not in known:
                yield name, tensor

    def buffers_and_attributes(self) -> dict[str, Item]:
        """As they are now."""
        items = {f"buffer {name}": Item.of(tensor) for name, tensor in self.buffers()}
        items |= {f"attribute {name}": Item.of(tensor) for name, tensor in self.attributes()}
        return items

    def mutated(self) -> dict[str, Item]:
        """Inputs and parameters that were written to."""
        after = {}
        # A call may have put further tensors into a list or dict that it was given.
        for name, tensor in {**dict(_input_tensors(self.private)), **self.inputs}.items():
            old = self.before.get(name)
            if old is None or not _is_untouched(old, tensor):
                after[f"{name} after the call"] = Item.of(tensor)
        for (name, parameter), memory in zip(self.parameters, self.memories, strict=True):
            if _has_changed(parameter, memory):
                after[f"{name} after the call"] = Item.of(parameter)
        return after

    def take_gradients(self) -> dict[str, Item]:
        """Gradients of parameters and of inputs that are leaves; each is taken off its tensor."""
        gradients = {}
        for name, tensor in self.differentiable():
            # an Item copies: not both at once
            gradient, tensor.grad = tensor.grad, None
            if gradient is None:
                item = Item(None)
            elif self._needs_no_copy(gradient):
                item = Item(gradient.detach())
            else:
                item = Item.of(gradient)
            gradients[f"gradient of {name}"] = item
        return gradients

    def _needs_no_copy(self, gradient: torch.Tensor) -> bool:
        """Nobody writes to it any more; but a distributed or sparse one is to be made dense."""
        return self.sparing and type(gradient) is torch.Tensor and gradient.layout is torch.strided

    def differentiable(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, and inputs that want a gradient."""
        yield from self.parameters
        for name, source in self.sources.items():
            if source.requires_grad and source.is_leaf:
                yield name, source


def _input_tensors(batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    for arguments in (batch.args, batch.kwargs):
        for path, tensor in tensors_of(arguments):
            yield f"input{path}", tensor


def _is_untouched(old: torch.Tensor, tensor: torch.Tensor) -> bool:
    if tensor.requires_grad != old.requires_grad or not same_bits(old.detach(), tensor.detach()):
        return False
    return visible_strides(tensor) == visible_strides(old)


def _remember_parameter(parameter: torch.Tensor) -> torch.Tensor | str:
    if is_spread(parameter):
        # All of it on every rank: whether it has changed is asked by all or none.
        return whole_value(parameter).clone()
    is_plain = parameter.layout is torch.strided and type(parameter.data) is torch.Tensor
    if is_plain and parameter.numel() <= _COPIED_UP_TO:
        return parameter.detach().clone()
    return fingerprint(parameter)


def _has_changed(parameter: torch.Tensor, memory: torch.Tensor | str) -> bool:
    if isinstance(memory, str):
        return fingerprint(parameter) != memory
    return not same_bits(memory, whole_value(parameter))
