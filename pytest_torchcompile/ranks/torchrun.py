"""Ranks over several nodes: torchrun starts one pytest for each rank, and every pytest runs its own rank of each cell.

    torchrun --nnodes 2 --nproc-per-node 1 ... -m pytest --compile-matrix --compile-ranks torchrun

All of them collect the same cells in the same order. Of a cell each runs one rank, in a rank process of its own. All
meet in the store of torchrun's agent: the ranks in the cell's process group, then every pytest to tell the others what
came of its rank. So all judge the same outcomes; the one of rank 0 reports. No torch, no pytest on this side.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.observation import Job, RankOutcome, rank_failed
from pytest_torchcompile.quantity import count
from pytest_torchcompile.ranks.fresh import START_SECONDS
from pytest_torchcompile.ranks.message_frames import Channel
from pytest_torchcompile.ranks.rank import Rank
from pytest_torchcompile.ranks.rank_group import GRACE, ended_after
from pytest_torchcompile.ranks.starting import wait_for_any

__all__ = ["Nodes", "Torchrun", "own_file"]

_VARIABLES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
                     "TORCHELASTIC_RESTART_COUNT")  # fmt: skip
"""What torchrun tells each process that it starts (torch/distributed/elastic/agent/server/local_elastic_agent.py, torch
2.8 to 2.13)."""


@dataclass(frozen=True)
class Torchrun:
    """What torchrun has told this process."""

    rank: int
    world: int
    local_rank: int
    meeting: str
    """``tcp://HOST:PORT/RUN``: the agent's store, and the prefix of this run's keys in it."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Torchrun:
        """Read the variables that torchrun sets. Raises :class:`UsageError` where it has not started this process."""
        missing = [name for name in _VARIABLES if not environment.get(name)]
        if missing or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            why = f"{', '.join(missing)} not set" if missing else "its agent keeps no store"
            raise UsageError(
                f"--compile-ranks torchrun: this pytest was not started by torchrun ({why}); expected for example "
                "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m pytest "
                "--compile-matrix --compile-ranks torchrun")
        given = {name: environment[name] for name in _VARIABLES}
        # A restart meets under other keys: what the ranks before it have told is still in the store.
        run = f"{given['TORCHELASTIC_RUN_ID']}/{given['TORCHELASTIC_RESTART_COUNT']}"
        return cls(int(given["RANK"]), int(given["WORLD_SIZE"]), int(given["LOCAL_RANK"]),
                   f"tcp://{given['MASTER_ADDR']}:{given['MASTER_PORT']}/{run}")


def own_file(root: Path, torchrun: Torchrun | None, file: str) -> Path:
    """Where a file of a run lies; those of the ranks after 0 lie apart, since nodes may share a disk."""
    path = root / file
    if torchrun is None or torchrun.rank == 0:
        return path
    return path.parent / f"rank{torchrun.rank}" / path.name


class Nodes:
    """This node's rank of each cell, and two processes that speak with the other nodes': one tells what came of this
    rank, and one listens meanwhile for a rank that has failed, for which this one might wait until its time-out."""

    def __init__(self, folder: Path, torchrun: Torchrun) -> None:
        """``folder`` is the run's."""
        self.torchrun = torchrun
        self._rank, self._messenger, self._watcher = Rank(folder), Rank(folder), Rank(folder)
        self._runs = Counter[str]()
        """How often each cell was run: the store keeps what was told of it before. The same on every node."""

    def run(self, job: Job, world: int, path: list[str], timeout: float) -> list[RankOutcome]:
        """Run a cell, of which every other node runs its ranks; one outcome for each rank, the same on all nodes.

        A cell that has not as many ranks as torchrun has started is skipped. ``path`` and ``timeout`` as for
        :meth:`~pytest_torchcompile.ranks.rank_group.Group.run`.
        """
        here = self.torchrun
        if world != here.world:
            message = f"it has {count(world, 'rank')}, and torchrun has started {here.world}"
            return [RankOutcome("skip", message=message)]
        key = _cell_key(job)
        self._runs[key] += 1
        meeting = f"{here.meeting}/{job.cell['model']}/{key}/{self._runs[key]}"
        job = replace(job, rank=here.rank, world=world, rendezvous=meeting, timeout=timeout, local_rank=here.local_rank)
        # Another node may have begun later by as long as a first process takes to start.
        patience = timeout + START_SECONDS
        common = {"meeting": f"{meeting}/outcomes", "rank": here.rank, "world": world, "patience": patience}
        # Before this rank begins: another one may fail while it still starts.
        watching = self._watcher.begin({"do": "watch", **common})
        mine, heard = self._run_own({"do": "cell", "job": job, "path": path}, watching, timeout)
        if rank_failed(mine):
            # Its connections close too, so that who waits for it notices.
            self._rank.close()
        tell = {"do": "tell", **common, "mine": json.dumps(asdict(mine))}
        answer = self._messenger.run(tell, patience + START_SECONDS)
        if not heard:
            # It ends by itself: it has now heard of this rank.
            self._watcher.finish()
        outcomes = _all_outcomes(answer, here, mine)
        if any(rank_failed(outcome) for outcome in outcomes):
            self._rank.close()
        return outcomes

    def _run_own(self, job: dict[str, Any], watching: Channel, timeout: float) -> tuple[RankOutcome, bool]:
        """This node's outcome, once another rank has failed what there is after the grace; and whether one has."""
        connection, deadline = self._rank.begin(job), time.monotonic() + timeout
        ready = wait_for_any([connection, watching], timeout)
        heard = watching in ready
        failed_rank = None
        if heard:
            # None too if the watcher itself has died.
            failed_rank = self._watcher.finish().value
        seconds_left = max(0.0, deadline - time.monotonic())
        if failed_rank is not None:
            seconds_left = min(seconds_left, GRACE)
        if connection in ready or connection.poll(seconds_left):
            return self._rank.finish(), heard
        late = self._rank.give_up(f"no result after {timeout:g} s")
        if failed_rank is not None:
            late = ended_after(failed_rank, late)
        return late, heard

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for process in (self._rank, self._messenger, self._watcher):
            process.close()


def _cell_key(job: Job) -> str:
    """What tells the cell from the run's others, the same on every node."""
    return json.dumps(job.cell, sort_keys=True)


def _all_outcomes(answer: RankOutcome, here: Torchrun, mine: RankOutcome) -> list[RankOutcome]:
    """The outcome of every rank; one that was not heard of has crashed, as far as anybody can tell.

    ``answer`` is what the messenger has brought: each rank's outcome as JSON, None of a silent one.
    """
    if answer.status == "done":
        heard: list[str | None] = answer.value
        why = "its pytest was not heard of: see that node's log"
    else:
        heard = [None] * here.world
        why = f"this node could not speak with the others: {answer.message}"
    outcomes: list[RankOutcome] = []
    for text in heard:
        if text is None:
            outcomes.append(RankOutcome("crash", message=why, evidence=answer.evidence))
        else:
            outcomes.append(RankOutcome(**json.loads(text)))
    # One's own outcome is known at first hand, also where the others could not be reached.
    outcomes[here.rank] = mine
    return outcomes
