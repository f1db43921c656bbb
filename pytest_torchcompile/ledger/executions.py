"""How often each compiled graph ran, whatever the backend, also on a cache hit.

Dynamo puts what the backend returned into the globals of the traced function, under ``__compiled_fn_...``
(``OutputGraph.install_global_unsafe`` in torch/_dynamo/output_graph.py, and ``CleanupManager`` in
torch/_dynamo/utils.py, which knows all of them; torch 2.8 to 2.15). There, outside of everything that the
backend or a cache sees, a counter is put around it, and taken off when the last ledger closes.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.errors import InstrumentError
from pytest_torchcompile.ledger.entries import cache_entries
from pytest_torchcompile.ledger.in_progress import Attempt
from pytest_torchcompile.ledger.ledger import Ledger
from pytest_torchcompile.ledger.records import Graph, GraphBreak
from pytest_torchcompile.ledger.sites import code_owner, read_code_name

if TYPE_CHECKING:
    from pytest_torchcompile.ledger.watch import Watch

__all__ = ["install_hook"]

_NAME = "__compiled_fn"


class _Counter:
    """Counts the runs of one graph, for each ledger apart."""

    def __init__(
        self, watch: Watch, compile_id: str, ops: int | None, function: str, earlier: GraphBreak | None = None
    ) -> None:
        self.watch, self.compile_id, self.ops, self.function = watch, compile_id, ops, function
        self.earlier = earlier
        """The break that this graph follows, where torch met it before the observation began."""
        self.ledgers: object = None
        """The open ledgers that :attr:`open` was made for."""
        self.open: list[tuple[Ledger, Graph]] = []

    def enter(self) -> None:
        """Show the graph in every open ledger."""
        before, self.open = self.open, []
        for ledger, root in self.watch.ledgers:
            if (graph := next((graph for known, graph in before if known is ledger), None)) is None:
                graph = Graph(self.compile_id, self.ops, 0, self.function)
                ledger.add(graph)
                if self.earlier:
                    ledger.add(replace(self.earlier, during=ledger.label, owner=code_owner(self.earlier.file, root)))
            self.open.append((ledger, graph))
        self.ledgers = self.watch.ledgers

    def count(self) -> None:
        """One more run; it runs with every graph."""
        watch = self.watch
        watch.thread.runs += 1
        with watch.lock:
            if self.ledgers is not watch.ledgers:
                self.enter()
            for ledger, graph in self.open:
                graph.runs += 1
                if graph.runs == 1 and all(known is not graph for known in ledger.graphs):
                    ledger.add(graph)  # the ledger was cleared


def _counted(value: Callable[..., Any], counter: _Counter) -> Callable[..., Any]:
    """Put a counter around what Dynamo installed. Like torch's own callable it is not traced into."""
    import torch._dynamo

    inner, watch = value, counter.watch
    if isinstance(value, types.FunctionType) and getattr(value, "_torchdynamo_disable", False):
        inner = value._torchdynamo_orig_callable  # type: ignore[attr-defined]  # saves one layer of disable()

    def run(*args: Any, **kwargs: Any) -> Any:
        counter.count()
        if watch.marker is None:
            return inner(*args, **kwargs)
        with watch.marker(counter.compile_id):
            return inner(*args, **kwargs)

    return torch._dynamo.disable(run, reason="do not trace Dynamo-compiled graph")  # type: ignore[no-any-return, no-untyped-call]


def _missing(name: str) -> InstrumentError:
    import torch

    return InstrumentError(f"torch {torch.__version__} has no {name}, which counts graph executions; please "
                           "report it with this version")


def _graphs() -> Iterator[tuple[dict[str, Any], str, str, types.CodeType | None]]:
    """Graphs of this process: globals they lie in, name there, compile id ('?': unknown), the user's code."""
    from torch._dynamo import utils

    try:
        cleanups = utils.CleanupManager.instance
        codes_of = utils.orig_code_map
        codes = {key: ref() for key, ref in cleanups.refs.items()}
        hooks = {key: list(found) for key, found in cleanups.values.items()}
    except AttributeError:
        raise _missing("torch._dynamo.utils.CleanupManager.instance") from None
    for key, found in hooks.items():
        graphs = [h for h in found if h.name.startswith(_NAME) and h.name in h.scope]
        original = codes_of.get(codes.get(key)) if graphs else None
        entries = cache_entries(original) if original is not None else []
        of = next((str(e.compile_id) for e in entries if e.code is codes.get(key)), "?")
        yield from ((h.scope, h.name, of, original) for h in graphs)


def _earlier(code: types.CodeType) -> GraphBreak | None:
    """The break before a resume function; of a break in the past torch keeps no more than the line."""
    function, line = read_code_name(code.co_name)
    if not line:
        return None
    return GraphBreak("a graph break met before this observation began", "", code.co_filename, line,
                      "observe the first call: it names the reason", function=function)  # fmt: skip


@contextlib.contextmanager
def install_hook(watch: Watch) -> Iterator[None]:
    """Count for ``watch`` while the block runs: graphs that exist already, and those compiled meanwhile."""
    from torch._dynamo.output_graph import OutputGraph
    from torch._guards import CompileContext

    original = getattr(OutputGraph, "install_global_unsafe", None)
    if original is None:
        raise _missing("torch._dynamo.output_graph.OutputGraph.install_global_unsafe")
    replaced: list[tuple[dict[str, Any], str, Any, Any]] = []

    def put(scope: dict[str, Any], name: str, counter: _Counter) -> None:
        before = scope.get(name)
        if before is None:  # garbage was collected since it was listed, and torch has taken the name out
            return
        scope[name] = after = _counted(before, counter)
        replaced.append((scope, name, before, after))

    @functools.wraps(original)
    def install(self: Any, name: str, value: Any) -> None:
        original(self, name, value)
        if name.startswith(_NAME) and callable(value):
            watch.run_guarded(count, self, name)

    def count(output: Any, name: str) -> None:
        attempt = watch.thread.attempts[-1] if watch.thread.attempts else Attempt()
        attempt.graphs += 1
        attempt.ops += (ops := int(output.count_calls()))
        counter = _Counter(watch, str(CompileContext.current_compile_id()), ops, attempt.function)
        put(output.global_scope, name, counter)
        counter.enter()

    for scope, name, of, code in list(_graphs()):
        function = watch.functions.of_code(code) if code else ""
        put(scope, name, _Counter(watch, of, None, function, _earlier(code) if code else None))
    OutputGraph.install_global_unsafe = install  # type: ignore[method-assign]
    try:
        yield
    finally:
        OutputGraph.install_global_unsafe = original  # type: ignore[method-assign]
        for scope, name, before, after in replaced:
            if scope.get(name) is after:  # torch.compiler.reset() may have removed it
                scope[name] = before
