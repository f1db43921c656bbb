"""Arrivals: has every rank come to the end of its call? Told through the store in which the ranks first met.

Not through a collective: a rank whose model raises has left its call, and the others may be in the middle of theirs,
where a vote of ours would be taken for one of the model's collectives. (gloo ends the process by SIGABRT for that.)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["LIMIT", "PATIENCE", "Arrivals"]

PATIENCE = 30.0
"""Seconds that a rank whose model has raised waits for the others: eager calls that began together end together, unless
one of them waits for another."""
LIMIT = 1800.0
"""Seconds that a rank whose call has ended waits for the others, which may compile: torch's own default for groups."""


class Arrivals:
    """The calls of a model that is spread over ``groups``, counted in the same way on every rank."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self._rank = torch.distributed.get_rank() if groups else 0
        self._groups = [(f"pytest_torchcompile/{group.group_name}", torch.distributed.get_process_group_ranks(group))
                        for group in groups]
        real = groups and all(torch.distributed.get_backend(group) != "fake" for group in groups)
        self._store = _default_store() if real else None
        self._number = 0
        self.left: tuple[int, ...] = ()
        """Ranks that have said that they will make no more calls."""
        if self._store is not None:  # a count in the store itself: it begins anew with the next store
            self._groups = [(f"{name}/{self._store.add(f'{name}/{self._rank}', 1)}", ranks)
                            for name, ranks in self._groups]

    def missing(self, patience: float) -> tuple[int, ...]:
        """Say that this rank's call has ended; the ranks whose has not within so many seconds, or that have left.

        Empty where torch has no store to ask.
        """
        self._number += 1
        store, until, found = self._store, time.monotonic() + patience, set[int]()
        if store is None:
            return ()
        for name, ranks in self._groups:  # before any is waited for
            here = f"{name}/{self._number}"
            store.set(f"{here}/{self._rank}", "1")
            if store.add(f"{here}/came", 1) == len(ranks):
                store.set(f"{here}/all", "1")
        for name, ranks in self._groups:
            here, pause = f"{name}/{self._number}", 0.001
            while not store.check([f"{here}/all"]) and not store.check([f"{name}/left"]):
                if time.monotonic() > until:
                    found.update(rank for rank in ranks if not store.check([f"{here}/{rank}"]))
                    break
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
            if store.check([f"{name}/left"]):
                self.left += tuple(rank for rank in ranks if store.check([f"{name}/left/{rank}"]))
        return tuple(sorted(found.union(self.left) - {self._rank}))

    def leave(self) -> None:
        """Say that this rank will make no more calls together with the others."""
        if self._store is not None:
            for name, _ in self._groups:
                self._store.set(f"{name}/left/{self._rank}", "1")
                self._store.set(f"{name}/left", "1")  # after whose it is


def _default_store() -> Any:
    """``torch.distributed.distributed_c10d._get_default_store``: torch 2.8 to 2.13; None where there is none."""
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return None
