"""Recording: everything observable about one call, in copies that no later call can overwrite.

And what a call raised, with whose code raised it, the user's or ours: only the user's own mistake may be told as one.
"""

from __future__ import annotations

import os
import sysconfig
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Final, TypeVar

import torch

from pytest_torchcompile.oracle.measurement import read_numbers
from pytest_torchcompile.oracle.python_state import PythonState
from pytest_torchcompile.oracle.step_outputs import NamedLeaf, Step, StepOutput, TrainingOutput, parameter_moved_by
from pytest_torchcompile.state.tensor_forms import (
    computable,
    dense_form,
    fingerprint,
    layout_of,
    stored_parts,
    subclass_of,
    visible_strides,
    whole_value,
)
from pytest_torchcompile.state.value_leaves import leaves_of

__all__ = ["Fault", "Item", "NamedLeaf", "Recording", "Step", "StepOutput", "TrainingOutput", "detached_copy",
           "has_signal", "named_leaves", "parameter_moved_by", "raised_by_us", "run_theirs", "says_fork"]

Result = TypeVar("Result")

_OURS: Final = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
# What of ours runs around and inside the user's model, and hands on what that raises.
_GUESTS: Final = tuple(_OURS + name for name in ("zoo", "wrappers", "backends", "layer", "ledger", "gauges", "faults"))
_ZOO: Final = _OURS + "zoo"
# Torch and Python raise on behalf of whoever calls them. What is installed beside them is the user's.
_NEITHER: Final = (os.path.join(os.path.dirname(torch.__file__), ""),
                   os.path.join(sysconfig.get_path("stdlib"), ""))
_INSTALLED: Final = f"{os.sep}site-packages{os.sep}"
# What autograd (torch/csrc/autograd/engine.cpp) and CUDA (torch/cuda/__init__.py) say in a fork that came too late:
# torch 2.8 to 2.15. Cells run in forks, and it is us who forked.
_OF_A_FORK: Final = ("fork-based multiprocessing", "in forked subprocess")
# Of a stack that is longer, its beginning and its end are kept.
_STACK_LINES = 40
# Causes of causes that are looked at.
_CAUSES = 8
_COMMON = (Exception, BaseException, object)


@dataclass(frozen=True)
class Fault:
    """What a call raised."""

    type: str
    text: str
    phase: str
    """``forward``, ``loss`` or ``backward``."""
    traceback: str = ""
    """The stack, innermost frame last; long ones shortened in the middle."""
    family: frozenset[str] = frozenset()
    """Names of the classes between its own and ``Exception``, and those of the exceptions that it was raised from."""
    exception: BaseException | None = field(default=None, repr=False, compare=False)
    """The exception itself, for whoever wants to raise it again."""
    at: float = field(default_factory=time.monotonic, compare=False)
    """``time.monotonic()`` when it was seen."""
    ours: bool = False
    """In an eager run: whether our own code raised it, and not the user's."""

    @classmethod
    def of(cls, error: BaseException, phase: str, *, ours: bool = False) -> Fault:
        """Describe an exception."""
        return cls(_qualified_name(type(error)), str(error), phase, _stack_text(error), _class_family(error), error,
                   ours=ours)

    def is_akin(self, other: Fault) -> bool:
        """Whether whoever expects this error may take the other one for it.

        One class derives from the other, or one was raised from an error like the other. Dynamo and Inductor wrap what
        they meet while tracing, and name its class in their text. The kernels of Inductor know one error only.
        """
        if self.family & other.family:
            return True
        for inner, outer in ((self, other), (other, self)):
            if _wraps_others(outer.type) and inner.type.rpartition(".")[2] in outer.text:
                return True
        return self._about_bounds and other._about_bounds

    @property
    def _about_bounds(self) -> bool:
        return "out of bounds" in self.text or "out of range" in self.text

    def raise_own_mistake(self) -> None:
        """Raise what our own code had raised: nothing is known of the model then."""
        if self.ours and self.exception is not None:
            raise self.exception

    def to_dict(self) -> dict[str, str]:
        """Plain data for a report."""
        return {"type": self.type, "text": self.text, "phase": self.phase, "traceback": self.traceback}

    def __str__(self) -> str:
        text = self.text.strip()
        first_line = text.splitlines()[0] if text else ""
        if not first_line:
            return f"{self.type} in {self.phase}"
        return f"{self.type} in {self.phase}: {first_line[:300]}"


def _stack_text(error: BaseException) -> str:
    """The frames of an exception, without those of this package; at most 40 lines."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]
    lines = "".join(traceback.format_list(frames)).splitlines()
    if len(lines) > _STACK_LINES:
        lines = [*lines[:12], "  ...", *lines[-28:]]
    return "\n".join(lines)


def _class_family(error: BaseException | None) -> frozenset[str]:
    names: set[str] = set()
    depth = 0
    while error is not None and depth < _CAUSES:
        names |= {_qualified_name(kind) for kind in type(error).__mro__ if kind not in _COMMON}
        error, depth = error.__cause__ or error.__context__, depth + 1
    return frozenset(names)


def _wraps_others(kind: str) -> bool:
    return kind.startswith(("torch._dynamo.", "torch._inductor."))


def _qualified_name(kind: type[BaseException]) -> str:
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def run_theirs(function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
    """Call what is the user's: a model, a loss, a backward pass, or an operator in one of them.

    The frame of this call is the border that :func:`raised_by_us` looks for.
    """
    return function(*args, **kwargs)


def says_fork(error: BaseException) -> bool:
    """Whether torch says that this process was forked too late, which is no doing of the user's."""
    return any(text in str(error) for text in _OF_A_FORK)


def raised_by_us(error: BaseException) -> bool:
    """Whether an exception of an eager run is our own mistake, by the place where it was raised.

    It is the user's only inside of :func:`run_theirs`, and there only if no code of ours was entered once more, as that
    of a mode which watches each operator.
    """
    if says_fork(error):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    borders = [place for place, frame in enumerate(frames) if frame.f_code is run_theirs.__code__]
    if not borders:
        return True
    inside = frames[borders[-1] + 1:]
    for frame in reversed(inside):
        if _is_neutral(frame, innermost=frame is inside[-1]):
            continue
        return frame.f_code.co_filename.startswith(_OURS)
    return False


def _is_neutral(frame: FrameType, innermost: bool) -> bool:
    """Whether a frame says nothing about whose mistake it was: the one that called it has to be asked."""
    file = frame.f_code.co_filename
    if file.startswith(_OURS):
        return file.startswith(_ZOO) or (file.startswith(_GUESTS) and not innermost)
    if file.startswith("<"):
        return True
    return file.startswith(_NEITHER[0]) or (file.startswith(_NEITHER[1]) and _INSTALLED not in file)


@dataclass(frozen=True, eq=False)
class Item:
    """A detached copy of a tensor with the properties of the original, or a Python object."""

    value: Any
    stride: tuple[int, ...] | None = None
    requires_grad: bool = False
    layout: str = str(torch.strided)
    subclass: str = ""
    """The class of a tensor that is none of torch's own; see ``subclass_of``."""

    @classmethod
    def of(cls, value: Any) -> Item:
        """Copy a tensor, with its visible strides; anything else is kept as it is."""
        if not isinstance(value, torch.Tensor):
            return cls(value)
        return cls(detached_copy(value), visible_strides(value), value.requires_grad, layout_of(value.detach()),
                   subclass_of(value))

    @classmethod
    def of_state(cls, value: Any) -> Item:
        """As :meth:`of`, of a buffer or an attribute: of a large sparse one the numbers that it stores.

        Its dense form may be larger than all memory: of a graph of 100,000 nodes 37 GiB.
        """
        parts = None
        if isinstance(value, torch.Tensor) and value.numel() > _LARGEST_DENSE:
            parts = stored_parts(value.detach())
        if parts is None:
            return cls.of(value)
        numbers, *places = parts
        # Short, for a message shows it: that numbers are elsewhere is all that it has to tell.
        fingerprints = [fingerprint(part).tolist() for part in places]
        mark_of_places = f"{zlib.crc32(repr(fingerprints).encode()):08x}"
        layout = f"{layout_of(value.detach())}, {numbers.shape[0]} numbers at places {mark_of_places}"
        return cls(numbers.clone(), None, value.requires_grad, layout, subclass_of(value))

    @classmethod
    def shared(cls, tensor: torch.Tensor) -> Item:
        """A strided tensor that nobody writes to any more, as it is."""
        return cls(tensor.detach(), visible_strides(tensor), tensor.requires_grad, layout_of(tensor.detach()))


# Elements of a sparse buffer that is recorded in its dense form.
_LARGEST_DENSE: Final = 1 << 20
# The properties of a value that has none.
_PLAIN = Item(None)


# How the leaf of a gradient is named: ``step 3: gradient of up.weight, added to that of step 2``.


def named_leaves(output: Any) -> tuple[list[NamedLeaf], str]:
    """The leaves of an output, and a text that is equal for outputs of one structure."""
    if isinstance(output, TrainingOutput):
        leaves: list[NamedLeaf] = []
        for step in output.steps:
            leaves += step.leaves()
        return leaves, _structure_of_steps(output.steps)
    if isinstance(output, StepOutput):
        return list(output.leaves()), leaves_of(dict.fromkeys(output.values))[1]
    pairs, structure = leaves_of(output)
    return [NamedLeaf(f"output{path}", leaf) for path, leaf in pairs], structure


def _structure_of_steps(steps: list[Step]) -> str:
    """As of a dict of the steps with a dict of what each computed."""
    names: dict[str, dict[str, None]] = {}
    for step in steps:
        names[step.name] = {leaf.name.removeprefix(f"{step.name}: "): None for leaf in step.leaves()}
    return leaves_of(names)[1]


@dataclass(frozen=True, eq=False)
class Recording:
    """One call, its loss and its backward pass. Names are the ones that a report prints."""

    outputs: dict[str, Item] = field(default_factory=dict)
    """By path: ``output``, ``output[0]``, ``output['logits']``, ``output.hidden``."""
    structure: str = ""
    loss: torch.Tensor | None = None
    backward: bool = False
    """Whether gradients were asked for: ``train``, and the loss depends on something that requires grad."""
    mutated: dict[str, torch.Tensor] = field(default_factory=dict)
    """Inputs and parameters that the call wrote to, as they are afterwards; of a training all that it trains, too."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Buffers, and tensors that modules hold in attributes."""
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    """Of every parameter and every input that requires grad; ``None`` where none arrived."""
    properties: dict[str, Item] = field(default_factory=dict)
    """Strides and ``requires_grad`` of what the three hold, by name; the value is in those."""
    aliases: frozenset[tuple[str, str]] = frozenset()
    training: frozenset[str] = frozenset()
    """Names of the modules that were in training mode after the call."""
    left_out: tuple[str, ...] = ()
    """Outputs that the loss takes no gradient of; they have a backward pass of their own."""
    generators: dict[str, torch.Tensor] = field(default_factory=dict)
    """State of the random generators after the call, by device."""
    python: tuple[PythonState, PythonState] | None = None
    """What modules hold outside of tensors, before the call and after it; None where several ranks share a model."""
    error: Fault | None = None
    kinds: dict[str, str] = field(default_factory=dict)
    """Of the outputs: ``value``, but for the gradients that a training returns."""

    def items(self) -> Iterator[tuple[str, str, Item]]:
        """``(name, kind, item)`` of everything that has a value, in the order of a report."""
        for name, item in self.outputs.items():
            yield name, self.kinds.get(name, "value"), item
        if self.loss is not None:
            yield "loss", "value", Item(self.loss)
        yield from self._items_of("mutation", self.mutated)
        yield from self._items_of("buffer", self.buffers)
        yield from self._items_of("gradient", self.gradients)

    def _items_of(self, kind: str, table: Mapping[str, torch.Tensor | None]) -> Iterator[tuple[str, str, Item]]:
        for name, value in table.items():
            yield name, kind, replace(self.properties.get(name, _PLAIN), value=value)

    def values(self) -> Iterator[tuple[str, str, Any]]:
        """:meth:`items` without the properties."""
        for name, kind, item in self.items():
            yield name, kind, item.value

    def items_by_name(self) -> dict[str, tuple[str, Item]]:
        """:meth:`items`, each with its kind."""
        return {name: (kind, item) for name, kind, item in self.items()}

    def item_named(self, name: str) -> Item | None:
        """Of :meth:`items`."""
        _, item = self.items_by_name().get(name, ("", None))
        return item

    def values_by_name(self) -> dict[str, Any]:
        """:meth:`values` without their kinds."""
        return {name: value for name, _, value in self.values()}

    def without(self, parameters: frozenset[str]) -> Recording:
        """What is left if nothing is said of some parameters: no gradient, and not what the call wrote to them."""
        if not parameters:
            return self
        gradients = dict(self.gradients)
        for name in gradients:
            if name.removeprefix("gradient of ") in parameters:
                gradients[name] = None
        mutated = {}
        for name, value in self.mutated.items():
            if name.removesuffix(" after the call") not in parameters:
                mutated[name] = value
        return replace(self, gradients=gradients, mutated=mutated)

    @property
    def all_zero(self) -> bool:
        """Whether every number that was returned is zero, NaN or infinite: such a call proves nothing."""
        tensors = self._output_tensors()
        return bool(tensors) and not any(read_numbers(*map(_signal_of, tensors)))

    @property
    def has_answers(self) -> bool:
        """Whether an output or a gradient is more than zeros.

        A zero among whole numbers, or False, is an answer like any other; floating zeros may just be memory.
        """
        if self.signalling_gradients:
            return True
        tensors = self._output_tensors()
        if tensors:
            return not self.all_zero or any(map(_holds_whole_numbers, tensors))
        # Of a model that returns no tensor, its Python values are the answer.
        return any(item.value for item in self.outputs.values())

    @property
    def signalling_gradients(self) -> int:
        """How many gradients are neither missing nor all zero, NaN or infinite."""
        gradients = list(self.gradients.values())
        # Those of a step that does its own backward pass are what it returns.
        for name, item in self.outputs.items():
            if self.kinds.get(name) == "gradient":
                gradients.append(item.value)
        signals = [_signal_of(gradient) for gradient in gradients if gradient is not None]
        return sum(map(bool, read_numbers(*signals)))

    def _output_tensors(self) -> list[torch.Tensor]:
        return [item.value for item in self.outputs.values() if isinstance(item.value, torch.Tensor)]


def has_signal(tensor: torch.Tensor) -> bool:
    """Whether a tensor has an element that is finite and not zero, so that equality with it says something."""
    return bool(_signal_of(tensor))


def _signal_of(tensor: torch.Tensor) -> torch.Tensor:
    """:func:`has_signal`, not read yet."""
    if tensor.layout is not torch.strided:
        return torch.tensor(bool(tensor.any()), device="cpu")
    # Of some dtypes torch has no arithmetic.
    if not tensor.numel():
        return torch.tensor(False, device="cpu")
    numbers = computable(tensor)
    return (numbers.isfinite() & (numbers != 0)).any()


def _holds_whole_numbers(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and not (tensor.is_floating_point() or tensor.is_complex())


def detached_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A detached copy with the same strides where they can be kept; a distributed tensor is gathered whole.

    A sparse or nested one is made dense (:func:`~pytest_torchcompile.state.tensor_forms.dense_form`).

    Gathering (``DTensor.full_tensor``) is collective: every rank must record the same call.
    """
    return dense_form(whole_value(tensor)).clone()
