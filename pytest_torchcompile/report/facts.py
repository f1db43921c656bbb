"""Facts: what a cell of a report holds, as typed records, whatever its sections lack. No torch.

The schema says what a cell is, but leaves each section's inside to its check: one may be missing, be of another
version, or have been written by another tool. Here what cannot be read counts as not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, cached_property
from typing import Any, TypeVar

from pytest_torchcompile.ledger.ledger import Ledger
from pytest_torchcompile.ledger.records import Compile, EagerFrame, Graph, GraphBreak
from pytest_torchcompile.observation import Problem
from pytest_torchcompile.oracle.leaf_limits import Leaf
from pytest_torchcompile.wrappers.wrapping import lane_of

__all__ = ["Compared", "Facts", "Generated", "Kernel", "KernelTouch", "TouchedTensor", "Verdict", "as_number",
           "as_text", "read_objects", "read_record"]

T = TypeVar("T")


@dataclass
class Verdict:
    """What one check says of the cell."""

    check: str
    verdict: str
    problems: list[Problem]
    note: str = ""


@dataclass
class Kernel:
    """One generated kernel (:class:`pytest_torchcompile.gauges.kernels.Kernel`)."""

    name: str
    language: str
    ops: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    calls: int = 0


@dataclass
class TouchedTensor:
    """A tensor that a kernel reads or writes, or an intermediate that it keeps inside."""

    name: str = ""
    of: str = ""
    """The node of the graph whose result it is."""
    tensor: str = ""
    """``float32[4, 600]``"""
    bytes: float = 0


@dataclass
class KernelTouch:
    """What one call of a kernel touches (:func:`pytest_torchcompile.lowering.kernel_records.call_facts`)."""

    name: str
    kind: str = ""
    library: str = ""
    where: str = ""
    """Of one in a subgraph, which; empty for one of the graph itself."""
    counted: bool = True
    """Whether its bytes are part of a sum: those of a branch of ``torch.cond`` are those of its call."""
    operators: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    reads: list[TouchedTensor] = field(default_factory=list)
    writes: list[TouchedTensor] = field(default_factory=list)
    kept_inside: list[TouchedTensor] = field(default_factory=list)


@dataclass
class Generated:
    """What one run of one generated graph calls (:class:`pytest_torchcompile.gauges.kernels.Kernels`)."""

    compile_id: str
    stage: str
    library: dict[str, float] = field(default_factory=dict)
    fallbacks: dict[str, float] = field(default_factory=dict)
    generated: list[Kernel] = field(default_factory=list)
    calls: list[KernelTouch] = field(default_factory=list)
    """In order; empty in reports of earlier versions."""


@dataclass(frozen=True)
class Compared(Leaf):
    """One thing that eager and compiled were compared in, and in which call."""

    call: str = ""


class Facts:
    """One cell of a report's block ``compile_matrix``."""

    def __init__(self, cell: Mapping[str, Any]) -> None:
        self.cell = cell
        self.id: str = as_text(cell.get("id"))
        self.axes: dict[str, str] = {str(name): as_text(value) for name, value in as_mapping(cell.get("axes")).items()}
        self.status: str = as_text(cell.get("status"))
        self.observation = as_mapping(cell.get("observation"))
        self.sections = _mappings(self.observation.get("sections"))

    @property
    def lane(self) -> str:
        """A key of :data:`~pytest_torchcompile.wrappers.wrapping.LANES`: what the cell ran in."""
        # Not the report's own word for it, which reports of earlier versions lack.
        return lane_of(self.axes.get("wrapper", "none"))

    @cached_property
    def others(self) -> list[Facts]:
        """What the ranks after the first recorded, each as a cell that has been told nothing else."""
        return [Facts({"id": self.id, "observation": rank}) for rank in as_list(self.observation.get("ranks"))]

    @property
    def ranks(self) -> list[Mapping[str, Mapping[str, Any]]]:
        """The sections of each rank."""
        return [self.sections, *(rank.sections for rank in self.others)]

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """What each check says, in the order of the report."""
        verdicts = []
        for name, check in _mappings(self.cell.get("checks")).items():
            problems = read_objects(Problem, check.get("problems"))
            verdicts.append(Verdict(name, as_text(check.get("verdict")), problems, as_text(check.get("note"))))
        return verdicts

    @property
    def failed(self) -> list[Verdict]:
        """The checks that neither passed nor were skipped, and were not expected to fail."""
        return [verdict for verdict in self.verdicts if verdict.verdict not in ("pass", "skip", "xfail")]

    @property
    def note(self) -> str:
        """Why a cell without problems has the status it has: of a skip or an expected failure."""
        for verdict in self.verdicts:
            if verdict.note and verdict.verdict != "pass":
                return verdict.note
        return ""

    @cached_property
    def compiles(self) -> list[Compile]:
        """Every compile, in order."""
        return read_objects(Compile, self.section("compiles").get("compiles"))

    @property
    def recompiles(self) -> list[Compile]:
        """The compiles whose guards had failed before."""
        return [compiled for compiled in self.compiles if compiled.kind == "recompile"]

    @cached_property
    def graphs(self) -> list[Graph]:
        """Every graph that a backend compiled."""
        return read_objects(Graph, self.section("compiles").get("graphs"))

    @property
    def graph_runs(self) -> int:
        """How often they ran, all of them together."""
        return Ledger(graphs=self.graphs).graph_runs

    @cached_property
    def eager_frames(self) -> list[EagerFrame]:
        """Frames that ran eagerly though they were asked to compile."""
        return read_objects(EagerFrame, self.section("compiles").get("eager_frames"))

    @cached_property
    def graph_breaks(self) -> list[GraphBreak]:
        """Places in user code where a graph ended early; also empty where the check did not run."""
        return read_objects(GraphBreak, self.section("graph_breaks").get("graph_breaks"))

    @property
    def coverage(self) -> float | None:
        """The smallest share of operator calls that ran inside compiled graphs, of all calls."""
        smallest = None
        for call in as_list(self.section("compiles").get("coverage")):
            share = as_number(as_mapping(call).get("share"))
            if share is not None and (smallest is None or share < smallest):
                smallest = share
        return smallest

    @property
    def leaves(self) -> list[Compared]:
        """What was compared and not bitwise equal, of values and gradients; each in the call where it is worst."""
        worst: dict[str, Compared] = {}
        for section in self.compared.values():
            for leaf in read_objects(Compared, section.get("leaves")):
                # A section has its worst leaves first.
                worst.setdefault(leaf.name, leaf)
        return list(worst.values())

    @property
    def compared(self) -> dict[str, Mapping[str, Any]]:
        """The sections of checks that compare numbers (:mod:`pytest_torchcompile.checks.numerics`), by check."""
        return {name: section for name, section in self.sections.items() if "leaves" in section}

    @cached_property
    def generated(self) -> list[Generated]:
        """Generated kernels of each graph; empty where they were not recorded."""
        records = []
        for graph in map(as_mapping, as_list(self.section("kernels").get("graphs"))):
            record = read_record(Generated, graph)
            record.generated = read_objects(Kernel, graph.get("generated"))
            record.calls = list(map(_read_touch, map(as_mapping, as_list(graph.get("calls")))))
            records.append(record)
        return records

    @property
    def seconds(self) -> dict[str, float]:
        """Wall seconds by phase of the run."""
        return _finite_numbers(self.observation.get("seconds"))

    @property
    def total_seconds(self) -> float | None:
        """Wall seconds of the whole cell."""
        return as_number(self.cell.get("seconds"))

    @property
    def planned(self) -> Mapping[str, Any]:
        """What the matrix asked of it: rule, limits, checks; empty in reports of schema 1.0."""
        return as_mapping(self.cell.get("planned"))

    @property
    def reused(self) -> Mapping[str, Any] | None:
        """The earlier run that its result is of (``run``, ``commit``, ``changed``, ``age``); None: it was run."""
        return as_mapping(self.cell.get("reused")) or None

    @property
    def leaks(self) -> list[str]:
        """Torch settings that the cell changed, and that were put back."""
        return list(map(as_text, as_list(self.observation.get("leaks"))))

    def section(self, name: str) -> Mapping[str, Any]:
        """One section of the observation; empty where it was not measured."""
        return self.sections.get(name, {})


def read_objects(kind: type[T], given: Any) -> list[T]:
    """Records of a list of objects; what is no object is left out."""
    return [read_record(kind, each) for each in as_list(given) if isinstance(each, dict)]


def _read_touch(given: Mapping[str, Any]) -> KernelTouch:
    touch = read_record(KernelTouch, given)
    touch.reads = read_objects(TouchedTensor, given.get("reads"))
    touch.writes = read_objects(TouchedTensor, given.get("writes"))
    touch.kept_inside = read_objects(TouchedTensor, given.get("kept_inside"))
    return touch


def read_record(kind: type[T], given: Mapping[str, Any]) -> T:
    """Make a record of a dataclass whose fields are texts, numbers, lists of texts and objects of numbers.

    A field that is missing or of another type has its type's empty value; unknown keys are left out.
    """
    values: dict[str, Any] = {}
    # mypy does not take type[T] for hashable.
    hashable_kind: Any = kind
    for name, type_text, required in _fields_of(hashable_kind):
        if required or name in given:
            values[name] = _fit_to_type(given.get(name), type_text)
    return kind(**values)


@cache
def _fields_of(kind: Any) -> tuple[tuple[str, str, bool], ...]:
    """For each field its name, its type as it is written, and whether it has no default."""
    return tuple((f.name, str(f.type), f.default is f.default_factory is MISSING) for f in fields(kind))


def _fit_to_type(value: Any, type_text: str) -> Any:
    # Types are compared as texts: a report of 10,000 cells has a hundred thousand records, so this has to be quick.
    if type_text == "str":
        return as_text(value)
    if type_text == "bool":
        return value is True
    if type_text.startswith("tuple"):
        return tuple(map(as_text, as_list(value)))
    if type_text.startswith("dict"):
        return _finite_numbers(value)
    # A list of records is read by whoever knows their type.
    if type_text.startswith("list"):
        return []
    if "int" in type_text or "float" in type_text:
        return _fit_to_number(value, optional="None" in type_text)
    if type_text == "Scalar":
        return value if isinstance(value, (str, int, float)) else None
    return as_text(value)


def _fit_to_number(value: Any, *, optional: bool) -> float | None:
    # A report has NaN and infinities as texts, because JSON has no numbers for them.
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    number = as_number(value)
    if number is None and not optional:
        return 0
    return number


def as_mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def as_text(value: Any) -> str:
    """A value as text: nothing for null, ``true`` and ``false`` as in JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_number(value: Any) -> float | None:
    """The value if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        is_finite = math.isfinite(value)
    # A whole number that no float can hold.
    except OverflowError:
        return None
    return value if is_finite else None


def _mappings(value: Any) -> dict[str, Mapping[str, Any]]:
    """An object of objects; a member that is none counts as an empty one."""
    return {str(name): as_mapping(inner) for name, inner in as_mapping(value).items()}


def _finite_numbers(value: Any) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, inner in as_mapping(value).items():
        number = as_number(inner)
        if number is not None:
            numbers[str(name)] = number
    return numbers
