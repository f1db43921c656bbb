"""Outline: a comparison in sections, each line with cells, place and remedy; page, Markdown and JSON show it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from pytest_torchcompile.adoption.stale_rules import StaleRule
from pytest_torchcompile.checks import COMPARING, severity
from pytest_torchcompile.checks.severity import Effect, Severity
from pytest_torchcompile.errors import short_line
from pytest_torchcompile.gate.baseline import Change
from pytest_torchcompile.observation import portable_path
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.causes import check_effect
from pytest_torchcompile.report.code_changes import CodeChange, CodeChanges, CodeStore, pieces_in_words
from pytest_torchcompile.report.facts import Facts
from pytest_torchcompile.report.finding import EXIT_CODES
from pytest_torchcompile.report.merging import Merged
from pytest_torchcompile.report.metrics import METRICS
from pytest_torchcompile.upgrade.paired_reports import Figure, NewCause, UpgradeComparison

__all__ = ["SECTIONS", "Outline", "OutlineLine", "Section", "make_outline"]

SCHEMA_VERSION: Final = "1.0"
_SHOWN_LINES: Final = 4
_LONGEST: Final = 400
"""Characters of a line."""
_CHANGED_KERNELS: Final = 20
"""Pieces of code that are named; the others are counted."""


@dataclass(frozen=True)
class Section:
    """One section of the page."""

    title: str
    nothing: str
    """What stands there where it has no line."""
    fails: bool = True
    """Does a line in it make the exit code 1?"""


SECTIONS: Final[dict[str, Section]] = {
    "wrong": Section("Newly wrong", "no cell computes other numbers than before"),
    "failing": Section("Newly failing to compile", "what compiled compiles"),
    "eager": Section("Silently eager", "what ran compiled runs compiled"),
    "breaks": Section("Newly breaking graphs", "no new graph break"),
    "recompiles": Section("Newly recompiling", "no new recompile"),
    "other": Section("Other checks that fail", "no other check fails that held"),
    "gone": Section("Not run any more", "every cell that ran is run"),
    "compile_seconds": Section("Compile seconds", "no difference that every pair of runs has"),
    "run_time": Section("Run time", "no difference that every pair of runs has"),
    "memory": Section("Memory", "no difference that every pair of runs has"),
    "guards": Section("Guard cost", "no difference that every pair of runs has"),
    "code": Section("Changed kernels", "every kernel and graph is the same", fails=False),
    "wavers": Section("Not decided", "every check had one verdict with each version", fails=False),
    "better": Section("What got better", "nothing", fails=False),
}
"""In the order of the page: the worst first."""
_CHECKS_OF_SECTION: Final = {
    "wrong": ("equivalence", *COMPARING), "failing": ("compiles",), "eager": ("compiles",), "breaks": ("graph_breaks",),
    "recompiles": ("recompiles",),
}
"""Checks of which one at least has to have looked."""
_METRICS_OF_SECTION: Final = {"compile_seconds": ("compile_seconds", "compiles"), "run_time": ("step_ms", "worth"),
                              "memory": ("memory_mib", "worth"), "guards": ("guard_microseconds", "compiles")}
"""The metric of a section, and the check that measures it."""
_SECTION_OF_METRIC: Final = {"compile_seconds": "compile_seconds", "guard_microseconds": "guards",
                             "memory_mib": "memory"}
_SECTION_OF_SEVERITY: Final = {
    Severity.WRONG_NUMBERS: "wrong", Severity.CRASH: "failing", Severity.SILENTLY_EAGER: "eager",
}
_SECTION_OF_EFFECT: Final = {severity.BREAKS: "breaks", severity.RECOMPILES: "recompiles", severity.STALE: "better"}


@dataclass(frozen=True)
class OutlineLine:
    """One thing that is not as it was."""

    section: str
    text: str
    cells: tuple[str, ...] = ()
    check: str = ""
    """The check that fails; empty where none does."""
    place: str = ""
    """``file:line`` in the user's code."""
    remedy: str = ""
    first_bad: str = ""
    """What a bisection found, in words."""
    sure: bool = True
    """False: of times, whose noise can be guessed only; it is told, and never fails."""

    @property
    def fails(self) -> bool:
        """Does it make the exit code 1?"""
        return self.sure and SECTIONS[self.section].fails


@dataclass
class Outline:
    """One page."""

    package: str
    old: str
    new: str
    matrix: str
    cells: int
    runs: tuple[int, int]
    machine: str
    lines: list[OutlineLine] = field(default_factory=list)
    differences: list[tuple[str, str, str]] = field(default_factory=list)
    """What else differs between the environments: a name, and what it is in each; empty where it is not there."""
    notes: dict[str, str] = field(default_factory=dict)
    """Section to why nothing was looked at there; others were looked at."""
    code_summary: str = ""
    edit: str = ""
    """The command that takes out the rules that nothing needs any more; empty where there are none."""

    @property
    def title(self) -> str:
        """The package and its versions."""
        return f"{self.package} {self.old} to {self.new}"

    @property
    def code(self) -> int:
        """The exit code."""
        return EXIT_CODES["fail"] if any(line.fails for line in self.lines) else 0

    @property
    def sentence(self) -> str:
        """The answer."""
        worse = sum(line.fails for line in self.lines)
        better = len(self.lines_of("better"))
        what = f"{count(worse, 'thing is', 'things are')} worse" if worse else "nothing is worse"
        return (f"{self.title}: {what}, {better or 'nothing'} better, in {count(self.cells, 'cell')} of {self.matrix}")

    def lines_of(self, section: str) -> list[OutlineLine]:
        """Those of one section."""
        return [line for line in self.lines if line.section == section]

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        content = asdict(self)
        content["lines"] = [{**asdict(line), "fails": line.fails} for line in self.lines]
        return {"schema_version": SCHEMA_VERSION, "exit_code": self.code, "sentence": self.sentence, **content}


def make_outline(outline: Outline, found: UpgradeComparison, new_run: Merged, stale: Sequence[StaleRule],
                 store: CodeStore | None = None) -> Outline:
    """Fill in the lines.

    ``outline``: with what is known of the run; ``new_run``: the first of the new version; ``store``: has the texts of
    kernels, where they were kept.
    """
    lines = [*_lines_of_causes(found), *_lines_of_changes(found.changes, new_run), *_lines_of_figures(found.figures),
             *_lines_of_code(found, store), *_lines_of_wavers(found), *_lines_of_better(found, stale)]
    order = list(SECTIONS)
    # Stable: within a section the order in which they were found, which has the worst first.
    lines.sort(key=lambda line: order.index(line.section))
    return replace(outline, lines=lines, cells=found.cells, runs=found.runs, code_summary=pieces_in_words(found.code),
                   notes=dict(_unseen_sections(found, new_run)))


def _unseen_sections(found: UpgradeComparison, run: Merged) -> Iterator[tuple[str, str]]:
    """Where no line means nothing, because nothing was looked at."""
    checks: set[str] = set()
    for cell in run.cells.values():
        checks.update(cell["checks"])
    for section, wanted in _CHECKS_OF_SECTION.items():
        if checks.isdisjoint(wanted):
            yield section, f"not looked at: no cell has the check {wanted[0]}"
    for section, (metric, check) in _METRICS_OF_SECTION.items():
        if metric not in found.measured:
            yield section, f"not measured: no cell has {metric}, which the check {check} measures"
        elif found.figures_note:
            yield section, found.figures_note


# ---------------------------------------------------------------------------------------------------- what is worse now
def _lines_of_causes(found: UpgradeComparison) -> Iterator[OutlineLine]:
    for new in found.causes:
        section = _section_of_effect(new.cause.effect)
        # What passes unexpectedly is told with the rule that is to go.
        if section != "better":
            yield _line_of_cause(new, section)


def _section_of_effect(effect: Effect) -> str:
    if effect in _SECTION_OF_EFFECT:
        return _SECTION_OF_EFFECT[effect]
    return _SECTION_OF_SEVERITY.get(effect.severity, "other")


def _line_of_cause(new: NewCause, section: str) -> OutlineLine:
    cause = new.cause
    problem = cause.problem
    text = f"{first_names(cause.models)} {cause.effect.of(len(cause.models))}: {problem.message}"
    return OutlineLine(section, short_line(text, _LONGEST), new.cells, cause.checks[0], _portable_place(problem.place),
                       short_line(problem.hint.partition("\n")[0], _LONGEST))


def _lines_of_changes(changes: Sequence[Change], run: Merged) -> Iterator[OutlineLine]:
    for change in changes:
        place = f"{change.file}:{change.line}" if change.file else ""
        if change.kind == "graph_breaks":
            yield OutlineLine("breaks", f"graph break: {change.about}", change.cells, "graph_breaks", place,
                              _hint_at(change, run))
        elif change.kind == "recompiles":
            yield OutlineLine("recompiles", f"recompile of {change.about}", change.cells, "recompiles", place,
                              _hint_at(change, run))
        elif change.kind == "gone":
            yield OutlineLine("gone", f"{count(len(change.cells), 'cell')} not run: {first_names(change.cells)}",
                              change.cells)
        else:
            # A check that fails without a problem that says why.
            section = _section_of_effect(check_effect(change.check))
            yield OutlineLine(section, f"{change.check} held and fails now", change.cells, change.check)


def _hint_at(change: Change, run: Merged) -> str:
    """What the ledger would try there."""
    section = {"graph_breaks": "graph_breaks", "recompiles": "recompiles"}[change.kind]
    key = {"graph_breaks": "hint", "recompiles": "advice"}[change.kind]
    for cell in change.cells:
        for record in Facts(run.cells[cell]).section(section).get(section) or ():
            if (portable_path(str(record.get("file"))), record.get("line")) == (change.file, change.line):
                return short_line(str(record.get(key) or "").partition("\n")[0], _LONGEST)
    return ""


def _lines_of_figures(figures: Sequence[Figure]) -> Iterator[OutlineLine]:
    for figure in figures:
        section = "better" if figure.better else _SECTION_OF_METRIC.get(figure.metric, "run_time")
        yield OutlineLine(section, _figure_in_words(figure), figure.cells, sure=False)


def _figure_in_words(figure: Figure) -> str:
    metric = METRICS[figure.metric]
    if len(figure.cells) > 1:
        now = ", ".join(f"{value:.2f}" for value in figure.new)
        then = ", ".join(f"{value:.2f}" for value in figure.old)
        return (f"{metric.help}: the median of {count(len(figure.cells), 'cell')} is {now} times that of the first old "
                f"run, and in the old runs {then}")
    then = ", ".join(f"{value:.3g}" for value in figure.old)
    now = ", ".join(f"{value:.3g}" for value in figure.new)
    return f"{figure.cells[0]}: {metric.help}: was {then}{metric.unit}, is {now}{metric.unit}"


def _lines_of_code(found: UpgradeComparison, store: CodeStore | None) -> Iterator[OutlineLine]:
    kernels = []
    alike: dict[tuple[str, ...], list[CodeChange]] = {}
    for change in found.code.changes:
        difference = _changed_lines(change, store)
        if change.kind == "kernel" and difference:
            # One edit of the code generator changes hundreds of kernels alike: that is one line of news.
            alike.setdefault(difference, []).append(change)
        elif change.kind == "kernel":
            kernels.append(change)
    for difference, same in alike.items():
        names = first_names(change.name for change in same)
        more = f" and {count(len(difference) - _SHOWN_LINES, 'more line')}" if len(difference) > _SHOWN_LINES else ""
        lines = " · ".join(difference[:_SHOWN_LINES])
        places = _places_of(same)
        how = "changed by the same lines" if places > 1 else "changed"
        yield OutlineLine("code", f"{count(places, 'kernel')} {how} ({names}): {lines}{more}", _cells_of(same))
    for change in kernels[:_CHANGED_KERNELS]:
        times = f", {change.places} times" if change.places > 1 else ""
        yield OutlineLine("code", f"{change.happened} {change.kind} {change.name}{times}", change.cells)
    left = kernels[_CHANGED_KERNELS:]
    if left:
        yield OutlineLine("code", f"and {count(_places_of(left), 'more kernel')}", _cells_of(left))
    # A kernel changes with its graph, so graphs are one line behind the kernels.
    graphs = [change for change in found.code.changes if change.kind == "graph"]
    if graphs:
        yield OutlineLine("code", _graphs_in_words(found.code), _cells_of(graphs))
    if found.code_wavers:
        yield OutlineLine("wavers", "code that is not the same in two runs of one version", found.code_wavers)


def _graphs_in_words(code: CodeChanges) -> str:
    """So that they add up to the summary: changed and new ones of the new version's graphs, gone ones of the old's."""
    changed, new, gone = (code.places("graph", happened) for happened in ("changed", "new", "gone"))
    words = []
    if changed:
        words.append(count(changed, "graph that calls kernels or is captured otherwise",
                           "graphs that call kernels or are captured otherwise"))
    if new:
        words.append(count(new, "new graph"))
    if gone:
        words.append(count(gone, "graph that is gone", "graphs that are gone"))
    return ", ".join(words)


def _places_of(changes: Sequence[CodeChange]) -> int:
    return sum(change.places for change in changes)


def _changed_lines(change: CodeChange, store: CodeStore | None) -> tuple[str, ...]:
    """The lines that came and went, each once, in their order; none where a text was not kept or nothing was there."""
    if store is None or not change.old or not change.new:
        return ()
    old, new = store.read(change.old), store.read(change.new)
    if old is None or new is None:
        return ()
    found: dict[str, None] = {}
    for line in difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0):
        # The types of a kernel's arguments, a list in its first line, are there again in the head of its function.
        if line[:3] not in ("---", "+++") and line[:2] != "@@" and line[1:2] != "[":
            found[f"{line[0]} {line[1:].strip()}"] = None
    return tuple(found)


def _cells_of(changes: Sequence[CodeChange]) -> tuple[str, ...]:
    cells: dict[str, None] = {}
    for change in changes:
        cells.update(dict.fromkeys(change.cells))
    return tuple(cells)


def _lines_of_wavers(found: UpgradeComparison) -> Iterator[OutlineLine]:
    """One line for each check and way in which it wavers, and one for cells that were judged at times."""
    if found.ended_early:
        yield OutlineLine("wavers", "came to no verdict with the old version, so nothing of them is better",
                          found.ended_early)
    if found.partly:
        yield OutlineLine("wavers", "judged in some runs of one version, and not in others of it", found.partly)
    alike: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for waver in found.wavers:
        alike.setdefault((waver.check, waver.old, waver.new), []).append(waver.cell)
    for (check, old, new), cells in alike.items():
        yield OutlineLine("wavers", f"{check}: {', '.join(old)} with the old version, {', '.join(new)} with the new "
                                    "one: a flake, or a race", tuple(cells), check)


# -------------------------------------------------------------------------------------------------- what is better now
def _lines_of_better(found: UpgradeComparison, stale: Sequence[StaleRule]) -> Iterator[OutlineLine]:
    for rule in stale:
        what = {"xfail": "an expected failure", "limits": "limits"}[rule.verb]
        yield OutlineLine("better", f"{what} that nothing needs any more: {rule.reason or 'no reason given'}",
                          rule.cells, place=rule.where, remedy="take the rule out")
    for change in found.better:
        place = f"{change.file}:{change.line}" if change.file else ""
        if change.kind == "failures":
            yield OutlineLine("better", f"{change.check} failed and holds now", change.cells, change.check)
        elif change.kind == "graph_breaks":
            yield OutlineLine("better", f"no graph break any more: {change.about}", change.cells, place=place)
        elif change.kind == "recompiles":
            yield OutlineLine("better", f"fewer recompiles of {change.about}", change.cells, place=place)
        elif change.kind == "gone":
            yield OutlineLine("better", "could not be run, and runs now", change.cells)
    covered: set[str] = set()
    for rule in stale:
        covered.update(rule.cells)
    for new in found.causes:
        if _section_of_effect(new.cause.effect) == "better" and not covered.issuperset(new.cells):
            yield _line_of_cause(new, "better")


def _portable_place(place: str) -> str:
    """Without the folder of an environment."""
    file, colon, line = place.rpartition(":")
    if not colon:
        return place
    return f"{portable_path(file)}:{line}"


def environment_differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Every package that is not in both at the same version."""
    differences = []
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            differences.append((name, old.get(name, ""), new.get(name, "")))
    return differences
