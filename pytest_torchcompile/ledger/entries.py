"""Cached entries of a function, and which of them a new call was nearest to."""

from __future__ import annotations

import re
import sys
import types
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pytest_torchcompile.errors import InstrumentError
from pytest_torchcompile.ledger.guard_causes import classify_guard
from pytest_torchcompile.ledger.reasons import Reason

__all__ = [
    "cache_entries", "commonest_reason", "compiled_so_far", "count_differences", "guards_of", "nearest_reason",
]  # fmt: skip

_OTHER_BACKEND: Final = "BACKEND_MATCH"
"""The entry is that of a torch.compile with another backend or other options; no guard of the model's failed."""
_SUBJECT: Final = re.compile(r"\b[LG](?:\['[^']*'\]|\[-?\d+\]|\.\w+)+")
"""The local or global that a guard speaks of."""
_OF_SIZE: Final = re.compile(r"\.(size|stride|storage_offset)$")
_BARE_STATE: Final = "___check_global_state()"
_STATE: Final = re.compile(r" against | == |\(")


def cache_entries(code: types.CodeType) -> list[Any]:
    """Entries that torch holds for a code object (``_debug_get_cache_entry_list``, torch 2.8 to 2.15)."""
    import torch
    from torch._C._dynamo import eval_frame

    try:
        return list(eval_frame._debug_get_cache_entry_list(code))
    except AttributeError:
        raise InstrumentError(
            f"torch {torch.__version__} has no torch._C._dynamo.eval_frame._debug_get_cache_entry_list, which lists "
            "what is compiled; please report it with this version"
        ) from None


def compiled_so_far() -> int:
    """Graphs compiled since torch's counters were last cleared (``torch._dynamo.utils.counters``, torch 2.8 to 2.15).

    Does not load torch: where nobody has, nothing was compiled.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters.get("stats", {}).get("unique_graphs", 0)) if utils else 0


def guards_of(manager: Any) -> tuple[str, ...]:
    """All guards of an entry, as text (``GuardManagerWrapper.code_parts`` in torch/_dynamo/guards.py, seen in 2.13).

    Empty where torch has none: then the entry last used is taken for the nearest.
    """
    return tuple(getattr(manager, "code_parts", None) or ())


def nearest_reason(reasons: Sequence[Reason], new: Sequence[str], entries: Mapping[str, Sequence[str]]) -> Reason:
    """Of one failed guard for each cached entry, that of the entry with the fewest differences to the new one.

    Torch names the first guard of each entry that failed, of the entry last used first. That one may differ in
    more than the new call did: after calls with and without gradients, a new size fails against the entry without
    them because of the grad mode, though there is an entry with that mode, which fails because of the size.

    :param new: guards of the entry that was made for the call.
    :param entries: compile id to the guards of the entry.
    """
    nearest, fewest = Reason(""), -1
    for reason in reasons:
        if reason.guard.startswith(_OTHER_BACKEND):
            continue
        differences = _entry_distance(reason, entries.get(reason.entry, ()), new)
        # Of several that are equally near the first, which torch used last.
        if fewest < 0 or differences < fewest:
            nearest, fewest = reason, differences
    return nearest


def _entry_distance(reason: Reason, old: Sequence[str], new: Sequence[str]) -> int:
    """How many things an entry differs in."""
    differences = count_differences(old, new)
    # Torch 2.8 to 2.10 write the guard on the global state without its values, so both entries have the same text.
    # Without this a new size was told as a change of the grad mode.
    if reason.guard.startswith("GLOBAL_STATE changed") and _BARE_STATE in old:
        differences += 1
    return differences


def commonest_reason(reasons: Iterable[Reason]) -> Reason:
    """Of one failed guard for each cached entry, the first of the kind that there are most of."""
    kinds: Counter[tuple[str, str]] = Counter()
    first_of_kind: dict[tuple[str, str], Reason] = {}
    for reason in reasons:
        kind = (classify_guard(reason.guard), reason.what)
        kinds[kind] += 1
        first_of_kind.setdefault(kind, reason)
    if not kinds:
        return Reason("")
    # most_common keeps the order in which equals came.
    return first_of_kind[kinds.most_common(1)[0][0]]


def count_differences(old: Iterable[str], new: Iterable[str]) -> int:
    """How many things two sets of guards both speak of, and differently; a thing counts once.

    >>> old = ["L['k'] == 1", "check_tensor(L['x'], size=[3])"]
    >>> count_differences(old, ["L['k'] == 1", "check_tensor(L['x'], size=[4])"])
    1
    """
    before, now = _guards_by_subject(old), _guards_by_subject(new)
    return sum(before[subject] != now[subject] for subject in before.keys() & now.keys())


def _guards_by_subject(guards: Iterable[str]) -> dict[str, set[str]]:
    """What guards speak of, to the guards: a tensor with all of its sizes, a name, or a state of the process."""
    by_subject: dict[str, set[str]] = {}
    for guard in guards:
        if match := _SUBJECT.search(guard):
            subject = _OF_SIZE.sub("", match[0])
        else:
            subject = _STATE.split(guard, maxsplit=1)[0]
        by_subject.setdefault(subject, set()).add(guard)
    return by_subject
