"""Kernel timing: how long each call of a kernel takes in warm steps on a CPU.

Inductor writes a Python function for each graph, which calls its kernels one after another. That function is written
once more, with a clock before and behind each statement that calls a kernel, and runs in place of the first. Kernels
are not compiled again. What a call takes holds what Python needs to make it: about a microsecond.

On a GPU a call returns before its kernel is done, so nothing is timed there.
"""

from __future__ import annotations

import ast
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, Final

from pytest_torchcompile.gauges.kernels import functions_of_graph
from pytest_torchcompile.gauges.quietness import (
    LEAST_SECONDS,
    TURNS,
    OthersLoad,
    unrest_of,
    unrest_of_round,
    watch_others,
)
from pytest_torchcompile.ledger.torch_internals import private_name
from pytest_torchcompile.lowering.kernel_records import KernelCall, kernel_name

__all__ = ["KernelTimer"]

_CLOCK: Final = "_kernel_clock"
_STEPS: Final = 30
_ROUNDS: Final = 5
_LEAST_STEPS: Final = 4
"""The first is not counted."""
_ENOUGH_SECONDS: Final = 0.5
"""After the least number of steps; a long step is timed no more often than it must."""

_RunsGraph = Callable[[Any], Any]


@dataclass
class _Clock:
    """Seconds of each statement; the rewritten function calls ``begin`` and ``end`` around it."""

    spans: dict[int, list[float]] = field(default_factory=dict)
    begun: int = 0

    def begin(self) -> None:
        """The statement comes next."""
        self.begun = time.perf_counter_ns()

    def end(self, statement: int) -> None:
        """It is done."""
        ended = time.perf_counter_ns()
        self.spans.setdefault(statement, []).append((ended - self.begun) / 1e9)


@dataclass
class _GraphModule:
    """A module of generated code, and the function that runs its graph now."""

    module: ModuleType
    code: str
    original: _RunsGraph
    current: _RunsGraph
    clock: _Clock = field(default_factory=_Clock)
    names: list[str] = field(default_factory=list)
    """Of the kernel that each clocked statement calls."""

    def run(self, args: Any) -> Any:
        """What compiled code holds in place of the module's own function."""
        return self.current(args)

    def clocked(self, names: Collection[str]) -> _RunsGraph:
        """The function that runs the graph, with a clock around each call of these kernels."""
        rewriting = _ClockedCalls(names)
        kept = [rewriting.rewritten(statement) for statement in ast.parse(self.code).body if _runs_graph(statement)]
        self.names = rewriting.names
        rewritten = ast.fix_missing_locations(ast.Module(kept, type_ignores=[]))
        # Kernels and helpers are those of the module, loaded already.
        namespace = {**vars(self.module), _CLOCK: self.clock}
        exec(compile(rewritten, f"<{self.module.__name__}, clocked>", "exec"), namespace)
        function: _RunsGraph = namespace["call"]
        return function


@dataclass
class KernelTimer:
    """Times the kernels of graphs that are compiled while it is on."""

    modules: dict[str, _GraphModule] = field(default_factory=dict)
    """By their code."""
    unrest: float = 1.0
    """How restless the machine was meanwhile (:func:`~pytest_torchcompile.gauges.quietness.unrest_of`)."""
    others: OthersLoad = field(default_factory=OthersLoad)
    """What other processes did meanwhile."""
    _step_seconds: list[float] = field(default_factory=list)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Have a switch built into each graph that is loaded while the block runs.

        ``PyCodeCache.load_by_key_path`` (torch/_inductor/codecache.py, torch 2.8 to 2.13) returns the module whose
        function ``call`` becomes a part of the compiled graph.

        :raises InstrumentError: this torch has no such name.
        """
        loads = private_name("torch._inductor.codecache", "PyCodeCache.load_by_key_path", "loads generated code",
                             "kernels can't be timed")
        from torch._inductor.codecache import PyCodeCache

        # A class method: what stands in the class, and not what is bound to it.
        stored = vars(PyCodeCache)["load_by_key_path"]

        def load(*args: Any, **kwargs: Any) -> ModuleType:
            module: ModuleType = loads(*args, **kwargs)
            self._switchable(module)
            return module

        PyCodeCache.load_by_key_path = staticmethod(load)  # type: ignore[method-assign]
        try:
            yield
        finally:
            PyCodeCache.load_by_key_path = stored  # type: ignore[method-assign]
            for known in self.modules.values():
                known.module.call = known.original  # type: ignore[attr-defined]

    def timed(self, calls: Sequence[KernelCall], codes: Sequence[str], step: Callable[[], object]) -> list[KernelCall]:
        """The calls with their seconds: the median of some warm steps, each a run of ``step``.

        A call that the code has not where it was planned keeps None.

        :param codes: the generated code of each graph, by its number.
        """
        names = {call.name for call in calls}
        for known in self.modules.values():
            known.current = known.clocked(names)
        try:
            with watch_others() as self.others:
                self._run_steps(step)
        finally:
            for known in self.modules.values():
                known.current = known.original
        self.unrest = _unrest_of(step, self._step_seconds)
        turns: Counter[tuple[int, str]] = Counter()
        timed = []
        for call in calls:
            turn = turns[call.graph, call.name]
            turns[call.graph, call.name] += 1
            timed.append(replace(call, seconds=self._seconds_of(codes[call.graph], call.name, turn)))
        return timed

    def _switchable(self, module: ModuleType) -> None:
        call = getattr(module, "call", None)
        file = getattr(module, "__file__", None)
        if call is None or file is None:
            return
        code = Path(file).read_text(encoding="utf-8")
        known = self.modules.get(code)
        if known is None:
            known = self.modules[code] = _GraphModule(module, code, original=call, current=call)
        module.call = known.run  # type: ignore[attr-defined]

    def _run_steps(self, step: Callable[[], object]) -> None:
        # The first fills caches of the processor, and of whatever looks things up once.
        step()
        for known in self.modules.values():
            known.clock.spans.clear()
        begun = time.perf_counter()
        self._step_seconds.clear()
        for number in range(1, _STEPS):
            started = time.perf_counter()
            step()
            self._step_seconds.append(max(1e-9, time.perf_counter() - started))
            if number + 1 >= _LEAST_STEPS and time.perf_counter() - begun > _ENOUGH_SECONDS:
                break

    def _seconds_of(self, code: str, name: str, turn: int) -> float | None:
        """Of the call of a kernel that is number ``turn`` of its name in a graph."""
        known = self.modules.get(code)
        if known is None:
            return None
        statements = [number for number, called in enumerate(known.names) if called == name]
        spans = known.clock.spans.get(statements[turn]) if turn < len(statements) else None
        return max(0.0, median(spans) - _empty_span()) if spans else None


def _unrest_of(step: Callable[[], object], known: Sequence[float]) -> float:
    """By the steps that were timed already; short ones are run again, as many in a row as fill a timing."""
    repeats = math.ceil(LEAST_SECONDS / median(known))
    timings = list(known)
    if repeats > 1:
        timings = []
        for _ in range(_ROUNDS * TURNS):
            begun = time.perf_counter()
            for _ in range(repeats):
                step()
            timings.append(time.perf_counter() - begun)
    whole = len(timings) // TURNS * TURNS
    return unrest_of(unrest_of_round(timings[first:first + TURNS]) for first in range(0, whole, TURNS))


def _empty_span() -> float:
    """What the clock takes for itself, in seconds."""
    clock = _Clock()
    for _ in range(100):
        clock.begin()
        clock.end(0)
    return median(clock.spans[0])


def _runs_graph(statement: ast.stmt) -> bool:
    """Whether it defines functions that run the graph, or makes the object that holds them."""
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
        return bool(functions_of_graph(ast.Module([statement], type_ignores=[])))
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return isinstance(statement, ast.Assign) and bool(names & {"runner", "Runner"})


class _ClockedCalls(ast.NodeTransformer):
    """Puts a clock around each statement that calls one of some kernels."""

    def __init__(self, kernels: Collection[str]) -> None:
        self.names: list[str] = []
        self._kernels = kernels

    def rewritten(self, statement: ast.stmt) -> ast.stmt:
        """A statement of the module with clocks in it."""
        result: ast.stmt = self.visit(statement)
        return result

    def visit_Expr(self, node: ast.Expr) -> Any:
        """A kernel that writes into what it is given."""
        return self._with_clock(node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        """One that returns its result."""
        return self._with_clock(node)

    def _with_clock(self, statement: ast.stmt) -> ast.stmt | list[ast.stmt]:
        name = self._kernel_called(statement)
        if not name:
            return statement
        self.names.append(name)
        before, after = ast.parse(f"{_CLOCK}.begin()\n{_CLOCK}.end({len(self.names) - 1})").body
        return [before, statement, after]

    def _kernel_called(self, statement: ast.stmt) -> str:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                name = kernel_name(ast.unparse(node.func))
                if name in self._kernels:
                    return name
        return ""
