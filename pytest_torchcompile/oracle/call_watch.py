"""Call watch: the tensors that a recorded call may write to, as they were before it and as it leaves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from pytest_torchcompile.batch import Batch, source_of
from pytest_torchcompile.oracle.recording import Item
from pytest_torchcompile.oracle.same_values import names_of_differing
from pytest_torchcompile.oracle.training import Training
from pytest_torchcompile.state.tensor_forms import (
    fingerprint,
    is_spread,
    own_part,
    same_bits,
    true_on_any_rank,
    visible_strides,
)
from pytest_torchcompile.state.value_leaves import attribute_tensors, tensors_of

__all__ = ["Watch"]

# Parameters of more elements are remembered by a fingerprint, to save memory.
_COPIED_UP_TO = 1 << 26


class Watch:
    """The tensors that a call may write to. Made before the call, asked after it."""

    def __init__(self, module: torch.nn.Module | None, before: Batch, private: Batch, sparing: bool = False,
                 unwritten: bool = False) -> None:
        """``before`` is the caller's batch, ``private`` the copy that the call is given.

        ``sparing``: nobody else has the module. Its parameters are remembered by fingerprints, and gradients are taken
        as they are, not copied. ``unwritten``: the call is known to leave the parameters alone.
        """
        self.private = private
        self.module = module
        self.sparing = sparing
        self.parameters = [] if module is None else list(module.named_parameters())
        self.before = dict(_input_tensors(before))
        self.inputs = dict(_input_tensors(private))
        # Where the gradients of inputs arrive.
        self.sources = {name: source_of(tensor) for name, tensor in self.inputs.items()}
        # By name: what to look at of a parameter to see whether it was written to, and what that was before.
        self.memories: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {}
        if not unwritten:
            for name, parameter in self.parameters:
                shown = fingerprint if sparing else _shown_of(parameter)
                self.memories[name] = (shown, shown(parameter).clone())
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
        items = {f"buffer {name}": Item.of_state(tensor) for name, tensor in self.buffers()}
        items |= {f"attribute {name}": Item.of_state(tensor) for name, tensor in self.attributes()}
        return items

    def inputs_after(self) -> dict[str, torch.Tensor]:
        """The inputs, and further tensors that the call has put into a list or dict that it was given."""
        return {**dict(_input_tensors(self.private)), **self.inputs}

    def mutated(self) -> dict[str, Item]:
        """Inputs and parameters that were written to, and all that a training is there to move."""
        after = {}
        for name, tensor in self.inputs_after().items():
            old = self.before.get(name)
            if old is None or not _is_untouched(old, tensor):
                after[f"{name} after the call"] = Item.of(tensor)
        written = self._written_parameters()
        for name, parameter in self.parameters:
            if name in self.memories and (name in written or self._is_trained(name, parameter)):
                after[f"{name} after the call"] = Item.of(parameter)
        return after

    def _written_parameters(self) -> set[str]:
        """The names of the remembered parameters that the call has written to, on this rank or another one."""
        differing = names_of_differing(self._before_and_after())
        written = {name: name in differing for name in self.memories}
        spread = {name: parameter for name, parameter in self.parameters if name in written and is_spread(parameter)}
        # What a rank then reads of such a parameter it reads together with the others.
        written |= true_on_any_rank(spread, written)
        return {name for name, is_written in written.items() if is_written}

    def _before_and_after(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        for name, parameter in self.parameters:
            if name in self.memories:
                shown, before = self.memories[name]
                yield name, before, shown(parameter)

    def _is_trained(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether a training moves it: a step may be too small to change a bit on one side alone, which is no fault."""
        return isinstance(self.module, Training) and self.module.is_trained(name, parameter)

    def take_gradients(self) -> dict[str, Item]:
        """Gradients of parameters and of inputs that are leaves; each is taken off its tensor."""
        gradients = {}
        for name, tensor in self.differentiable():
            # an Item copies: not both at once
            gradient, tensor.grad = tensor.grad, None
            if gradient is None:
                item = Item(None)
            elif self._needs_no_copy(gradient):
                item = Item.shared(gradient)
            else:
                item = Item.of(gradient)
            if gradient is not None and gradient.layout is torch.sparse_coo:
                # Autograd takes a sparse gradient as it is or adds it to none: who looks on decides on that.
                item = replace(item, layout=str(gradient.layout))
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


def _shown_of(parameter: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """What to look at of a parameter to see whether it was written to."""
    is_plain = parameter.layout is torch.strided and type(parameter.data) is torch.Tensor
    # Of a spread one each rank its own part: to gather all of it takes a collective, and its memory on every rank.
    if is_spread(parameter) or (is_plain and parameter.numel() <= _COPIED_UP_TO):
        return own_part
    return fingerprint
