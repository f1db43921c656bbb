"""The search: kept sequences first, then given and drawn ones, within a budget; what fails is shrunk and kept.

Only wrong numbers, and what may be some, end the search. What is milder is kept aside while worse is looked for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.dims import Dims, complete_sizes
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.fuzz.drawn_call import Sequence, as_plain, free_dims, from_plain
from pytest_torchcompile.fuzz.shrinking import minimal

if TYPE_CHECKING:
    from hypothesis.database import ExampleDatabase
    from hypothesis.strategies import SearchStrategy

__all__ = ["WORST", "Budget", "Examined", "FailingSequence", "Result", "Search", "SequenceProblem", "search"]

WORST: Final = 9
"""The severity of wrong numbers, and of everything of which nobody knows that it is milder."""


@dataclass(frozen=True)
class Budget:
    """How long a search goes on: until one of these is reached."""

    examples: int = 30
    """Sequences given and drawn; those tried when shrinking are not counted."""
    seconds: float = 60.0
    """Wall seconds, shrinking included."""
    drawing: float = 0.5
    """Share of the seconds after which nothing more is drawn: the rest is for shrinking."""
    compiles: int = 2000
    """Graphs compiled."""


@dataclass(frozen=True)
class SequenceProblem:
    """What one sequence shows."""

    kind: str
    """Shrinking keeps to sequences that show the same kind."""
    message: str
    at: int
    """Index of the call that shows it."""
    evidence: str = ""
    compiles: int = 0
    severity: int = WORST
    """The larger the worse. The search goes on after anything milder than :data:`WORST`."""


@dataclass
class FailingSequence:
    """A problem with the sequence that shows it."""

    problem: SequenceProblem
    sequence: Sequence
    """The minimal failing sequence, as far as the budget went."""
    drawn: Sequence
    """The failing sequence as it was found."""
    kept: bool = False
    """Was it found by a sequence kept from an earlier run?"""
    shrunk: bool = False
    cut: str = ""
    """Which part of the budget ended its shrinking; empty if it went to the end."""


@dataclass(frozen=True)
class Examined:
    """What became of one sequence."""

    problem: SequenceProblem | None
    compiles: int
    """Graphs compiled."""
    calls: int
    """Calls that ran eagerly and compiled, and were compared."""
    refused: int = 0
    """Calls that eager refuses, and so does compiled code."""
    mute: int = 0
    """Calls whose equality proves nothing: all zeros, or nothing but rounding noise."""

    @property
    def counts(self) -> bool:
        """Does it say anything? Where every call was refused or mute nothing was compared."""
        return self.calls > 0 or self.problem is not None


@dataclass
class Result:
    """What a search came to. A sequence of which eager refuses every call is not counted as one."""

    examples: int = 0
    """Sequences given or drawn, and compared."""
    tries: int = 0
    """All sequences that were compared: drawn, kept from earlier runs, and tried when shrinking."""
    calls: int = 0
    """Calls of them that ran on both sides."""
    refused: int = 0
    """Calls that eager refused, of any sequence."""
    mute: int = 0
    """Calls whose equality proves nothing."""
    compiles: int = 0
    seconds: float = 0.0
    spent: str = ""
    """Which part of the budget ended the search, or the shrinking, or ``sizes``, where no more were found that belong
    together; empty if neither was cut short."""
    failing: list[FailingSequence] = field(default_factory=list)
    """One of each kind, in the order in which they were found; only one of them is of the severity :data:`WORST`."""

    @property
    def worst_first(self) -> list[FailingSequence]:
        """The failing sequences, the worst first; of equals the one that was found first."""
        return sorted(self.failing, key=_mildness)

    @property
    def worst(self) -> FailingSequence | None:
        """The sequence with the worst problem, if any failed."""
        return next(iter(self.worst_first), None)

    @property
    def problem(self) -> SequenceProblem | None:
        """The worst problem, if there is any."""
        return self.worst.problem if self.worst else None

    @property
    def sequence(self) -> Sequence:
        """The sequence that shows the worst failing."""
        return self.worst.sequence if self.worst else ()


def _mildness(failing: FailingSequence) -> int:
    return -failing.problem.severity


Try = Callable[[Sequence], Examined]
"""Run a sequence from a fresh compiler state."""


def search(strategy: SearchStrategy[Sequence], dims: Dims, attempt: Try, budget: Budget, *, seed: int = 0,
           database: ExampleDatabase | None = None, key: str = "", first: Iterable[Sequence] = ()) -> Result:
    """Look for a sequence that ``attempt`` finds fault with, and shrink it; after a mild problem, for a worse one too.

    ``first`` are sequences to begin with (:func:`~pytest_torchcompile.fuzz.drawn_call.sweep`). The same seed draws the
    same sequences. Failing sequences are kept in Hypothesis' ``database`` under ``key``; kept ones are tried first,
    and dropped when they no longer fail.
    """
    searched = Search(strategy, dims, attempt, budget, seed, database, key, first)
    searched.find()
    searched.shrink()
    return searched.result


class _Ended(Exception):
    """Ends the drawing: Hypothesis goes on until something fails. It replays what failed, so it is raised again."""


@dataclass
class Search:
    """One search in two steps, :meth:`find` and :meth:`shrink`; the arguments are those of :func:`search`."""

    strategy: SearchStrategy[Sequence]
    dims: Dims
    attempt: Try
    budget: Budget
    seed: int = 0
    database: ExampleDatabase | None = None
    key: str = ""
    first: Iterable[Sequence] = ()
    told: frozenset[str] = frozenset()
    """Kinds of mild problems that somebody else has found already."""
    result: Result = field(default_factory=Result)
    started: float = field(default_factory=time.monotonic)
    known: dict[Sequence, SequenceProblem | None] = field(default_factory=dict)
    given: int = 0
    """Sequences given or drawn, refused ones too: what the budget is about."""

    @property
    def found_worst(self) -> bool:
        """Was something found than which nothing is worse?"""
        return any(failing.problem.severity == WORST for failing in self.result.failing)

    def find(self) -> None:
        """Try sequences until one shows the worst, or the budget is spent."""
        self._try_kept()
        if not self.found_worst:
            self._try_given()
        if not self.found_worst and not self.result.spent and self.given < self.budget.examples:
            self._try_drawn()
        self.result.seconds = time.monotonic() - self.started

    def shrink(self) -> None:
        """Make the failing sequences minimal, those of the worst problems first, and keep them for a later run."""
        # On the way from a mild problem to its minimum a worse one may turn up, which is the next then.
        while (failing := self._next_to_shrink()) is not None:
            self._shrink_to_minimal(failing)
            if self.database is not None:
                self.database.save(self._stored_key, _encode_sequence(failing.sequence))
        self.result.seconds = time.monotonic() - self.started

    def _next_to_shrink(self) -> FailingSequence | None:
        return next((failing for failing in self.result.worst_first if not failing.shrunk), None)

    @property
    def _stored_key(self) -> bytes:
        # The key begins with our name: Hypothesis keeps its own failing examples in the same database.
        return f"torchcompile:{self.key}".encode()

    def _examine(self, sequence: Sequence) -> SequenceProblem | None:
        """Run a sequence, unless it is known what it shows, and note a problem that nobody has found."""
        if sequence not in self.known:
            examined = self.attempt(sequence)
            self.result.tries += examined.counts
            self.result.calls += examined.calls
            self.result.refused += examined.refused
            self.result.mute += examined.mute
            self.result.compiles += examined.compiles
            self.known[sequence] = examined.problem
            if examined.problem is not None:
                self._note_problem(sequence, examined.problem)
        return self.known[sequence]

    def _try_example(self, sequence: Sequence) -> None:
        """Try a sequence that was given or drawn; one that is known already is not counted again."""
        self.given += sequence not in self.known
        before = self.result.tries
        self._examine(sequence)
        self.result.examples += self.result.tries - before

    def _note_problem(self, sequence: Sequence, problem: SequenceProblem) -> None:
        if problem.severity == WORST:
            known = self.found_worst
        else:
            noted = {failing.problem.kind for failing in self.result.failing}
            known = problem.kind in self.told or problem.kind in noted
        if not known:
            # What came after cannot matter.
            self.result.failing.append(FailingSequence(problem, sequence[:problem.at + 1], sequence))

    def _spent_budget(self, seconds: float) -> str:
        if time.monotonic() - self.started >= seconds:
            return "seconds"
        if self.result.compiles >= self.budget.compiles:
            return "compiles"
        return ""

    @property
    def _drawing_seconds(self) -> float:
        """Seconds after which nothing new is tried."""
        return self.budget.seconds * self.budget.drawing

    def _try_kept(self) -> None:
        if self.database is None:
            return
        # Sorted, since a database has no order and the first that fails is reported.
        for value in sorted(self.database.fetch(self._stored_key)):
            sequence = _decode_sequence(value)
            if not sequence or not self._still_possible(sequence) or self._examine(sequence) is None:
                self.database.delete(self._stored_key, value)
            for failing in self.result.failing:
                failing.kept = True
            if self.found_worst:
                return

    def _still_possible(self, sequence: Sequence) -> bool:
        """Do the dims still have these sizes? They may have changed since the sequence was kept."""
        for each in sequence:
            sizes = dict(each.sizes)
            if list(sizes) != list(self.dims) or not self._allows(sizes):
                return False
        return True

    def _allows(self, sizes: dict[str, int]) -> bool:
        chosen = {name: sizes[name] for name in free_dims(self.dims)}
        for name, size in chosen.items():
            dim = self.dims[name]
            # Of a dim with a list only what is listed is drawn.
            allowed = size in dim.listed if dim.listed else dim.allows(size)
            if not allowed:
                return False
        try:
            # An example of an earlier run may be kept although the dims were edited since.
            return complete_sizes(self.dims, chosen) == sizes
        except UsageError:
            return False

    def _try_given(self) -> None:
        result = self.result
        for sequence in self.first:
            result.spent = self._spent_budget(self._drawing_seconds)
            if result.spent or self.found_worst or self.given >= self.budget.examples:
                return
            self._try_example(sequence)

    def _try_drawn(self) -> None:
        import hypothesis

        result = self.result

        # Hypothesis only generates: its shrinking, its database and its messages are replaced by ours.
        @hypothesis.settings(
            max_examples=self.budget.examples - self.given, phases=[hypothesis.Phase.generate],
            database=None, deadline=None,
            print_blob=False, report_multiple_bugs=False, verbosity=hypothesis.Verbosity.quiet,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(self.strategy)
        def try_sequence(sequence: Sequence) -> None:
            result.spent = result.spent or self._spent_budget(self._drawing_seconds)
            if not result.spent and not self.found_worst:
                self._try_example(sequence)
            if result.spent or self.found_worst:
                raise _Ended

        try:
            with suppress(_Ended):
                hypothesis.seed(self.seed)(try_sequence)()
        except hypothesis.errors.Unsatisfiable:
            # Every sequence was rejected: see `where` of shape_sequences.
            result.spent = "sizes"

    def _shrink_to_minimal(self, failing: FailingSequence) -> None:
        kind = failing.problem.kind

        def still_fails(sequence: Sequence) -> bool:
            failing.cut = failing.cut or self._spent_budget(self.budget.seconds)
            if failing.cut:
                return False
            again = self._examine(sequence)
            return again is not None and again.kind == kind and again.at == len(sequence) - 1

        failing.sequence, failing.shrunk = minimal(failing.sequence, self.dims, still_fails), True
        self.result.spent = self.result.spent or failing.cut
        shown = self.known.get(failing.sequence)
        # With its last calls left out the sequence may show something worse instead.
        if shown is not None and shown.kind == kind:
            failing.problem = shown


def _encode_sequence(sequence: Sequence) -> bytes:
    return json.dumps(as_plain(sequence)).encode()


def _decode_sequence(value: bytes) -> Sequence:
    try:
        data: Any = json.loads(value)
        return from_plain(data)
    except (ValueError, KeyError, TypeError, AttributeError):
        # Not ours, or of an older form.
        return ()
