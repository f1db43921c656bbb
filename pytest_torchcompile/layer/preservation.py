"""Run something and leave no trace: parameters, buffers, gradients, attributes, optimiser and random states return."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pytest_torchcompile.state.snapshot import StateSnapshot, generator_state
from pytest_torchcompile.state.value_leaves import STANDARD_PACKAGES, containers_in

__all__ = ["DeepSnapshot", "preserved"]

_REGISTERED: Final = frozenset({"_parameters", "_buffers"})
"""Tables that :class:`StateSnapshot` puts back itself."""
_FOREIGN: Final = STANDARD_PACKAGES | {"numpy", "torch", "triton", "_pytest"}
"""Packages whose objects belong to the process or are compiled code, and are no state of a model: left alone."""


class DeepSnapshot:
    """What a call of a module may change, but gradients; :meth:`restore` puts it back, into the very same objects.

    All that :class:`StateSnapshot` remembers, and what it leaves to the model's own history: which object each
    attribute is, and what lists, dicts, sets, deques and objects of the user's classes hold, however deep inside.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tensors = StateSnapshot(module)
        # What several modules share is remembered once.
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
        names: list[str] = []
        for attributes in self._attributes:
            names.extend(attributes.changed())
        return names


@dataclass(frozen=True)
class _Box:
    """A container, or the attributes of an object, with what it held."""

    path: str
    live: Any
    contents: Any

    @property
    def changed(self) -> bool:
        return _identities(self.live) != _identities(self.contents)

    def refill(self) -> None:
        """By the methods of the builtin kind: a subclass may forbid it."""
        kind = next(kind for kind in _KINDS if isinstance(self.live, kind))
        kind.clear(self.live)
        if kind in (list, deque):
            kind.extend(self.live, self.contents)
        else:
            kind.update(self.live, self.contents)


_KINDS: Final[tuple[Any, ...]] = (list, deque, set, OrderedDict, dict)
"""Of boxes; an OrderedDict is a dict too, and comes before it."""


class _Attributes:
    """A namespace: its objects, and the contents of those that can be refilled, and states of generators."""

    def __init__(
        self, namespace: dict[str, Any], without: frozenset[str], owner: str = "", seen: set[int] | None = None
    ) -> None:
        self._namespace, self._without, self._owner = namespace, without, owner
        self._objects = self._present()
        named = [(self._path(name), value) for name, value in self._objects.items()]
        self._boxes: list[_Box] = []
        inside: list[tuple[str, Any]] = []
        for path, live in containers_in(named, _is_users_own, seen):
            self._boxes.append(_Box(path, live, _contents_of(live)))
            inside += [(path, value) for value in _values_in(live)]
        self._sources = []
        for path, value in (*named, *inside):
            source = generator_state(value)
            if source:
                self._sources.append((path, source))

    def restore(self) -> None:
        for name in self._present().keys() - self._objects.keys():
            del self._namespace[name]
        self._namespace.update(self._objects)
        for box in self._boxes:
            if box.changed:
                box.refill()
        for _, source in self._sources:
            source.restore()

    def changed(self) -> Iterator[str]:
        present = self._present()
        for name in {**self._objects, **present}:
            if present.get(name, _NOTHING) is not self._objects.get(name, _NOTHING):
                yield self._path(name)
        yield from (box.path for box in self._boxes if box.changed)
        yield from (f"the state of the generator in {path}" for path, source in self._sources if source.changed())

    def _present(self) -> dict[str, Any]:
        return {name: value for name, value in self._namespace.items() if name not in self._without}

    def _path(self, name: str) -> str:
        return f"{self._owner}.{name}".removeprefix(".")


_NOTHING: Final = object()


def _is_users_own(value: Any) -> bool:
    """Whether an object is of a class of the user's, so that its attributes are state of the model."""
    package = type(value).__module__.partition(".")[0]
    return package not in _FOREIGN and not isinstance(value, (nn.Module, type))


def _contents_of(live: Any) -> Any:
    if isinstance(live, dict):
        return dict(live)
    return list(live)


def _values_in(live: Any) -> Any:
    if isinstance(live, dict):
        return live.values()
    return live


def _identities(contents: Any) -> list[int]:
    """The identities of what a container holds, in order; of a dict those of its keys, then of its values."""
    identities = [id(each) for each in contents]
    if isinstance(contents, dict):
        identities += [id(value) for value in contents.values()]
    return identities


class _Optimizer:
    """State and parameter groups of an optimiser, and its own attributes."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._attributes = _Attributes(vars(optimizer), frozenset({"state", "param_groups"}))
        self._state = [(parameter, _Values(values)) for parameter, values in optimizer.state.items()]
        self._groups: list[tuple[dict[str, Any], list[Any], _Values]] = []
        for group in optimizer.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            self._groups.append((group, list(group["params"]), _Values(options)))

    def restore(self) -> None:
        self._attributes.restore()
        state = self._optimizer.state
        state.clear()
        state.update((parameter, values.restored()) for parameter, values in self._state)
        # In place: others may hold on to the list, and to the groups in it.
        self._optimizer.param_groups[:] = [group for group, _, _ in self._groups]
        for group, parameters, values in self._groups:
            options = values.restored()
            group.clear()
            group.update(params=parameters, **options)


class _Values:
    """Any structure: its tensors keep their identity and get their values back, the rest is copied."""

    def __init__(self, value: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(value)
        self._leaves: list[tuple[torch.Tensor | None, Any]] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self._leaves.append((leaf, leaf.detach().clone()))
            else:
                self._leaves.append((None, _copied(leaf)))

    def restored(self) -> Any:
        """The structure as it was."""
        leaves: list[Any] = []
        with torch.no_grad():
            for tensor, value in self._leaves:
                if tensor is None:
                    leaves.append(value)
                else:
                    leaves.append(tensor.copy_(value))
        return pytree.tree_unflatten(leaves, self._spec)


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:
        # An object that no copy can be made of is nothing that a step writes to.
        return value


@contextlib.contextmanager
def preserved(module: nn.Module, optimizer: Any = None) -> Iterator[None]:
    """Run a block and put back, exactly and whatever happens, all that it may have changed.

    Parameters, buffers, training flags and attributes of ``module`` (see :class:`DeepSnapshot`), gradients (the very
    tensors), the optimiser's state and groups, the random states of torch on every device, of Python, of NumPy if it is
    loaded, and of generators that the module holds. Needs memory for one more copy of parameters, buffers and the
    optimiser's state. Inside the block there are no gradients at first.
    """
    tensors = [*module.parameters(), *module.buffers()]
    gradients = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]
    # Put back in reverse order: random states first, gradients last, for restoring a module drops them.
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
    devices = range(device.device_count() if started else 0)
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=devices, device_type=kind):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if accelerator is not None and not started:
            # A seed that waits for a device's first use would be the block's own; the user's was that of the CPU.
            device.manual_seed_all(torch.initial_seed())
