"""Transcript: the operators of one run of a program, by which it runs again without its Python code and autograd.

Noise is drawn up to 36 times, and each draw is a run of the program in which each operator rounds otherwise. What the
program and autograd do between the operators costs half of that or more, and is the same each time.

It holds where nothing but operators touches numbers that rounding moves. A program that looks at one in Python may go
another way with noise, so its run is no transcript (:attr:`Transcript.why`). Before it is used it is run once without
noise, and compared to the exact run: what no operator was seen to do, such as a kernel's work, shows there.
Not seen is a number that torch itself reads of a tensor of whole numbers, as ``tensor_split`` does, where noise moves
it so rarely that the run and the exact one have the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_torchcompile.oracle.exact_calls import has_fractions
from pytest_torchcompile.oracle.gpu_waits import asks_for_numbers
from pytest_torchcompile.oracle.tape import as_sequence, written_tensors
from pytest_torchcompile.oracle.transcript_memory import Memory, OuterTensor, bytes_of, memory_of
from pytest_torchcompile.oracle.transcript_steps import (
    CallStep,
    Listener,
    Number,
    Performer,
    Place,
    SeedStep,
    Step,
    ViewStep,
    put_argument,
)
from pytest_torchcompile.state.tensor_forms import is_plain

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.call_watch import Watch

__all__ = ["Transcript"]

# Attribute of a tensor that an operator of a transcript has made: that transcript's key, the tensor's number in it, and
# its id, as a deep copy has the attribute too.
_NUMBER: Final = "_torchcompile_number"
# What hands numbers to Python, and memory to a kernel, and is no operator.
_LOOKS: Final = ("tolist", "numpy", "__bool__", "__complex__", "__float__", "__index__", "__int__")
_HANDED_OVER: Final = ("data_ptr", "__dlpack__")
_BLANK: Final = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize",
})
_KEYS: Final = count()


class Transcript(Listener):
    """Is told each call of an operator while a program runs, and makes the run again as often as is asked for."""

    is_graph: Literal[False] = False
    dice = None

    def __init__(self) -> None:
        self.why = ""
        """Why the run can't be made again; empty where it can."""
        self.ended = False
        self._key = next(_KEYS)
        self._steps: list[Step] = []
        # Where the steps of the second pass begin, and of each pass its results by name.
        self._second_pass: int | None = None
        self._results: list[dict[str, Any]] = []
        # Tensors from before the run by their numbers, and the numbers by the ids of tensors.
        self._outer: dict[int, OuterTensor] = {}
        self._outer_numbers: dict[int, int] = {}
        # The memory of each tensor, by its number.
        self._places: list[Memory] = []
        self._memories: dict[StorageWeakRef, Memory] = {}
        self._blank: set[StorageWeakRef] = set()
        self._looks_are_ours = False

    # ------------------------------------------------------------------------------------------------------ it is made

    def refuse(self, why: str) -> None:
        """The run can't be made again."""
        self.why = self.why or why
        self._steps, self._results, self._outer = [], [], {}
        self._forget_making()

    def _forget_making(self) -> None:
        self._memories, self._outer_numbers, self._blank = {}, {}, set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Notice it where Python code looks at numbers without an operator."""
        names = (*_LOOKS, *_HANDED_OVER)
        kept = {name: vars(torch.Tensor).get(name) for name in names}
        for name in names:
            setattr(torch.Tensor, name, self._noticed(name, getattr(torch.Tensor, name)))
        try:
            yield
        finally:
            for name, before in kept.items():
                if before is None:
                    delattr(torch.Tensor, name)
                else:
                    setattr(torch.Tensor, name, before)

    def _noticed(self, name: str, look: Any) -> Any:
        def noticed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not (self._looks_are_ours or self.ended or self.why):
                with self._refusing():
                    self._note_look(name, tensor)
            return look(tensor, *args, **kwargs)

        return noticed

    def _note_look(self, name: str, tensor: torch.Tensor) -> None:
        number = self._number_of(tensor)
        if self.why:
            return
        if name in _HANDED_OVER or self._places[number].moved:
            self.refuse(f"it calls {name}()")
        elif name == "numpy":
            self._places[number].shared = True

    def begin_pass(self, seed: int, watch: Watch) -> None:
        """A forward and a backward pass begin, with random generators seeded so."""
        if self.why or self.ended:
            return
        if len(self._results) == 1:
            self._second_pass = len(self._steps)
        self._results.append({})
        self._steps.append(SeedStep(seed))

    def note(self, performer: Performer, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of an operator (:class:`~pytest_torchcompile.oracle.noise.RoundedCall`), and remember it."""
        if self.why or self.ended:
            return performer.perform(call, args, kwargs)
        step, moved = CallStep(call, list(args), dict(kwargs)), False
        with self._refusing():
            self._note_arguments(step)
            moved = any(self._places[number].moved for number in step.numbers()) and not self.why
            if moved and asks_for_numbers(call.func, args):
                self.refuse(f"it asks for a number ({call.about.name})")
            self._note_writes(call, args, kwargs, moved)
        # An operator that is written out here may look at numbers; it will again.
        self._looks_are_ours = True
        try:
            out = performer.perform(call, args, kwargs)
        except Exception:
            # With other noise it may not.
            self.refuse(f"an operator raises ({call.about.name})")
            raise
        finally:
            self._looks_are_ours = False
        with self._refusing():
            self._note_results(step, out, moved)
        return out

    def keep(self, name: str, value: Any) -> None:
        """Remember one of the pass' results: a tensor as it is now, or another value."""
        if self.why or self.ended:
            return
        with self._refusing():
            if isinstance(value, torch.Tensor):
                value = Number(self._number_of(value))
            if self._results:
                self._results[-1][name] = value

    def note_kept(self, tensor: torch.Tensor) -> None:
        """Refuse where the run has written to a tensor, and has left its numbers as they were: others may change."""
        if self.why or self.ended:
            return
        memory = self._memories.get(memory_of(tensor)) if is_plain(tensor) else None
        if memory is not None and memory.before is not None and memory.moved:
            self.refuse("it writes to a tensor what is there already")

    def end(self) -> None:
        """The run is over: what follows is none of it."""
        if self.ended:
            return
        self.ended = True
        if not self._steps:
            self.refuse("it was told of no operator")
        self._forget_making()
        needed = set()
        for value in chain.from_iterable(results.values() for results in self._results):
            if type(value) is Number:
                needed.add(value.number)
        for step in reversed(self._steps):
            for number in {*step.numbers(), *step.made()}:
                if number not in needed:
                    step.done.append(number)
                    needed.add(number)

    def held_tensors(self) -> list[torch.Tensor]:
        """The tensors that it keeps."""
        held = []
        for outer in self._outer.values():
            held.append(outer.tensor if outer.memory.before is None else outer.memory.before)
        return held

    def _note_arguments(self, step: CallStep) -> None:
        call = step.call
        given: list[tuple[Place, Any]] = [*enumerate(step.args), *step.kwargs.items()]
        for place, value in given:
            if isinstance(value, torch.Tensor):
                put_argument(step.args, step.kwargs, place, None)
                step.tensors.append((place, self._number_of(value)))
                self._note_reading(call, place, value)
            elif isinstance(value, (list, tuple)) and any(isinstance(each, torch.Tensor) for each in value):
                put_argument(step.args, step.kwargs, place, None)
                numbers: list[Any] = []
                for each in value:
                    if isinstance(each, torch.Tensor):
                        numbers.append(Number(self._number_of(each)))
                        self._note_reading(call, place, each)
                    else:
                        numbers.append(each)
                step.lists.append((place, numbers))

    def _number_of(self, tensor: torch.Tensor) -> int:
        """The number of an argument, or of a result; 0 where the run is refused."""
        known = self._known_number(tensor)
        if known is not None:
            return known
        number = self._new_number(tensor, outer=True)
        if number is None:
            return 0
        memory, offset = self._places[number], int(tensor.storage_offset())
        if memory.outer:
            self._outer_numbers[id(tensor)] = number
            self._outer[number] = OuterTensor(tensor, memory, tensor.shape, tensor.stride(), offset)
        elif tensor.dtype != memory.dtype or tensor.is_conj() or tensor.is_neg():
            self.refuse("autograd has kept a view of another dtype")
        else:
            self._steps.append(ViewStep(number, memory.owner, tensor.shape, tensor.stride(), offset))
        return number

    def _number_of_result(self, result: Any) -> int | None:
        if not isinstance(result, torch.Tensor):
            return None
        known = self._known_number(result)
        if known is not None:
            return known
        number = self._new_number(result, outer=False)
        if number is not None:
            setattr(result, _NUMBER, (self._key, number, id(result)))
        return number

    def _known_number(self, tensor: torch.Tensor) -> int | None:
        key, number, known = getattr(tensor, _NUMBER, (None, 0, 0))
        if key == self._key and known == id(tensor):
            return int(number)
        return self._outer_numbers.get(id(tensor))

    def _new_number(self, tensor: torch.Tensor, outer: bool) -> int | None:
        """Give a tensor a number; ``outer``: memory that nobody has seen yet was there before the run."""
        if not is_plain(tensor):
            self.refuse("it has other tensors than plain ones")
        if self.why:
            return None
        number, reference = len(self._places), memory_of(tensor)
        if reference not in self._memories:
            self._memories[reference] = Memory(number, outer, tensor.dtype)
        self._places.append(self._memories[reference])
        return number

    def _note_writes(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], moved: bool) -> None:
        running = [args[place] for place in call.about.running if place < len(args)]
        for tensor in (*running, *written_tensors(call.about, args, kwargs)):
            # A batch norm may have no running statistics.
            if tensor is None or self.why:
                continue
            reference = memory_of(tensor)
            self._blank.discard(reference)
            memory = self._memories.get(reference)
            if memory is None:
                self.refuse("it has given a tensor other memory")
                return
            if memory.outer and memory.before is None:
                memory.before = bytes_of(tensor).clone()
            memory.moved = memory.moved or moved or (call.is_noisy and has_fractions(tensor))
            if memory.moved and memory.shared:
                self.refuse("numbers are written to an array of Python's")

    def _note_reading(self, call: Any, place: Place, tensor: torch.Tensor) -> None:
        """Refuse where memory is read that no operator has written to: something else has, or it means nothing."""
        if not self._blank or call.func.is_view:
            return
        is_written = place in call.about.writes or place in call.about.writes.values()
        if not is_written and memory_of(tensor) in self._blank:
            self.refuse("memory is read that no operator has written to")

    def _note_results(self, step: CallStep, out: Any, moved: bool) -> None:
        """Number the results; note whether rounding moves them, or whether they are memory without a number yet."""
        if self.why:
            return
        call, results = step.call, as_sequence(out)
        step.results = [self._number_of_result(result) for result in results]
        moved = moved or bool(call.is_noisy and call.inputs)
        for number, result in zip(step.results, results, strict=True):
            if number is None or self.why:
                continue
            if moved or (call.is_noisy and has_fractions(result)):
                self._places[number].moved = True
            if call.about.name in _BLANK and result.numel():
                self._blank.add(memory_of(result))
        if not self.why:
            self._steps.append(step)

    # --------------------------------------------------------------------------------------------------- it runs again

    def run(self, performer: Performer, rest: bool) -> dict[str, Any]:
        """Run the operators again: those of the first pass, and of the ``rest``. Returns the results by name.

        Raises:
            Exception: what an operator raises.
        """
        tensors: list[Any] = [None] * len(self._places)
        fresh: dict[int, torch.Tensor] = {}
        for number, outer in self._outer.items():
            tensors[number] = outer.again(fresh)
        passes = [self._steps[: self._second_pass]]
        if rest and self._second_pass is not None:
            passes.append(self._steps[self._second_pass :])
        results = {}
        with torch.no_grad():
            for number, steps in enumerate(passes):
                for step in steps:
                    step.run(performer, tensors)
                    for done in step.done:
                        tensors[done] = None
                for name, value in self._results[number].items():
                    results[name] = self._result(value, tensors)
        return results

    def _result(self, value: Any, tensors: list[Any]) -> Any:
        if type(value) is not Number:
            return value
        result = tensors[value.number]
        if self._places[value.number].before is not None:
            # The second pass may write to it too.
            result = result.clone()
        return result
