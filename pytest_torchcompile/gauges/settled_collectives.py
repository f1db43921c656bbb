"""Settled collectives: a profiler must not be left before gloo's threads have ended what a call has begun.

They write the end of each collective into the profiler's events. One that ends while the profiler gathers these spoils
the heap, and the process dies by SIGSEGV (torch 2.13, ``docs/found/profiler-ends-before-gloo.md``). An eager call
leaves one behind whose result nobody has read yet: the output of a tensor parallel model, say.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["settled_collectives"]

_PATIENCE: Final = 60.0
"""Seconds for peers that are late. One that never comes ends the cell by its time-out."""
_SHORTEST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.1
"""Seconds between two looks, each of which reads the whole recorder: some 40 ms where it is full."""


@contextmanager
def settled_collectives() -> Iterator[None]:
    """Inside of a profiler: it is left once gloo has ended every collective that was begun in it.

    The flight recorder tells, which rank processes have on; where it keeps no entries nobody is waited for.
    """
    since = time.time_ns()
    try:
        yield
    finally:
        _wait_until_settled(since)


def _wait_until_settled(since: int) -> None:
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    from pytest_torchcompile.gauges.flight_recorder import count_under_way

    deadline, pause = time.monotonic() + _PATIENCE, _SHORTEST_PAUSE
    while count_under_way(since) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
