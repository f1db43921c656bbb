"""The flight recorder: torch's own list of the collectives that a process has begun, NCCL's and gloo's.

An entry is a collective: its number within its process group, by which ranks are compared, sizes, dtype, and how far it
has come. ``started`` is known of NCCL's only with ``TORCH_NCCL_ENABLE_TIMING=1``; else they stay ``scheduled`` until
they are ``completed``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, Final

import torch

__all__ = ["count_under_way", "keep_entries", "last_collectives"]

LAST: Final = 10
"""Entries that are told."""
_SIZES: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Variables for the entries that are kept; torch 2.8 to 2.13 read both and warn of the second."""


def keep_entries() -> None:
    """Have torch keep entries, to be called before the process makes its first process group.

    torch 2.13 keeps some anyway, torch 2.8 none. What the user has set stays.
    """
    if not any(name in os.environ for name in _SIZES):
        os.environ[_SIZES[0]] = "2000"


def last_collectives(since: int) -> str:
    """The last collectives that this process has begun at ``since`` (``time.time_ns()``) or later, a line each."""
    dumps = _read_dumps()
    if not dumps:
        return f"flight recorder: torch {torch.__version__} has none that can be read here"
    # A warm process has entries of earlier cells too.
    entries = _entries_since(dumps, since)
    entries.sort(key=itemgetter("time_created_ns"))
    # There are two recorders, or one by two names: the same line is told once.
    lines = list(dict.fromkeys(_entry_line(entry) for entry in entries))
    if not lines:
        given = ", ".join(f"{name}={os.environ[name]}" for name in _SIZES if name in os.environ)
        return f"flight recorder: no collective was begun, or none recorded ({given})"
    last = lines[-LAST:]
    return "\n".join([f"flight recorder, the last {len(last)} of {len(lines)} collectives:", *last])


def count_under_way(since: int) -> int:
    """Collectives of gloo that were begun at ``since`` (``time.time_ns()``) or later, and that its threads still do."""
    under_way = 0
    for entry in _entries_since(_read_dumps(), since):
        is_gloo = entry["profiling_name"].startswith("gloo:")
        if is_gloo and _progress_of(entry) not in ("completed", "ended"):
            under_way += 1
    return under_way


def _entries_since(dumps: Iterable[Mapping[str, Any]], since: int) -> list[Mapping[str, Any]]:
    return [entry for dump in dumps for entry in dump.get("entries", ()) if entry["time_created_ns"] >= since]


def _read_dumps() -> list[dict[str, Any]]:
    """What NCCL's recorder holds and what that of the other backends does; [] where torch has no function for it.

    ``torch._C._distributed_c10d._dump_nccl_trace_json`` (builds with NCCL) and ``._dump_fr_trace_json`` (every build),
    both ``(includeCollectives, onlyActive) -> bytes``: torch 2.8 to 2.13. They read different recorders: gloo's entries
    are in the second alone, NCCL's in the first.
    """
    c10d = getattr(torch._C, "_distributed_c10d", None)
    dumps = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            dumps.append(json.loads(dump(True, False)))
    return dumps


def _entry_line(entry: Mapping[str, Any]) -> str:
    """``  #3 gloo:all_reduce in default_pg, [3, 4] Float: scheduled``."""
    number = f"p2p #{entry['p2p_seq_id']}" if entry["is_p2p"] else f"#{entry['collective_seq_id']}"
    name, described = entry["process_group"]
    inputs = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    sizes = ", ".join(f"{size} {dtype}" for size, dtype in inputs)
    progress = _progress_of(entry)
    return f"  {number} {entry['profiling_name']} in {described or name}, {sizes or 'no tensor'}: {progress}"


def _progress_of(entry: Mapping[str, Any]) -> str:
    """How far it has come; what is retired ended, and only of NCCL is it known whether it had completed."""
    is_nccl, retired, state = entry["profiling_name"].startswith("nccl"), entry.get("retired"), str(entry["state"])
    if state == "completed":
        # NCCL also calls a collective completed whose CUDA events have not been recorded yet: one that waits for its
        # communicator, which takes all ranks of the group. It is retired a moment after it has completed.
        if is_nccl and not retired:
            return "completed, or not begun"
        return state
    if not retired:
        return state
    return "given up" if is_nccl else "ended"
