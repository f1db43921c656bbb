"""record(): run a model once on private copies and keep everything that can be observed: what it returned, and what it
wrote to.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pytest_torchcompile.batch import Batch, source_of
from pytest_torchcompile.errors import TorchcompileError
from pytest_torchcompile.gauges.replays import step_begins
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
from pytest_torchcompile.oracle.same_values import names_of_differing
from pytest_torchcompile.oracle.spread import NOT_SPREAD, Spread, average_gradients, losses_of_others
from pytest_torchcompile.oracle.tape import Tape
from pytest_torchcompile.oracle.training import BY_LEFT_OUT, Training, default_loss, left_out, loss_of
from pytest_torchcompile.oracle.transcript import Transcript
from pytest_torchcompile.state.torch_state import seed_everything
from pytest_torchcompile.state.value_leaves import (
    attribute_tensors,
    fingerprint,
    is_spread,
    own_part,
    same_bits,
    tensors_of,
    true_on_any_rank,
    visible_strides,
)

__all__ = ["record", "seed_everything"]

# Parameters of more elements are remembered by a fingerprint, to save memory.
_COPIED_UP_TO = 1 << 26


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


class _Watch:
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
        items = {f"buffer {name}": Item.of(tensor) for name, tensor in self.buffers()}
        items |= {f"attribute {name}": Item.of(tensor) for name, tensor in self.attributes()}
        return items

    def mutated(self) -> dict[str, Item]:
        """Inputs and parameters that were written to, and all that a training is there to move."""
        after = {}
        # A call may have put further tensors into a list or dict that it was given.
        for name, tensor in {**dict(_input_tensors(self.private)), **self.inputs}.items():
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

    def record_call(self, call: Callable[..., Any], module: torch.nn.Module | None, batch: Batch) -> Recording:
        private = self.copied(batch)
        if not self.train:
            # Without gradients nothing of the other replicas is asked for.
            private = replace(private, other_replicas=())
        if module is not None:
            module.zero_grad(set_to_none=True)
        with self.spread.whole():
            watch = _Watch(module, batch, private, self.sparing, self.unwritten)
        if isinstance(self.mode, Tape):
            self.mode.begin_run([parameter for _, parameter in watch.parameters])
        seed_everything(self.seed)
        if isinstance(self.mode, Wide) and self.mode.transcript is not None:
            self.mode.transcript.begin_pass(self.seed)
        if type(self.spread) is Spread:
            self.python_before = python_state(module)
        with torch.set_grad_enabled(self.train), self.mode or nullcontext():
            error = self.run_phases(call, module, private)
        if error is not None and (watch.spread or self.spread.reads_together):
            return Recording(self.outputs, self.structure, backward=self.backward, error=error,
                             generators=_generator_states(watch.devices))
        with torch.no_grad(), self.spread.whole():
            return self._read_all(module, watch, error)

    def _read_all(self, module: torch.nn.Module | None, watch: _Watch, error: Fault | None) -> Recording:
        if isinstance(self.mode, Tape):
            self.mode.end_run()
        python = None
        if self.python_before is not None:
            python = self.python_before, python_state(module)
        # Before the gradients are read, which takes them off their tensors.
        aliases = self.shared_memory(watch)
        mutated, buffers = watch.mutated(), watch.buffers_and_attributes()
        if isinstance(self.mode, Wide) and self.mode.transcript is not None:
            self._tell(self.mode.transcript, watch, mutated)
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

    def _tell(self, transcript: Transcript, watch: _Watch, mutated: Container[str]) -> None:
        """Tell a transcript which tensors hold the values of the recording."""
        if self.only:
            for name, tensor in watch.differentiable():
                transcript.keep(f"gradient of {name}{BY_LEFT_OUT}", tensor.grad)
            return
        for name, item in self.outputs.items():
            transcript.keep(name, item.value)
        if self.loss is not None:
            transcript.keep("loss", self.loss)
        for kind, tensors in (("buffer", watch.buffers()), ("attribute", watch.attributes())):
            for name, tensor in tensors:
                transcript.keep(f"{kind} {name}", tensor)
        for name, tensor in (*watch.inputs.items(), *watch.parameters):
            if f"{name} after the call" in mutated:
                transcript.keep(f"{name} after the call", tensor)
        if self.backward:
            for name, tensor in watch.differentiable():
                transcript.keep(f"gradient of {name}", tensor.grad)

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

    def shared_memory(self, watch: _Watch) -> frozenset[tuple[str, str]]:
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
