"""What modules hold outside their parameters and buffers, in attributes, lists, dicts, caches: tensors, generators of
random numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from pytest_torchcompile.state.bits import same_bits
from pytest_torchcompile.state.paths import opened, tensors_of
from pytest_torchcompile.state.sources import source_of

__all__ = ["Holdings", "attribute_tensors", "boxes"]

_TORCHS = frozenset(vars(torch.nn.Module()))
"""What every module has: registries of parameters, buffers, submodules and hooks."""
_BOXES = (list, dict, deque, set)
_PLAIN = (bool, int, float, str, bytes, type(None), torch.nn.Module)


def attribute_tensors(module: torch.nn.Module | None) -> Iterator[tuple[str, torch.Tensor]]:
    """``(name, tensor)`` of every tensor in an attribute or in a container or object in one; each once."""
    seen = set()
    for where, part in [] if module is None else module.named_modules():
        for name, value in _own(part):
            if isinstance(value, _PLAIN):
                continue
            for path, tensor in tensors_of(value):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{where}{'.' if where else ''}{name}{path}", tensor


class Holdings:
    """The attributes of a module tree that hold tensors, and its own generators of random numbers, to be put back.

    Counters and flags are the model's own history, and stay.
    """

    def __init__(self, module: torch.nn.Module | None) -> None:
        self._parts = [] if module is None else [(part, dict(_own(part))) for part in module.modules()]
        held = [value for _, own in self._parts for value in own.values()]
        self._contents = [(box, _copied(box)) for _, box in boxes(("", value) for value in held)]
        inside = [each for box, _ in self._contents for each in (box.values() if isinstance(box, dict) else box)]
        self._sources = [source for value in (*held, *inside) if (source := source_of(value))]
        tensors = {id(t): t for value in held for _, t in tensors_of(value)}
        self._saved = [(t, t.detach().clone()) for t in tensors.values()]

    def restore(self) -> None:
        """Put objects, containers and values back; compiled code finds the very objects that it has guarded."""
        for part, own in self._parts:
            now = dict(_own(part))
            for name in [*own, *(n for n in now if n not in own)]:
                if now.get(name) is own.get(name) or not any(_holds(v.get(name)) for v in (now, own)):
                    continue
                if name in own:
                    part.__dict__[name] = own[name]
                else:
                    del part.__dict__[name]
        for box, contents in self._contents:
            if not _same(box, contents) and (_holds(box) or _holds(contents)):
                box.clear()
                (box.extend if isinstance(box, (list, deque)) else box.update)(contents)
        for source in self._sources:
            source.restore()
        with torch.no_grad():
            for tensor, value in self._saved:
                if not same_bits(tensor.detach(), value):
                    tensor.copy_(value)


def _own(part: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    yield from ((name, value) for name, value in list(vars(part).items()) if name not in _TORCHS)


def _holds(value: Any) -> bool:
    return not isinstance(value, _PLAIN) and any(True for _ in tensors_of(value))


def _may_hold_tensors(value: Any) -> bool:
    return opened(value) is not None


def boxes(
    values: Iterable[tuple[str, Any]], opens: Callable[[Any], bool] = _may_hold_tensors, seen: set[int] | None = None
) -> Iterator[tuple[str, Any]]:
    """What can be refilled among some named values and in them: lists, deques, sets, dicts, the attributes of objects.

    ``opens`` says of which objects; ``seen`` are the ids of boxes that were met before.
    """
    seen = set() if seen is None else seen
    left = deque(values)
    while left:
        name, value = left.popleft()
        namespace = [vars(value)] if hasattr(value, "__dict__") and opens(value) else []
        for box in (*namespace, *([value] if isinstance(value, (*_BOXES, tuple)) else [])):
            if id(box) in seen:
                continue
            seen.add(id(box))
            pairs = box.items() if isinstance(box, dict) else enumerate(box)
            left.extend((name + (f"[{_shown(key)}]" if box is value else f".{key}"), each) for key, each in pairs)
            if not isinstance(box, tuple):
                yield name, box


def _shown(key: Any) -> str:
    return repr(key) if isinstance(key, (str, int)) else type(key).__name__


def _copied(box: Any) -> Any:
    return dict(box) if isinstance(box, dict) else list(box)


def _same(box: Any, contents: Any) -> bool:
    if len(box) != len(contents) or (isinstance(box, dict) and list(box) != list(contents)):
        return False
    pairs = zip(*(list(b.values()) if isinstance(b, dict) else b for b in (box, contents)), strict=True)
    return all(one is other for one, other in pairs)
