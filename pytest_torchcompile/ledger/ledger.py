"""Ledger: what torch.compile did while it was open, as live lists. Plain data and bookkeeping, no torch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from pytest_torchcompile.ledger.break_text import same_place
from pytest_torchcompile.ledger.records import (
    Compile,
    CudagraphSkip,
    EagerFrame,
    Failure,
    Graph,
    GraphBreak,
    Record,
    Text,
)

__all__ = ["Ledger"]

R = TypeVar("R", bound=Record)

_LISTS: dict[str, type[Record]] = {
    "compiles": Compile, "recompiles": Compile, "graph_breaks": GraphBreak, "eager_frames": EagerFrame,
    "failures": Failure, "graphs": Graph, "texts": Text, "cudagraph_skips": CudagraphSkip,
}  # fmt: skip


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
    failures: list[Failure] = field(default_factory=list)
    """Compiles that raised to their caller."""
    cudagraph_skips: list[CudagraphSkip] = field(default_factory=list)
    """Why Inductor did without a CUDA graph, each reason once. CUDA only: on a CPU it skips all of them silently."""
    graphs: list[Graph] = field(default_factory=list)
    """Graphs compiled or run, also those compiled before the block began (once they ran)."""
    texts: list[Text] = field(default_factory=list)
    """Graphs and code of each stage, where `keep_texts` is set; :mod:`.stages` and :mod:`.kernels` read them."""
    keep_texts: bool = False
    raised: int = 0
    """Calls of compiled callables that raised before any graph of theirs ran."""
    lost: list[str] = field(default_factory=list)
    """What the instrument could not read; empty unless torch changed its records. Never silently dropped."""

    _labels: list[tuple[int, str]] = field(default_factory=list, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @contextlib.contextmanager
    def during(self, label: str) -> Iterator[None]:
        """Mark what happens inside as happening during ``label``; of nested labels the inner one.

        What happens on a thread without a label of its own (autograd's) takes the newest label of any.
        """
        entry = (threading.get_ident(), label)
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
        newest = labels[-1][1] if labels else ""
        return next((text for ident, text in reversed(labels) if ident == thread), newest)

    def clear(self) -> None:
        """Forget what was entered so far; what happens from now on is entered as before."""
        with self._lock:
            for graph in self.graphs:
                graph.runs = 0
            for name in (*_LISTS, "lost"):
                getattr(self, name).clear()
            self.raised = 0

    def add(self, record: R) -> R:
        """Enter a record, and return it; or what is there already and says the same."""
        with self._lock:
            if isinstance(record, GraphBreak):
                for known in self.graph_breaks:
                    if same_place(known) == same_place(record):
                        return cast(R, known)
                self.graph_breaks.append(record)
            elif isinstance(record, EagerFrame):
                self._add_eager(record)
            elif isinstance(record, Compile):
                self.compiles.append(record)
                if record.reason:
                    self.recompiles.append(record)
            elif isinstance(record, Failure):
                self.failures.append(record)
            elif isinstance(record, Graph):
                self.graphs.append(record)
            elif isinstance(record, Text):
                self.texts.append(record)
            elif isinstance(record, CudagraphSkip):
                same = (record.reason, record.file, record.line)
                if same not in ((r.reason, r.file, r.line) for r in self.cudagraph_skips):
                    self.cudagraph_skips.append(record)
            return record

    def _add_eager(self, record: EagerFrame) -> None:
        key = (record.function, record.file, record.line, record.kind)
        for known in self.eager_frames:
            if (known.function, known.file, known.line, known.kind) == key:
                known.calls += record.calls
                return
        self.eager_frames.append(record)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` takes."""
        with self._lock:
            found: dict[str, Any] = {name: [r.to_dict() for r in getattr(self, name)] for name in _LISTS}
            return found | {"raised": self.raised, "lost": list(self.lost)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Ledger:
        """Make a closed ledger from what :meth:`to_dict` returned."""
        lists: dict[str, Any] = {n: [k.from_dict(r) for r in data.get(n, ())] for n, k in _LISTS.items()}
        return cls(**lists, raised=data.get("raised", 0), lost=list(data.get("lost", ())))
