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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.errors import InstrumentError
from pytest_torchcompile.ledger.break_sites import code_owner, read_code_name
from pytest_torchcompile.ledger.entries import cache_entries
from pytest_torchcompile.ledger.ledger import Ledger
from pytest_torchcompile.ledger.records import Graph, GraphBreak
from pytest_torchcompile.ledger.users import FrameAttempt

if TYPE_CHECKING:
    from pytest_torchcompile.ledger.watch import LedgerWatch

__all__ = ["install_hook"]

_NAME = "__compiled_fn"


class _Counter:
    """Counts the runs of one graph, for each ledger apart."""

    def __init__(
        self, watch: LedgerWatch, compile_id: str, ops: int | None, function: str, earlier: GraphBreak | None = None
    ) -> None:
        self.watch, self.compile_id, self.ops, self.function = watch, compile_id, ops, function
        self.earlier = earlier
        """The break that this graph follows, where torch met it before the observation began."""
        self.ledgers: object = None
        """The open ledgers that :attr:`open` was made for."""
        self.open: list[tuple[Ledger, Graph]] = []

    def enter_graph(self) -> None:
        """Show the graph in every open ledger."""
        before, self.open = self.open, []
        for ledger, root in self.watch.ledgers:
            graph = _graph_in(ledger, before)
            if graph is None:
                graph = Graph(self.compile_id, self.ops, 0, self.function)
                ledger.add(graph)
                if self.earlier:
                    owner = code_owner(self.earlier.file, root)
                    ledger.add(replace(self.earlier, during=ledger.label, owner=owner))
            self.open.append((ledger, graph))
        self.ledgers = self.watch.ledgers

    def count_run(self) -> None:
        """One more run; it runs with every graph."""
        watch = self.watch
        watch.thread.runs += 1
        with watch.lock:
            # The watch makes a new list when a ledger opens or closes. Comparing its ids would not do: Python gives a
            # new ledger the memory of one that is gone.
            if self.ledgers is not watch.ledgers:
                self.enter_graph()
            for ledger, graph in self.open:
                graph.runs += 1
                # The ledger was cleared, which sets the runs to 0 and forgets the graph.
                if graph.runs == 1 and all(known is not graph for known in ledger.graphs):
                    ledger.add(graph)


def _graph_in(ledger: Ledger, known: list[tuple[Ledger, Graph]]) -> Graph | None:
    for known_ledger, graph in known:
        if known_ledger is ledger:
            return graph
    return None


def _counted_graph(value: Callable[..., Any], counter: _Counter) -> Callable[..., Any]:
    """Put a counter around what Dynamo installed. Like torch's own callable it is not traced into."""
    import torch._dynamo

    inner, watch = value, counter.watch
    # Ours is disabled too, so one layer of disable() can be saved in every call.
    if isinstance(value, types.FunctionType) and getattr(value, "_torchdynamo_disable", False):
        inner = value._torchdynamo_orig_callable  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        counter.count_run()
        if watch.marker is None:
            return inner(*args, **kwargs)
        with watch.marker(counter.compile_id):
            return inner(*args, **kwargs)

    return torch._dynamo.disable(run, reason="do not trace Dynamo-compiled graph")  # type: ignore[no-any-return, no-untyped-call]


def _missing_internal(name: str) -> InstrumentError:
    import torch

    return InstrumentError(f"torch {torch.__version__} has no {name}, which counts graph executions; please "
                           "report it with this version")


@dataclass(frozen=True)
class _InstalledGraph:
    """A graph that was compiled before the first ledger opened."""

    scope: dict[str, Any]
    """The globals that it lies in."""
    name: str
    compile_id: str
    """``?`` where it is not known."""
    code: types.CodeType | None
    """The user's."""


def _installed_graphs() -> list[_InstalledGraph]:
    """All compiled graphs of this process."""
    from torch._dynamo import utils

    try:
        cleanups = utils.CleanupManager.instance
        codes_of = utils.orig_code_map
        codes = {key: reference() for key, reference in cleanups.refs.items()}
        # Copied: garbage collection may take entries out at any time.
        hooks = {key: list(of_code) for key, of_code in cleanups.values.items()}
    except AttributeError:
        raise _missing_internal("torch._dynamo.utils.CleanupManager.instance") from None
    installed = []
    for key, hooks_of_code in hooks.items():
        graphs = [hook for hook in hooks_of_code if hook.name.startswith(_NAME) and hook.name in hook.scope]
        if not graphs:
            continue
        compiled = codes.get(key)
        original = codes_of.get(compiled)
        compile_id = _compile_id_of(original, compiled)
        for hook in graphs:
            installed.append(_InstalledGraph(hook.scope, hook.name, compile_id, original))
    return installed


def _compile_id_of(original: types.CodeType | None, compiled: object) -> str:
    """The compile that made Dynamo's code of the user's; ``?`` where the entry is gone."""
    if original is not None:
        for entry in cache_entries(original):
            if entry.code is compiled:
                return str(entry.compile_id)
    return "?"


def _earlier_break(code: types.CodeType) -> GraphBreak | None:
    """The break before a resume function; of a break in the past torch keeps no more than the line."""
    function, line = read_code_name(code.co_name)
    if not line:
        return None
    return GraphBreak("a graph break met before this observation began", "", code.co_filename, line,
                      "observe the first call: it names the reason", function=function)  # fmt: skip


@contextlib.contextmanager
def install_hook(watch: LedgerWatch) -> Iterator[None]:
    """Count for ``watch`` while the block runs: graphs that exist already, and those compiled meanwhile."""
    from torch._dynamo.output_graph import OutputGraph
    from torch._guards import CompileContext

    original = getattr(OutputGraph, "install_global_unsafe", None)
    if original is None:
        raise _missing_internal("torch._dynamo.output_graph.OutputGraph.install_global_unsafe")
    replaced: list[tuple[dict[str, Any], str, Any, Any]] = []

    def put_counter(scope: dict[str, Any], name: str, counter: _Counter) -> None:
        before = scope.get(name)
        if before is None:  # garbage was collected since it was listed, and torch has taken the name out
            return
        after = _counted_graph(before, counter)
        scope[name] = after
        replaced.append((scope, name, before, after))

    @functools.wraps(original)
    def install(self: Any, name: str, value: Any) -> None:
        original(self, name, value)
        if name.startswith(_NAME) and callable(value):
            watch.run_guarded(count_new_graph, self, name)

    def count_new_graph(output: Any, name: str) -> None:
        attempt = watch.thread.attempts[-1] if watch.thread.attempts else FrameAttempt()
        ops = int(output.count_calls())
        attempt.graphs += 1
        attempt.ops += ops
        counter = _Counter(watch, str(CompileContext.current_compile_id()), ops, attempt.function)
        put_counter(output.global_scope, name, counter)
        counter.enter_graph()

    # A graph of an earlier compile is shown when it runs; its operators torch no longer counts.
    for graph in _installed_graphs():
        counter = _Counter(watch, graph.compile_id, None, "")
        if graph.code is not None:
            counter.function, counter.earlier = watch.functions.name_of_code(graph.code), _earlier_break(graph.code)
        put_counter(graph.scope, graph.name, counter)
    OutputGraph.install_global_unsafe = install  # type: ignore[method-assign]
    try:
        yield
    finally:
        OutputGraph.install_global_unsafe = original  # type: ignore[method-assign]
        for scope, name, before, after in replaced:
            if scope.get(name) is after:  # torch.compiler.reset() may have removed it
                scope[name] = before
