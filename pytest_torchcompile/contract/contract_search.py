"""The search: every mutation once, then drawn histories; what is found is made small: the history, then the module."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.contract.stand_in import path_of
from pytest_torchcompile.contract.worker import ProgramSource, Told, Worker
from pytest_torchcompile.dims import Dims
from pytest_torchcompile.fuzz.drawn_call import DrawnCall, Sequence, shape_sequences
from pytest_torchcompile.fuzz.search import WORST, Budget, Examined, FailingSequence, Result, Search, SequenceProblem

if TYPE_CHECKING:
    from hypothesis.database import ExampleDatabase

__all__ = ["ContractFinding", "ContractResult", "search_contract", "search_with"]

MAX_CALLS: Final = 4
"""Calls of a drawn history: what matters is most often what was called before, and once before."""
_MILDER: Final = {"error": 5, "stride": 3}
"""Kinds that say nothing of what compiled code computes, with their severity."""
_CULPRIT_SECONDS: Final = 60.0
"""For the operator to blame, of what is left of the budget."""
STAGES: Final = ("eager", "aot_eager", "aot_eager_decomp_partition", "inductor")
"""Backends, each with more of the compiler than the one before."""


@dataclass(frozen=True)
class ContractFinding:
    """One thing in which both sides differ, made small."""

    told: Told
    failing: FailingSequence
    without: tuple[str, ...]
    """What stands in for submodules that it needs not, as in ``stand_in.py``."""
    stage: str
    """The first backend that shows it; ``eager`` side only: empty."""
    culprit: dict[str, Any] | None = None
    """The operator to blame, a :class:`~pytest_torchcompile.culprit.culprit_record.Culprit` as plain data."""


@dataclass
class ContractResult:
    """What a search came to."""

    result: Result
    offered: dict[str, list[str]]
    findings: list[ContractFinding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Sums over all histories: see :class:`~pytest_torchcompile.contract.worker.Told`."""
    uncompared: list[str] = field(default_factory=list)
    """Mutations offered of which nothing is known: eager refused them, or the budget was spent before them."""
    processes: int = 1

    @property
    def compared_none(self) -> bool:
        """Whether no call with a mutation was compared, and so nothing that plain calls do not show."""
        return len(self.uncompared) == len(self.offered)


def search_contract(source: ProgramSource, dims: Dims, budget: Budget, *, flips: bool = False, seed: int = 0,
                    database: ExampleDatabase | None = None, key: str = "") -> ContractResult:
    """Search a program in a process of its own: see :func:`search_with`. Raises UsageError where it can't be made."""
    with Worker(source) as worker:
        return search_with(worker, worker.offered, dims, budget, flips=flips, seed=seed, database=database, key=key)


def search_with(worker: Worker, offered: dict[str, list[str]], dims: Dims, budget: Budget, *, flips: bool = False,
                seed: int = 0, database: ExampleDatabase | None = None, key: str = "",
                swept: bool = True) -> ContractResult:
    """Run histories until one shows something, or the budget is spent; every mutation once before any is drawn.

    Args:
        worker: Has the program.
        offered: The choices of each mutation that are tried, of those that the worker offers.
        dims: The sizes.
        budget: How long.
        flips: Whether calls switch between training and evaluation.
        seed: Of what is drawn.
        database: Where Hypothesis keeps what failed.
        key: The program's name there.
        swept: Whether every choice is run alone before any history is drawn.

    Only what eager accepts and repeats is judged. Raises OwnFailure for what is our own fault.
    """
    started, attempts = worker.started, _Attempts(worker)
    plain = DrawnCall(tuple(worker.source.sizes.items()))
    strategy = shape_sequences(dims, MAX_CALLS, flips=flips, mutations=offered)
    first = list(_sweep(plain, offered)) if swept else [(plain, plain)]
    # What is offered is tried whatever the number of drawn ones is.
    whole = Budget(budget.examples + len(first), budget.seconds, max(budget.drawing, 0.6), budget.compiles)
    search = Search(strategy, dims, attempts, whole, seed, database, key, first)
    search.find()
    search.shrink()
    uncompared = [name for name in offered if name not in attempts.compared]
    came = ContractResult(search.result, offered, counts=attempts.counts, uncompared=uncompared)
    deadline = search.started + whole.seconds
    for failing in search.result.worst_first:
        came.findings.append(_examined_finding(worker, failing, deadline))
    came.processes += worker.started - started
    return came


def _sweep(plain: DrawnCall, offered: dict[str, list[str]]) -> Iterable[Sequence]:
    """Each choice of each mutation alone, and between two calls without it."""
    yield plain, plain
    for name, choices in offered.items():
        for choice in choices:
            mutated = DrawnCall(plain.sizes, mutations=((name, choice),))
            yield mutated, plain
            yield plain, mutated, plain


class _Attempts:
    """Runs histories for a search, and sums up what they were."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.counts: Counter[str] = Counter()
        self.compared: set[str] = set()
        """Mutations of histories of which eager refused no call."""

    def __call__(self, history: Sequence) -> Examined:
        told = self.worker.run(history)
        self.counts.update(told.counts)
        self.counts["histories"] += 1
        if told.kind or not told.counts.get("refused", 0):
            for call in history:
                self.compared.update(name for name, _choice in call.mutations)
        problem = None
        if told.kind:
            problem = SequenceProblem(told.kind, told.message, told.at, severity=_MILDER.get(told.kind, WORST))
        counts = {name: int(told.counts.get(name, 0)) for name in ("calls", "refused", "mute")}
        return Examined(problem, int(told.counts.get("graphs", 0)), **counts)


def _examined_finding(worker: Worker, failing: FailingSequence, deadline: float) -> ContractFinding:
    """Leave out what parts of the module it needs not, and ask which stage brings it in."""
    history, kind = failing.sequence, failing.problem.kind
    told = worker.run(history)
    if told.kind != kind:
        # It does not come again: told as it was found.
        return ContractFinding(Told(kind, "", failing.problem.message, failing.problem.at), failing, (), "")
    without: tuple[str, ...] = ()
    paths, linears = _submodules(worker), {}
    if paths:
        linears = worker.linear_stand_ins()
    for path in paths:
        gone = any(path.startswith(f"{path_of(other)}.") for other in without)
        for stand_in in (path, linears.get(path)):
            if stand_in is None or gone or time.monotonic() > deadline:
                continue
            smaller = worker.run(history, (*without, stand_in))
            # With the part left out the other side may end.
            same_side = kind != "crash" or smaller.where == told.where
            if smaller.kind == kind and same_side:
                without, told, gone = (*without, stand_in), smaller, True
    stage = _first_stage(worker, history, without, told)
    culprit = None
    seconds = min(_CULPRIT_SECONDS, deadline - time.monotonic())
    # What Dynamo itself makes otherwise is no operator's fault, and a compiler that ends the process is none to ask.
    if stage not in ("", "eager") and told.kind not in ("crash", "hang") and seconds > 0:
        culprit = worker.culprit(history, without, stage, told, seconds)
    return ContractFinding(told, failing, without, stage, culprit)


def _submodules(worker: Worker) -> list[str]:
    """Paths of all submodules, outer ones first."""
    return sorted(worker.paths, key=lambda path: path.count("."))


def _first_stage(worker: Worker, history: Sequence, without: tuple[str, ...], told: Told) -> str:
    if told.where == "eager" and told.kind in ("crash", "hang"):
        return ""
    for stage in STAGES:
        if worker.run(history, without, stage).kind == told.kind:
            return stage
    return ""
