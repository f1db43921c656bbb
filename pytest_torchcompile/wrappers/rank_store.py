"""The store in which ranks meet: a file for those of one host, torchrun's for those of several."""

from __future__ import annotations

import datetime
import json
import re
import time
import zlib
from typing import Any, Final

import torch.distributed as dist

from pytest_torchcompile.observation import Job, RankOutcome, rank_failed

__all__ = ["all_well", "exchange_outcomes", "failed_elsewhere", "open_store"]

_PIECE: Final = 1 << 20
"""Bytes of one value: the store takes no more than a few MiB."""
_POLL_SECONDS: Final = 0.01
_WATCH_SECONDS: Final = 0.1
"""Between two looks at whether a rank has failed: every rank asks one store."""
_FAILED: Final = "failed"


def open_store(job: Job) -> Any:
    """The store of a cell's process group."""
    if not job.rendezvous.startswith("tcp://"):
        return dist.FileStore(job.rendezvous, job.world)  # type: ignore[attr-defined]
    return _agent_store(f"{job.rendezvous}/group", job.timeout)


def all_well(store: Any, job: Job, well: bool) -> bool:
    """Whether the cell went well on every rank. Waits for all that have not said so, until one has said otherwise.

    A rank that is gone never says anything; the side that waits for the cell then ends the others too.
    """
    if not well:
        store.set("not well", "1")
        return False
    came = store.add("well", 1)
    while came < job.world:
        if store.check(["not well"]):
            return False
        time.sleep(_POLL_SECONDS)
        came = store.add("well", 0)
    return True


def exchange_outcomes(meeting: str, rank: int, world: int, mine: str, patience: float) -> list[str | None]:
    """Tell all ranks an outcome, as JSON, and hear theirs; None of one that is silent for ``patience`` seconds."""
    store, deadline = _agent_store(meeting, patience), time.monotonic() + patience
    data = zlib.compress(mine.encode())
    pieces = [data[i : i + _PIECE] for i in range(0, len(data), _PIECE)]
    for number, piece in enumerate(pieces):
        store.set(f"{rank}/{number}", piece)
    # Last: who finds this key may read all pieces.
    store.set(f"{rank}", str(len(pieces)))
    if rank_failed(RankOutcome(**json.loads(mine))):
        store.set(_FAILED, str(rank))
    heard: list[str | None] = []
    for other in range(world):
        seconds_left = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([f"{other}"], datetime.timedelta(seconds=seconds_left))
        except dist.DistError:
            heard.append(None)
            continue
        heard.append(_read_outcome(store, other))
    return heard


def failed_elsewhere(meeting: str, rank: int, patience: float) -> int | None:
    """A rank that has told of a failure; None once this one has told its own outcome, or after ``patience``.

    A rank whose peer is gone does not always notice: over NCCL it waits for it until its time-out.
    """
    store, deadline = _agent_store(meeting, patience), time.monotonic() + patience
    # The key of this rank's own outcome is written by the process that does exchange_outcomes().
    while not store.check([f"{rank}"]) and time.monotonic() < deadline:
        if store.check([_FAILED]):
            return int(store.get(_FAILED))
        time.sleep(_WATCH_SECONDS)
    return None


def _read_outcome(store: Any, rank: int) -> str:
    """What a rank has told, which its key says is there."""
    count = int(store.get(f"{rank}"))
    pieces = [store.get(f"{rank}/{number}") for number in range(count)]
    return zlib.decompress(b"".join(pieces)).decode()


def _agent_store(meeting: str, seconds: float) -> Any:
    """The store of torchrun's agent, and in it the keys of ``tcp://HOST:PORT/PREFIX``."""
    address = re.fullmatch(r"tcp://(.+?):(\d+)/(.*)", meeting, re.DOTALL)
    if address is None:
        raise ValueError(f"{meeting!r} is no meeting place; expected tcp://HOST:PORT/PREFIX")
    host, port, prefix = address.groups()
    store = dist.TCPStore(host, int(port), is_master=False,  # type: ignore[attr-defined]
                          timeout=datetime.timedelta(seconds=seconds))
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
