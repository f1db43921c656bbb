"""Matrix: a YAML file to the cells that are run, with ``file:line:column`` for every mistake."""

from __future__ import annotations

import datetime
import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import yaml

from pytest_torchcompile.cell import Scalar
from pytest_torchcompile.checks import CHECKS, default_limits
from pytest_torchcompile.plan.axes import Axes, read_axes
from pytest_torchcompile.plan.expansion import MAX_CELLS, Excluded, Expansion, PlannedCell, count_combinations, expand
from pytest_torchcompile.plan.matrix_path import is_shipped, shipped_path
from pytest_torchcompile.plan.models import ModelEntry, read_models
from pytest_torchcompile.plan.nodes import compose, describe_node, read_bytes
from pytest_torchcompile.plan.reader import Reader
from pytest_torchcompile.plan.rules import OUTCOMES, Rule, read_checks, read_rules
from pytest_torchcompile.plan.strategy import Strategy, choose, read_strategy
from pytest_torchcompile.plan.targets import Targets

__all__ = ["KEYS", "VERSION", "Excluded", "Matrix", "ModelEntry", "PlannedCell", "find_root", "load_matrix"]

VERSION: Final = 1
KEYS: Final = {
    "version": f"version of this format: {VERSION}",
    "models": "name to the model under test",
    "axes": "axis to the values it takes; one that the package does not know is handed to the factories",
    "rules": "what is excluded, skipped, known to fail, and which limits hold",
    "strategy": "full, pairwise, {pairwise: {strength: 3}} or {sample: {n: 200, seed: 1}}",
    "checks": "the checks of every cell; default: all",
    "autotune_choices": "candidates that autotuning may try for each kernel; 0: all of torch's",
    "fuzz_seconds": "seconds that fuzzing one cell may take, unless --compile-fuzz-seconds says so",
}
AUTOTUNE_CHOICES: Final = 8
"""Enough to choose from, and few enough for a run of many cells."""
_RANKS: Final = {"run": 0, "xfail": 1, "skip": 2}
MARKS: Final = ("pyproject.toml", "pytest.ini", "tox.ini", "setup.cfg", ".git")


@dataclass(frozen=True)
class Matrix:
    """What a matrix file says, expanded."""

    path: Path
    root: Path
    """The folder that factories are looked up from."""
    sha256: str
    """Of the file's bytes."""
    models: dict[str, ModelEntry]
    checks: tuple[str, ...]
    cells: tuple[PlannedCell, ...]
    """The cells that are run or skipped, in the order of the axes."""
    excluded: tuple[Excluded, ...]
    strategy: Strategy
    left_out: int = 0
    """Cells that only the strategy left out."""
    notes: tuple[str, ...] = ()
    """What the reader of a report should know: expired rules."""
    autotune_choices: int = AUTOTUNE_CHOICES
    """Candidates that autotuning may try for each kernel; 0: as many as torch wants."""
    fuzz_seconds: float | None = None
    """Seconds that fuzzing one cell may take; None: the matrix does not say."""

    def checks_of(self, planned: PlannedCell, asked: Sequence[str] = ()) -> list[str]:
        """The checks that have something to judge in the cell: of those a run asks for, else of the matrix' own.

        Causes are judged before what follows from them, whichever of them a rule has added.
        """
        wanted = asked or (*self.checks, *planned.also)
        return [name for name in CHECKS if name in wanted and CHECKS[name].applies(planned.cell.axes)]


def load_matrix(path: str | Path, root: str | Path | None = None, *, shown: str | None = None,
                today: datetime.date | None = None) -> Matrix:
    """Read and expand a matrix file, or a shipped matrix: ``shipped:smoke``.

    ``root``: where factories are looked up; default :func:`find_root`. ``shown``: the path as error texts
    name it; default as given. ``today``: decides which xfails have expired.
    Raises :class:`~pytest_torchcompile.errors.UsageError` for a matrix that is not shipped, and
    :class:`~pytest_torchcompile.errors.MatrixError` with a line for each mistake, in the file's order.
    """
    shown = str(path) if shown is None else shown
    if is_shipped(str(path)):
        path = shipped_path(str(path))
    path = Path(os.path.abspath(path))  # without `..`, as pytest has paths
    data = read_bytes(path, shown)
    node = compose(data, shown)
    # A shipped matrix is read as if it lay in the user's own folder `matrix`.
    place = Path.cwd() / "matrix" / path.name if is_shipped(shown) else path
    root = find_root(place) if root is None else Path(root).absolute()
    reader = Reader(shown)
    sections = _read(reader, node, Targets(root))
    reader.finish()
    expansion, notes = _expand(reader, node, sections, today or datetime.date.today())
    reader.finish()
    chosen = choose(sections.strategy, expansion.rows, [each.cell.id for each in expansion.planned],
                    [_RANKS[each.outcome] for each in expansion.planned])
    return Matrix(
        path, root, hashlib.sha256(data).hexdigest(), sections.models, sections.checks,
        cells=tuple(expansion.planned[k] for k in chosen),
        excluded=tuple(expansion.excluded),
        strategy=sections.strategy,
        left_out=len(expansion.planned) - len(chosen),
        notes=tuple(notes),
        autotune_choices=sections.autotune_choices,
        fuzz_seconds=sections.fuzz_seconds,
    )


def find_root(path: Path) -> Path:
    """Return the project's folder for a matrix file.

    The nearest parent with a project file, else the parent of a folder called ``matrix``, else the file's
    own folder.
    """
    for folder in path.parents:
        if any((folder / mark).exists() for mark in MARKS):
            return folder
    return path.parent.parent if path.parent.name == "matrix" else path.parent


@dataclass(frozen=True)
class _Sections:
    """The file, read."""

    models: dict[str, ModelEntry]
    axes: Axes
    axes_of: dict[str, Axes]
    """Model to the values that its cells take."""
    checks: tuple[str, ...]
    rules: list[tuple[Rule, yaml.Node]]
    strategy: Strategy
    autotune_choices: int
    fuzz_seconds: float | None


def _read(reader: Reader, node: yaml.Node, targets: Targets) -> _Sections:
    found = reader.fields(node, "the matrix", KEYS, ("version", "models"))
    if "version" in found:
        version = found["version"]
        if not isinstance(version, yaml.ScalarNode) or version.value != str(VERSION) or version.style:
            text = f"version: found {describe_node(version)}, expected {VERSION}, the only one that is read here"
            reader.wrong(version, text)
    models, own = read_models(reader, found["models"], targets) if "models" in found else ({}, {})
    axes, axes_of = read_axes(reader, found.get("axes"), models, own, targets)
    consistent = not reader.mistakes  # else a rule that names what is misspelt above would be blamed as well
    checks = read_checks(reader, found.get("checks"))
    rules = read_rules(reader, found.get("rules"), axes if consistent else None, checks)
    choices = reader.integer(found["autotune_choices"], "autotune_choices") if "autotune_choices" in found else None
    seconds = None
    if "fuzz_seconds" in found:
        seconds = reader.number(found["fuzz_seconds"], "fuzz_seconds", whole=False, least=1)
    return _Sections(models, axes, axes_of, checks, rules, read_strategy(reader, found.get("strategy")),
                     AUTOTUNE_CHOICES if choices is None else choices, seconds)


def _expand(reader: Reader, node: yaml.Node, sections: _Sections,
            today: datetime.date) -> tuple[Expansion, list[str]]:
    """Expand; note rules without effect, cells that share an id, and that no cell is left."""
    total = count_combinations(sections.axes_of)
    if total > MAX_CELLS:
        reader.wrong(node, f"the axes multiply to {total:,} cells, more than {MAX_CELLS:,}; take values out")
        reader.finish()
    rules = [rule for rule, _ in sections.rules]
    expired = frozenset(k for k, rule in enumerate(rules) if rule.expired(today))
    torch = torch_version()
    elsewhere = frozenset(k for k, rule in enumerate(rules) if not rule.is_for(torch))
    expansion = expand(sections.axes, sections.axes_of, rules, expired, default_limits(sections.checks), elsewhere)
    for k, (rule, place) in enumerate(sections.rules):
        if not expansion.matches[k]:
            cells = "cell" if rule.verb in OUTCOMES else "cell that is left"
            reader.wrong(place, f"this {rule.verb} rule matches no {cells}: {_selector(rule)}; "
                                f"remove it, or correct a value")
        elif not expansion.hits[k]:
            reader.wrong(place, f"this {rule.verb} rule decides nothing: earlier rules decide every cell it "
                                f"matches; remove it, or move it up")
    _refuse_idle(reader, sections.rules, expansion)
    if not expansion.planned:
        reader.wrong(node, f"zero cells: the rules exclude all {total:,}; expected at least one that is left")
    for cell, times in Counter(each.cell.id for each in expansion.planned).items():
        if times > 1:
            reader.wrong(node, f"{times} cells have the id {cell!r}; rename a model, or a value of an axis")
    notes = [f"{rules[k].where}: this xfail expired on {rules[k].until}, its cells are expected to pass: "
             f"{rules[k].reason}" for k in sorted(expired - elsewhere)]
    return expansion, notes


def torch_version() -> str | None:
    """The version of the installed torch, which is not imported for it; None if there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def _refuse_idle(reader: Reader, rules: Sequence[tuple[Rule, yaml.Node]], expansion: Expansion) -> None:
    """Note every check that rules ask of cells in none of which it has something to judge."""
    for rule, place in rules:
        for name in rule.checks if rule.verb == "also" else ():
            idle = [CHECKS[name].idle(planned.cell.axes) for planned in expansion.planned if name in planned.also]
            if idle and all(idle):
                reader.wrong(place, f"also: {name} has nothing to judge in any cell that has it: {idle[0]}")


def _selector(rule: Rule) -> str:
    wanted = _condition(rule.select) or "any"
    return f"{wanted}, not ({_condition(rule.unless)})" if rule.unless else wanted


def _condition(select: Mapping[str, tuple[Scalar, ...]]) -> str:
    return ", ".join(f"{axis} = {' | '.join(map(str, values))}" for axis, values in select.items())
