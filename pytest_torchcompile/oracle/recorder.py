"""record(): run a model once on private copies and keep everything that can be observed: what it returned, and what it
wrote to.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.errors import TorchcompileError
from pytest_torchcompile.gauges.replays import step_begins
from pytest_torchcompile.oracle.call_watch import Watch
from pytest_torchcompile.oracle.noise import Wide
from pytest_torchcompile.oracle.properties import alias_pairs
from pytest_torchcompile.oracle.python_state import PythonState, python_state
from pytest_torchcompile.oracle.recording import (
    Fault,
    Item,
    NamedLeaf,
    Recording,
    detached_copy,
    named_leaves,
    raised_by_us,
    run_theirs,
)
from pytest_torchcompile.oracle.spread import NOT_SPREAD, Spread, average_gradients, losses_of_others
from pytest_torchcompile.oracle.tape import Tape
from pytest_torchcompile.oracle.training import BY_LEFT_OUT, default_loss, left_out, loss_of
from pytest_torchcompile.state.torch_state import seed_everything

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.draw_graph import DrawGraph
    from pytest_torchcompile.oracle.transcript import Transcript

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
    unwritten: bool = False,
    spread: Spread = NOT_SPREAD,
    copied: Callable[[Batch], Batch] = Batch.clone,
) -> Recording:
    """Run ``call(*args, **kwargs)``, the loss and the backward pass, and keep what they did.

    Args:
        call: The module itself, or whatever runs it (compiled, wrapped).
        module: Whose parameters and buffers are read; it starts from its present state, without
            gradients, and is left as the call leaves it (see ``StateSnapshot``), again without gradients.
        batch: Cloned first, so that a call that writes to its inputs leaves the caller's alone. Those of other replicas
            are run before it, and the gradients of parameters are the means over all of them. Everything else is of
            ``batch`` alone.
        loss: ``loss(output, batch.for_loss)``, a tensor of one element; ``None`` is ``default_loss``. Where it takes
            no gradient of some outputs, the call is run once more for a backward pass through those alone,
            unless ``rest`` is False.
        train: Whether to run backward; ``False`` runs under ``torch.no_grad()``. ``module.training`` is
            not touched.
        seed: Given to every random generator (torch's of all devices, Python's, NumPy's if it is loaded).
        mode: Entered around forward, loss and backward, e.g. a ``Tape``.
        sparing: Whether ``module`` is a private copy whose gradients need not be copied: saves memory.
        unwritten: Whether it is known that the call writes to no parameter, so that none has to be remembered.
        spread: How ``module`` is spread over ranks.
        copied: Makes the private copy of the batch.

    An exception of the call, the loss or backward becomes ``Recording.error``; what was seen until
    then is kept. Not what only all ranks together could read: the others may be in the middle of the call still, where
    a collective of ours would be taken for one of the model's.

    Raises:
        UsageError: the loss returned something that is no tensor of one element.
    """
    run = _Run(loss, train, seed, mode, sparing, unwritten, spread, copied)
    recording = run.record_call(call, module, batch)
    if not rest or not recording.left_out or recording.error:
        return recording
    through = replace(run, only=recording.left_out).record_call(call, module, batch)
    gradients, properties = dict(recording.gradients), dict(recording.properties)
    for name, gradient in through.gradients.items():
        new_name = name + BY_LEFT_OUT
        gradients[new_name], properties[new_name] = gradient, through.properties[name]
    return replace(recording, gradients=gradients, properties=properties, error=through.error)


@dataclass
class _Run:
    """The three phases of one call; what each left behind."""

    loss_function: Callable[[Any, Any], Any] | None
    train: bool
    seed: int
    mode: AbstractContextManager[Any] | None
    sparing: bool
    unwritten: bool
    spread: Spread
    copied: Callable[[Batch], Batch]
    only: tuple[str, ...] = ()
    """The names of outputs whose ``default_loss`` stands in for the loss."""
    output_leaves: list[NamedLeaf] = field(default_factory=list, init=False)
    outputs: dict[str, Item] = field(default_factory=dict, init=False)
    structure: str = field(default="", init=False)
    loss: torch.Tensor | None = field(default=None, init=False)
    left_out: tuple[str, ...] = field(default=(), init=False)
    backward: bool = field(default=False, init=False)
    python_before: PythonState | None = field(default=None, init=False)

    @property
    def listener(self) -> Transcript | DrawGraph | None:
        """What is told of the run, beside the recording."""
        return self.mode.listener if isinstance(self.mode, Wide) else None

    def record_call(self, call: Callable[..., Any], module: torch.nn.Module | None, batch: Batch) -> Recording:
        private = self.copied(batch)
        if not self.train:
            # Without gradients nothing of the other replicas is asked for.
            private = replace(private, other_replicas=())
        if module is not None:
            module.zero_grad(set_to_none=True)
        with self.spread.whole():
            watch = Watch(module, batch, private, self.sparing, self.unwritten)
        if isinstance(self.mode, Tape):
            self.mode.begin_run([parameter for _, parameter in watch.parameters])
        seed_everything(self.seed)
        if self.listener is not None:
            self.listener.begin_pass(self.seed, watch)
        if type(self.spread) is Spread:
            self.python_before = python_state(module)
        with torch.set_grad_enabled(self.train), self.mode or nullcontext():
            error = self.run_phases(call, module, private)
        if error is None and self.listener is not None and self.listener.is_graph and self.listener.why:
            # No operator has run, so there are no values.
            error = Fault("RuntimeError", self.listener.why, "recording")
        if error is not None and (watch.spread or self.spread.reads_together):
            return Recording(self.outputs, self.structure, backward=self.backward, error=error,
                             generators=_generator_states(watch.devices))
        with torch.no_grad(), self.spread.whole():
            return self._read_all(module, watch, error)

    def _read_all(self, module: torch.nn.Module | None, watch: Watch, error: Fault | None) -> Recording:
        if isinstance(self.mode, Tape):
            self.mode.end_run()
        python = None
        if self.python_before is not None:
            python = self.python_before, python_state(module)
        # Before the gradients are read, which takes them off their tensors.
        aliases = self.shared_memory(watch)
        mutated, buffers = watch.mutated(), watch.buffers_and_attributes()
        if self.listener is not None:
            self._tell(self.listener, watch, mutated)
        gradients = watch.take_gradients() if self.backward else {}
        properties: dict[str, Item] = {}
        for table in (mutated, buffers, gradients):
            properties |= {name: replace(item, value=None) for name, item in table.items()}
        training = frozenset[str]()
        if module is not None:
            training = frozenset(name for name, part in module.named_modules() if part.training)
        return Recording(
            outputs=self.outputs,
            structure=self.structure,
            loss=None if self.loss is None else detached_copy(self.loss),
            backward=self.backward,
            mutated=_values_of(mutated),
            buffers=_values_of(buffers),
            gradients=_values_of(gradients),
            properties=properties,
            aliases=aliases,
            training=training,
            left_out=self.left_out,
            generators=_generator_states(watch.devices),
            python=python,
            error=error,
            kinds={leaf.name: leaf.kind for leaf in self.output_leaves},
        )

    def _tell(self, listener: Transcript | DrawGraph, watch: Watch, mutated: Container[str]) -> None:
        """Tell it which tensors hold the values of the recording."""
        if self.only:
            for name, tensor in watch.differentiable():
                listener.keep(f"gradient of {name}{BY_LEFT_OUT}", tensor.grad)
            return
        for name, item in self.outputs.items():
            listener.keep(name, item.value)
        if self.loss is not None:
            listener.keep("loss", self.loss)
        for kind, tensors in (("buffer", watch.buffers()), ("attribute", watch.attributes())):
            for name, tensor in tensors:
                listener.keep(f"{kind} {name}", tensor)
        for name, tensor in (*watch.inputs_after().items(), *watch.parameters):
            if f"{name} after the call" in mutated:
                listener.keep(f"{name} after the call", tensor)
            else:
                listener.note_kept(tensor)
        if self.backward:
            for name, tensor in watch.differentiable():
                listener.keep(f"gradient of {name}", tensor.grad)

    def run_phases(self, call: Callable[..., Any], module: torch.nn.Module | None, batch: Batch) -> Fault | None:
        """Forward, loss and backward; returns what one of them raised."""
        phase = "forward"
        try:
            losses = []
            if module is not None:
                losses = losses_of_others(call, module, batch, self.compute_loss)
            step_begins()
            output = run_theirs(call, *batch.args, **batch.kwargs)
            self.keep_output(output)
            phase = "loss"
            self.loss = self.compute_loss(output, batch)
            self.backward = self.train and self.loss is not None and self.loss.requires_grad
            if self.backward and self.loss is not None:
                if self.loss_function is not None and not self.only:
                    self.left_out = left_out(self.loss, self.output_tensors())
                phase = "backward"
                run_theirs(torch.autograd.backward, [self.loss, *losses])
                if module is not None:
                    average_gradients(module.parameters(), batch)
        except TorchcompileError:
            raise
        except Exception as error:
            if phase == "backward":
                self._raise_refused(error)
            if self.only:
                phase = f"{phase}, for outputs that the loss leaves out"
            return Fault.of(error, phase, ours=raised_by_us(error))
        return None

    def _raise_refused(self, error: Exception) -> None:
        """Raise what is to be said where torch has no gradients of an operator while it is watched."""
        # Here, for most backward passes raise nothing.
        from pytest_torchcompile.oracle.higher_order import refused_backward

        refused = refused_backward(self.mode, error)
        if refused is not None:
            raise refused from error

    def compute_loss(self, output: Any, batch: Batch) -> torch.Tensor | None:
        if self.loss_function is not None and not self.only:
            return loss_of(self.loss_function, output, batch.for_loss)
        if self.only:
            chosen = []
            for leaf in named_leaves(output)[0]:
                if leaf.name in self.only and isinstance(leaf.value, torch.Tensor):
                    chosen.append(leaf.value)
            output = chosen
        with self.mode.finely() if isinstance(self.mode, Wide) else nullcontext():
            return default_loss(output)

    def keep_output(self, output: Any) -> None:
        # before backward: a replayed CUDA graph may reuse the memory of an output
        self.output_leaves, self.structure = named_leaves(output)
        self.outputs = {leaf.name: Item.of(leaf.value) for leaf in self.output_leaves}

    def output_tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(leaf.name, leaf.value) for leaf in self.output_leaves if isinstance(leaf.value, torch.Tensor)]

    def shared_memory(self, watch: Watch) -> frozenset[tuple[str, str]]:
        others = list(watch.named_tensors())
        arrived = []
        for name, tensor in watch.differentiable():
            if tensor.grad is not None:
                arrived.append((f"gradient of {name}", tensor.grad))
        return alias_pairs(self.output_tensors(), others) | alias_pairs(arrived, others)


def _values_of(table: dict[str, Item]) -> dict[str, Any]:
    return {name: item.value for name, item in table.items()}


def _generator_states(devices: set[torch.device]) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    for device in devices:
        if device.type == "mps":
            # It has one generator and takes no device.
            states[str(device)] = torch.get_device_module(device).get_rng_state()
        elif device.type not in ("cpu", "meta"):
            states[str(device)] = torch.get_device_module(device).get_rng_state(device)
    return states
