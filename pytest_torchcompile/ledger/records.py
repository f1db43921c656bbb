"""What `observe()` hands out: one plain record for each compile, graph break, eager frame, failure and graph.

No torch here, so that a stored observation can be read and judged anywhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

__all__ = [
    "FAILED_GUARD",
    "SILENT",
    "Compile",
    "CudagraphSkip",
    "EagerFrame",
    "FailedCompile",
    "FrameRecord",
    "Graph",
    "GraphBreak",
    "GuardFacts",
    "LedgerRecord",
    "OverLimit",
    "Text",
    "compiled_unit",
    "part_of",
    "whole_compiles",
]

SILENT = frozenset({"limit", "suppressed", "stance", "off", "skipped"})
"""Kinds of :class:`EagerFrame` that nobody asked for and torch does not tell of: what no limit of a matrix allows, and
no smoketest takes for compiled. The others (a graph break, a disabled module, nothing to compile) are what the
coverage limit is for."""

EAGER_WITHOUT_WORDS = (
    "a frame without tensor operations, torch.compiler.disable, a stance or TORCHDYNAMO_DISABLE=1 does this")
"""What leaves code to eager without a graph break and without a frame that torch tells of."""

NOT_CONVERTED = "WON'T CONVERT"
"""How the reason of a :class:`GraphBreak` begins where torch gives up a frame, after it has said why
(convert_frame.py, torch 2.8 to 2.15)."""

FAILED_GUARD = "a guard that failed: "
"""How the guard begins in the reason of an :class:`EagerFrame` of kind ``limit``."""

R = TypeVar("R", bound="LedgerRecord")


@dataclass
class LedgerRecord:
    """Something that the observed run did, as JSON-able data.

    A kind of an instrument's own needs no more than a :attr:`list_name`: a ledger makes that list when the first
    record comes, and writes and reads it with its own.
    """

    list_name: ClassVar[str] = ""
    """The list of a ledger that these are entered in."""
    kinds: ClassVar[dict[str, type[LedgerRecord]]] = {}
    """All kinds of records, by their list."""

    def __init_subclass__(cls) -> None:
        if "list_name" in vars(cls):
            LedgerRecord.kinds[cls.list_name] = cls

    @property
    def same_as(self) -> Hashable:
        """What records have in common that are entered once; None: each of them is entered."""
        return None

    def enter(self: R, entered: list[R]) -> R:
        """Append this to what a ledger holds, and return it; or else what is there already and says the same."""
        mine = self.same_as
        if mine is not None:
            for known in entered:
                if known.same_as == mine:
                    known.take_in(self)
                    return known
        entered.append(self)
        return self

    def take_in(self: R, other: R) -> None:
        """Called where another record that says the same is not entered."""

    def labelled(self: R, label: str) -> R:
        """A copy that happened during a call."""
        return replace(self, during=label)  # type: ignore[call-arg]  # every kind that a watch enters has it

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` takes."""
        return asdict(self)

    @classmethod
    def from_dict(cls: type[R], data: dict[str, Any]) -> R:
        """Make a record from what :meth:`to_dict` returned; keys of a newer version are dropped."""
        known = {field.name for field in fields(cls)}
        values = {}
        for name, value in data.items():
            if name in known:
                # JSON has no tuples.
                values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


@dataclass
class FrameRecord(LedgerRecord):
    """Something that happened to the frame of a function."""

    function: str
    """Name in user code; for a compiled module ``Model.forward``."""
    file: str
    line: int
    """First line of the function (one-based)."""


@dataclass(kw_only=True)
class GuardFacts:
    """What is known of a guard that failed, beyond torch's own words; empty texts where it is not known."""

    what: str = ""
    """What the guard compared, as an expression of the function's own names."""
    expected: str = ""
    """Its value when the cached entry was compiled."""
    actual: str = ""
    """Its value now; where torch does not say it :mod:`.entries` may find it."""
    source: str = ""
    """The line of code that the guard comes from."""
    at: str = ""
    """``file:line`` of that line; torch may shorten the path."""
    advice: str = ""
    """What torch itself advises."""

    def guard_facts(self) -> dict[str, Any]:
        """These fields alone, as keyword arguments."""
        return {field.name: getattr(self, field.name) for field in fields(GuardFacts)}


@dataclass
class Compile(GuardFacts, FrameRecord):
    """One compile of one frame, the first or a later one. Its guard facts are of a recompile."""

    list_name = "compiles"

    compile_id: str
    """Torch's id, ``frame/compile``. The second part says nothing about recompiles."""
    kind: str
    """``first``, ``recompile`` (an entry was there, its guards failed), ``instance`` (the entry there is that
    of another torch.compile, which keeps its own), ``raced`` (another thread compiled the same meanwhile), ``resume``
    (the rest of a frame after a graph break) or ``backward`` (compiled when the first backward needed it)."""
    reason: str = ""
    """The guard that failed, in torch's words, for the cached entry nearest to the call; empty unless a recompile."""
    cause: str = ""
    """Class of the reason (:data:`pytest_torchcompile.ledger.reasons.CAUSES`); empty unless a recompile."""
    all_reasons: tuple[str, ...] = ()
    """One failed guard for each cached entry, that of the one last used first."""
    during: str = ""
    """Label of the call during which it happened (:meth:`Ledger.during`)."""
    graphs: int = 0
    """Graphs given to the backend; 0 where the frame broke before its first operator."""
    ops: int = 0
    """Call nodes in those graphs."""
    guards: int = 0
    guard_microseconds: int = 0
    """How long asking all of them takes, as torch measured it once; 0 where it did not (torch 2.8)."""
    seconds: float = 0.0
    """Wall time of the whole compile."""
    seconds_in: dict[str, float] = field(default_factory=dict)
    """The same by stage, each without the next: ``dynamo``, ``aot`` (AOTAutograd, or another backend), ``inductor``,
    ``kernels`` (g++ or Triton)."""
    specialised: dict[str, str] = field(default_factory=dict)
    """Sizes that torch had kept open in this compile and the code made constants of, to ``file:line`` of that code."""
    resumed_at: int = 0
    """For a resume function the line of the graph break; else 0."""
    caches: tuple[str, ...] = ()
    """What the compile caches answered, in order: ``fx hit``, ``fx miss``, ``aot bypass``, ..."""
    cache_keys: tuple[str, ...] = ()
    """The key of the graph that each of these answers is about; empty where torch names none."""
    thread: str = ""
    """The name of the thread that compiled; empty where it is the one in which the observation began."""
    missed: tuple[str, ...] = ()
    """Settings that hold in that thread and not in this one: since torch 2.12 each thread has its own."""


@dataclass
class GraphBreak(LedgerRecord):
    """One place in user code where a graph ends early."""

    list_name = "graph_breaks"

    reason: str
    """Torch's headline, one line."""
    gb_id: str
    """``gb0025``; empty where torch names none (torch 2.8)."""
    file: str
    """Of the innermost user frame."""
    line: int
    hint: str = ""
    owner: str = "mine"
    """``mine`` (under the project's root), ``third_party`` or ``torch``."""
    function: str = ""
    whole_frame: bool = False
    """True where torch gave up a whole frame: all of :attr:`gave_up` ran eagerly."""
    explanation: str = ""
    link: str = ""
    during: str = ""
    compile_id: str = ""
    stack: tuple[str, ...] = ()
    """Traced frames, innermost first, like ``net.py:12 in forward``; torch's own are left out."""
    gave_up: str = ""
    """Name of the function that torch gave up because of it; it may be a caller of :attr:`function`."""

    @property
    def same_as(self) -> tuple[str, int, str]:
        """Breaks of one place are one: torch records a place again for each caller, retry and recompile."""
        return self.file, self.line, self.gb_id or self.reason


def part_of(function: str, resumed_at: int) -> str:
    """A function, or the rest of it behind a graph break.

    >>> part_of("Net.forward", 9)
    'the rest of Net.forward after line 9'
    """
    return f"the rest of {function} after line {resumed_at}" if resumed_at else function


@dataclass
class EagerFrame(FrameRecord):
    """A frame that ran eagerly though it was asked to compile."""

    list_name = "eager_frames"

    reason: str
    kind: str
    """``limit`` (recompile limit), ``suppressed`` (an error in compiling, hidden by suppress_errors),
    ``graph_break`` (a break that torch cannot resume from), ``disabled``, ``stance``, ``off`` (compiler is
    switched off), ``empty`` (nothing to compile in it), ``skipped`` (torch does not compile such code, and does not
    say so) or ``unknown`` (given up before the observation began)."""
    during: str = ""
    calls: int = 1
    """Calls seen to run eagerly for this reason."""
    resumed_at: int = 0
    """Where only the rest of the function behind a graph break was given up, the line of the break; else 0."""

    @property
    def same_as(self) -> tuple[str, str, int, str, int]:
        """Each function, and each rest of one, once for each kind; the first reason stays."""
        return self.function, self.file, self.line, self.kind, self.resumed_at

    @property
    def part(self) -> str:
        """What ran eagerly."""
        return part_of(self.function, self.resumed_at)

    def take_in(self, other: EagerFrame) -> None:
        """All calls count."""
        self.calls += other.calls


@dataclass(frozen=True)
class OverLimit:
    """A function, or the rest of one, that was compiled so often that torch runs it eagerly from then on."""

    function: str
    file: str
    line: int
    """First line of the function (one-based)."""
    guard: str
    """The guard that failed last, in torch's words; empty where the limit was hit before anybody looked."""
    what: str
    """What that guard compared; empty where it is not known."""
    at: str
    """``file:line`` of the code that the guard comes from; empty where it is not known."""
    advice: str
    """What to do about the recompiles."""
    resumed_at: int = 0
    """As :attr:`EagerFrame.resumed_at`."""

    def told(self, outside: float | None = None) -> str:
        """In a sentence.

        :param outside: the share of the model's operator calls that run eagerly in all, where that was measured.
        """
        why = ""
        if changed := self.what or self.guard:
            why = f" because of {changed}"
        if self.at:
            why += f" at {self.at.replace(chr(92), '/').rpartition('/')[2]}"
        share = "" if outside is None else f" ({outside:.0%} of the operator calls run eagerly in all)"
        return (f"{part_of(self.function, self.resumed_at)} ({self.file}:{self.resumed_at or self.line}) hit Dynamo's "
                f"recompile limit{why}, and runs eagerly from then on{share}: {self.advice}")

    def __str__(self) -> str:
        return self.told()


@dataclass
class CudagraphSkip(LedgerRecord):
    """A graph that was to become a CUDA graph and did not."""

    list_name = "cudagraph_skips"

    reason: str
    file: str = ""
    """Of the user's line that torch names; empty where it names none."""
    line: int = 0
    during: str = ""
    part: bool = False
    """There is a CUDA graph, but it holds only a part of the compiled graph."""

    @property
    def same_as(self) -> tuple[str, str, int]:
        """Each reason once for each place, however many graphs meet it."""
        return self.reason, self.file, self.line


@dataclass
class FailedCompile(FrameRecord):
    """A compile that raised to its caller."""

    list_name = "failures"

    compile_id: str
    type: str
    """Class name of the exception."""
    message: str
    during: str = ""


@dataclass
class Graph(LedgerRecord):
    """One graph that a backend compiled, and how often it ran."""

    list_name = "graphs"

    compile_id: str
    ops: int | None
    """Call nodes in the graph; None where it was compiled before the observation began."""
    runs: int = 0
    function: str = ""


@dataclass
class Text(LedgerRecord):
    """What one stage of one compile made, as text; kept only where :func:`observe` was asked for it."""

    list_name = "texts"

    compile_id: str
    stage: str
    """``dynamo``, ``joint``, ``forward``, ``backward``, ``post_grad``, ``code`` or ``kernel_lines``."""
    text: str
    during: str = ""


def whole_compiles(compiles: Iterable[Compile]) -> list[Compile]:
    """Each compile once: a backward that is compiled when it is first needed belongs to that of its forward.

    A backward alone stays, as of a forward that was compiled before the observation began.
    """
    compiles = list(compiles)
    forwards = {record.compile_id for record in compiles if record.kind != "backward"}
    return [record for record in compiles if record.kind != "backward" or record.compile_id not in forwards]


def compiled_unit(compiled: Mapping[str, Any]) -> tuple[Any, ...]:
    """What is compiled by itself, of a :class:`Compile` as a dict: a function, or the rest of one after a break."""
    return compiled["file"], compiled["line"], compiled["function"], compiled.get("resumed_at", 0)
