"""record(): run a model once on private copies and keep everything that can be observed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.errors import TorchcompileError
from pytest_torchcompile.gauges.replays import step_begins
from pytest_torchcompile.oracle.losses import default_loss, left_out, loss_of
from pytest_torchcompile.oracle.noise import Wide
from pytest_torchcompile.oracle.ownership import raised_by_us, run_theirs
from pytest_torchcompile.oracle.recording import Fault, Item, Recording, detached_copy
from pytest_torchcompile.oracle.replicas import average_gradients, losses_of_others
from pytest_torchcompile.oracle.shared_memory import alias_pairs
from pytest_torchcompile.oracle.watched_memory import Watch
from pytest_torchcompile.state.paths import leaves_of

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
    rest: bool = True,
    sparing: bool = False,
    also: Sequence[Batch] = (),
    whole: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Recording:
    """Run ``call(*args, **kwargs)``, the loss and the backward pass, and keep what they did.

    Args:
        call: The module itself, or whatever runs it (compiled, wrapped).
        module: Whose parameters and buffers are read; it starts from its present state, without
            gradients, and is left as the call leaves it (see ``StateSnapshot``), again without gradients.
        batch: Cloned first, so that a call that writes to its inputs leaves the caller's alone.
        loss: ``loss(output, batch.value)``, a tensor of one element; ``None`` is ``default_loss``. Where it takes
            no gradient of some outputs, the call is run once more for a backward pass through those alone,
            unless ``rest`` is False.
        also: Batches of other replicas (:mod:`~pytest_torchcompile.oracle.replicas`): run first, and the gradients of
            parameters are the means over all of them. Everything else is of ``batch`` alone.
        whole: Entered where parameters and gradients are read: inside of it the ranks of a model that is spread over
            several have all of them.
        train: Whether to run backward; ``False`` runs under ``torch.no_grad()``. ``module.training`` is
            not touched.
        seed: Given to every random generator (torch's of all devices, Python's, NumPy's if it is loaded).
        mode: Entered around forward, loss and backward, e.g. a ``Tape``.
        sparing: Whether ``module`` is a private copy whose gradients need not be copied: saves memory. Strides and
            ``requires_grad`` of gradients are not recorded.

    An exception of the call, the loss or backward becomes ``Recording.error``; what was seen until
    then is kept. Not what only all ranks together could read: the others may be in the middle of the call still, where
    a collective of ours would be taken for one of the model's.

    Raises:
        UsageError: the loss returned something that is no tensor of one element.
    """
    seen = _Run(loss, train, seed, mode, sparing=sparing, also=also, whole=whole).recording(call, module, batch)
    if not rest or not seen.left_out or seen.error:
        return seen
    through = _Run(loss, train, seed, mode, seen.left_out, sparing, also, whole).recording(call, module, batch)
    gradients, properties = dict(seen.gradients), dict(seen.properties)
    for name, gradient in through.gradients.items():
        named = f"{name} by outputs that the loss leaves out"
        gradients[named], properties[named] = gradient, through.properties[name]
    return replace(seen, gradients=gradients, properties=properties, error=through.error)


class _Run:
    """The three phases of one call; what each left behind."""

    def __init__(
        self,
        loss: Callable[[Any, Any], Any] | None,
        train: bool,
        seed: int,
        mode: AbstractContextManager[Any] | None,
        only: tuple[str, ...] = (),
        sparing: bool = False,
        also: Sequence[Batch] = (),
        whole: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """``only``: the names of outputs whose ``default_loss`` stands in for the loss."""
        self.sparing = sparing
        self.loss_function, self.train, self.seed, self.mode, self.only = loss, train, seed, mode, only
        self.whole = whole
        self.also = [each.clone() for each in also] if train else []
        self.outputs: dict[str, Item] = {}
        self.structure = ""
        self.live: list[tuple[str, torch.Tensor]] = []
        self.loss: torch.Tensor | None = None
        self.left_out: tuple[str, ...] = ()
        self.backward = False

    def recording(
        self,
        call: Callable[..., Any],
        module: torch.nn.Module | None,
        batch: Batch,
    ) -> Recording:
        private = batch.clone()
        if module is not None:
            module.zero_grad(set_to_none=True)
        with self.whole():
            watch = Watch(module, batch, private, self.sparing)
        seed_everything(self.seed)
        with torch.set_grad_enabled(self.train), self.mode or nullcontext():
            error = self.through(call, module, private)
        if error is not None and (watch.spread or self.whole is not nullcontext):
            return Recording(self.outputs, self.structure, backward=self.backward, error=error,
                             generators=_generators(watch.devices))
        with torch.no_grad(), self.whole():
            shared = self.aliases(watch)
            tables = watch.mutated(), watch.held(), watch.gradients() if self.backward else {}
            mutated, buffers, gradients = ({n: item.value for n, item in table.items()} for table in tables)
            return Recording(
                outputs=self.outputs,
                structure=self.structure,
                loss=None if self.loss is None else detached_copy(self.loss),
                backward=self.backward,
                mutated=mutated,
                buffers=buffers,
                gradients=gradients,
                properties={n: replace(item, value=None) for table in tables for n, item in table.items()},
                aliases=shared,
                training=frozenset(name for name, part in _modules(module) if part.training),
                left_out=self.left_out,
                generators=_generators(watch.devices),
                error=error,
            )

    def through(self, call: Callable[..., Any], module: torch.nn.Module | None, batch: Batch) -> Fault | None:
        phase = "forward"
        try:
            others = [] if module is None else losses_of_others(call, module, self.also, self.loss_of)
            step_begins()
            output = run_theirs(call, *batch.args, **batch.kwargs)
            self.keep(output)
            phase = "loss"
            self.loss = self.loss_of(output, batch)
            self.backward = self.train and self.loss is not None and self.loss.requires_grad
            if self.backward and self.loss is not None:
                if self.loss_function is not None and not self.only:
                    self.left_out = left_out(self.loss, self.live)
                phase = "backward"
                run_theirs(torch.autograd.backward, [self.loss, *others])
                if self.also and module is not None:
                    average_gradients(module.parameters(), 1 + len(self.also))
        except TorchcompileError:
            raise
        except Exception as error:
            told = f"{phase}, for outputs that the loss leaves out" if self.only else phase
            return Fault.of(error, told, ours=raised_by_us(error))
        return None

    def loss_of(self, output: Any, batch: Batch) -> torch.Tensor | None:
        if self.loss_function is not None and not self.only:
            return loss_of(self.loss_function, output, batch.value)
        chosen = [leaf for name, leaf in _live(output) if name in self.only] if self.only else output
        with self.mode.finely() if isinstance(self.mode, Wide) else nullcontext():
            return default_loss(chosen)

    def aliases(self, watch: Watch) -> frozenset[tuple[str, str]]:
        others = list(watch.named())
        arrived = [(f"gradient of {n}", t.grad) for n, t in watch.differentiable() if t.grad is not None]
        return alias_pairs(self.live, others) | alias_pairs(arrived, others)

    def keep(self, output: Any) -> None:
        # before backward: a replayed CUDA graph may reuse the memory of an output
        leaves, self.structure = leaves_of(output)
        self.outputs = {f"output{path}": Item.of(leaf) for path, leaf in leaves}
        self.live = _live(output)


def _live(output: Any) -> list[tuple[str, torch.Tensor]]:
    return [(f"output{path}", leaf) for path, leaf in leaves_of(output)[0] if isinstance(leaf, torch.Tensor)]


def _modules(module: torch.nn.Module | None) -> list[tuple[str, torch.nn.Module]]:
    return [] if module is None else list(module.named_modules())


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
