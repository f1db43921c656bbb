"""The command ``pytest-torchcompile accept``: what a run found becomes limits and expected failures.

What cells need becomes rules of a matrix, one for all that need the same. They are added behind those that are there;
every other character of the file stays, comments too.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from pytest_torchcompile.adoption.acceptance import CellNeeds, Left, Need, needs_of_cell
from pytest_torchcompile.adoption.next_steps import excuse_text, text_after_accept
from pytest_torchcompile.adoption.stale_rules import find_stale_rules, without_stale_rules
from pytest_torchcompile.cell import Scalar
from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.errors import ReportError, UsageError, nearest
from pytest_torchcompile.plan.matrix import Matrix, PlannedCell, load_matrix, parse_matrix
from pytest_torchcompile.plan.matrix_path import DEFAULT, find_matrix, is_of_model, is_shipped
from pytest_torchcompile.plan.nodes import compose, offsets_of_entry, scalar_text
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.merging import Merged, merge_reports
from pytest_torchcompile.report.reading import model_report_hint, read_report
from pytest_torchcompile.report.record import GATES
from pytest_torchcompile.report.safe_output import OUR_COMMENT, REPORT_FILE, harmless_text, replace_file

__all__ = ["AcceptedRule", "add_rules", "rules_of", "rules_text", "run_command"]


@dataclass(frozen=True)
class AcceptedRule:
    """One rule, and the cells that it is for."""

    need: Need
    select: dict[str, tuple[Scalar, ...]]
    cells: tuple[str, ...]

    @property
    def fields(self) -> list[tuple[str, str]]:
        """Keys and values, as YAML in one line each."""
        fields = [("xfail", _mapping(self.select))]
        if self.need.limits:
            limits = ", ".join(f"{name}: {value}" for name, value in self.need.limits)
            fields = [("limits", f"{{{limits}}}"), ("when", _mapping(self.select))]
        if self.need.checks:
            fields.append(("checks", f"[{', '.join(self.need.checks)}]"))
        fields.append(("reason", json.dumps(self.need.reason, ensure_ascii=False)))
        if self.need.issue:
            fields.append(("issue", self.need.issue))
        return fields


def rules_of(needs: Iterable[CellNeeds], universe: Sequence[PlannedCell]) -> list[AcceptedRule]:
    """The rules for all needs, by category. ``universe``: all cells of the matrix, so that no rule takes in another."""
    together: dict[tuple[Any, ...], list[tuple[PlannedCell, Need]]] = {}
    for of_cell in needs:
        for need in of_cell.needs:
            key = (need.same_as, of_cell.planned.cell.model)
            together.setdefault(key, []).append((of_cell.planned, need))
    rules = []
    for pairs in together.values():
        need = pairs[0][1]
        cells = [planned for planned, _ in pairs]
        for select, part in _selectors(cells, universe):
            rules.append(AcceptedRule(need, select, tuple(planned.cell.id for planned in part)))
    # Stable: within a category in the order of the cells.
    categories = list(dict.fromkeys(rule.need.category for rule in rules))
    return sorted(rules, key=lambda rule: categories.index(rule.need.category))


def _selectors(cells: Sequence[PlannedCell],
               universe: Sequence[PlannedCell]) -> list[tuple[dict[str, tuple[Scalar, ...]], list[PlannedCell]]]:
    """Conditions that together match exactly these cells of the universe, as few as a split axis by axis makes."""
    select = _selector(cells, universe)
    matched = [planned for planned in universe if _matches(planned, select)]
    ids = {planned.cell.id for planned in cells}
    # What is skipped, or expected to fail by a rule before, is not touched by one more.
    others = [planned for planned in matched if planned.cell.id not in ids and planned.outcome == "run"]
    if not others:
        return [(select, list(cells))]
    axis = _axis_to_split(cells)
    result = []
    for value in _values_of(axis, cells):
        part = [planned for planned in cells if planned.cell.axes.get(axis) == value]
        result += _selectors(part, universe)
    return result


def _selector(cells: Sequence[PlannedCell], universe: Sequence[PlannedCell]) -> dict[str, tuple[Scalar, ...]]:
    """The values that the cells have, of those axes in which they do not have all values of their models."""
    models = set(_values_of("model", cells))
    kin = [planned for planned in universe if planned.cell.model in models]
    select = {"model": _values_of("model", cells)}
    for axis in cells[0].cell.axes:
        values = _values_of(axis, cells)
        if axis != "model" and len(values) < len(_values_of(axis, kin)):
            select[axis] = values
    return select


def _axis_to_split(cells: Sequence[PlannedCell]) -> str:
    """The axis with the fewest values above one."""
    counts = {axis: len(_values_of(axis, cells)) for axis in cells[0].cell.axes}
    return min((axis for axis, count in counts.items() if count > 1), key=counts.__getitem__)


def _values_of(axis: str, cells: Sequence[PlannedCell]) -> tuple[Scalar, ...]:
    return tuple(dict.fromkeys(planned.cell.axes[axis] for planned in cells if axis in planned.cell.axes))


def _matches(planned: PlannedCell, select: dict[str, tuple[Scalar, ...]]) -> bool:
    return all(planned.cell.axes.get(axis) in values for axis, values in select.items())


def _mapping(select: dict[str, tuple[Scalar, ...]]) -> str:
    words = []
    for axis, values in select.items():
        texts = [scalar_text(value) for value in values]
        text = texts[0]
        if len(texts) > 1:
            text = f"[{', '.join(texts)}]"
        words.append(f"{axis}: {text}")
    return f"{{{', '.join(words)}}}"


# ------------------------------------------------------------------------------------------------------------- the edit
def add_rules(text: str, rules: Sequence[AcceptedRule], shown: str) -> str:
    """The text of a matrix with the rules added.

    Raises :class:`UsageError`, with the rules to add by hand, where the whole file is written in braces.
    """
    root = compose(text.encode(), shown)
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise UsageError(f"{shown}: not edited: all of it is written in braces; add by hand:\n{rules_text(rules, 2)}")
    section = next((value for key, value in root.value if key.value == "rules"), None)
    if section is None:
        before, ours = _split_our_line(text if text.endswith("\n") else f"{text}\n")
        return f"{before}\nrules:\n{rules_text(rules, 2)}{ours}"
    start, end = section.start_mark.index, section.end_mark.index
    if not section.value:
        # An empty list, in brackets.
        return f"{text[:start].rstrip(' ')}\n{rules_text(rules, 2).rstrip()}{text[end:]}"
    if section.flow_style:
        last = section.value[-1].end_mark.index
        return text[:last] + "".join(f", {_in_braces(rule)}" for rule in rules) + text[last:]
    dash = text.rindex("-", 0, section.value[-1].start_mark.index)
    indent = dash - (text.rfind("\n", 0, dash) + 1)
    _, behind = offsets_of_entry(section.value[-1], text)
    before = text[:behind]
    if not before.endswith("\n"):
        before += "\n"
    return before + rules_text(rules, indent) + text[behind:]


def _split_our_line(text: str) -> tuple[str, str]:
    """The text, and the line at its end by which a file of ours is known, if there is one."""
    start = text.rstrip("\n").rfind("\n") + 1
    if text.startswith(OUR_COMMENT, start):
        return text[:start], text[start:]
    return text, ""


def rules_text(rules: Sequence[AcceptedRule], indent: int) -> str:
    """The rules as a block, each category with a comment above."""
    blank = " " * indent
    lines = []
    category = ""
    for rule in rules:
        if rule.need.category != category:
            category = rule.need.category
            lines.append(f"{blank}# {category}")
        (verb, value), *others = rule.fields
        lines.append(f"{blank}- {verb}: {value}")
        lines += [f"{blank}  {key}: {text}" for key, text in others]
    return "\n".join([*lines, ""])


def _in_braces(rule: AcceptedRule) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in rule.fields) + "}"


# ---------------------------------------------------------------------------------------------------------- the command
def run_command(given: argparse.Namespace) -> int:
    """Edit the matrix, and print the edit as a diff. Returns 0, or 1 where something is left that is not green.

    Raises :class:`ReportError` for reports that can't be read or are of an earlier run, and :class:`UsageError` for a
    matrix that is no file of the user's, and for wrong numbers that are named and are none.
    """
    paths = given.reports or [REPORT_FILE]
    run = _read_run(paths)
    matrix, shown = _matrix_of(run, Path(paths[0]))
    named = _named_checks(given.wrong_numbers, run)
    if given.since is not None:
        return _take_out_rules(merge_reports([read_report(given.since)]), run, matrix, shown, dry=given.dry_run)
    # Not refused: to edit a rule and to accept the rest of the same run is the usual way.
    if matrix.sha256 != run.matrix["sha256"]:
        print(f"{shown} was edited since that run: its cells are judged again by its rules as they are now")
    needs = _needs_of_cells(run, matrix, named)
    rules = rules_of(needs, matrix.cells)
    left = []
    for of_cell in needs:
        left.extend(of_cell.left)
    if rules:
        _write_rules(rules, needs, matrix, shown, dry=given.dry_run)
    else:
        print(f"{shown}: nothing to accept" + ("" if left else f": {count(len(needs), 'cell')} as expected"))
    _print_left(left)
    if rules and not given.dry_run:
        print(text_after_accept(shown))
    if missing := _cells_not_run(run, matrix):
        were = count(len(missing), "cell of the matrix was", "cells of the matrix were")
        print(harmless_text(f"\n{were} not run: {first_names(missing)}: run the whole matrix, then accept again"))
    return 1 if left else 0


def _take_out_rules(old: Merged, run: Merged, matrix: Matrix, shown: str, *, dry: bool) -> int:
    """Take out what the earlier run needed and this one does not; returns 0."""
    text = matrix.path.read_bytes().decode("utf-8-sig")
    stale = find_stale_rules(text, matrix, shown, old, run)
    if not stale:
        print(f"{shown}: every rule that the earlier run needed is needed still")
        return 0
    edited = without_stale_rules(text, matrix, shown, old, run)
    if not dry:
        replace_file(matrix.path, edited)
    print(f"{shown}: {count(len(stale), 'rule')} {'would be ' if dry else ''}taken out\n")
    _print_difference(text, edited, shown)
    return 0


def _print_difference(text: str, edited: str, shown: str) -> None:
    for line in difflib.unified_diff(text.splitlines(), edited.splitlines(), shown, shown, lineterm=""):
        print(harmless_text(line))


def _cells_not_run(run: Merged, matrix: Matrix) -> list[str]:
    """Cells of the matrix as it is now that no report has; those that an edit has removed are not asked for."""
    missing = []
    for planned in matrix.cells:
        cell = run.cells.get(planned.cell.id)
        if cell is None or not cell["selected"]:
            missing.append(planned.cell.id)
    return missing


def _read_run(paths: Sequence[str]) -> Merged:
    if paths == [REPORT_FILE] and not Path(REPORT_FILE).is_file():
        raise ReportError(f"{REPORT_FILE}: there is no report here; run `pytest --compile-matrix` first, or name one"
                          f"{model_report_hint()}")
    reports = [read_report(path) for path in paths]
    for report in reports:
        if report.later_run:
            raise ReportError(f"{report.name}: is of an earlier run; a later one began and left no report: run the "
                              "matrix again")
    return merge_reports(reports)


def _matrix_of(run: Merged, report: Path) -> tuple[Matrix, str]:
    """The matrix of the run as it is now, and its name."""
    shown: str = run.matrix["path"]
    if not shown:
        raise UsageError(f"{report}: is of a run without a matrix, so there is no file to edit")
    if is_of_model(shown):
        target = shown.partition(":")[2].replace(",", " --inputs ")
        raise UsageError(f"{report}: is of a run without a matrix file; `pytest-torchcompile init {target}` writes "
                         "one, then run that and accept")
    if is_shipped(shown):
        raise UsageError(f"{report}: is of {shown}, which comes with the package and is not edited; write its models "
                         f"to a file of your own, such as {DEFAULT}")
    # The run was started here, or in the folder that holds the report's own.
    path = find_matrix(shown, (Path.cwd(), report.absolute().parent.parent))
    return load_matrix(path, shown=shown), shown


def _named_checks(texts: Sequence[str], run: Merged) -> dict[str, set[str]]:
    """Cell to the checks whose wrong numbers are accepted."""
    named: dict[str, set[str]] = {}
    for text in texts:
        cell, _, check = text.rpartition(":")
        cell = cell.removesuffix(":")
        if cell not in run.cells:
            raise UsageError(f"--wrong-numbers {text}: the report has no cell {cell!r}; {nearest(cell, run.cells)}")
        if check not in CHECKS:
            raise UsageError(f"--wrong-numbers {text}: {check!r} is no check; {nearest(check, CHECKS)}")
        named.setdefault(cell, set()).add(check)
    return named


def _needs_of_cells(run: Merged, matrix: Matrix, named: Mapping[str, set[str]]) -> list[CellNeeds]:
    """What each cell needs that both the report and the matrix have."""
    planned = {each.cell.id: each for each in matrix.cells}
    needs = []
    for name, cell in run.cells.items():
        if name not in planned:
            print(harmless_text(f"{name}: is no cell of the matrix any more; left out"))
            continue
        needs.append(needs_of_cell(cell, planned[name], named.get(name, set())))
    return needs


def _write_rules(rules: Sequence[AcceptedRule], needs: Sequence[CellNeeds], matrix: Matrix, shown: str, *,
                 dry: bool) -> None:
    # The marks of YAML count characters, without a byte order mark.
    text = matrix.path.read_bytes().decode("utf-8-sig")
    edited = add_rules(text, rules, shown)
    _check_edited(edited, rules, needs, matrix, shown)
    if not dry:
        replace_file(matrix.path, edited)
    categories = Counter(rule.need.category for rule in rules)
    # A cell may need several rules.
    cells: set[str] = set()
    for rule in rules:
        cells.update(rule.cells)
    listed = ", ".join(f"{category}: {number}" for category, number in categories.items())
    print(f"{shown}: {count(len(rules), 'rule')} {'would be ' if dry else ''}added for {count(len(cells), 'cell')} "
          f"({listed})\n")
    _print_difference(text, edited, shown)
    gates: set[str] = set(GATES) & set(matrix.checks)
    blocking = [rule for rule in rules if _keeps_gate_from_passing(rule.need, gates)]
    if blocking:
        excuse = excuse_text((dict(rule.fields) for rule in blocking), date.today())
        print("\na cell that is expected to fail keeps `pytest-torchcompile gate` from passing: "
              f"{', '.join(sorted(gates))} must pass there. In place of its rule, `exclude` the cell; or excuse it in "
              f"a policy, which leaves pytest red and lets the gate pass:\n{excuse}")


def _keeps_gate_from_passing(need: Need, gates: set[str]) -> bool:
    """Whether a gate that the matrix runs is among what is expected to fail."""
    expected = set(need.checks) or gates
    return not need.limits and not gates.isdisjoint(expected)


def _check_edited(text: str, rules: Sequence[AcceptedRule], needs: Sequence[CellNeeds], matrix: Matrix,
                  shown: str) -> None:
    """A text edit that went wrong must not reach the file: every cell has its limits, and no other cell is touched."""
    try:
        # Parsed as any other matrix, so that no rule of this file's own decides whether the edit is right.
        edited = parse_matrix(text.encode(), matrix.path, matrix.root, shown=shown)
    except UsageError as error:
        raise _too_unusual(shown, rules, str(error)) from None
    planned = {each.cell.id: each for each in edited.cells}
    before = {each.cell.id: each for each in matrix.cells}
    if planned.keys() != before.keys():
        raise _too_unusual(shown, rules, "other cells came of it")
    wanted = {each.planned.cell.id: each.needs for each in needs}
    for name, old in before.items():
        limits = dict(old.limits)
        outcome = old.outcome
        for need in wanted.get(name, ()):
            limits |= dict(need.limits)
            if not need.limits:
                outcome = "xfail"
        # A limit beside one that is skipped, or expected to fail, changes nothing.
        if old.outcome == "run" and (planned[name].limits, planned[name].outcome) != (limits, outcome):
            raise _too_unusual(shown, rules, f"{name} has not what it needs")


def _too_unusual(shown: str, rules: Sequence[AcceptedRule], why: str) -> UsageError:
    return UsageError(f"{shown}: not edited: its form is too unusual ({why}); add by hand, below `rules:`:\n"
                      f"{rules_text(rules, 2)}")


def _print_left(left: Sequence[Left]) -> None:
    """What is not green, each with the reason why nothing was written for it."""
    if not left:
        return
    print(f"\n{count(len(left), 'verdict is left as it is', 'verdicts are left as they are')}:")
    by_reason: dict[str, list[Left]] = {}
    for each in left:
        by_reason.setdefault(each.why, []).append(each)
    for why, alike in by_reason.items():
        who = f"{alike[0].cell}::{alike[0].check}"
        if len(alike) > 1:
            cells = dict.fromkeys(each.cell for each in alike)
            who = f"{count(len(alike), 'verdict')} of {first_names(cells)}"
        print(harmless_text(f"  {who}: {why}"))
