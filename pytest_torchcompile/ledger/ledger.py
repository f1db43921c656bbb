"""Ledger: what torch.compile did while it was open, as live lists. Plain data and bookkeeping, no torch."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pytest_torchcompile.ledger.records import (
    Compile,
    CudagraphSkip,
    EagerFrame,
    FailedCompile,
    Graph,
    GraphBreak,
    LedgerRecord,
    Text,
)

__all__ = ["Ledger"]

R = TypeVar("R", bound=LedgerRecord)

_LISTS: dict[str, type[LedgerRecord]] = {
    "compiles": Compile, "recompiles": Compile, "graph_breaks": GraphBreak, "eager_frames": EagerFrame,
    "failures": FailedCompile, "graphs": Graph, "texts": Text, "cudagraph_skips": CudagraphSkip,
}  # fmt: skip
"""The lists that every ledger has, in the order in which they are written."""


@dataclass
class Ledger:
    """What happened, in order of time. The lists grow while the block runs and may be read at any time."""

    compiles: list[Compile] = field(default_factory=list)
    """Everything that was compiled: first compiles, recompiles, resume functions, backwards."""
    recompiles: list[Compile] = field(default_factory=list)
    """Those of :attr:`compiles` that happened because the guards of a cached entry failed."""
    graph_breaks: list[GraphBreak] = field(default_factory=list)
    """One entry for each place in user code, however often torch came by."""
    eager_frames: list[EagerFrame] = field(default_factory=list)
    failures: list[FailedCompile] = field(default_factory=list)
    """Compiles that raised to their caller."""
    cudagraph_skips: list[CudagraphSkip] = field(default_factory=list)
    """Why Inductor did without a CUDA graph, each reason once. CUDA only: on a CPU it skips all of them silently."""
    graphs: list[Graph] = field(default_factory=list)
    """Graphs compiled or run, also those compiled before the block began (once they ran)."""
    texts: list[Text] = field(default_factory=list)
    """Graphs and code of each stage, where `keep_texts` is set; ``gauges.kernels`` reads them."""
    keep_texts: bool = False
    times_guards_often: bool = False
    """Are quick guards timed five times too? A limit on them is set; else a timing is dearer than what it tells."""
    raised: int = 0
    """Calls of compiled callables that raised before any graph of theirs ran."""
    lost: list[str] = field(default_factory=list)
    """What the instrument could not read; empty unless torch changed its records. Never silently dropped."""
    more: dict[str, list[Any]] = field(default_factory=dict)
    """Records of kinds that have no list above, by their :attr:`~.records.LedgerRecord.list_name`."""

    _labels: list[tuple[int, str]] = field(default_factory=list, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @contextlib.contextmanager
    def during(self, label: str) -> Iterator[None]:
        """Mark what happens inside as happening during ``label``; of nested labels the inner one.

        What happens on a thread without a label of its own (autograd's) takes the newest label of any.
        """
        entry = (threading.get_ident(), label)
        # Replaced, never changed: other threads read the list without the lock.
        with self._lock:
            self._labels = [*self._labels, entry]
        try:
            yield
        finally:
            with self._lock:
                index = max(i for i, known in enumerate(self._labels) if known is entry)
                self._labels = self._labels[:index] + self._labels[index + 1 :]

    @property
    def label(self) -> str:
        """The label that holds for this thread now."""
        labels, thread = self._labels, threading.get_ident()
        for labelled_thread, text in reversed(labels):
            if labelled_thread == thread:
                return text
        if labels:
            return labels[-1][1]
        return ""

    @property
    def graph_runs(self) -> int:
        """How often compiled graphs ran, all of them together."""
        return sum(graph.runs for graph in self.graphs)

    def clear(self) -> None:
        """Forget what was entered so far; what happens from now on is entered as before."""
        with self._lock:
            # The counters of open graphs hold these records, and enter them again with their next run.
            for graph in self.graphs:
                graph.runs = 0
            for name in (*_LISTS, "lost", "more"):
                getattr(self, name).clear()
            self.raised = 0

    def add(self, record: R) -> R:
        """Enter a record, and return it; or what is there already and says the same."""
        with self._lock:
            entered = record.enter(self._records_of(record.list_name))
            if isinstance(record, Compile) and record.reason:
                self.recompiles.append(record)
            return entered

    def _records_of(self, name: str) -> list[Any]:
        if name not in _LISTS:
            return self.more.setdefault(name, [])
        records: list[Any] = getattr(self, name)
        return records

    def to_dict(self, root: str | os.PathLike[str] = "") -> dict[str, Any]:
        """Plain data that :meth:`from_dict` takes.

        ``root``: the project's folder; its files are named from there, so that reports of two checkouts agree.
        """
        with self._lock:
            plain: dict[str, Any] = {}
            for name in (*_LISTS, *self.more):
                plain[name] = [record.to_dict() for record in self._records_of(name)]
                if root:
                    _name_files_from(root, plain[name])
            return plain | {"raised": self.raised, "lost": list(self.lost)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Ledger:
        """Make a closed ledger from what :meth:`to_dict` returned; what no kind of record is known for is dropped."""
        ledger = cls(raised=data.get("raised", 0), lost=list(data.get("lost", ())))
        for name, kind in (LedgerRecord.kinds | _LISTS).items():
            if name in data:
                ledger._records_of(name).extend(kind.from_dict(record) for record in data[name])
        return ledger


def _name_files_from(root: str | os.PathLike[str], records: list[dict[str, Any]]) -> None:
    home = f"{os.fspath(root)}{os.sep}"
    for record in records:
        if str(record.get("file", "")).startswith(home):
            record["file"] = record["file"].removeprefix(home)
