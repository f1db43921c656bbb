"""JudgedCase: what our checks said of one case, and what that means.

Of a fault about which nothing was said a second opinion is asked: is it really there? Bit by bit, of plain runs,
without reference runs, noise or limits (:class:`Presence`).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pytest_torchcompile import checks
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.cell import DYNAMIC, Cell
from pytest_torchcompile.checks.severity import SLOW_GUARDS
from pytest_torchcompile.contract.history_run import Program as ContractProgram
from pytest_torchcompile.contract.history_run import run_history
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.errors import TorchcompileError
from pytest_torchcompile.faults.fault_parts import Case
from pytest_torchcompile.layer.config import CompileConfig
from pytest_torchcompile.layer.equivalence import compare
from pytest_torchcompile.observation import Job
from pytest_torchcompile.oracle import Item, Recording, record
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.run.runner import run_cell
from pytest_torchcompile.run.subject import cxx_compiler
from pytest_torchcompile.state.snapshot import StateSnapshot
from pytest_torchcompile.state.tensor_forms import same_bits
from pytest_torchcompile.state.torch_state import isolated, same_random_draws

__all__ = ["GOOD", "Checked", "JudgedCase", "Presence", "ReportedProblem", "run_case"]

GOOD: Final = ("caught", "below noise", "silent", "mended", "unavailable")
"""The verdicts that are as they should be."""


@dataclass(frozen=True)
class ReportedProblem:
    """One problem that a check reported."""

    kind: str
    where: str
    text: str


@dataclass(frozen=True)
class JudgedCase:
    """The verdict on one case."""

    case: Case
    verdict: str
    """``caught`` (the right kind in the right place), ``missed``, ``below noise`` (silent, and proven to be no further
    from the exact result than eager), ``silent`` and ``false alarm`` (of correct ones), ``mended`` (a fault of torch's
    that this torch does not have), ``not planted`` (nothing differs: the record is at fault), ``failed`` (the check
    raised), ``unavailable``."""
    reported: tuple[ReportedProblem, ...]
    text: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Is it as it should be?"""
        return self.verdict in GOOD

    def __str__(self) -> str:
        kind = self.case.kind or "correct"
        lines = [f"{self.verdict}: {self.case.name} ({kind}; {self.case.says})"]
        if self.text:
            lines.append(f"    {self.text}")
        # One fault in a weight may be told at every leaf.
        for report in self.reported[:6]:
            lines.append(f"    reported: {report.kind} of {report.where}: {report.text}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Checked:
    """What a check made of a case."""

    reported: list[ReportedProblem]
    noise: float = 0.0
    """The largest difference that was found, in units of rounding noise; 0 where compiled equals eager bit by bit."""


def run_case(case: Case) -> JudgedCase:
    """Run one case through the check that is there for it."""
    start = time.perf_counter()
    if case.inductor and case.program.device == "cpu" and cxx_compiler() is None:
        return JudgedCase(case, "unavailable", (), "no C++ compiler found; install g++ or clang")
    if case.program.cpu_only and case.program.device != "cpu":
        return JudgedCase(case, "unavailable", (), case.program.cpu_only)
    # A check that raises has caught nothing; the run goes on with the next case.
    reported: list[ReportedProblem] = []
    try:
        if case.has_fault is not None and not case.has_fault():
            return JudgedCase(case, "mended", (), f"this torch does not have it ({case.upstream})")
        checked = _CHECKS.get(case.check, _check_cell)(case)
        reported = checked.reported
        if case.kind:
            verdict, text = _judge_fault(case, reported)
        else:
            verdict, text = _judge_correct(case, checked)
    except Exception as error:
        verdict, text = "failed", f"the check itself raised {type(error).__name__}: {error}"
    return JudgedCase(case, verdict, tuple(reported), text, time.perf_counter() - start)


def _judge_fault(case: Case, reported: list[ReportedProblem]) -> tuple[str, str]:
    """The verdict on a fault, and why."""
    if any("UsageError: the graph" in report.text for report in reported):
        return "not planted", "a pass did not find what it was to change"
    hits = [report.kind == case.kind and case.where in report.where for report in reported]
    if any(hits):
        if case.alone and not all(hits):
            return "false alarm", "beside the fault, right things too"
        return "caught", ""
    # What these are about no comparison of tensors shows, so that there is no second opinion to ask for.
    if case.check != "compare" or case.kind in ("vacuous", "nondeterministic"):
        return "missed", f"{case.check} reported nothing of kind {case.kind!r}"
    return _judge_silence(case, reported)


def _judge_silence(case: Case, reported: list[ReportedProblem]) -> tuple[str, str]:
    """The verdict where the fault was not reported: it is missed, unless it is not there or excused."""
    # Asked only now: for each case it would take longer than the check itself.
    presence = Presence(case)
    if case.upstream and presence.largest_difference() < _MENDED:
        return "mended", f"this torch computes it right ({case.upstream})"
    differences = presence.differences()
    if case.kind != "error":
        differences.discard("error")
    if not differences:
        return "not planted", "eager and compiled are equal, bit by bit"
    if case.below and not reported and presence.is_rounding():
        return "below noise", case.below
    place = f" in {case.where!r}" if case.where else ""
    return "missed", f"expected a problem of kind {case.kind!r}{place}; what differs: {sorted(presence.differences())}"


_MENDED: Final = 0.05
"""A relative difference that no rounding explains, and that torch's own faults exceed many times."""


def _judge_correct(case: Case, checked: Checked) -> tuple[str, str]:
    if checked.reported:
        return "false alarm", ""
    if case.check == "compare" and not case.control and not checked.noise:
        return "not planted", "compiled is bitwise equal to eager, so that its silence proves nothing"
    return "silent", ""


def _check_by_compare(case: Case) -> Checked:
    config = CompileConfig(enabled=True, backend=case.backend(), dynamic=case.dynamic)
    comparison = compare(case.program.build_model(), case.program.make_calls(), config, loss=case.program.loss,
                         steps=case.steps)
    reported = []
    for each in comparison.problems:
        reported.append(ReportedProblem(each.kind, each.where, f"{each.message} {each.evidence}"))
    return Checked(reported, comparison.noise)


_KINDS: Final = {"graph_breaks": "graph_break", "recompiles": "recompile", "compiles": "vacuous", "randomness": "rng",
                 "memory": "memory", "determinism": "code", "equivalence": "value"}


def _check_cell(case: Case) -> Checked:
    """As a cell of a matrix, in this process, judged by the check of that name."""
    program = case.program
    dims = {}
    for name in program.sizes[0]:
        sizes_of_dim = [sizes[name] for sizes in program.sizes]
        dims[name] = Dim(buckets=tuple(sizes_of_dim))
    entry = ModelEntry("program", _path_of(program.model), _path_of(program.inputs), dims=dims)
    dynamic = next(name for name, value in DYNAMIC.items() if value is case.dynamic)
    cell = Cell(model="program", backend=case.backend(), dynamic=dynamic, device=program.device)
    # Running a cell puts the folder of its matrix onto the path.
    path = list(sys.path)
    try:
        seen, _ = run_cell(Job(cell.to_dict(), entry.to_dict(), str(Path.cwd()), (case.check,)))
    finally:
        sys.path[:] = path
    if failure := seen["failure"]:
        raise TorchcompileError(f"the cell did not run: {failure}")
    problems = checks.load(case.check).judge(seen["sections"][case.check], case.limits)
    reported = []
    for each in problems:
        kind = _KINDS[case.check]
        if each.message.startswith(SLOW_GUARDS):
            kind = "guards"
        reported.append(ReportedProblem(kind, each.evidence or each.message, each.message))
    return Checked(reported)


def _path_of(function: Callable[..., object]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def _check_by_history(case: Case) -> Checked:
    """The history of a case, in this process."""
    program = case.program

    def make_batch(sizes: Mapping[str, int], seed: int) -> Batch:
        torch.manual_seed(seed + 1)
        return Batch.of(program.inputs(**sizes)).to(device=program.device, dtype=program.dtype)

    called = ContractProgram(program.build_model, {"backend": case.backend(), "dynamic": case.dynamic}, make_batch)
    with isolated([]), same_random_draws():
        outcome = run_history(called, tuple(case.history), lambda index, side: None)
    if outcome.calls < len(case.history) and outcome.problem is None:
        raise TorchcompileError(f"of {len(case.history)} calls {outcome.calls} were compared")
    if not outcome.graphs:
        raise TorchcompileError("no graph ran")
    if outcome.problem is None:
        return Checked([])
    return Checked([ReportedProblem(outcome.problem.kind, outcome.problem.where, outcome.problem.message)])


_CHECKS: Final[dict[str, Callable[[Case], Checked]]] = {"compare": _check_by_compare, "contract": _check_by_history}


PASSES: Final = 3
"""How often all calls are made: a fault may wait for the third."""


class Presence:
    """Every call of a case, PASSES times over, eagerly and compiled."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.overwritten = False
        """Did a later call of the compiled model change what an earlier one had returned?"""
        with isolated([]), same_random_draws():
            model = case.program.build_model()
            self.eager = self._record_calls(model, model)
            # A new model: the calls of the first have changed its buffers.
            model = case.program.build_model()
            compiled = torch.compile(model, backend=case.backend(), dynamic=case.dynamic)
            self.compiled = self._record_calls(model, compiled)

    def _record_calls(self, model: torch.nn.Module, function: Callable[..., Any],
                      dtype: torch.dtype | None = None) -> list[Recording]:
        """Call a model by ``function``, which may be the compiled one, with the batches in ``dtype`` if given."""
        returned: list[tuple[Tensor, Tensor]] = []

        def call_and_keep(*args: Any, **kwargs: Any) -> Any:
            output = function(*args, **kwargs)
            for leaf in pytree.tree_leaves(output):
                # Held, and copied: if they differ later, somebody wrote into what had been returned.
                if isinstance(leaf, Tensor):
                    returned.append((leaf, leaf.detach().clone()))
            return output

        # Every call starts from the same parameters and buffers, so that calls of both sides can be paired.
        start = StateSnapshot(model)
        recordings = []
        for _ in range(PASSES):
            for index, batch in enumerate(self.case.program.make_calls()):
                start.restore()
                if dtype is not None:
                    batch = batch.to(dtype=dtype)
                recordings.append(record(call_and_keep, model, batch, loss=self.case.program.loss, seed=index))
        self.overwritten |= any(not same_bits(now.detach(), then) for now, then in returned)
        return recordings

    def _leaves(self) -> Iterator[Pair]:
        for eager, compiled in zip(self.eager, self.compiled, strict=True):
            yield from pair_leaves(eager, compiled)

    def differences(self) -> set[str]:
        """Names of what is not the same, bit by bit, in any call."""
        names = {pair.name for pair in self._leaves() if not _are_same(pair.eager, pair.compiled)}
        if self.overwritten:
            names.add("an earlier output")
        return names

    def largest_difference(self) -> float:
        """The largest difference of any tensor, relative to the tensor's largest number; inf where only one is NaN."""
        return max((_relative_distance(pair.eager, pair.compiled) for pair in self._leaves()), default=0.0)

    def exact(self) -> list[Recording]:
        """The eager runs in float64."""
        model = self.case.program.build_model().double()
        return self._record_calls(model, model, torch.float64)

    def is_rounding(self, most: float = 4.0) -> bool:
        """Is compiled no further from a float64 run than ``most`` times eager is, in every leaf, as root mean square?

        So torch's own benchmarks judge, with 2 to 10 (``torch/_dynamo/utils.py: same``); 4 is our limit of a leaf.
        """
        for exact, eager, compiled in zip(self.exact(), self.eager, self.compiled, strict=True):
            truths = {pair.name: pair.eager for pair in pair_leaves(exact, exact)}
            for pair in pair_leaves(eager, compiled):
                if _are_same(pair.eager, pair.compiled):
                    continue
                truth = truths[pair.name]
                if _mean_error(pair.compiled, truth) > most * _mean_error(pair.eager, truth):
                    return False
        return True


class Pair(NamedTuple):
    """One thing that both recordings of a call hold."""

    name: str
    eager: Any
    compiled: Any


def pair_leaves(eager: Recording, compiled: Recording) -> Iterator[Pair]:
    """Everything that two recordings hold; ``...`` stands for what one of them lacks."""
    yield Pair("error", eager.error is None, compiled.error is None)
    if eager.error or compiled.error:
        return
    for name in ("structure", "backward", "aliases"):
        yield Pair(name, getattr(eager, name), getattr(compiled, name))
    yield Pair("loss", eager.loss, compiled.loss)
    for group in ("outputs", "mutated", "buffers", "gradients", "generators"):
        eager_items, compiled_items = getattr(eager, group), getattr(compiled, group)
        for name in dict.fromkeys([*eager_items, *compiled_items]):
            yield Pair(name, _item_facts(eager_items, name), _item_facts(compiled_items, name))


def _item_facts(items: Mapping[str, Any], name: str) -> Any:
    """What of an item has to be the same: of a tensor also its strides and whether it wants a gradient."""
    item = items.get(name, ...)
    if isinstance(item, Item):
        return item.value, item.stride, item.requires_grad
    return item


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return all(_are_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and one.shape == other.shape and same_bits(one, other)
    return type(one) is type(other) and bool(one == other)


def _as_float64(facts: Any) -> Tensor | None:
    """The tensor among the facts of an item; None where there is none of floats."""
    value = facts
    if isinstance(facts, tuple):
        value = facts[0]
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return None


def _relative_distance(eager: Any, compiled: Any) -> float:
    expected, actual = _as_float64(eager), _as_float64(compiled)
    if expected is None or actual is None or expected.shape != actual.shape or not expected.numel():
        return 0.0
    if not torch.equal(expected.isfinite(), actual.isfinite()):
        return math.inf
    # Clamped, since all of eager's numbers may be zero.
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def _mean_error(value: Any, truth: Any) -> float:
    actual, exact = _as_float64(value), _as_float64(truth)
    if actual is None or exact is None:
        return 0.0
    return float((actual - exact).square().mean().sqrt())
