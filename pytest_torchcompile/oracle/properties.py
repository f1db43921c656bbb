"""What no rounding excuses: errors, structure, dtypes, shapes, strides, shared memory, random generators.

Shared memory: which outputs share it with inputs, parameters, buffers or each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from pytest_torchcompile.oracle.leaf_limits import Leaf, Scalar
from pytest_torchcompile.oracle.python_state import compare_python
from pytest_torchcompile.oracle.recording import Item, Recording
from pytest_torchcompile.state.tensor_forms import computable

__all__ = [
    "ABSENT", "GENERATOR", "alias_pairs", "compare_errors", "compare_items", "compare_properties",
    "compare_zero_signs", "equal_objects", "has_drawn", "has_other_draws",
    "labels_with_other_draws", "plain_value", "storage_address",
]


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT: Any = _Absent()
"""The value of a name that only one of two recordings has."""
GENERATOR = "random generator"
"""Name of the leaf about the state of the random generators after a call."""
# Characters of a structure that one line has room for.
_LONG = 160
# Characters shown on either side of the first difference of longer ones.
_CONTEXT = 60
_ZERO_GRADIENT = (
    "eager has none, compiled has zeros: optimisers skip the one, and move the other's parameter by weight decay and "
    "momentum"
)


def compare_errors(eager: Recording, compiled: Recording) -> Leaf:
    """Eager raises if and only if compiled raises, in the same phase and of the same family of classes."""
    e, c = eager.error, compiled.error
    if e is not None and c is not None and e.phase == c.phase and e.is_akin(c):
        return Leaf("error", "error", bitwise=True, eager=str(e), compiled=str(c))
    one, other = _what_came(eager), _what_came(compiled)
    return Leaf("error", "error", eager=one, compiled=other, message=f"eager {one}, compiled {other}")


def _what_came(recording: Recording) -> str:
    return f"raised {recording.error}" if recording.error else "ran"


def compare_properties(eager: Recording, compiled: Recording) -> Iterator[Leaf]:
    """The leaves about a call as a whole."""
    message = ""
    if eager.structure != compiled.structure:
        message = _first_difference(eager.structure, compiled.structure)
    yield Leaf("output structure", "structure", bitwise=not message, message=message)
    if eager.backward != compiled.backward:
        yield Leaf(
            "loss", "requires_grad", eager=eager.backward, compiled=compiled.backward,
            message=f"requires grad: {eager.backward} in eager, {compiled.backward} compiled",
        )  # fmt: skip
    yield from _compare_aliases(eager, compiled)
    yield from _compare_modes(eager, compiled)
    yield _compare_generators(eager, compiled)
    if eager.python is not None and compiled.python is not None:
        (before, after), (compiled_before, compiled_after) = eager.python, compiled.python
        yield from compare_python((before, compiled_before), (after, compiled_after))


def _first_difference(eager: str, compiled: str) -> str:
    """Two structures in one line; of long ones what is around the first difference."""
    start = 0
    if max(len(eager), len(compiled)) > _LONG:
        start = max(0, _common_start(eager, compiled) - _CONTEXT)
    one, other = (_excerpt(text, start) for text in (eager, compiled))
    return f"eager returned {one}, compiled {other}"


def _common_start(one: str, other: str) -> int:
    """How many characters two texts begin with together."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def _excerpt(text: str, start: int) -> str:
    end = start + max(_LONG, 2 * _CONTEXT)
    before = "..." if start else ""
    after = "..." if end < len(text) else ""
    return f"{before}{text[start:end]}{after}"


def _compare_aliases(eager: Recording, compiled: Recording) -> Iterator[Leaf]:
    lost, new = eager.aliases - compiled.aliases, compiled.aliases - eager.aliases
    if not lost and not new:
        yield Leaf("memory sharing", "alias", numel=len(eager.aliases), bitwise=True)
    for one, other in sorted(lost):
        yield Leaf(f"{one} and {other}", "alias", message="share memory in eager, but not compiled")
    for one, other in sorted(new):
        yield Leaf(f"{one} and {other}", "alias", message="share memory compiled, but not in eager")


def _compare_modes(eager: Recording, compiled: Recording) -> Iterator[Leaf]:
    for name in sorted(eager.training ^ compiled.training):
        one, other = name in eager.training, name in compiled.training
        text = f"is {one} after the eager call, {other} after the compiled one"
        yield Leaf(f"{name or 'model'}.training", "mutation", eager=one, compiled=other, message=text)


def _compare_generators(eager: Recording, compiled: Recording) -> Leaf:
    devices = sorted(eager.generators.keys() & compiled.generators.keys())
    differ = [d for d in devices if not torch.equal(eager.generators[d], compiled.generators[d])]
    if not differ:
        return Leaf(GENERATOR, "rng", bitwise=True)
    text = (
        f"its state after the call differs on {', '.join(differ)}: more, fewer or other random numbers were "
        "drawn (with torch._inductor.config.fallback_random Inductor draws the ones of eager)"
    )
    return Leaf(GENERATOR, "rng", message=text)


def has_drawn(recording: Recording, seed: int) -> bool:
    """Whether a recorded run that began with ``seed`` has drawn from any of torch's random generators."""
    for device, state in recording.generators.items():
        at_first = torch.Generator(device).manual_seed(seed).get_state()
        if not torch.equal(at_first, state):
            return True
    return False


def labels_with_other_draws(leaves: Iterable[tuple[str, Leaf]]) -> list[str]:
    """The calls after which the random generators differ, in their order."""
    return [label for label, leaf in leaves if has_other_draws([leaf])]


def has_other_draws(leaves: Iterable[Leaf]) -> bool:
    """Whether one of these says that the random generators differ after a call."""
    return any(leaf.name == GENERATOR and leaf.kind == "rng" and leaf.message for leaf in leaves)


def compare_items(name: str, kind: str, eager: Item, compiled: Item) -> Iterator[Leaf]:
    """One leaf for every property in which two values differ; nothing where they agree."""
    e, c = eager.value, compiled.value
    if kind == "gradient" and e is None and _is_zero(c):
        yield Leaf(name, "zero_gradient", c.numel(), message=_ZERO_GRADIENT)
        return
    if not isinstance(e, torch.Tensor) or not isinstance(c, torch.Tensor):
        if isinstance(e, torch.Tensor) or isinstance(c, torch.Tensor) or type(e) is not type(c):
            text = _difference_of_objects(kind, e, c)
            yield Leaf(name, kind, eager=plain_value(e), compiled=plain_value(c), message=text)
        return
    # Of another shape or layout other strides say nothing more.
    stride = eager.stride
    if e.shape == c.shape and eager.layout == compiled.layout:
        stride = compiled.stride
    for about, what, one, other in (
        ("dtype", "dtype", e.dtype, c.dtype),
        ("shape", "shape", tuple(e.shape), tuple(c.shape)),
        ("stride", "layout", eager.layout, compiled.layout),
        (kind, "device", e.device, c.device),
        ("structure", "class", eager.subclass or "Tensor", compiled.subclass or "Tensor"),
        ("stride", "stride", eager.stride, stride),
        ("requires_grad", "requires_grad", eager.requires_grad, compiled.requires_grad),
    ):
        if one != other:
            text = f"{what} is {one} in eager, {other} compiled"
            yield Leaf(name, about, e.numel(), eager=str(one), compiled=str(other), message=text)


def compare_zero_signs(name: str, eager: Any, compiled: Any) -> Iterator[Leaf]:
    """A leaf where zeros of two tensors have another sign: they are equal, and one divided by them is not."""
    if not isinstance(eager, torch.Tensor) or not isinstance(compiled, torch.Tensor) or eager.is_complex():
        return
    if eager.shape != compiled.shape or eager.layout is not torch.strided or compiled.layout is not torch.strided:
        return
    if not eager.is_floating_point() or not compiled.is_floating_point() or eager.device != compiled.device:
        return
    eager, compiled = computable(eager), computable(compiled)
    differ = (eager == 0) & (compiled == 0) & (eager.signbit() != compiled.signbit())
    count = int(differ.sum())
    if count:
        index = tuple(differ.nonzero()[0].tolist())
        one, other = float(eager[index]), float(compiled[index])
        yield Leaf(name, "zero_sign", eager=one, compiled=other,
                   message=f"{count} zero(s) have another sign: {one} in eager, {other} compiled at {list(index)}")


def _is_zero(value: Any) -> bool:
    """Whether it is a tensor of nothing but zeros."""
    return isinstance(value, torch.Tensor) and not bool(value.any())


def _difference_of_objects(kind: str, e: Any, c: Any) -> str:
    if kind == "mutation":
        if c is ABSENT:
            return "eager wrote to it, the compiled call did not"
        if e is ABSENT:
            return "the compiled call wrote to it, eager did not"
    if kind == "gradient":
        names = {True: "none", False: "a gradient"}
        return f"eager has {names[e is None]}, compiled {names[c is None]}"
    if e is ABSENT:
        return "only compiled has it"
    if c is ABSENT:
        return "only eager has it"
    return f"eager has {type(e).__name__} {plain_value(e)}, compiled {type(c).__name__} {plain_value(c)}"


def plain_value(value: Any) -> Scalar:
    """A value as a report can hold it."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, torch.Tensor):
        return f"tensor of shape {tuple(value.shape)}"
    return repr(value)[:200]


def equal_objects(one: Any, other: Any) -> bool:
    """Whether two values that are no tensors are the same, as far as can be told."""
    if one is other:
        return True
    # NaN is equal to NaN here.
    if isinstance(one, float) and one != one and other != other:
        return True
    # Plain objects are equal only to themselves: their type is all that can be compared.
    if type(one) is type(other) and not any("__eq__" in vars(kind) for kind in type(one).__mro__[:-1]):
        return True
    try:
        return bool(one == other)
    except Exception:  # objects that refuse to be compared are told apart by their text
        return repr(one) == repr(other)


# -------------------------------------------------------------------------------------------------------- shared memory
# Bytes of memory up to which it is looked at element by element; beyond that two interleaved tensors share it.
_LARGEST = 1 << 24


def alias_pairs(
    outputs: Iterable[tuple[str, torch.Tensor]], others: Iterable[tuple[str, torch.Tensor]]
) -> frozenset[tuple[str, str]]:
    """Pairs ``(output, other name)`` that share elements: a write to one is seen in the other.

    An output is paired with the first of the others that it overlaps, and with the first output before it. Two parts
    of one allocation that have no element in common are none. Empty tensors have no memory to share.
    """
    owners: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in others:
        if address := storage_address(tensor):
            owners.setdefault(address, []).append((name, tensor))
    pairs = set()
    before: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in outputs:
        address = storage_address(tensor)
        if not address:
            continue
        for candidates in (owners.get(address, ()), before.get(address, ())):
            if (other := _first_overlapping(tensor, candidates)) is not None:
                pairs.add((name, other))
        before.setdefault(address, []).append((name, tensor))
    return frozenset(pairs)


def _first_overlapping(tensor: torch.Tensor, candidates: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    for name, other in candidates:
        if _have_common_bytes(tensor, other):
            return name
    return None


def _have_common_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of two tensors of one storage."""
    (start, end), (low, high) = _byte_range(one), _byte_range(other)
    if start >= high or low >= end:
        return False
    first, size = min(start, low), max(end, high) - min(start, low)
    if size > _LARGEST:
        return True
    # The ranges overlap, and still columns of one matrix have no byte in common: mark the bytes of one, look for them
    # in the other.
    taken = torch.zeros(size, dtype=torch.bool)
    _bytes_of(one, taken, first).fill_(True)
    return bool(_bytes_of(other, taken, first).any())


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after the last."""
    start = tensor.storage_offset()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(start * tensor.itemsize), int((start + last + 1) * tensor.itemsize)


def _bytes_of(tensor: torch.Tensor, memory: torch.Tensor, first: int) -> torch.Tensor:
    """The bytes of a tensor in a map of the memory that begins with the byte ``first``."""
    sizes, strides = [], []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        # a stride of 0 reads the same bytes again, and torch refuses to write to such a view
        if stride == 0:
            size = 1
        sizes.append(size)
        strides.append(stride * tensor.itemsize)
    offset = tensor.storage_offset() * tensor.itemsize - first
    return memory.as_strided((*sizes, tensor.itemsize), (*strides, 1), offset)


def storage_address(tensor: torch.Tensor) -> int:
    """Where the memory of a tensor begins; 0 where it has none that could be shared."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel() or tensor.device.type == "meta":
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # subclasses without a storage of their own
        return 0
