"""The watch: what all open ledgers of a process share. Hooks go in with the first ledger, out with the last.

:mod:`.process_watch` makes the process' only one, and names its hooks.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias, TypeVar

from pytest_torchcompile.ledger.entries import cache_entries, guards_of
from pytest_torchcompile.ledger.ledger import Ledger
from pytest_torchcompile.ledger.records import EagerFrame, LedgerRecord
from pytest_torchcompile.ledger.thread_settings import Settings, missed_settings, own_settings
from pytest_torchcompile.ledger.users import (
    FrameAttempt,
    FunctionPlace,
    Functions,
    Region,
    compiled_object,
    compiled_parts,
    runs_later,
)

__all__ = ["Awaited", "Hook", "LedgerWatch", "OtherThread"]

R = TypeVar("R")
Hook: TypeAlias = "Callable[[LedgerWatch], contextlib.AbstractContextManager[None]]"
"""Installs itself for a watch while a block runs."""


class OtherThread(NamedTuple):
    """A thread that is not the one in which the observation began."""

    name: str = ""
    missed: tuple[str, ...] = ()
    """Settings that it did not get."""


class _Thread(threading.local):
    """What one thread is doing."""

    def __init__(self) -> None:
        self.attempts: list[FrameAttempt] = []
        self.regions: list[Region] = []
        self.runs = 0
        """Graphs run by this thread since it was first watched."""


class Awaited:
    """A module or function of which it's asked whether a compiled call of it ran a graph."""

    def __init__(self, model: Any) -> None:
        # Parts may be compiled by themselves, as regional compilation does. Held, so that no id is used again.
        self.functions = {id(part): part for part in compiled_parts(model)}
        self.called = False
        self.ran = False

    def note_call(self, region: Region, ran: bool) -> None:
        """A compiled callable was called; was it this one, or a part of it?"""
        if id(compiled_object(region.function)) in self.functions:
            self.called = True
            # A coroutine's graphs run when it is awaited, after the call that makes it.
            self.ran = self.ran or ran or runs_later(region.function)


class LedgerWatch:
    """Hooks and the ledgers that they report to."""

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self.hooks = tuple(hooks)
        self.ledgers: list[tuple[Ledger, str | None]] = []
        """Open ledgers, each with its project's root folder."""
        self.thread = _Thread()
        self.opened_by = 0
        """The thread in which the first open ledger was opened."""
        self.settings: Settings = {}
        """What that thread had set for itself alone."""
        self.given_up: dict[FunctionPlace, list[EagerFrame]] = {}
        """Why a compiled callable ran without any graph, from the call where torch said so."""
        self.broken: set[FunctionPlace] = set()
        """Compiled callables in which a graph broke."""
        self.finished: dict[int, tuple[int, float]] = {}
        """Code, by its identity, to the thread that compiled it last, and when."""
        # Code objects with equal contents are equal, so they are known here by their identity. They are held beside it,
        # or another code could get the same identity later.
        self.eager: dict[int, types.CodeType] = {}
        """Code that is known to run eagerly, by its identity."""
        self.limited: dict[int, types.CodeType] = {}
        """Code that has hit a recompile limit, by its identity."""
        self.functions = Functions()
        self.awaited: list[Awaited] = []
        """What is waited for to run compiled; looking costs time in each call, so nothing is that has run."""
        self.marker: Callable[[str], contextlib.AbstractContextManager[Any]] | None = None
        """Opened around each graph that runs, with its compile id, for a gauge that needs the borders. Around each
        compile it is opened with an empty one."""
        self.on_purpose = 0
        """Blocks in which everything runs eagerly on purpose (``eager_on_purpose``)."""
        self.lock = threading.RLock()
        self._hooks = contextlib.ExitStack()

    def open(self, ledger: Ledger, root: str | None) -> None:
        """Begin to report to a ledger."""
        with self.lock:
            if not self.ledgers:
                self.opened_by, self.settings = threading.get_ident(), own_settings()
                # If a hook cannot be installed, those before it are taken out again.
                with contextlib.ExitStack() as hooks:
                    for hook in self.hooks:
                        hooks.enter_context(hook(self))
                    self._hooks = hooks.pop_all()
            # A new list, never a changed one: counters of graphs tell by its identity that a ledger came or went.
            self.ledgers = [*self.ledgers, (ledger, root)]

    def close(self, ledger: Ledger) -> None:
        """Stop reporting to a ledger; the last one takes the hooks out."""
        with self.lock:
            self.ledgers = [entry for entry in self.ledgers if entry[0] is not ledger]
            if not self.ledgers:
                # What was learned holds while the hooks see everything, and not longer.
                self.given_up.clear()
                self.broken.clear()
                self.eager.clear()
                self.finished.clear()
                self.functions = Functions()
                self.awaited = []
                self.thread = _Thread()
                self._hooks.close()

    def other_thread(self) -> OtherThread:
        """This thread, if the first open ledger was opened in another one; else one without a name."""
        if threading.get_ident() == self.opened_by:
            return OtherThread()
        return OtherThread(threading.current_thread().name, tuple(missed_settings(self.settings)))

    def add(self, record: LedgerRecord) -> None:
        """Enter a record in every open ledger, each with its own label."""
        for ledger, _root in self.ledgers:
            ledger.add(record.labelled(ledger.label))

    def wait_for(self, model: Any) -> Awaited:
        """Note from here on whether compiled calls of a model, or of a part of it, run a graph."""
        awaited = Awaited(model)
        self.awaited.append(awaited)
        return awaited

    def end_call(self, region: Region, ran: bool) -> None:
        """A call of a compiled callable has ended."""
        for awaited in self.awaited:
            awaited.note_call(region, ran)
        self.awaited = [awaited for awaited in self.awaited if not awaited.ran]

    def place_of(self, region: Region) -> FunctionPlace:
        """The compiled callable that a region is a call of."""
        return self.functions.place_of(region.function)

    def give_up(self, attempt: FrameAttempt, eager: EagerFrame) -> None:
        """Enter a frame that runs eagerly from now on."""
        self.add(eager)
        if attempt.frame_code is not None:
            self.eager[id(attempt.frame_code)] = attempt.frame_code
        if self.thread.regions:
            self.thread.regions[-1].gave_up += (eager,)

    def lost_race(self, attempt: FrameAttempt, made: Any) -> bool:
        """Whether another thread compiled the same while this one waited for torch's lock, so that an entry fits now.

        Of that entry torch can name no guard. Since 2.13 it says "Unexpected recompilation"
        (``get_guard_fail_reason_helper`` in torch/_dynamo/guards.py). Before, and for a call that waited for a second
        compile, it looks only at entries that were there when the call began. Then an entry with the same guards tells.

        :param made: the guarded code that this attempt ended with.
        """
        code = attempt.frame_code
        if code is None:
            return False
        thread, when = self.finished.get(id(code), (0, 0.0))
        if thread == threading.get_ident() or when <= attempt.begun:
            return False
        if any(reason.guard.startswith("Unexpected recompilation") for reason in attempt.reasons):
            return True
        new = set(guards_of(made.guard_manager))
        # Without the names of guards (torch has none to give) nothing can be told.
        return bool(new) and any(new == set(guards_of(entry.guard_manager)) for entry in cache_entries(code))

    def run_guarded(self, work: Callable[..., R], *args: Any) -> R | None:
        """Do some bookkeeping. If it fails, the run that is watched goes on, and the ledgers say what they lack."""
        try:
            return work(*args)
        except Exception as error:
            self.note_loss(f"{work.__qualname__}: {type(error).__name__}: {error}"[:200])
            return None

    def note_loss(self, text: str) -> None:
        """Say in every open ledger what could not be read."""
        for ledger, _root in self.ledgers:
            if text not in ledger.lost:
                ledger.lost.append(text)
