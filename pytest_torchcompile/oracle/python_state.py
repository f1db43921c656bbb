"""What a call changes outside of tensors: counters, lists and dicts of modules, and generators of random numbers.

Eager and compiled have histories of their own: a counter may stand elsewhere before a call, as in a copy that is run
once. So a value is compared only where it was the same before the call.
"""

from __future__ import annotations

import linecache
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_torchcompile.oracle.leaf_limits import Leaf
from pytest_torchcompile.state.snapshot import generator_state
from pytest_torchcompile.state.value_leaves import own_attributes

__all__ = ["PythonState", "compare_python", "python_state"]

_PLAIN = (bool, int, str, bytes, type(None))
# Items of a container, and containers in containers, that are looked at.
_MOST_ITEMS, _DEPTH = 256, 3
_NO_COUNT = 2**24
"""Whole numbers from here on are addresses, times and hashes, which are others in each run, and no counts."""
_OPAQUE: Any = object()
"""Stands for what is not compared."""
# A class whose source has one of these may do something else on purpose while it is compiled.
_ASKS = ("is_compiling", "is_dynamo_compiling", "is_torchdynamo_compiling", "is_exporting")
_ON_PURPOSE = "its module asks whether it is compiled, so this may be on purpose"


@dataclass(frozen=True, eq=False)
class PythonState:
    """The plain values that modules hold, and the states of generators."""

    attributes: Mapping[str, Any] = field(default_factory=dict)
    """By name: ``encoder.calls``."""
    generators: Mapping[str, Any] = field(default_factory=dict)
    asking: frozenset[str] = frozenset()
    """Attributes of classes that ask whether they are compiled."""


def python_state(module: torch.nn.Module | None) -> PythonState:
    """As it is now."""
    attributes: dict[str, Any] = {}
    generators: dict[str, Any] = {"Python": random.getstate()}
    if "numpy.random" in sys.modules:
        name, keys, *rest = sys.modules["numpy.random"].get_state()
        generators["NumPy"] = (name, keys.tobytes(), *rest)
    asking: set[str] = set()
    for where, part in () if module is None else module.named_modules():
        prefix = f"{where}." if where else ""
        asks = _asks_for_compiling(type(part))
        for name, value in own_attributes(part).items():
            # Torch's modules keep books: DDP notes (``_has_rebuilt_buckets``) what it does once, in whatever call.
            if name.startswith("_") and _is_torchs(type(part)):
                continue
            kept = _plain_copy(value, _DEPTH)
            if kept is not _OPAQUE:
                attributes[prefix + name] = kept
                if asks:
                    asking.add(prefix + name)
            elif state := generator_state(value):
                generators[f"attribute {prefix}{name}"] = _comparable(state.state)
    return PythonState(attributes, generators, frozenset(asking))


def _plain_copy(value: Any, depth: int) -> Any:
    """A value that a later call can't change; ``_OPAQUE`` for what holds anything but plain values.

    Numbers in floating point may come from tensors, and rounding would be told as a difference: they are opaque.
    """
    if isinstance(value, int) and abs(value) >= _NO_COUNT:
        return _OPAQUE
    if isinstance(value, _PLAIN):
        return value
    if not depth or not isinstance(value, (list, tuple, dict, set)) or len(value) > _MOST_ITEMS:
        return _OPAQUE
    if isinstance(value, dict):
        parts = [(_plain_copy(key, depth - 1), _plain_copy(item, depth - 1)) for key, item in value.items()]
        if any(_OPAQUE in pair for pair in parts):
            return _OPAQUE
        return dict(parts)
    items = [_plain_copy(item, depth - 1) for item in value]
    if any(item is _OPAQUE for item in items):
        return _OPAQUE
    if isinstance(value, set):
        return set(items)
    return items


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _comparable(state: Any) -> Any:
    return state.tolist() if isinstance(state, torch.Tensor) else repr(state)


_asked: dict[type, bool] = {}
"""What :func:`_asks_for_compiling` has found."""


def _asks_for_compiling(kind: type) -> bool:
    """Whether the file of a class, or of one that it derives from, asks if it is being compiled."""
    if kind not in _asked:
        texts = []
        for each in kind.__mro__:
            # Torch's own modules and those without a file do not count.
            file = getattr(sys.modules.get(each.__module__), "__file__", None)
            if file and not _is_torchs(each):
                texts.append("".join(linecache.getlines(file)))
        _asked[kind] = any(word in text for text in texts for word in _ASKS)
    return _asked[kind]


def compare_python(before: tuple[PythonState, PythonState], after: tuple[PythonState, PythonState]) -> Iterator[Leaf]:
    """One leaf for everything that a call has left in another state compiled than eagerly; pairs of eager, compiled."""
    yield from _compare_attributes(before, after)
    eager, compiled = after
    for name, state in eager.generators.items():
        if name not in compiled.generators or before[0].generators.get(name) != before[1].generators.get(name):
            continue
        if compiled.generators[name] != state:
            text = "its state after the call differs: more, fewer or other random numbers were drawn"
            yield Leaf(f"random generator: {name}", "rng", message=text)


def _compare_attributes(before: tuple[PythonState, PythonState],
                        after: tuple[PythonState, PythonState]) -> Iterator[Leaf]:
    eager, compiled = (state.attributes for state in after)
    for name in sorted({*eager, *compiled}):
        one, other = eager.get(name, _OPAQUE), compiled.get(name, _OPAQUE)
        first, second = (state.attributes.get(name, _OPAQUE) for state in before)
        if one == other or first != second:
            continue
        text = f"is {_shown(one)} after the eager call, {_shown(other)} after the compiled one"
        kind = "mutation"
        if name in after[0].asking | after[1].asking:
            kind, text = "nondeterministic", f"{text}; {_ON_PURPOSE}"
        yield Leaf(f"attribute {name}", kind, message=text)


def _shown(value: Any) -> str:
    if value is _OPAQUE:
        return "no plain value"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
