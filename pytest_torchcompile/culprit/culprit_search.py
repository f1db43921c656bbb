"""The search for the culprit: capture, shrink, ask torch's bisector or compare operators, write the script."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_torchcompile.culprit.captured_graph import CapturedGraph, GraphCatcher, graph_size, places_of
from pytest_torchcompile.culprit.compiler_bisection import bisect_compiler
from pytest_torchcompile.culprit.culprit_record import Culprit
from pytest_torchcompile.culprit.graph_shrinking import Shows, drawable_inputs, shrink_graph
from pytest_torchcompile.culprit.graph_trial import GraphTrial
from pytest_torchcompile.culprit.lone_script import run_alone
from pytest_torchcompile.culprit.operator_script import NoScript, graph_script, operator_script
from pytest_torchcompile.culprit.wrong_operator import find_wrong_operator
from pytest_torchcompile.errors import InstrumentError
from pytest_torchcompile.lowering.scheduler_notes import compile_anew
from pytest_torchcompile.state.torch_state import forget_compiled

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.trial import Trial

__all__ = ["find_culprit", "find_graphs_culprit"]

_BISECTED: Final = ("aot_eager_decomp_partition", "inductor")
"""Backends that torch's bisector takes apart."""
_SHARE: Final = 0.6
"""Of the budget, for making the graph small; the rest is for what is asked of the small one."""


def find_culprit(trial: Trial, backend: str, signs: frozenset[str], seconds: float) -> Culprit:
    """Name the operator to blame for what a trial has shown.

    Args:
        trial: The model and its calls; it need not have run, and nothing of it is changed.
        backend: The first stage that shows it (:func:`~pytest_torchcompile.oracle.diagnosis.locate_stage`).
        signs: What it shows, of :func:`~pytest_torchcompile.culprit.graph_trial.signs_of`.
        seconds: Budget of wall time; one compile may exceed it.

    It compiles many times, and forgets everything compiled. A compiler that ends the process ends this one: run it in
    a process of its own.
    """
    settings: dict[str, Any] = {}
    if trial.settings.get("backend", "inductor") == backend:
        # Modes and options belong to the backend under test.
        settings = {name: trial.settings[name] for name in ("mode", "options") if trial.settings.get(name)}
    if trial.settings.get("dynamic") is not None:
        settings["dynamic"] = trial.settings["dynamic"]
    return find_graphs_culprit(lambda: _graphs_of_calls(trial), backend, signs, seconds, settings,
                               str(trial.root or Path.cwd()))


def find_graphs_culprit(capture: Callable[[], Iterable[CapturedGraph]], backend: str, signs: frozenset[str],
                        seconds: float, settings: Mapping[str, Any], root: str) -> Culprit:
    """:func:`find_culprit` of what is no trial: ``capture`` gives its graphs with their inputs, one after the other.

    ``settings``: of ``torch.compile`` beside the backend; ``root``: the folder that places are told from.
    """
    started = time.monotonic()
    told = Culprit(backend, torch=torch.__version__)
    with warnings.catch_warnings():
        # A filter that makes errors of warnings would have torch's own end a compile.
        warnings.simplefilter("ignore")
        try:
            # What a cache holds may be of a compiler that was right.
            with compile_anew():
                told = _Search(capture, backend, signs, started, seconds, settings, root).find(told)
        except InstrumentError as missing:
            told = replace(told, why_not=str(missing))
    forget_compiled()
    return replace(told, seconds=time.monotonic() - started)


def _graphs_of_calls(trial: Trial) -> Iterator[CapturedGraph]:
    for call in trial.calls:
        forget_compiled()
        catcher = GraphCatcher()
        side = trial.make({"backend": catcher, "dynamic": False})
        side.run(call, trial.loss, trial.train, trial.seed)
        yield from catcher.graphs


class _Search:
    def __init__(self, capture: Callable[[], Iterable[CapturedGraph]], backend: str, signs: frozenset[str],
                 started: float, seconds: float, settings: Mapping[str, Any], root: str) -> None:
        self.capture, self.backend, self.signs, self.root = capture, backend, signs, root
        self.shrinking_ends, self.ends = started + seconds * _SHARE, started + seconds
        self.settings = {"backend": backend, **settings}

    def find(self, told: Culprit) -> Culprit:
        """Go the whole way, so far as the time allows."""
        found = self._first_wrong_graph()
        if found is None:
            return replace(told, why_not=self._why_no_graph())
        captured, sign = found
        told = replace(told, sign=sign, size=graph_size(captured.module))
        shows = self._shower(sign)
        small = shrink_graph(captured, shows, self.shrinking_ends)
        small = drawable_inputs(small, shows, self.ends)
        told = replace(told, left=_operators_of(small), places=tuple(map(self._from_root, places_of(small.module))))
        if self.backend in _BISECTED:
            told = self._bisected(told, small, sign)
        elif sign == "numbers":
            told = self._compared(told, small)
        title = f"{told.backend}: {told.sign}: {told.operator or ', '.join(told.left)}, torch {told.torch}"
        try:
            told = replace(told, script=graph_script(small, title, self.settings, sign))
        except NoScript as why:
            told = replace(told, why_no_script=str(why))
        return self._tried_alone(told)

    def _tried_alone(self, told: Culprit) -> Culprit:
        """The script of an issue, where torch is all that there is."""
        if not told.issue_script:
            return told
        # The script of an operator by itself ends with a comparison, whatever the sign of the model.
        sign = "" if told.operator_script else told.sign
        alone = run_alone(told.issue_script, sign, self.ends - time.monotonic())
        return replace(told, shown=alone.shown, needs_more=alone.needs_more, why_not_alone=alone.why_not)

    def _first_wrong_graph(self) -> tuple[CapturedGraph, str] | None:
        """The first graph of any call that shows by itself what the model has shown, and the sign of it."""
        self.graphs = 0
        for captured in self.capture():
            self.graphs += 1
            for sign in sorted(self.signs & self._signs_of(captured), key=lambda each: each != "numbers"):
                return captured, sign
            if time.monotonic() > self.ends:
                break
        return None

    def _why_no_graph(self) -> str:
        if not self.graphs:
            return "Dynamo captures no graph of the model"
        if not self.signs:
            return "what differs is told by no sign that a graph by itself could show"
        return (f"none of {self.graphs} graph(s) shows it by itself: it hangs on what is around them, on several "
                "calls, or on the loss")

    def _shower(self, sign: str) -> Shows:
        return lambda captured: sign in self._signs_of(captured)

    def _signs_of(self, captured: CapturedGraph) -> frozenset[str]:
        return self._graph_trial(captured).signs(**self.settings)

    @staticmethod
    def _graph_trial(captured: CapturedGraph) -> GraphTrial:
        return GraphTrial(captured.module, captured.inputs, captured.grad)

    def _bisected(self, told: Culprit, small: CapturedGraph, sign: str) -> Culprit:
        """By torch's bisector."""
        graph = self._graph_trial(small)
        came = bisect_compiler(lambda _: sign in graph.signs(**self.settings), self.backend, self.ends)
        operator = came.operator
        if came.subsystem == "decomposition":
            operator = came.step.removeprefix("<OpOverload(op='").replace("', overload='", ".").removesuffix("')>")
            operator = operator.replace("::", ".")
        return replace(told, subsystem=came.subsystem, number=came.number, step=came.step, operator=operator,
                       place=self._from_root(came.place) or _only(told.places), why_not=came.why_not)

    def _compared(self, told: Culprit, small: CapturedGraph) -> Culprit:
        """By every operator of AOTAutograd's graphs, where no compiler has a part in it."""
        wrong = find_wrong_operator(self._graph_trial(small))
        if wrong is None:
            return replace(told, place=_only(told.places),
                           why_not="each operator of AOTAutograd's graphs is right by itself and as eager's")
        place = self._from_root(wrong.note.place) or _only(told.places)
        told = replace(told, operator=wrong.note.name, place=place, noise=repr(wrong.noise), own_fault=wrong.own_fault,
                       remark=wrong.remark)
        if wrong.own_fault:
            try:
                title = f"{wrong.note.name}: {wrong.remark or 'wrong by itself'}, torch {told.torch}"
                told = replace(told, operator_script=operator_script(wrong.note, title))
            except NoScript:
                # The graph's script shows it too.
                pass
        return told

    def _from_root(self, place: str) -> str:
        return place.removeprefix(f"{self.root}{os.sep}")


def _only(places: tuple[str, ...]) -> str:
    """The place where there is just one."""
    return places[0] if len(places) == 1 else ""


def _operators_of(captured: CapturedGraph) -> tuple[str, ...]:
    """What a graph calls, each once, by the names that a user writes."""
    names: dict[str, None] = {}
    for node in captured.module.graph.nodes:
        if node.op == "call_function":
            names[_function_name(node.target)] = None
        elif node.op.startswith("call_"):
            names[str(node.target)] = None
    return tuple(names)


def _function_name(function: Any) -> str:
    return str(getattr(function, "__name__", function))
