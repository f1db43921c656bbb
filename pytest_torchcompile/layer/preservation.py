"""Run something and leave no trace: parameters, buffers, gradients, attributes, optimiser and random states return."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pytest_torchcompile.state.paths import STANDARD_PACKAGES, containers_in
from pytest_torchcompile.state.snapshot import StateSnapshot, generator_state

__all__ = ["DeepSnapshot", "preserved"]

_REGISTERED = frozenset({"_parameters", "_buffers"})
"""Tables that :class:`StateSnapshot` puts back itself."""


_FOREIGN = STANDARD_PACKAGES | {"numpy", "torch", "triton", "_pytest"}
"""Packages whose objects belong to the process or are compiled code, and are no state of a model: left alone."""


class DeepSnapshot:
    """What a call of a module may change, but gradients; :meth:`restore` puts it back, into the very same objects.

    All that :class:`StateSnapshot` remembers, and what it leaves to the model's own history: which object each
    attribute is, and what lists, dicts, sets, deques and objects of the user's classes hold, however deep inside.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tensors = StateSnapshot(module)
        seen: set[int] = set()
        self._attributes = [_Attributes(vars(part), _REGISTERED, name, seen) for name, part in module.named_modules()]

    def restore(self) -> None:
        """Put everything back; gradients are dropped."""
        for attributes in self._attributes:
            attributes.restore()
        self._tensors.restore()

    def changed(self) -> list[str]:
        """The names of attributes, of what is in them, and of generators that are not what they were.

        Values of tensors are not compared.
        """
        return [name for attributes in self._attributes for name in attributes.changed()]


class _Attributes:
    """A namespace: its objects, and the contents of those that can be refilled, and states of generators."""

    def __init__(
        self, namespace: dict[str, Any], without: frozenset[str], name: str = "", seen: set[int] | None = None
    ) -> None:
        self._namespace, self._without, self._name = namespace, without, name
        self._objects = {name: value for name, value in namespace.items() if name not in without}
        named = [(self._path(name), value) for name, value in self._objects.items()]
        self._contents = [(path, box, _contents(box)) for path, box in containers_in(named, _users_own, seen)]
        inside = [(path, each) for path, box, _ in self._contents
                  for each in (box.values() if isinstance(box, dict) else box)]
        self._sources = [(path, source) for path, value in (*named, *inside) if (source := generator_state(value))]

    def restore(self) -> None:
        for name in [n for n in self._namespace if n not in self._objects and n not in self._without]:
            del self._namespace[name]
        self._namespace.update(self._objects)
        for _, box, contents in self._contents:
            if _flat(box) != _flat(contents):
                kind = next(kind for kind in _KINDS if isinstance(box, kind))
                kind.clear(box)
                (kind.extend if kind in (list, deque) else kind.update)(box, contents)
        for _, source in self._sources:
            source.restore()

    def changed(self) -> Iterator[str]:
        mine = {name: value for name, value in self._namespace.items() if name not in self._without}
        for name in {**self._objects, **mine}:
            if mine.get(name, _NOTHING) is not self._objects.get(name, _NOTHING):
                yield self._path(name)
        yield from (path for path, box, contents in self._contents if _flat(box) != _flat(contents))
        yield from (f"the state of the generator in {path}" for path, source in self._sources if source.changed())

    def _path(self, name: str) -> str:
        return f"{self._name}.{name}".removeprefix(".")


_NOTHING = object()
_KINDS: tuple[Any, ...] = (list, deque, set, OrderedDict, dict)
"""Whose own methods refill a box: a subclass may forbid it."""


def _users_own(value: Any) -> bool:
    """Whether an object is of a class of the user's, so that its attributes are state of the model."""
    return type(value).__module__.partition(".")[0] not in _FOREIGN and not isinstance(value, (nn.Module, type))


def _contents(box: Any) -> Any:
    return dict(box) if isinstance(box, dict) else list(box)


def _flat(contents: Any) -> list[int]:
    """The identities of what a container holds, in order."""
    return [id(each) for each in ([*contents, *contents.values()] if isinstance(contents, dict) else contents)]


class _Optimizer:
    """State and parameter groups of an optimiser, and its own attributes."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._attributes = _Attributes(vars(optimizer), frozenset({"state", "param_groups"}))
        self._state = [(parameter, _Values(held)) for parameter, held in optimizer.state.items()]
        self._groups = [(group, list(group["params"]), _Values({k: v for k, v in group.items() if k != "params"}))
                        for group in optimizer.param_groups]

    def restore(self) -> None:
        self._attributes.restore()
        state = self._optimizer.state
        state.clear()
        state.update((parameter, values.restored()) for parameter, values in self._state)
        self._optimizer.param_groups[:] = [group for group, _, _ in self._groups]
        for group, parameters, values in self._groups:
            rest = values.restored()
            group.clear()
            group.update(params=parameters, **rest)


class _Values:
    """Any structure: its tensors keep their identity and get their values back, the rest is copied."""

    def __init__(self, value: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(value)
        self._leaves = [(leaf, leaf.detach().clone()) if isinstance(leaf, torch.Tensor) else (None, _copied(leaf))
                        for leaf in leaves]

    def restored(self) -> Any:
        """The structure as it was."""
        with torch.no_grad():
            leaves = [value if tensor is None else tensor.copy_(value) for tensor, value in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # an object that no copy can be made of is nothing that a step writes to
        return value


@contextlib.contextmanager
def preserved(module: nn.Module, optimizer: Any = None) -> Iterator[None]:
    """Run a block and put back, exactly and whatever happens, all that it may have changed.

    Parameters, buffers, training flags and attributes of ``module`` (see :class:`DeepSnapshot`), gradients (the very
    tensors), the optimiser's state and groups, the random states of torch on every device, of Python, of NumPy if it is
    loaded, and of generators that the module holds. Needs memory for one more copy of parameters, buffers and the
    optimiser's state. Inside the block
    there are no gradients at first.
    """
    tensors = [*module.parameters(), *module.buffers()]
    gradients = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]
    with contextlib.ExitStack() as restoring:
        for tensor, gradient in gradients:
            restoring.callback(setattr, tensor, "grad", gradient)
            tensor.grad = None
        restoring.callback(DeepSnapshot(module).restore)
        if optimizer is not None:
            restoring.callback(_Optimizer(optimizer).restore)
        restoring.enter_context(_same_random_states())
        yield


@contextlib.contextmanager
def _same_random_states() -> Iterator[None]:
    accelerator = torch.accelerator.current_accelerator()
    kind = accelerator.type if accelerator is not None else "cuda"
    device = torch.get_device_module(kind)
    started = accelerator is not None and device.is_initialized()
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numpys = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=range(device.device_count()) if started else (), device_type=kind):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpys)
        if accelerator is not None and not started:
            # A seed that waits for a device's first use would be the block's own; the user's was that of the CPU.
            device.manual_seed_all(torch.initial_seed())
