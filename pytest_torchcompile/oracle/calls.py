"""What a trial is made of: calls, other values for them, sides that run them, its options, what is kept of a call.

Other values show that compiled code computes from what it is given, not from what it has seen before: a call repeated
with the very same numbers can't tell a result from one that was kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_torchcompile.batch import Batch, KeptBatch
from pytest_torchcompile.gauges.replays import step_begins
from pytest_torchcompile.ledger import Ledger
from pytest_torchcompile.oracle.expected import References
from pytest_torchcompile.oracle.held import Held, HeldName
from pytest_torchcompile.oracle.measurement import read_numbers
from pytest_torchcompile.oracle.program import WideCopies
from pytest_torchcompile.oracle.recorder import record
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.oracle.spread import Spread
from pytest_torchcompile.quantity import named_sizes
from pytest_torchcompile.state.model_copy import copy_model
from pytest_torchcompile.state.snapshot import StateSnapshot
from pytest_torchcompile.state.tensor_forms import stored_numbers, whole_value, write_whole

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.known_comparisons import KnownComparisons

__all__ = ["REFUSED", "Call", "Loss", "Make", "Side", "TrialOptions", "Variant", "Variants",
           "other_values", "passes_over", "shrink_values", "vary_parameters"]

Loss = Callable[[Any, Any], Any]
"""``loss(output, batch)``: a tensor of one element."""
REFUSED: Final = (RuntimeError, NotImplementedError, TypeError, ValueError)
"""What expanded memory, sparse, nested and distributed tensors may raise: they stay as they are."""
# By how much a value shrinks at most: far more than rounding, and a probability or a mask stays one.
_SHARE: Final = 2.0**-4
# Between the seeds of two tensors.
_SEED_STEP: Final = 7919


@dataclass(frozen=True)
class Call:
    """One call of the model."""

    index: int
    batch: Batch
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes that have names."""
    other: int | None = None
    """Seed of other values for the parameters; None: their own."""
    suffix: str = ""
    training: bool | None = None
    """Switches the model to training, with a backward pass, or to evaluation, without; None: as the trial says."""
    other_replicas: tuple[Batch, ...] = ()
    """The batches of the other replicas. They are kept apart, for most who run a call run their own batch alone."""
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Values that buffers have before it, by name; beside other values for the parameters alone."""
    move: Callable[[torch.nn.Module], None] | None = None
    """Gives other values to what else a module holds, in place; beside other values for the parameters alone."""
    refilled: bool = False
    """Are its inputs those of the same call before, with other values written into them?"""

    @property
    def label(self) -> str:
        """``call 2 (B=2, S=64), again``."""
        text = f"call {self.index + 1}"
        if self.sizes:
            text += f" ({named_sizes(self.sizes)})"
        if self.training is not None:
            text += " training" if self.training else " evaluating"
        return text + self.suffix

    @property
    def batch_of_all(self) -> Batch:
        """The batch with those of the other replicas, for one process that runs them all."""
        return replace(self.batch, other_replicas=self.other_replicas)

    def batch_for(self, spread: Spread) -> Batch:
        """What a process runs of the call."""
        if spread.every_replica:
            return self.batch_of_all
        return self.batch

    def trains(self, otherwise: bool) -> bool:
        """Whether the call has a backward pass."""
        if self.training is None:
            return otherwise
        return self.training

    def switch_mode(self, module: torch.nn.Module) -> None:
        """Switch the model to training or evaluation, if the call does."""
        if self.training is not None:
            module.train(self.training)

    def move_state(self, module: torch.nn.Module) -> None:
        """Give the parameters and buffers of the model the other values that the call has, if it has."""
        if self.other is None:
            return
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in self.buffers:
                    write_whole(buffer, self.buffers[name])
        vary_parameters(module, self.other)
        if self.move is not None:
            self.move(module)

    def with_other_values(self, seed: int, buffers: Mapping[str, torch.Tensor] | None = None,
                          move: Callable[[torch.nn.Module], None] | None = None) -> Call:
        """The call with other values for parameters and batches, and for the buffers those that are given, varied;
        ``move`` as :attr:`move`.
        """
        # Each replica by itself: it varies its own batch in the same way.
        others = tuple(_varied_batch(batch, seed) for batch in self.other_replicas)
        return replace(self, batch=_varied_batch(self.batch, seed), other_replicas=others, other=seed,
                       suffix=f"{self.suffix}, with other values", buffers=buffers or {}, move=move)


def passes_over(calls: Sequence[Call], seed: int | None) -> Iterator[list[Call]]:
    """The calls three times over. The first pass compiles; in the second, parameters and batches have other values, so
    that a result which was kept is no result; the third is the first again, as CUDA graphs replay only then.

    The second pass refills the inputs of the first in place, as a caller does who keeps one buffer: no new address says
    that they are other ones. The third has new inputs: what was recorded with the memory of earlier ones is wrong then.

    ``seed`` None: always the same values.
    """
    yield list(calls)
    if seed is None:
        second = _with_suffix(calls, ", once more")
    else:
        second = [call.with_other_values(seed) for call in calls]
    yield [replace(call, refilled=True) for call in second]
    yield _with_suffix(calls, ", again")


def _with_suffix(calls: Sequence[Call], suffix: str) -> list[Call]:
    return [replace(call, suffix=suffix) for call in calls]


class Side:
    """A model that runs calls, eagerly or compiled, each from the state in which it was given."""

    def __init__(self, call: Callable[..., Any], module: torch.nn.Module, spread: type[Spread] = Spread) -> None:
        """Take what is run.

        Args:
            call: The module itself or whatever runs it.
            module: Has the state.
            spread: How the module is spread over ranks.
        """
        self.call, self.module, self.spread = call, module, spread(call, module)
        self._start, self._held = StateSnapshot(module), Held()
        self._given: dict[int, KeptBatch] = {}
        """What the calls were given last, by their index."""

    def begin_here(self) -> None:
        """Take the module's present state for the first one."""
        self._start = StateSnapshot(self.module)

    def begin_in_evaluation(self) -> Side:
        """The side itself, which from now on starts each call in evaluation."""
        self.module.eval()
        self.begin_here()
        return self

    def restore(self) -> None:
        """Go back to the first state."""
        self.spread.settle()
        self._start.restore()

    def start_over(self, fresh: Side) -> None:
        """Be ``fresh`` from here on, a side that has run nothing: what a model counts in Python is as at first."""
        self.__dict__.update(fresh.__dict__)

    def prepare_forward(self, call: Call) -> Callable[[], object]:
        """A forward pass of a call alone, from the first state."""
        self.restore()
        batch = call.batch.clone()

        def forward() -> object:
            step_begins()
            return self.call(*batch.args, **batch.kwargs)

        return forward

    def run(self, call: Call, loss: Loss | None, train: bool, seed: int,
            mode: AbstractContextManager[Any] | None = None) -> tuple[Recording, dict[HeldName, str]]:
        """Run a call, and say too what became of the outputs of earlier calls (:class:`Held`)."""
        self.restore()
        if call.other is not None:
            with self.spread.whole():
                call.move_state(self.module)
        call.switch_mode(self.module)
        recording = record(
            self._held.keep_outputs(self.call), self.module, call.batch_for(self.spread), loss=loss,
            train=call.trains(train), seed=seed + call.index, mode=mode, spread=self.spread,
            copied=partial(self._copy_for, call),
        )
        # What is made of the model next, a reference perhaps, must not have a hook that this call has left.
        self._start.restore_hooks()
        return recording, self._held.changes_by(recording, call.label)

    def _copy_for(self, call: Call, batch: Batch) -> Batch:
        """A private copy of a batch: a new one, or the call's last one, refilled where it asks for that."""
        last = self._given.get(call.index)
        if call.refilled and last is not None and last.refill(batch):
            return last.batch
        self._given[call.index] = KeptBatch(batch)
        return self._given[call.index].batch


Make = Callable[["dict[str, Any] | None"], Side]
"""``make(settings)``: the model in its initial state, compiled with ``torch.compile(**settings)``; None: eager."""


def keep_state() -> None:
    """The model of references is in its first state already."""


@dataclass(frozen=True)
class TrialOptions:
    """How a trial runs its calls, and what it compares."""

    loss: Loss | None = None
    """As for ``record``."""
    train: bool = True
    """As for ``record``."""
    steps: int = 1
    """SGD steps of a training; 1: none beyond the gradients of each call."""
    seed: int = 0
    """As for ``record``."""
    unit: float | None = None
    """As for ``reference``."""
    root: Path | None = None
    """The project's root folder."""
    references: References = field(default_factory=References)
    """Where they are kept, for other trials of the same model too."""
    key: tuple[Hashable, ...] = ()
    """What tells the model there from others."""
    covered: bool = False
    """Measure the coverage, by two more forward passes of each call under torch's profiler."""
    may_raise: bool = False
    """A call that raises eagerly has to raise compiled too; else it ends the trial."""
    varied: bool = True
    """Give the second pass other values; not for a model that can't be copied."""
    passes: int = 3
    """How many of the three passes over the calls are made."""
    keep_texts: bool = False
    """Keep what each stage of the compiler has written."""
    instrument: Callable[[Ledger], AbstractContextManager[None]] | None = None
    """Watches the whole run beside the ledger that it is given."""
    one_process: Callable[[], Side] | None = None
    """Makes the model as one process runs it, where ``make`` makes parts of it that run on several ranks: the eager
    side is held against that too, and ``pristine`` is the model as one process has it."""
    in_evaluation: bool = True
    """Run the trial once more in evaluation where compiled calls draw other random numbers than eager."""
    compared: bool = True
    """Compare what came of the calls; not where their numbers mean nothing."""
    known: KnownComparisons | None = None
    """Comparisons that an earlier run has made; None compares everything anew."""
    own_numbers: bool = False
    """Judge the random numbers that compiled code draws by itself, where it can be done."""
    begin_again: Callable[[], object] = keep_state
    """Puts the model of references in its first state, where it can't be copied and the sides run it themselves."""

    def unwatched(self) -> TrialOptions:
        """The same, for a run whose result alone is wanted."""
        return replace(self, covered=False, keep_texts=False, instrument=None, known=None, own_numbers=False)


@dataclass(frozen=True)
class Variant:
    """A model for references, never run and never changed, and its wide copies."""

    model: torch.nn.Module
    wide: WideCopies = field(default_factory=dict)


class Variants:
    """The model in its initial state as the calls of a trial run it, each variant made once."""

    def __init__(self, pristine: torch.nn.Module) -> None:
        self._pristine = pristine
        self._made: dict[Hashable, Variant] = {}

    def for_call(self, call: Call) -> Variant:
        """With the call's other values, switched to training or evaluation: the same for all sizes of a batch."""
        key = (call.other, call.training)
        if key not in self._made:
            model = self._pristine
            if call.other is not None or call.training is not None:
                model = copy_model(model)
                call.switch_mode(model)
            call.move_state(model)
            self._made[key] = Variant(model)
        return self._made[key]


def other_values(batch: Batch, seed: int) -> Batch:
    """A copy of a batch with other values all over: its samples have changed places, and what can be shrunk is."""
    return _varied_batch(_rolled_batch(batch), seed)


def _varied_batch(batch: Batch, seed: int) -> Batch:
    """A copy of a batch with its floating tensors shrunk; ids, masks of whole numbers and zeros stay."""
    other = batch.clone()
    shrink_values(other.tensors(), seed, filled=set())
    return other


def _rolled_batch(batch: Batch) -> Batch:
    """A copy of a batch whose samples have changed places, each value being as valid as before.

    Tensors are rolled by one, along the first dimension or else the second: the one that is longer than 1 and equally
    long in all of them. A batch without such a dimension stays, and so do tensors of one dimension beside others:
    they may be sorted lengths.
    """
    other = batch.clone()
    tensors = list({id(tensor): tensor for tensor in other.tensors() if tensor.ndim}.values())
    for dim in (0, 1):
        sizes = {tensor.shape[dim] for tensor in tensors if tensor.ndim > dim}
        if len(sizes) == 1 and sizes != {1}:
            longer = [tensor for tensor in tensors if tensor.ndim > 1]
            _roll_samples(longer or tensors, dim)
            break
        # no samples: nobody knows what the next dimension is
        if sizes != {1}:
            break
    return other


def _roll_samples(tensors: Iterable[torch.Tensor], dim: int) -> None:
    with torch.no_grad():
        for tensor in tensors:
            with contextlib.suppress(*REFUSED):
                tensor.copy_(tensor.roll(1, dim))


def vary_parameters(module: torch.nn.Module, seed: int) -> None:
    """Shrink each floating parameter and buffer element by up to 1/16, in place; ``seed`` decides.

    A parameter that is zero everywhere, as the last layer of a model often begins, gets values within 1/32 of zero:
    else nothing that it takes part in could be compared.
    """
    parameters = list(module.parameters())
    shrink_values([*parameters, *module.buffers()], seed, filled={id(parameter) for parameter in parameters})


def shrink_values(tensors: Iterable[torch.Tensor], seed: int, filled: set[int]) -> None:
    """Shrink each element of the floating tensors by up to 1/16, in place; whole numbers and Booleans stay.

    ``filled``: ids of those that get values where they are zero everywhere.
    """
    # Tied parameters are shrunk once. The number of a tensor is part of its seed.
    distinct = {id(tensor): tensor for tensor in tensors}
    with torch.no_grad():
        zeros = _zero_everywhere(tensor for key, tensor in distinct.items() if key in filled)
        for index, tensor in enumerate(distinct.values()):
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            with contextlib.suppress(*REFUSED):
                generator = torch.Generator(tensor.device).manual_seed(seed + _SEED_STEP * index)
                dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
                # What a sparse one does not store stays zero.
                numbers = stored_numbers(tensor)
                share = torch.rand(numbers.shape, generator=generator, device=tensor.device).to(dtype)
                value = whole_value(numbers)
                if id(tensor) in zeros:
                    write_whole(numbers, value + (share - 0.5) * _SHARE)
                else:
                    write_whole(numbers, value * (1 - share * _SHARE))


def _zero_everywhere(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Ids of the tensors that have nothing but zeros. All are read together, so that a GPU is waited for once."""
    has_others: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        # One on the device meta has no values to read.
        if not tensor.is_meta:
            with contextlib.suppress(*REFUSED):
                has_others[id(tensor)] = whole_value(tensor).any()
    read = read_numbers(*has_others.values())
    return {key for key, has_other in zip(has_others, read, strict=True) if not has_other}
