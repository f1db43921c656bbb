"""What no rounding excuses: errors, structure, dtypes, shapes, strides, shared memory, random generators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pytest_torchcompile.oracle.leaf import Leaf, Scalar
from pytest_torchcompile.oracle.recording import Item, Recording

__all__ = ["ABSENT", "compare_errors", "compare_items", "compare_properties", "plain_value"]


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT: Any = _Absent()
"""The value of a name that only one of two recordings has."""
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
        return Leaf("random generator", "rng", bitwise=True)
    text = (
        f"its state after the call differs on {', '.join(differ)}: more, fewer or other random numbers were "
        "drawn (with torch._inductor.config.fallback_random Inductor draws the ones of eager)"
    )
    return Leaf("random generator", "rng", message=text)


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
        ("stride", "stride", eager.stride, stride),
        ("requires_grad", "requires_grad", eager.requires_grad, compiled.requires_grad),
    ):
        if one != other:
            text = f"{what} is {one} in eager, {other} compiled"
            yield Leaf(name, about, e.numel(), eager=str(one), compiled=str(other), message=text)


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
