"""Shipping: one process compiles and writes, another loads, calls and compares. No torch here."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from pytest_torchcompile.contract.worker import ProgramSource, Told, Worker
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.fuzz.drawn_call import DrawnCall, Sequence, as_code, as_plain

__all__ = ["Shipment", "ship"]

_GUARDED: Final = ("strides", "dtypes", "aliasing", "grad_mode", "autocast", "python_values")
"""Mutations of the contract that guards of Dynamo tell apart, and that an artifact may not."""
_ENDED: Final = ("crash", "hang")
_TRIED: Final = 4
"""Choices that are tried of each."""


@dataclass(frozen=True)
class Shipment:
    """What is shipped, as plain data."""

    maker: str
    """``module:function``, called in the first process: with :meth:`order` of a folder; returns plain data with
    ``missing`` (why there is no such route), ``failure`` (what torch raised), ``seconds``, ``cached``,
    ``takes_module``."""
    loader: str
    """``module:function``, called in the second one: makes the program, as a :class:`ProgramSource` names it."""
    job: Mapping[str, Any]
    route: str
    declared: Sequence
    """The calls that the artifact is made for; one that is no cache is made of the first."""
    tamper: Callable[[Path], object] = field(default=lambda folder: None)
    """Called with the folder between the two: what may become of an artifact on its way."""

    def order(self, folder: str) -> dict[str, Any]:
        """What both processes are told."""
        return {"job": dict(self.job), "route": self.route, "folder": folder, "declared": as_plain(self.declared)}


def ship(shipment: Shipment) -> dict[str, Any]:
    """Ship and judge.

    Returns:
        A section with ``route``, ``skipped`` (why there is nothing to ship), ``refused`` (what torch said when it was
        to make the artifact), ``cached``, ``cold_seconds`` and ``loaded_seconds`` (wall, of making, and of loading with
        the first calls), ``hits`` and ``misses`` of the caches in the second process, ``calls`` that were compared,
        ``mute`` ones, ``refusals`` (calls that the artifact refuses and eager does not), and ``problems``.
    """
    section: dict[str, Any] = {"route": shipment.route, "skipped": "", "refused": "", "cached": False,
                               "cold_seconds": 0.0, "loaded_seconds": 0.0, "hits": 0, "misses": 0, "calls": 0,
                               "mute": 0, "refusals": [], "problems": []}
    with TemporaryDirectory(prefix="pytest-torchcompile-shipped-") as folder:
        order = shipment.order(folder)
        try:
            made = _in_first_process(shipment.maker, order)
        except BrokenProcessPool:
            section["refused"] = "the process that made the artifact ended without a word"
            return section
        section |= {"skipped": made["missing"], "refused": made["failure"], "cold_seconds": made["seconds"],
                    "cached": made["cached"]}
        if made["missing"] or made["failure"]:
            return section
        shipment.tamper(Path(folder))
        begun = time.perf_counter()
        source = ProgramSource(shipment.loader, order, _GUARDED, dict(shipment.declared[0].sizes))
        try:
            with Worker(source) as worker:
                _call_artifact(worker, shipment.declared, made, section, begun)
        except UsageError as why:
            section["problems"].append({"kind": "load", "code": "", "where": "", "message": str(why)})
    return section


def _in_first_process(maker: str, order: dict[str, Any]) -> dict[str, Any]:
    # Not fork: torch's threads do not survive it.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(_make, maker, order).result()


def _make(maker: str, order: dict[str, Any]) -> dict[str, Any]:
    module, _, name = maker.partition(":")
    made: dict[str, Any] = getattr(import_module(module), name)(order)
    return made


def _call_artifact(worker: Worker, declared: Sequence, made: Mapping[str, Any], section: dict[str, Any],
                   begun: float) -> None:
    shipped = declared if made["cached"] else declared[:1]
    told = worker.run(shipped)
    section["loaded_seconds"] = time.perf_counter() - begun
    section["hits"], section["misses"] = int(told.counts.get("hits", 0)), int(told.counts.get("misses", 0))
    if not _take(section, shipped, told, may_refuse=False):
        # What is wrong with the calls that it was made for would be told again of each other one.
        return
    if made["cached"]:
        # Dynamo asks its guards of every call anew: that is judged by the check `contract`.
        return
    for call in _other_calls(declared, worker.offered, made["takes_module"]):
        told = worker.run((call,))
        _take(section, (call,), told, may_refuse=True)
        if told.kind in _ENDED:
            # Each further one would end a process, too.
            return


def _other_calls(declared: Sequence, offered: Mapping[str, Iterable[str]], takes_module: bool) -> list[DrawnCall]:
    """The calls that the artifact was not made of, but a caller may make."""
    first = declared[0]
    others = list(declared[1:])
    if takes_module:
        others += [DrawnCall(first.sizes, training) for training in (True, False)]
    for name, choices in offered.items():
        others += [DrawnCall(first.sizes, None, ((name, choice),)) for choice in list(choices)[:_TRIED]]
    return others


def _take(section: dict[str, Any], calls: Sequence, told: Told, may_refuse: bool) -> bool:
    """Write down what became of calls; False where it is a problem."""
    code = as_code(calls)
    # An exception is an honest answer to a call that nobody has promised; nothing was compared then.
    if may_refuse and told.kind == "error":
        section["refusals"].append(code)
        return True
    section["calls"] += int(told.counts.get("calls", 0))
    section["mute"] += int(told.counts.get("mute", 0))
    if not told.kind:
        return True
    section["problems"].append({"kind": told.kind, "code": code, "where": told.where, "message": told.message})
    return False
