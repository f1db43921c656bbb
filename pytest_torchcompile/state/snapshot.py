"""StateSnapshot: a module's parameters, buffers, training flags and what it holds in attributes, to be put back.

And copies of it (:func:`copy_state`), to be compared.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from pytest_torchcompile.state.tensor_forms import is_plain, same_bits
from pytest_torchcompile.state.value_leaves import (
    attribute_tensors,
    containers_in,
    holds_tensors,
    own_attributes,
    tensors_of,
)

__all__ = ["GeneratorState", "StateSnapshot", "changed_names", "copy_state", "generator_state",
           "write_value"]


_HOOK_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")


class StateSnapshot:
    """Remember a module's tensors and training flags; :meth:`restore` puts them back in place.

    The tensor objects stay the ones that compiled code has guarded on: values are copied into them, and
    where a call has replaced, added or deleted a parameter or buffer, the object of the snapshot returns.
    Tensors in attributes, and in lists, dicts and objects there, are remembered too; counters and flags are not.
    Hooks of parameters are: one that a call has left would change the gradients of every run after it.
    """

    def __init__(self, module: torch.nn.Module | None) -> None:
        modules = [] if module is None else list(module.modules())
        self._registries = [_Registries(part) for part in modules]
        # Parameters before buffers, and each once, however many names it has.
        tensors: dict[int, torch.Tensor] = {}
        for name in ("parameters", "buffers"):
            for registries in self._registries:
                table: Mapping[str, torch.Tensor | None] = getattr(registries, name)
                tensors |= {id(tensor): tensor for tensor in table.values() if tensor is not None}
        self._attributes = _AttributeSnapshot(modules)
        self._saved = [(tensor, tensor.detach().clone(), tensor.requires_grad) for tensor in tensors.values()]
        self._hooks = [_TensorHooks(tensor) for tensor in tensors.values()]

    def restore_hooks(self) -> None:
        """Only put the hooks of parameters and buffers back."""
        for hooks in self._hooks:
            hooks.restore()

    def restore(self, *, counters: bool = False) -> None:
        """Copy the remembered values back, drop all gradients, set the training flags again.

        ``counters``: put counters, flags and whatever else attributes held back too, as if nothing had been called.
        """
        self.restore_hooks()
        for registries in self._registries:
            registries.restore()
        self._attributes.restore(counters)
        with torch.no_grad():
            for tensor, value, requires_grad in self._saved:
                _restore_tensor(tensor, value, requires_grad)


class _Registries:
    """What a module itself has: its training flag, and by name its parameters and buffers."""

    def __init__(self, part: torch.nn.Module) -> None:
        self.part, self.training = part, part.training
        self.parameters, self.buffers = dict(part._parameters), dict(part._buffers)

    def restore(self) -> None:
        """Put the objects back."""
        if self.part.training != self.training:
            self.part.training = self.training
        _refill_registry(self.part._parameters, self.parameters)
        _refill_registry(self.part._buffers, self.buffers)


class _TensorHooks:
    """The hooks of a tensor, to be put back.

    Private: ``Tensor._backward_hooks`` and ``Tensor._post_accumulate_grad_hooks``, dicts or None (torch 2.8 to 2.15).
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.before = {name: dict(getattr(tensor, name, None) or {}) for name in _HOOK_TABLES}

    def restore(self) -> None:
        """In the dicts themselves, which autograd reads."""
        for name, before in self.before.items():
            table = getattr(self.tensor, name, None)
            if table is None:
                continue
            # Torch's own stay: FSDP1 registers its hook in the first call, and notes that it has.
            kept = {key: hook for key, hook in table.items() if key not in before and _is_torchs_hook(hook)}
            if dict(table) != before | kept:
                table.clear()
                table.update(before | kept)


def _is_torchs_hook(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "torch"


def _restore_tensor(tensor: torch.Tensor, value: torch.Tensor, requires_grad: bool) -> None:
    if tensor.requires_grad != requires_grad:
        if tensor.is_leaf:
            tensor.requires_grad_(requires_grad)
        else:
            # a buffer that a call has tied to a graph (`self.cache = cache + x` written in place)
            tensor.detach_()
    write_value(tensor, value)
    if tensor.is_leaf:
        tensor.grad = None


def write_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a tensor in place, also where the tensor was made in inference mode, or is expanded."""
    if is_plain(tensor) and 0 in tensor.stride():
        # Elements that are one place in memory are written once; torch refuses to write them twice.
        once = [slice(None)] * tensor.dim()
        for dimension, stride in enumerate(tensor.stride()):
            if stride == 0:
                once[dimension] = slice(1)
        tensor, value = tensor[tuple(once)], value[tuple(once)]
    if not tensor.is_inference():
        tensor.copy_(value)
        return
    # Torch lets nobody write to such a one elsewhere.
    with torch.inference_mode():
        tensor.copy_(value)


def _refill_registry(table: dict[str, Any], before: Mapping[str, torch.Tensor | None]) -> None:
    if list(table) == list(before) and all(table[name] is before[name] for name in before):
        return
    table.clear()
    table.update(before)


class _AttributeSnapshot:
    """The attributes of modules that hold tensors, and their own generators of random numbers, to be put back.

    Counters and flags are the model's own history, and stay unless they are asked for.
    """

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self._parts = [(part, own_attributes(part)) for part in modules]
        values: list[Any] = []
        for _, own in self._parts:
            values += own.values()
        self._contents = []
        inner_values: list[Any] = []
        for _, container in containers_in(("", value) for value in values):
            contents = _copy_contents(container)
            self._contents.append((container, contents))
            inner_values += contents.values() if isinstance(contents, dict) else contents
        states = (generator_state(value) for value in (*values, *inner_values))
        self._generators = [state for state in states if state is not None]
        tensors: dict[int, torch.Tensor] = {}
        for value in values:
            tensors |= {id(tensor): tensor for _, tensor in tensors_of(value)}
        self._saved = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]

    def restore(self, counters: bool) -> None:
        """Put objects, containers and values back; compiled code finds the very objects that it has guarded."""
        for part, own in self._parts:
            _restore_attributes(part, own, counters)
        for container, contents in self._contents:
            _restore_contents(container, contents, counters)
        for generator in self._generators:
            generator.restore()
        with torch.no_grad():
            for tensor, value in self._saved:
                if not same_bits(tensor.detach(), value):
                    write_value(tensor, value)


def _restore_attributes(part: torch.nn.Module, before: Mapping[str, Any], counters: bool) -> None:
    now = own_attributes(part)
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if (name in before) == (name in now) and new is old:
            continue
        if not (counters or holds_tensors(new) or holds_tensors(old)):
            continue
        if name in before:
            part.__dict__[name] = old
        else:
            del part.__dict__[name]


def _copy_contents(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _restore_contents(container: Any, contents: Any, counters: bool) -> None:
    if _same_contents(container, contents):
        return
    if not (counters or holds_tensors(container) or holds_tensors(contents)):
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(contents)
    else:
        container.update(contents)


def _same_contents(container: Any, contents: Any) -> bool:
    if len(container) != len(contents):
        return False
    if isinstance(container, dict):
        if list(container) != list(contents):
            return False
        container, contents = container.values(), contents.values()
    return all(one is other for one, other in zip(container, contents, strict=True))


class GeneratorState(NamedTuple):
    """The state of a generator of random numbers, and how it is read and written."""

    get: Callable[[], Any]
    set: Callable[[Any], object]
    state: Any

    def changed(self) -> bool:
        """Whether something was drawn since."""
        now = self.get()
        if isinstance(now, torch.Tensor):
            return not torch.equal(now, self.state)
        return pickle.dumps(now) != pickle.dumps(self.state)

    def restore(self) -> None:
        """Go back to the state."""
        self.set(self.state)


def generator_state(value: Any) -> GeneratorState | None:
    """The present state of a generator of torch, Python or NumPy; None for anything else."""
    access = _generator_access(value)
    if access is None:
        return None
    get_state, set_state = access
    return GeneratorState(get_state, set_state, get_state())


def _generator_access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    # SystemRandom asks the operating system and has no state.
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    # Not imported here: a model that draws from NumPy has loaded it.
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(value, numpy.RandomState):
        return value.get_state, value.set_state
    if numpy is not None and isinstance(value, numpy.Generator):
        bits = value.bit_generator

        def set_bits(state: Any) -> None:
            bits.state = state

        return lambda: bits.state, set_bits
    return None


def copy_state(module: torch.nn.Module) -> dict[str, Any]:
    """The tensors, flags and random state that an attempt could leave changed, by the name that a report gives them."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in named.items()}
    for name, tensor in attribute_tensors(module):
        state[f"attribute {name}"] = tensor.detach().clone()
    for name, tensor in named.items():
        if tensor.is_leaf:
            state[f"gradient of {name}"] = tensor.grad
    for name, part in module.named_modules():
        state[f"{name or 'model'}.training"] = part.training
    state["the random state"] = torch.get_rng_state()
    return state


def changed_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What of :func:`copy_state` is another now, bit by bit, what is gone among it."""
    changed = []
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor):
            same = same_bits(new, old)
        else:
            same = type(new) is type(old) and bool(new == old)
        if not same:
            changed.append(name)
    return changed
