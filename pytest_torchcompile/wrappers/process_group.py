"""The process group of a cell that runs on several ranks: made before it, taken apart after it.

Its ranks meet in a store: a file for those of one host, torchrun's for those of several. The one file of this folder
that touches what torch keeps to itself.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.errors import Unavailable, UsageError
from pytest_torchcompile.observation import Job, RankOutcome, rank_failed
from pytest_torchcompile.wrappers.protocol import Wrapper
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["all_well", "count_collectives", "exchange_outcomes", "failed_elsewhere", "forget_shardings", "join_group",
           "left_behind", "open_store", "refuse_unavailable"]

_LONGER = 120.0
"""Seconds by which the collectives' own time-out is longer than the cell's: the side that waits ends a cell that hangs,
and takes the stacks of every rank first."""


@contextmanager
def join_group(job: Job, cell: Cell, wrapper: Wrapper, where: str, failed: Callable[[], bool]) -> Iterator[Any]:
    """Join the cell's process group; yield the ``DeviceMesh``, or None for a cell of one rank.

    ``failed`` tells at the end whether the cell has failed on this rank, as does an exception in the block. Raises
    :class:`Unavailable` where this machine can't have the group.
    """
    refuse_unavailable(cell, wrapper, where)
    if wrapper.ranks == 1:
        yield None
        return
    if Wrapping.read(cell.wrapper).fake:
        with _join_fake_group(cell, wrapper) as mesh:
            yield mesh
        return
    device = _rank_device(job, cell)
    from torch.distributed.device_mesh import init_device_mesh

    with _own_caches(cell, f"{job.rank}of{job.world}"):
        store = open_store(job)
        transport = "nccl" if device.type == "cuda" else "gloo"
        # Without device_id: with it torch 2.11 splits the groups of a mesh from this one, which ends a process that
        # has had a group before with a segmentation fault (pytorch/pytorch#192109).
        dist.init_process_group(
            transport, rank=job.rank, world_size=job.world, store=store,
            timeout=datetime.timedelta(seconds=job.timeout + _LONGER),
        )
        well = False
        try:
            yield init_device_mesh(device.type, wrapper.shape(job.world), mesh_dim_names=wrapper.axes)
            well = not failed()
        finally:
            # NCCL's communicators end together: who ends its own waits for ranks that may be waiting for it. After a
            # failure the group is left to end with the processes, so that each rank can say what it has seen.
            if device.type == "cpu" or all_well(store, job, well):
                dist.destroy_process_group()
                forget_shardings()


def left_behind() -> bool:
    """Whether a cell has left its process group, which nothing can be done about but to end the process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextmanager
def _join_fake_group(cell: Cell, wrapper: Wrapper) -> Iterator[Any]:
    """The mesh of rank 0 in a group that this process is alone in: each collective is said to be done, and none is."""
    from torch.distributed.device_mesh import init_device_mesh

    with _own_caches(cell, "fake"):
        dist.init_process_group("fake", rank=0, world_size=wrapper.ranks, store=_fake_store(cell)())
        try:
            shape = wrapper.shape(wrapper.ranks)
            yield init_device_mesh(torch.device(cell.device).type, shape, mesh_dim_names=wrapper.axes)
        finally:
            dist.destroy_process_group()
            forget_shardings()


def refuse_unavailable(cell: Cell, wrapper: Wrapper, where: str) -> None:
    """Raise :class:`Unavailable` where this machine can't have a cell of the wrapper, however many devices it has.

    Raises :class:`UsageError`, starting with ``where``, for a device that several ranks can't have. Makes no group.
    """
    if wrapper.ranks > 1:
        _refuse_group(cell, where)
    if wrapper.check is not None:
        wrapper.check()


def _refuse_group(cell: Cell, where: str) -> None:
    device = torch.device(cell.device)
    if not torch.distributed.is_available():
        raise Unavailable(f"wrapper {cell.wrapper!r} needs torch.distributed, which this torch is built without")
    if Wrapping.read(cell.wrapper).fake:
        _fake_store(cell)
    elif device.type == "cpu":
        if not torch.distributed.is_gloo_available():
            raise Unavailable(f"wrapper {cell.wrapper!r} on cpu needs gloo, which this torch is built without")
    elif device.type != "cuda":
        raise Unavailable(f"wrapper {cell.wrapper!r} runs on cpu and cuda, not on {device.type}")
    elif ":" in cell.device:
        raise UsageError(f"{where}: wrapper {cell.wrapper!r} takes one GPU for each rank, and device "
                         f"{cell.device!r} names one; write device: cuda")
    elif not torch.cuda.is_available():
        raise Unavailable(f"device {cell.device!r} is not here: torch.cuda.is_available() is false")
    elif not torch.distributed.is_nccl_available():
        raise Unavailable(f"wrapper {cell.wrapper!r} on cuda needs NCCL, which this torch is built without")


def _fake_store(cell: Cell) -> Any:
    """``torch.testing._internal.distributed.fake_pg.FakeStore``, whose import makes the backend ``fake`` known: torch
    2.8 to 2.13.
    """
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as why:
        raise Unavailable(f"wrapper {cell.wrapper!r} needs torch's fake process group, and torch {torch.__version__} "
                          f"has none: {why}") from None
    return FakeStore


def _rank_device(job: Job, cell: Cell) -> torch.device:
    """The device of this rank; on CUDA it becomes the current one."""
    device = torch.device(cell.device)
    all_here = job.local_rank < 0
    if device.type == "cpu":
        # gloo looks up the host's name otherwise, which need not resolve.
        if all_here and Path("/sys/class/net/lo").exists():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return device
    if all_here:
        mine, wanted = job.rank, job.world
    else:
        # torchrun's numbers: how many ranks this node has in all is not known here, but that it has this one.
        mine, wanted = job.local_rank, job.local_rank + 1
    if (count := torch.cuda.device_count()) < wanted:
        raise Unavailable(f"wrapper {cell.wrapper!r} needs {wanted} GPUs, and this machine has {count}")
    torch.cuda.set_device(mine)
    return torch.device("cuda", mine)


@contextmanager
def _own_caches(cell: Cell, rank: str) -> Iterator[None]:
    """Compiled code in a folder of this wrapper, world and rank.

    AOTAutograd's cache keeps names of process groups in what it stores but not in its key, so that a rank may be handed
    code that calls another one's group (seen in torch 2.13: ``Could not resolve the process group``).
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    key = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(key)
    # What a file name can't hold in every file system, such as the * of the ranks.
    wrapper = re.sub(r"[^\w.+-]", "_", cell.wrapper)
    os.environ[key] = str(Path(cache_dir()) / "ranks" / wrapper / rank)
    try:
        yield
    finally:
        os.environ.pop(key)
        if before is not None:
            os.environ[key] = before


def forget_shardings() -> bool:
    """Drop DTensor's cache of sharding decisions, which name the groups that are gone; False if torch has no way to.

    What ``torch.distributed.tensor.debug._clear_sharding_prop_cache`` does, whose module can't be imported without
    NumPy: torch 2.8 to 2.13, there also the cache of the dispatch in C++. Where the first is missing a
    process can't be used for another cell.
    """
    from torch.distributed.tensor import DTensor

    dispatcher: Any = getattr(DTensor, "_op_dispatcher", None)
    propagate = getattr(getattr(dispatcher, "sharding_propagator", None), "propagate_op_sharding", None)
    clear_python = getattr(propagate, "cache_clear", None)
    if clear_python is None:
        return False
    clear_python()
    # Torch 2.8 has no second cache.
    clear_native = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear_native is not None:
        clear_native()
    return True


def count_collectives() -> dict[str, int]:
    """How many collectives this rank has begun in each of its process groups, by what the mesh calls it.

    ``torch.distributed.distributed_c10d._world.pg_group_ranks``, ``ProcessGroup._get_sequence_number_for_group``:
    torch 2.8 to 2.13. Empty where torch does not tell.
    """
    from torch.distributed import distributed_c10d

    begun: dict[str, int] = {}
    try:
        for group, ranks in distributed_c10d._world.pg_group_ranks.items():
            name = f"{getattr(group, 'group_desc', '') or 'group'} of {len(ranks)}"
            number = int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
            begun[name] = begun.get(name, 0) + number
    except (AttributeError, RuntimeError):
        return {}
    return begun


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
        # Zero is the store's word for no time-out: it would wait for ever.
        seconds_left = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([f"{other}"], datetime.timedelta(seconds=seconds_left))
        # A rank that is silent is told as such, and the others are still heard.
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
