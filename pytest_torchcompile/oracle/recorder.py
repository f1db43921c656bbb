"""record(): run a model once on private copies and keep everything that can be observed."""

from __future__ import annotations

import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.errors import TorchcompileError
from pytest_torchcompile.oracle.aliasing import alias_pairs, visible_strides
from pytest_torchcompile.oracle.bits import fingerprint, same_bits
from pytest_torchcompile.oracle.losses import loss_of
from pytest_torchcompile.oracle.noise import Wide
from pytest_torchcompile.oracle.paths import leaves_of
from pytest_torchcompile.oracle.recording import Fault, Item, Recording, kept

__all__ = ["record", "seed_everything"]


def record(
    call: Callable[..., Any],
    module: torch.nn.Module | None,
    batch: Batch,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    train: bool = True,
    seed: int = 0,
    mode: AbstractContextManager[Any] | None = None,
) -> Recording:
    """Run ``call(*args, **kwargs)``, the loss and the backward pass, and keep what they did.

    Args:
        call: The module itself, or whatever runs it (compiled, wrapped).
        module: Whose parameters and buffers are read; it starts from its present state, without
            gradients, and is left as the call leaves it (see ``StateSnapshot``), again without gradients.
        batch: Cloned first, so that a call that writes to its inputs leaves the caller's alone.
        loss: ``loss(output, batch.value)``, a tensor of one element; ``None`` is ``default_loss``.
        train: Whether to run backward; ``False`` runs under ``torch.no_grad()``. ``module.training`` is
            not touched.
        seed: Given to every random generator (torch's of all devices, Python's, NumPy's if it is loaded).
        mode: Entered around forward, loss and backward, e.g. a ``Tape``.

    An exception of the call, the loss or backward becomes ``Recording.error``; what was seen until
    then is kept.

    Raises:
        UsageError: the loss returned something that is no tensor of one element.
    """
    private = batch.clone()
    if module is not None:
        module.zero_grad(set_to_none=True)
    watch = _Watch(module, batch, private)
    seed_everything(seed)
    run = _Run(loss, private, train, mode)
    with torch.set_grad_enabled(train), mode or nullcontext():
        error = run.through(call)
    with torch.no_grad():
        return Recording(
            outputs=run.outputs,
            structure=run.structure,
            loss=None if run.loss is None else kept(run.loss),
            backward=run.backward,
            mutated=watch.mutated(),
            buffers={f"buffer {name}": kept(b) for name, b in _buffers(module)},
            gradients=watch.gradients() if run.backward else {},
            aliases=run.aliases(watch),
            generators=_generators(watch.devices),
            error=error,
        )


class _Run:
    """The three phases of one call; what each left behind."""

    def __init__(
        self, loss: Callable[[Any, Any], Any] | None, batch: Batch, train: bool, mode: object
    ) -> None:
        self.loss_function, self.batch, self.train = loss, batch, train
        self.own_loss = mode.finely if loss is None and isinstance(mode, Wide) else nullcontext
        self.outputs: dict[str, Item] = {}
        self.structure = ""
        self.live: list[tuple[str, torch.Tensor]] = []
        self.loss: torch.Tensor | None = None
        self.backward = False

    def through(self, call: Callable[..., Any]) -> Fault | None:
        phase = "forward"
        try:
            output = call(*self.batch.args, **self.batch.kwargs)
            self.keep(output)
            phase = "loss"
            with self.own_loss():
                self.loss = loss_of(self.loss_function, output, self.batch.value)
            phase = "backward"
            self.backward = self.train and self.loss is not None and self.loss.requires_grad
            if self.backward and self.loss is not None:
                self.loss.backward()  # type: ignore[no-untyped-call]
        except TorchcompileError:
            raise
        except Exception as error:
            return Fault(_qualified(type(error)), str(error), phase, _stack(error), error)
        return None

    def keep(self, output: Any) -> None:
        # before backward: a replayed CUDA graph may reuse the memory of an output
        leaves, self.structure = leaves_of(output)
        for path, leaf in leaves:
            name = f"output{path}"
            if isinstance(leaf, torch.Tensor):
                self.outputs[name] = Item(kept(leaf), visible_strides(leaf), leaf.requires_grad)
                self.live.append((name, leaf))
            else:
                self.outputs[name] = Item(leaf)

    def aliases(self, watch: _Watch) -> frozenset[tuple[str, str]]:
        return alias_pairs(self.live, watch.named())


def _stack(error: BaseException) -> str:
    """The frames of an exception, without those of this package; at most 40 lines."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OURS)]
    lines = "".join(traceback.format_list(frames)).splitlines()
    return "\n".join(lines if len(lines) <= 40 else [*lines[:12], "  ...", *lines[-28:]])


_OURS = os.path.dirname(os.path.dirname(__file__))


_EXACT = 1 << 26
"""Parameters of more elements are remembered by a fingerprint, to save memory."""


def _memory(parameter: torch.Tensor) -> torch.Tensor | str:
    plain = parameter.layout is torch.strided and parameter.numel() <= _EXACT and type(parameter.data) is torch.Tensor
    return parameter.detach().clone() if plain else fingerprint(parameter)


def _changed(parameter: torch.Tensor, memory: torch.Tensor | str) -> bool:
    if isinstance(memory, str):
        return fingerprint(parameter) != memory
    return not same_bits(memory, parameter.detach())


class _Watch:
    """The tensors that a call may write to: arguments, parameters, buffers."""

    def __init__(self, module: torch.nn.Module | None, before: Batch, private: Batch) -> None:
        self.private = private
        self.module = module
        self.parameters = [] if module is None else list(module.named_parameters())
        self.before = dict(_inputs(before))
        self.inputs = dict(_inputs(private))
        self.prints = [_memory(p) for _, p in self.parameters]
        tensors = [*self.inputs.values(), *(p for _, p in self.parameters), *(b for _, b in _buffers(module))]
        self.devices = {t.device for t in tensors}

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.inputs.items()
        yield from self.parameters
        yield from _buffers(self.module)

    def mutated(self) -> dict[str, torch.Tensor]:
        after = {}
        for name, tensor in {**dict(_inputs(self.private)), **self.inputs}.items():
            old = self.before.get(name)
            if old is None or not same_bits(old.detach(), tensor.detach()):
                after[f"{name} after the call"] = kept(tensor)
        for (name, parameter), old_print in zip(self.parameters, self.prints, strict=True):
            if _changed(parameter, old_print):
                after[f"{name} after the call"] = kept(parameter)
        return after

    def gradients(self) -> dict[str, torch.Tensor | None]:
        found = {}
        inputs = [(name, t) for name, t in self.inputs.items() if t.requires_grad and t.is_leaf]
        for name, tensor in (*self.parameters, *inputs):
            found[f"gradient of {name}"] = None if tensor.grad is None else kept(tensor.grad)
            tensor.grad = None  # not both at once
        return found


def _inputs(batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    for path, leaf in (*leaves_of(batch.args)[0], *leaves_of(batch.kwargs)[0]):
        if isinstance(leaf, torch.Tensor):
            yield f"input{path}", leaf


def _buffers(module: torch.nn.Module | None) -> Iterator[tuple[str, torch.Tensor]]:
    if module is not None:
        yield from module.named_buffers()


def _generators(devices: set[torch.device]) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device)
            # mps has one generator and takes no device
            states[str(device)] = module.get_rng_state(*(() if device.type == "mps" else (device,)))
    return states


def seed_everything(seed: int) -> None:
    """Seed torch's generators of every device, Python's, and NumPy's if somebody has loaded it."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _qualified(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
