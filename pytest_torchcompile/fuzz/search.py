"""The search: kept sequences first, then given and drawn ones, within a budget; what fails is shrunk and kept."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.dims import Dims, complete_sizes
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.fuzz.drawn_call import Sequence, as_plain, free_dims, from_plain
from pytest_torchcompile.fuzz.shrinking import minimal

if TYPE_CHECKING:
    from hypothesis.database import ExampleDatabase
    from hypothesis.strategies import SearchStrategy

__all__ = ["Budget", "Examined", "Finding", "Result", "search"]


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
class Finding:
    """What one sequence shows."""

    kind: str
    """Shrinking keeps to sequences that show the same kind."""
    message: str
    at: int
    """Index of the call that shows it."""
    evidence: str = ""
    compiles: int = 0


@dataclass(frozen=True)
class Examined:
    """What became of one sequence."""

    finding: Finding | None
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
        return self.calls > 0 or self.finding is not None


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
    finding: Finding | None = None
    sequence: Sequence = ()
    """The minimal failing sequence, as far as the budget went."""
    drawn: Sequence = ()
    """The failing sequence as it was found."""
    spent: str = ""
    """Which part of the budget ended the search, or the shrinking, or ``sizes``, where no more were found that belong
    together; empty if neither was cut short."""
    kept: bool = False
    """Was it found by a sequence kept from an earlier run?"""


Try = Callable[[Sequence], Examined]
"""Run a sequence from a fresh compiler state."""


def search(strategy: SearchStrategy[Sequence], dims: Dims, attempt: Try, budget: Budget, *, seed: int = 0,
           database: ExampleDatabase | None = None, key: str = "", first: Iterable[Sequence] = ()) -> Result:
    """Look for a sequence that ``attempt`` finds fault with, and shrink it.

    ``first`` are sequences to begin with (:func:`~pytest_torchcompile.fuzz.drawing.sweep`). The same seed draws the
    same sequences. Failing sequences are kept in Hypothesis' ``database`` under ``key``; kept ones are tried first,
    and dropped when they no longer fail.
    """
    # The key begins with our name: Hypothesis keeps its own failing examples in the same database.
    stored = f"torchcompile:{key}".encode()
    return _Search(strategy, dims, attempt, budget, seed, database, stored, first).run_all()


class _Ended(Exception):
    """Ends the drawing: Hypothesis goes on until something fails. It replays what failed, so it is raised again."""


@dataclass
class _Search:
    strategy: SearchStrategy[Sequence]
    dims: Dims
    attempt: Try
    budget: Budget
    seed: int
    database: ExampleDatabase | None
    key: bytes
    first: Iterable[Sequence]
    result: Result = field(default_factory=Result)
    started: float = field(default_factory=time.monotonic)
    known: dict[Sequence, Finding | None] = field(default_factory=dict)
    given: int = 0
    """Sequences given or drawn, refused ones too: what the budget is about."""

    def run_all(self) -> Result:
        result = self.result
        self._try_kept()
        if result.finding is None:
            self._try_given()
        if result.finding is None and not result.spent and self.given < self.budget.examples:
            self._try_drawn()
        if result.finding is not None:
            self._shrink_to_minimal(result.finding)
            if self.database is not None:
                self.database.save(self.key, _encode_sequence(result.sequence))
        result.seconds = time.monotonic() - self.started
        return result

    def _examine(self, sequence: Sequence) -> Finding | None:
        """Run a sequence, unless it is known what it shows."""
        if sequence not in self.known:
            examined = self.attempt(sequence)
            self.result.tries += examined.counts
            self.result.calls += examined.calls
            self.result.refused += examined.refused
            self.result.mute += examined.mute
            self.result.compiles += examined.compiles
            self.known[sequence] = examined.finding
        return self.known[sequence]

    def _try_example(self, sequence: Sequence) -> None:
        """Try a sequence that was given or drawn; one that is known already is not counted again."""
        self.given += sequence not in self.known
        before = self.result.tries
        finding = self._examine(sequence)
        self.result.examples += self.result.tries - before
        if finding:
            self._take_finding(sequence, finding)

    def _take_finding(self, sequence: Sequence, finding: Finding) -> None:
        self.result.finding, self.result.drawn = finding, sequence
        # What came after cannot matter.
        self.result.sequence = sequence[:finding.at + 1]

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
        for value in sorted(self.database.fetch(self.key)):
            sequence = _decode_sequence(value)
            if sequence and self._still_possible(sequence) and (finding := self._examine(sequence)):
                self._take_finding(sequence, finding)
                self.result.kept = True
                return
            self.database.delete(self.key, value)

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
            return complete_sizes(self.dims, chosen) == sizes
        except UsageError:
            return False

    def _try_given(self) -> None:
        result = self.result
        for sequence in self.first:
            result.spent = self._spent_budget(self._drawing_seconds)
            if result.spent or result.finding or self.given >= self.budget.examples:
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
            if not result.spent and not result.finding:
                self._try_example(sequence)
            if result.spent or result.finding:
                raise _Ended

        try:
            with suppress(_Ended):
                hypothesis.seed(self.seed)(try_sequence)()
        except hypothesis.errors.Unsatisfiable:
            # Every sequence was rejected: see `where` of shape_sequences.
            result.spent = "sizes"

    def _shrink_to_minimal(self, finding: Finding) -> None:
        result = self.result

        def still_fails(sequence: Sequence) -> bool:
            result.spent = result.spent or self._spent_budget(self.budget.seconds)
            if result.spent:
                return False
            again = self._examine(sequence)
            return again is not None and again.kind == finding.kind and again.at == len(sequence) - 1

        result.sequence = minimal(result.sequence, self.dims, still_fails)
        if shown := self.known.get(result.sequence):
            result.finding = shown


def _encode_sequence(sequence: Sequence) -> bytes:
    return json.dumps(as_plain(sequence)).encode()


def _decode_sequence(value: bytes) -> Sequence:
    try:
        data: Any = json.loads(value)
        return from_plain(data)
    except (ValueError, KeyError, TypeError, AttributeError):
        # Not ours, or of an older form.
        return ()
