"""Guards: what must be as it was when the code was compiled, one by one, and what would break each. No torch.

Read from the tree that a cached entry prints (``str(guard_manager)``), which names the kind of each guard:
``+- KIND: text  # line of code  # place`` (torch/_dynamo/guards.py, torch 2.13).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

__all__ = ["KINDS", "Guard", "count_kinds", "explain_symbolic", "read_guards"]

KINDS: Final = {
    "TENSOR_MATCH": "another dtype, device, requires_grad, size or stride; a size None may be any",
    "SHAPE_ENV": "a size for which this does not hold",
    "TYPE_MATCH": "an object of another type",
    "ID_MATCH": "another object in its place",
    "OBJECT_ALIASING": "two objects that were one, or one that were two",
    "NO_TENSOR_ALIASING": "the same tensor passed twice",
    "STORAGE_OVERLAPPING": "tensors whose memory overlaps otherwise",
    "EQUALS_MATCH": "another value",
    "CONSTANT_MATCH": "another value",
    "BOOL_MATCH": "the other truth value",
    "TRUE_MATCH": "anything but True",
    "FALSE_MATCH": "anything but False",
    "NONE_MATCH": "anything but None",
    "LENGTH_CHECK": "another length",
    "TUPLE_ITERATOR_LEN": "another length",
    "DICT_CONTAINS": "a key that comes or goes: a forward patched onto the instance, for example",
    "DICT_NOT_CONTAINS": "a key that comes",
    "DICT_LENGTH": "another number of keys",
    "DICT_VERSION": "any change of the dict",
    "DICT_KEYS_MATCH": "other keys",
    "NOT_PRESENT_IN_GENERIC_DICT": "an attribute set on the instance",
    "HASATTR": "an attribute that comes or goes",
    "NO_HASATTR": "an attribute that comes",
    "DIMENSION_DYNAMIC_MARKING_GUARD": "the tensor marked by mark_dynamic, or marked otherwise",
    "DYNAMIC_INDICES": "the tensor marked by mark_dynamic, or marked otherwise",
    "WEAKREF_ALIVE": "the object freed",
    "DATA_PTR_MATCH": "the tensor at another address",
    "GLOBAL_STATE": "grad mode, autocast, default dtype, number of threads or determinism changed",
    "TORCH_FUNCTION_MODE_STACK": "a torch function mode entered or left",
    "DEFAULT_DEVICE": "another default device",
    "LAMBDA_GUARD": "anything for which this does not hold",
}
"""Each kind of guard, and what would break it."""
_OTHER: Final = "anything for which this does not hold"

_LEAF: Final = re.compile(r"^[| ]*\+- ([A-Z][A-Z0-9_]+): (.*)$")
_SOURCE: Final = re.compile(r"\b(?:L\['[^']*'\]|G\['[^']*'\])(?:\.\w+|\[[^\]]*\])*")
_SIZE: Final = re.compile(r"\.(?:size|stride|storage_offset)\b|\.shape\[")
_SYMBOLIC: Final = frozenset({"LAMBDA_GUARD", "SYMBOLIC_SHAPE_GUARD", "SHAPE_ENV"})
_OF_TORCH: Final = "G['__import_torch"
_RANGE: Final = re.compile(r"^(?:(\d+) (<=?) )?([^<>=!%]+?)(?: (<=?|>=?) (\d+))?$")
"""A size between numbers, or on one side of one: ``2 <= s <= 256``, ``s < 9``, ``s >= 4``."""
_REMAINDER: Final = re.compile(r"% (\d+)\)? (==|!=) (\d+)$")
_BOUND: Final = "a comparison or an operator of the model needs that, or mark_dynamic was told so"


@dataclass(frozen=True)
class Guard:
    """One guard of one compiled entry."""

    compile_id: str
    kind: str
    """As torch calls it; ``SHAPE_ENV`` where it speaks of sizes."""
    text: str
    source: str = ""
    """What is guarded, as an expression of the function's own names: ``self.weight``; empty for a state of torch."""
    place: str = ""
    """Where the function asked for it, as torch says it: ``net.py:12 in forward``."""
    why: str = ""
    """Of a guard on sizes: why it is there."""
    torchs_own: bool = False
    """It guards a function or a setting of torch's, which nobody changes by calling the model."""

    @property
    def broken_by(self) -> str:
        """What would break it."""
        return KINDS.get(self.kind, _OTHER)


def read_guards(tree: str, compile_id: str) -> list[Guard]:
    """All guards of an entry, in the order in which they are asked.

    >>> tree = "| +- TYPE_MATCH: ___check_type_id(L['x'], 7)  # return x + 1  # net.py:3 in forward"
    >>> [(guard.kind, guard.source, guard.place) for guard in read_guards(tree, "0/0")]
    [('TYPE_MATCH', 'x', 'net.py:3 in forward')]
    """
    guards: list[Guard] = []
    for line in tree.splitlines():
        match = _LEAF.match(line)
        if not match:
            continue
        kind, text = match[1], match[2]
        text, *comments = re.split(r"\s{2,}# ", text)
        place = comments[-1].partition(" (")[0] if comments else ""
        subject = _SOURCE.search(text)
        source = _SIZE.sub("", _user_name(subject[0])) if subject else ""
        if kind in _SYMBOLIC and _SIZE.search(text):
            # Several in one text: each is a condition of its own.
            for part in text.split(" and "):
                guards.append(Guard(compile_id, "SHAPE_ENV", _user_name(part), source, place, explain_symbolic(part)))
            continue
        own = _OF_TORCH in text or not subject
        guards.append(Guard(compile_id, kind, text, source, place, torchs_own=own))
    return guards


def explain_symbolic(condition: str) -> str:
    """Why a condition on sizes is there.

    >>> explain_symbolic("2 <= L['x'].size()[0]")
    'sizes 0 and 1 are compiled apart: they broadcast, and their strides mean nothing; from 2 on one code serves'
    """
    condition = condition.strip()
    if "%" in condition:
        return _explain_remainder(condition)
    if match := _RANGE.match(condition):
        least, most = _bounds_of(match)
        if least is not None or most is not None:
            return _explain_range(least, most)
    if "!=" in condition:
        return "the other case takes another way through the model"
    if "==" in condition:
        if re.search(r"== \d+$", condition):
            return "this size was taken for a constant; another compiles anew"
        if ".stride()" in condition:
            return "how the tensor lies in memory: this stride follows from its sizes, as without gaps"
        return "these sizes were equal, or follow from each other, in an operator of the model"
    return "a comparison in the model, or in an operator, went this way"


def _explain_remainder(condition: str) -> str:
    """A guard with ``%``: which remainder it asks for."""
    match = _REMAINDER.search(condition)
    if match is None:
        return "the model divides a size, or asks for a remainder: in this call it was as said here"
    divisor, comparison, remainder = match.groups()
    if comparison == "!=":
        asked = f"must not be divisible by {divisor}" if remainder == "0" else f"must not leave {remainder} over"
    elif remainder == "0":
        asked = f"must be divisible by {divisor}"
    else:
        asked = f"must leave {remainder} over, divided by {divisor}"
    return f"this size {asked}: the model divides it, or asks for its remainder, and went this way"


def _bounds_of(match: re.Match[str]) -> tuple[int | None, int | None]:
    """The least and the most size of a range; None where it is open."""
    low, low_sign, _size, sign, number = match.groups()
    least = int(low) + (low_sign == "<") if low else None
    if sign in (">", ">="):
        return int(number) + (sign == ">"), None
    most = int(number) - (sign == "<") if sign else None
    return least, most


def _explain_range(least: int | None, most: int | None) -> str:
    """Why a size has a lower bound, an upper bound, or both."""
    above = "" if most is None else f"; {most} is the most: {_BOUND}"
    if least is None:
        return above.removeprefix("; ")
    if least == 2:
        to = "" if most is None else f" to {most}"
        return ("sizes 0 and 1 are compiled apart: they broadcast, and their strides mean nothing; from 2 on"
                f"{to} one code serves{above}")
    return f"{least} is the least: {_BOUND}{above}"


def _user_name(expression: str) -> str:
    """``self.blocks[0].weight`` of Dynamo's ``L['self']._modules['blocks']._modules['0']._parameters['weight']``."""
    expression = re.sub(r"\._(?:modules|parameters|buffers)\['(\d+)'\]", r"[\1]", expression)
    expression = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", expression)
    return re.sub(r"\b[LG]\['(\w+)'\]", r"\1", expression)


def count_kinds(guards: Iterable[Guard]) -> dict[str, int]:
    """How many of each kind, the commonest first."""
    return dict(Counter(guard.kind for guard in guards).most_common())
