"""Observation: what one run of one cell recorded, and the verdicts that checks made of it. Plain data.

No torch here: an observation crosses process and machine borders as JSON, and a stored one can be judged
again under other limits.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

__all__ = ["BAD", "GOOD", "NO_RANK", "RAISED", "RAISED_TWICE", "VERDICTS", "Failure", "Job", "Judgement", "Observation",
           "Problem", "RankOutcome", "portable_path", "rank_failed", "verdicts_in", "worst"]

VERDICTS: Final = (
    "pass", "skip", "xfail", "not_run", "xpass", "fail", "error", "timeout", "crash",
)  # from the best to the worst: a cell's status is the worst of its checks'
GOOD: Final = ("pass", "xfail")
"""Verdicts that every release takes."""
BAD: Final = ("xpass", "fail", "error", "timeout", "crash")
"""Verdicts that no release takes unless a policy allows it."""

NO_RANK: Final = "no_rank"
"""The kind of failure of a cell that was not run, because no rank process could be had."""
RAISED: Final = "the compiled run raised"
"""How every text begins that tells of an exception: the same text in two models is the same fault of a backend."""
RAISED_TWICE: Final = "raised twice"
"""The phase of a failure ``usage`` that every cell has which calls the user's functions alike."""

_INSTALLED: Final = re.compile(r"^.*[/\\](site|dist)-packages[/\\]")


def portable_path(file: str) -> str:
    """A file of an installed package by its path inside of ``site-packages``: environments are in any folder."""
    return _INSTALLED.sub("", file)


def worst(verdicts: list[str]) -> str:
    """Return the worst of some verdicts; ``not_run`` where there is none."""
    return max(verdicts, key=VERDICTS.index, default="not_run")


def verdicts_in(checks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Of checks as a report has them, or a judged cell."""
    return [check["verdict"] for check in checks.values()]


@dataclass(frozen=True)
class Job:
    """What a rank process is asked to do for one cell."""

    cell: dict[str, Any]
    """:meth:`pytest_torchcompile.cell.Cell.to_dict`."""
    entry: dict[str, Any]
    """The model's entry of the matrix (:meth:`pytest_torchcompile.plan.matrix.ModelEntry.to_dict`)."""
    root: str
    """The matrix' root folder, first on ``sys.path`` when factories are looked up."""
    checks: tuple[str, ...]
    """The checks that will judge; heavy sections are measured only if one of them wants them."""
    limits: dict[str, float] = field(default_factory=dict)
    """The cell's limits: of ``steps`` at least as many are run."""
    locate: float = 0.0
    """Where something differs, look for the stage of the compiler that brings it in, if the run took no more seconds
    than this."""
    culprit: float = 0.0
    """Seconds for finding the operator to blame, where a stage is found; 0: it is not looked for."""
    modules: tuple[str, ...] = ()
    """The modules that the matrix names. All are imported before the cell, so that a setting that one of them makes
    when it is imported holds for every cell, whichever ran before."""
    seed: int = 0
    fuzz: dict[str, Any] = field(default_factory=dict)
    """:meth:`pytest_torchcompile.fuzz.fuzz_options.FuzzOptions.to_dict`; empty: the default ones."""
    threads: int = 0
    """Threads that torch computes with; 0: torch's own choice."""
    compile_threads: int = 1
    """Threads that Inductor compiles with."""
    warm_toolchain: bool = False
    """Compile something small before the cell, so that a cold compiler counts as nobody's."""
    autotune_choices: int = 0
    """Candidates that autotuning may try for each kernel; 0: as many as torch wants."""
    rank: int = 0
    world: int = 1
    rendezvous: str = ""
    """Where the ranks of a cell find each other: a file, or ``tcp://HOST:PORT/PREFIX`` for torchrun's store."""
    local_rank: int = -1
    """Which of this host's ranks it is; -1: all ranks are here."""
    timeout: float = 600.0
    """Seconds after which the other side ends the cell."""
    logs: tuple[str, ...] = ()
    """Channels of torch's log that are written to a file; see :mod:`pytest_torchcompile.ledger.torch_logs`."""
    log_folder: str = ""
    """Where these files are."""
    watched: bool = False
    """Tell what the process has read too, so that the result may be reused (:mod:`pytest_torchcompile.reuse`)."""
    comparisons: dict[str, Any] | None = None
    """Comparisons of earlier runs by key, to be taken where everything is the same; None: make all, and tell none."""


@dataclass(frozen=True)
class Failure:
    """Why a run has no result, or stopped early."""

    kind: str
    """``skip`` (this machine cannot), ``usage`` (the matrix is wrong), ``user`` (eager fails too),
    ``crash``, ``timeout``, ``no_rank`` (see :data:`NO_RANK`), ``internal`` (our own mistake, nobody else's),
    ``aborted`` (of a rank: another one had failed before)."""
    message: str
    phase: str = ""
    evidence: str = ""
    """Stacks, the last lines of the log, a traceback."""


@dataclass(frozen=True)
class RankOutcome:
    """How a job ended: ``done`` with its value, ``crash`` or ``timeout`` with evidence, ``no_rank`` if none began."""

    status: str
    value: Any = None
    message: str = ""
    evidence: str = ""
    seconds: float = 0.0
    at: float = field(default_factory=time.monotonic)
    """``time.monotonic()`` when it was noticed."""


def rank_failed(outcome: RankOutcome) -> bool:
    """Whether the other ranks may now wait for this one in vain."""
    if outcome.status != "done":
        return True
    # A rank whose compiled run raised takes no part in the collectives that are still to come.
    seen: Mapping[str, Any] = outcome.value
    return bool(seen["failure"] or (seen["sections"].get("compiles") or {}).get("error"))


@dataclass
class Observation:
    """What one run of one cell recorded."""

    cell: str
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    """One section per thing measured (``numerics``, ``compiles``, ...), each JSON-able."""
    failure: Failure | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall seconds by phase."""
    leaks: list[str] = field(default_factory=list)
    """Torch state that the cell changed and left changed; it was restored."""
    environment: dict[str, Any] = field(default_factory=dict)
    """torch, device, compiler, ... of the process that ran the cell."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """What the ranks after rank 0 recorded: ``sections``, ``failure``, ``seconds`` and ``leaks`` of each; rank 0's are
    the cell's own."""

    sources: dict[str, str] | None = None
    """The project's files that its process has imported (:mod:`~pytest_torchcompile.run.imported`); None: not known."""
    code_texts: dict[str, str] | None = None
    """The code of its graphs and kernels by key (:mod:`~pytest_torchcompile.gauges.generated_code`). In no report."""
    comparisons: dict[str, Any] | None = None
    """``taken`` of an earlier run, and ``made``, by key
    (:class:`~pytest_torchcompile.oracle.known_comparisons.KnownComparisons`). In no report."""
    failed_at: float | None = None
    """``time.monotonic()`` of the first failure, by which the ranks of a cell are put in order. In no report."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` takes."""
        data = asdict(self)
        # What is not known is not told: a report has no empty fields for it.
        for name in ("code_texts", "comparisons", "failed_at", "sources"):
            if data[name] is None:
                del data[name]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Observation:
        """Make an observation from what :meth:`to_dict` returned."""
        failure = data.get("failure")
        return cls(**{**data, "failure": Failure(**failure) if failure else None})


@dataclass(frozen=True)
class Problem:
    """One thing that a check found wrong, in the order that helps: culprit, evidence, what to try."""

    message: str
    evidence: str = ""
    hint: str = ""
    file: str = ""
    line: int = 0

    @property
    def place(self) -> str:
        """``file:line``, or nothing."""
        return f"{self.file}:{self.line}" if self.file else ""


@dataclass(frozen=True)
class Judgement:
    """What one check says of one observation."""

    verdict: str
    problems: tuple[Problem, ...] = ()
    note: str = ""
    """A remark that changes nothing: what was found although the verdict is ``pass``, or why it is a skip."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the report."""
        return asdict(self) | {"problems": [asdict(p) for p in self.problems]}
