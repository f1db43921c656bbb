"""Ranks of one model decide alike: what one of them sees, all act upon, or the others would wait for it for ever.

The calls of a model that is spread over ranks are collective. So whether one is made must never depend on what a single
rank computed: each decision is a vote, by ``all_reduce`` over the model's own process groups, at the same place of
the same program on every rank.

Whether every rank has come to the end of its call is not asked by a vote, but through the store in which the ranks
first met: a rank whose model raises has left its call, and the others may be in the middle of theirs, where a vote of
ours would be taken for one of the model's collectives. (gloo ends the process by SIGABRT for that.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from pytest_torchcompile.quantity import numbered

__all__ = ["LIMIT", "PATIENCE", "FailedElsewhere", "RankVotes"]

PATIENCE = 30.0
"""Seconds that a rank whose model has raised waits for the others: eager calls that began together end together, unless
one of them waits for another."""
LIMIT = 1800.0
"""Seconds that a rank whose call has ended waits for the others, which may compile: torch's own default for groups."""
_LONGEST_PAUSE = 0.1
"""Seconds between two looks at the store."""

P = ParamSpec("P")
R = TypeVar("R")
_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel"})
"""Modules that keep the ranks they work with in ``process_group`` (torch 2.8 to 2.13)."""


class FailedElsewhere(Exception):
    """Nothing failed on this rank, but something did on others."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        log_of = "those ranks says" if len(ranks) > 1 else "that rank says"
        super().__init__(f"it failed on {numbered('rank', ranks)}, and all ranks do the same; the log of {log_of} why")
        self.ranks = ranks


class RankVotes:
    """Whether a model is spread over ranks, and their common answers."""

    def __init__(self, model: Any) -> None:
        modules: list[nn.Module] = []
        if isinstance(model, nn.Module):
            modules = list(model.modules())
        self._sharded: list[Any] = [part for part in modules if "FSDPModule" in _class_names(part)]
        # FSDP2 may have gathered parameters in an earlier call.
        self.reshard()
        self._groups: list[Any] = []
        if torch.distributed.is_available():
            self._groups = list(dict.fromkeys(_process_groups(modules)))
        self.spread = bool(self._groups)
        """Its calls are collective."""
        self.diverged = False
        """The ranks are no longer at the same place of the program: each decides for itself."""
        self._arrivals = _Arrivals(self._groups)

    @property
    def departed(self) -> tuple[int, ...]:
        """The ranks that have said that they have :attr:`diverged`."""
        return self._arrivals.departed

    def missing_after_call(self, error: bool, eager: bool) -> tuple[int, ...]:
        """Say that a call of the model has ended here, by an error or not; wait for the other ranks.

        Returns those that do not come: then the ranks have :attr:`diverged`. ``eager``: nothing was compiled in the
        call.
        """
        if not self.spread or self.diverged:
            return ()
        device = _vote_device(self._groups[0])
        if device.type != "cpu" and not error:
            # What the call has begun has to end too, before it counts as ended.
            torch.get_device_module(device).synchronize()
        # Other ranks may still be compiling; but eager calls end together.
        patience = PATIENCE if error and eager else LIMIT
        missing = self._arrivals.wait_for_others(patience)
        if missing:
            self.diverged = True
            # The others would wait for this rank in vain.
            self._arrivals.leave()
        return missing

    def ranks_saying(self, mine: bool) -> tuple[int, ...]:
        """The ranks that say yes. Collective where the model is spread.

        Each group takes the maximum in turn, so that of a mesh with several dimensions every rank hears of every other.
        """
        if not self.spread:
            return (0,) if mine else ()
        rank = torch.distributed.get_rank()
        if self.diverged:
            return (rank,) if mine else ()
        votes = torch.zeros(torch.distributed.get_world_size(), dtype=torch.int32, device=_vote_device(self._groups[0]))
        # Everybody's place in one tensor, so that all hear who it was.
        votes[rank] = int(mine)
        for group in self._groups:
            torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX, group)
        return tuple(votes.nonzero().flatten().tolist())

    def any_rank(self, mine: bool) -> bool:
        """Whether any rank says so. Collective where the model is spread."""
        return bool(self.ranks_saying(mine))

    def run_agreed(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What ``work(...)`` returns, unless it raises on any rank: its own exception here, else FailedElsewhere.

        Collective where the model is spread.
        """
        error = None
        try:
            result = work(*args, **kwargs)
        except Exception as raised:
            error = raised
        # No vote within the handler: an exception of the vote's would seem to come from the first one.
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


def _class_names(part: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(part).__mro__}


def _process_groups(modules: Sequence[Any]) -> Iterator[Any]:
    """The process groups that the calls of a model work with, in the same order on every rank."""
    for part in modules:
        if _class_names(part) & _WRAPPERS:
            yield part.process_group
    if not modules:
        return
    # The first is the model itself.
    for tensor in modules[0].parameters():
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is not None:
            yield from map(mesh.get_group, range(mesh.ndim))


def _vote_device(group: Any) -> torch.device:
    """Where a vote of a group can be held: on the CPU, if it has a backend for that."""
    backends = torch.distributed.get_backend_config(group).split(",")
    kinds = [backend.partition(":")[0] for backend in backends]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


@dataclass
class _MeetingPlace:
    """The keys of one process group in the store."""

    prefix: str
    ranks: Sequence[int]

    @property
    def departed(self) -> str:
        return f"{self.prefix}/left"

    def of_call(self, number: int) -> str:
        return f"{self.prefix}/{number}"


class _Arrivals:
    """The calls of a model that is spread over ``groups``, counted in the same way on every rank."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self.departed: tuple[int, ...] = ()
        """Ranks that have said that they will make no more calls."""
        self._number = 0
        self._rank = 0
        self._store: Any = None
        self._places: list[_MeetingPlace] = []
        if not groups:
            return
        self._rank = torch.distributed.get_rank()
        if all(torch.distributed.get_backend(group) != "fake" for group in groups):
            self._store = _default_store()
        if self._store is None:
            return
        for group in groups:
            name = f"pytest_torchcompile/{group.group_name}"
            # A count in the store itself: it begins anew with the next store.
            count = self._store.add(f"{name}/{self._rank}", 1)
            self._places.append(_MeetingPlace(f"{name}/{count}", torch.distributed.get_process_group_ranks(group)))

    def wait_for_others(self, patience: float) -> tuple[int, ...]:
        """Say that this rank's call has ended; the ranks whose has not within so many seconds, or that have left.

        Empty where torch has no store to ask.
        """
        self._number += 1
        if self._store is None:
            return ()
        deadline = time.monotonic() + patience
        missing: set[int] = set()
        # Said in every group before any is waited for.
        for place in self._places:
            self._arrive(place)
        for place in self._places:
            missing |= self._missing_in(place, deadline)
        return tuple(sorted(missing.union(self.departed) - {self._rank}))

    def leave(self) -> None:
        """Say that this rank will make no more calls together with the others."""
        if self._store is None:
            return
        for place in self._places:
            self._store.set(f"{place.departed}/{self._rank}", "1")
            # After the rank's own key: whoever sees this one asks for those.
            self._store.set(place.departed, "1")

    def _arrive(self, place: _MeetingPlace) -> None:
        here = place.of_call(self._number)
        self._store.set(f"{here}/{self._rank}", "1")
        if self._store.add(f"{here}/came", 1) == len(place.ranks):
            self._store.set(f"{here}/all", "1")

    def _missing_in(self, place: _MeetingPlace, deadline: float) -> set[int]:
        """Wait for the ranks of one group; those that have not come in time. Notes those that have departed."""
        store, here = self._store, place.of_call(self._number)
        missing: set[int] = set()
        pause = 0.001
        while not store.check([f"{here}/all"]) and not store.check([place.departed]):
            if time.monotonic() > deadline:
                missing = {rank for rank in place.ranks if not store.check([f"{here}/{rank}"])}
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if store.check([place.departed]):
            self.departed += tuple(rank for rank in place.ranks if store.check([f"{place.departed}/{rank}"]))
        return missing


def _default_store() -> Any:
    """``torch.distributed.distributed_c10d._get_default_store``: torch 2.8 to 2.13; None where there is none."""
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return None
