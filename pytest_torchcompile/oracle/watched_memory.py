"""Watch: what a call may write to (arguments, parameters, buffers, attributes), and what it has written."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pytest_torchcompile.batch import Batch, source_of
from pytest_torchcompile.oracle.recording import Item
from pytest_torchcompile.state.paths import attribute_tensors, tensors_of
from pytest_torchcompile.state.tensor_values import fingerprint, is_spread, same_bits, visible_strides, whole_value

__all__ = ["Watch"]

_EXACT = 1 << 26
"""Parameters of more elements are remembered by a fingerprint, to save memory."""


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
        self.before = dict(_inputs(before))
        self.inputs = dict(_inputs(private))
        self.sources = {name: source_of(tensor) for name, tensor in self.inputs.items()}
        """Where the gradients of inputs arrive."""
        self.memories = [fingerprint(p) if sparing else _memory(p) for _, p in self.parameters]
        tensors = [*self.inputs.values(), *(p for _, p in self.parameters), *(b for _, b in self.buffers())]
        self.devices = {t.device for t in tensors}
        self.spread = any(is_spread(tensor) for _, tensor in self.named())
        """Reading them is collective."""

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
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
        known = {id(t) for _, t in (*self.parameters, *self.buffers())}
        yield from ((name, t) for name, t in attribute_tensors(self.module) if id(t) not in known)

    def held(self) -> dict[str, Item]:
        """Buffers and attributes, as they are now."""
        found = {f"buffer {name}": Item.of(tensor) for name, tensor in self.buffers()}
        return found | {f"attribute {name}": Item.of(tensor) for name, tensor in self.attributes()}

    def mutated(self) -> dict[str, Item]:
        """Inputs and parameters that were written to."""
        after = {}
        for name, tensor in {**dict(_inputs(self.private)), **self.inputs}.items():
            old = self.before.get(name)
            if old is None or not _alike(old, tensor):
                after[f"{name} after the call"] = Item.of(tensor)
        for (name, parameter), memory in zip(self.parameters, self.memories, strict=True):
            if _changed(parameter, memory):
                after[f"{name} after the call"] = Item.of(parameter)
        return after

    def gradients(self) -> dict[str, Item]:
        """Gradients of parameters and of inputs that are leaves; each is taken off its tensor."""
        found = {}
        for name, tensor in self.differentiable():
            # an Item copies: not both at once
            taken, tensor.grad = tensor.grad, None
            found[f"gradient of {name}"] = (Item(None) if taken is None else Item(taken.detach()) if self._whole(taken)
                                            else Item.of(taken))
        return found

    def _whole(self, gradient: torch.Tensor) -> bool:
        """Can it be kept as it is? Nobody writes to it any more; a distributed or sparse one is to be made dense."""
        return self.sparing and type(gradient) is torch.Tensor and gradient.layout is torch.strided

    def differentiable(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, and inputs that want a gradient."""
        yield from self.parameters
        yield from ((name, source) for name, source in self.sources.items() if source.requires_grad and source.is_leaf)


def _inputs(batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    for arguments in (batch.args, batch.kwargs):
        yield from ((f"input{path}", tensor) for path, tensor in tensors_of(arguments))


def _alike(old: torch.Tensor, tensor: torch.Tensor) -> bool:
    if tensor.requires_grad != old.requires_grad or not same_bits(old.detach(), tensor.detach()):
        return False
    return visible_strides(tensor) == visible_strides(old)


def _memory(parameter: torch.Tensor) -> torch.Tensor | str:
    if is_spread(parameter):
        return whole_value(parameter).clone()  # all of it on every rank: whether it has changed is asked by all or none
    plain = parameter.layout is torch.strided and parameter.numel() <= _EXACT and type(parameter.data) is torch.Tensor
    return parameter.detach().clone() if plain else fingerprint(parameter)


def _changed(parameter: torch.Tensor, memory: torch.Tensor | str) -> bool:
    if isinstance(memory, str):
        return fingerprint(parameter) != memory
    return not same_bits(memory, whole_value(parameter))
