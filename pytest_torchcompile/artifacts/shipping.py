"""Shipping: one process compiles and writes, another loads, calls and compares. No torch here."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from pytest_torchcompile.contract.worker import (
    NotLoaded,
    OwnFailure,
    ProgramSource,
    Told,
    Worker,
    ended_in_words,
    own_failure_text,
)
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
        the first calls), ``hits`` and ``misses`` of the caches in the second process, ``built`` (libraries of C++
        kernels that it compiled, which no cache of graphs counts), ``calls`` that were compared,
        ``mute`` ones, ``refusals`` (calls that the artifact refuses and eager does not), and ``problems``.

    Raises :class:`~pytest_torchcompile.errors.UsageError` where the user's own functions raise, and
    :class:`~pytest_torchcompile.contract.worker.OwnFailure` for a mistake of this package.
    """
    section: dict[str, Any] = {"route": shipment.route, "skipped": "", "refused": "", "cached": False,
                               "cold_seconds": 0.0, "loaded_seconds": 0.0, "hits": 0, "misses": 0, "built": 0,
                               "calls": 0, "mute": 0, "refusals": [], "problems": []}
    with TemporaryDirectory(prefix="pytest-torchcompile-shipped-") as folder:
        order = shipment.order(folder)
        made = _in_first_process(shipment.maker, order)
        if "ended" in made:
            section["problems"].append(_problem("crash", f"making the artifact {made['ended']}"))
            return section
        section |= {"skipped": made["missing"], "refused": made["failure"], "cold_seconds": made["seconds"],
                    "cached": made["cached"]}
        if made["missing"] or made["failure"]:
            return section
        shipment.tamper(Path(folder))
        shipped = _libraries_in(folder)
        begun = time.perf_counter()
        source = ProgramSource(shipment.loader, order, _GUARDED, dict(shipment.declared[0].sizes))
        try:
            with Worker(source) as worker:
                _call_artifact(worker, shipment.declared, made, section, begun)
        except NotLoaded as why:
            section["problems"].append(_problem("load", str(why)))
        section["built"] = len(_libraries_in(folder) - shipped)
    return section


def _libraries_in(folder: str) -> set[Path]:
    """Inductor's libraries of C++ kernels; the others that it builds try out the processor (seen in torch 2.13)."""
    return set(Path(folder).rglob("*.main.so"))


def _problem(kind: str, message: str) -> dict[str, str]:
    """A problem of no call."""
    return {"kind": kind, "code": "", "where": "", "message": message}


def _in_first_process(maker: str, order: dict[str, Any]) -> dict[str, Any]:
    """What the maker returns; ``ended``, in words, where its process ended before."""
    # Not fork: torch's threads do not survive it.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_make, args=(theirs, maker, order))
    process.start()
    theirs.close()
    try:
        word, value = ours.recv()
    except EOFError:
        process.join()
        return {"ended": ended_in_words(process.exitcode)}
    finally:
        ours.close()
        process.join()
    if word == "usage":
        raise UsageError(value)
    if word == "own":
        raise OwnFailure(value)
    made: dict[str, Any] = value
    return made


def _make(connection: Connection, maker: str, order: dict[str, Any]) -> None:
    """The first process. Texts, not exceptions: some exceptions of torch's cannot be sent."""
    module, _, name = maker.partition(":")
    try:
        answer = ("made", getattr(import_module(module), name)(order))
    except UsageError as why:
        answer = ("usage", str(why))
    except Exception:
        answer = ("own", own_failure_text())
    connection.send(answer)


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
