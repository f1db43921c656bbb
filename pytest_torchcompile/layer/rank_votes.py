"""Ranks of one model decide alike: what one of them sees, all act upon, or the others would wait for it for ever.

The calls of a model that is spread over ranks are collective. So whether one is made must never depend on what a single
rank computed: each decision is a vote, by ``all_reduce`` over the model's own process groups, at the same place of
the same program on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from pytest_torchcompile.quantity import numbered

__all__ = ["FailedElsewhere", "RankVotes"]

PATIENCE = 30.0
"""Seconds that a rank whose model has raised waits for the others: eager calls that began together end together, unless
one of them waits for another."""
LIMIT = 1800.0
"""Seconds that a rank whose call has ended waits for the others, which may compile: torch's own default for groups."""

R = TypeVar("R")
_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel"})
"""Modules that keep the ranks they work with in ``process_group`` (torch 2.8 to 2.13)."""


class FailedElsewhere(Exception):
    """Nothing failed on this rank, but something did on others."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__(f"it failed on {numbered('rank', ranks)}, and all ranks do the same; "
                         f"the log of {'those ranks says' if len(ranks) > 1 else 'that rank says'} why")
        self.ranks = ranks


class RankVotes:
    """Whether a model is spread over ranks, and their common answers."""

    def __init__(self, model: Any) -> None:
        self._sharded: list[Any] = [part for part in _modules(model) if _kinds(part) & {"FSDPModule"}]
        self.reshard()
        self._groups = list(dict.fromkeys(_groups(model))) if torch.distributed.is_available() else []
        self.spread = bool(self._groups)
        """Its calls are collective."""
        self.apart = False
        """The ranks are no longer at the same place of the program: each decides for itself."""
        self._arrivals = Arrivals(self._groups)

    @property
    def left(self) -> tuple[int, ...]:
        """The ranks that have said that they are :attr:`apart`."""
        return self._arrivals.left

    def ended(self, error: bool, eager: bool) -> tuple[int, ...]:
        """Say that a call of the model has ended here, by an error or not; wait for the other ranks.

        Returns those that do not come: then the ranks are :attr:`apart`. ``eager``: nothing was compiled in the call.
        """
        if not self.spread or self.apart:
            return ()
        device = _device(self._groups[0])
        if device.type != "cpu" and not error:  # what the call has begun has ended too
            torch.get_device_module(device).synchronize()
        missing = self._arrivals.missing(PATIENCE if error and eager else LIMIT)
        if missing:
            self.apart = True
            self._arrivals.leave()
        return missing

    def ranks_saying(self, mine: bool) -> tuple[int, ...]:
        """The ranks that say yes. Collective where the model is spread.

        Each group takes the maximum in turn, so that of a mesh with several dimensions every rank hears of every other.
        """
        if not self.spread:
            return (0,) if mine else ()
        if self.apart:
            return (torch.distributed.get_rank(),) if mine else ()
        votes = torch.zeros(torch.distributed.get_world_size(), dtype=torch.int32, device=_device(self._groups[0]))
        votes[torch.distributed.get_rank()] = int(mine)
        for group in self._groups:
            torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX, group)
        return tuple(votes.nonzero().flatten().tolist())

    def any_rank(self, mine: bool) -> bool:
        """Whether any rank says so. Collective where the model is spread."""
        return bool(self.ranks_saying(mine))

    def run_agreed(self, work: Callable[[], R]) -> R:
        """What ``work()`` returns, unless it raises on any rank: its own exception here, else :class:`FailedElsewhere`.

        Collective where the model is spread.
        """
        error = None
        try:
            result = work()
        except Exception as raised:
            error = raised
        ranks = self.ranks_saying(error is not None)
        if error is not None:
            raise error
        if ranks:
            raise FailedElsewhere(ranks)
        return result

    def reshard(self) -> None:
        """Free what FSDP2 has gathered: between a forward pass and the next its root keeps whole parameters, which no
        snapshot of the model may mistake for its own. Not collective.
        """
        for part in self._sharded:
            part.reshard()


def _modules(model: Any) -> Iterator[nn.Module]:
    yield from model.modules() if isinstance(model, nn.Module) else ()


def _kinds(part: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(part).__mro__}


def _groups(model: Any) -> Iterator[Any]:
    """The process groups that the calls of a model work with, in the same order on every rank."""
    for part in _modules(model):
        if _kinds(part) & _WRAPPERS:
            yield part.process_group
    for tensor in model.parameters() if isinstance(model, nn.Module) else ():
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is not None:
            yield from (mesh.get_group(dim) for dim in range(mesh.ndim))


def _device(group: Any) -> torch.device:
    """Where a vote of a group can be held: on the CPU, if it has a backend for that."""
    kinds = [pair.partition(":")[0] for pair in torch.distributed.get_backend_config(group).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


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
