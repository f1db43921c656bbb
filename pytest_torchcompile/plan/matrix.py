"""Matrix: a YAML file to the cells that are run, with ``file:line:column`` for every mistake."""

from __future__ import annotations

import datetime
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import yaml

from pytest_torchcompile.cell import Scalar
from pytest_torchcompile.checks import CHECKS, default_limits
from pytest_torchcompile.dims import first_sizes, sample_of_range
from pytest_torchcompile.plan.axes import Axes, read_axes
from pytest_torchcompile.plan.expansion import MAX_CELLS, Excluded, Expansion, PlannedCell, count_combinations, expand
from pytest_torchcompile.plan.matrix_path import is_shipped, shipped_path
from pytest_torchcompile.plan.models import ModelEntry, read_models
from pytest_torchcompile.plan.nodes import compose, describe_node, read_bytes
from pytest_torchcompile.plan.reader import Reader
from pytest_torchcompile.plan.rules import OUTCOMES, Rule, read_checks, read_rules
from pytest_torchcompile.plan.selection import Strategy, choose_cells, read_strategy
from pytest_torchcompile.plan.targets import Targets

__all__ = ["KEYS", "VERSION", "Excluded", "Matrix", "ModelEntry", "PlannedCell", "find_root", "load_matrix",
           "parse_matrix"]

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
_PREFERENCE: Final = {"run": 0, "xfail": 1, "skip": 2}
"""Of cells that cover the same values, a covering array takes those with the lowest number."""
MARKS: Final = ("pyproject.toml", "pytest.ini", "tox.ini", "setup.cfg", ".git")
"""Files and folders by which a project's folder is known."""


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

    @property
    def cell_ids(self) -> list[str]:
        """The names of the cells, in their order."""
        return [planned.cell.id for planned in self.cells]

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
    if shown is None:
        shown = str(path)
    if is_shipped(str(path)):
        path = shipped_path(str(path))
    # Without `..`, as pytest has paths.
    path = Path(os.path.abspath(path))
    data = read_bytes(path, shown)
    return parse_matrix(data, path, _root_folder(path, shown, root), shown=shown, today=today)


def parse_matrix(data: bytes, path: Path, folder: Path, *, shown: str, today: datetime.date | None = None) -> Matrix:
    """Expand the bytes of a matrix file. ``path``: where it is, or would be; ``folder``: where factories are looked up.

    Raises as :func:`load_matrix`.
    """
    node = compose(data, shown)
    reader = Reader(shown)
    sections = _read_sections(reader, node, Targets(folder))
    # Mistakes in the sections are told before the cells are made: half a matrix would give misleading ones.
    reader.finish()
    expansion, notes = _expand_sections(reader, node, sections, today or datetime.date.today())
    reader.finish()
    ids = [planned.cell.id for planned in expansion.planned]
    preferences = [_PREFERENCE[planned.outcome] for planned in expansion.planned]
    chosen = choose_cells(sections.strategy, expansion.rows, ids, preferences)
    return Matrix(
        path, folder, hashlib.sha256(data).hexdigest(), sections.models, sections.checks,
        cells=tuple(expansion.planned[index] for index in chosen),
        excluded=tuple(expansion.excluded),
        strategy=sections.strategy,
        left_out=len(expansion.planned) - len(chosen),
        notes=tuple(notes),
        autotune_choices=sections.autotune_choices,
        fuzz_seconds=sections.fuzz_seconds,
    )


def _root_folder(path: Path, shown: str, root: str | Path | None) -> Path:
    if root is not None:
        return Path(root).absolute()
    # A shipped matrix is read as if it lay in the user's own folder `matrix`.
    if is_shipped(shown):
        return find_root(Path.cwd() / "matrix" / path.name)
    return find_root(path)


def find_root(path: Path) -> Path:
    """Return the project's folder for a matrix file.

    The nearest parent with a project file, else the parent of a folder called ``matrix``, else the file's
    own folder.
    """
    for folder in path.parents:
        if any((folder / mark).exists() for mark in MARKS):
            return folder
    if path.parent.name == "matrix":
        return path.parent.parent
    return path.parent


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


def _read_sections(reader: Reader, node: yaml.Node, targets: Targets) -> _Sections:
    sections = reader.fields(node, "the matrix", KEYS, ("version", "models"))
    if "version" in sections:
        _check_version(reader, sections["version"])
    models: dict[str, ModelEntry] = {}
    own_axes: dict[str, yaml.Node] = {}
    if "models" in sections:
        models, own_axes = read_models(reader, sections["models"], targets)
    axes, axes_of = read_axes(reader, sections.get("axes"), models, own_axes, targets)
    # A rule that names what is misspelt above would be blamed as well: its values are then not looked up.
    known_axes = None if reader.mistakes else axes
    checks = read_checks(reader, sections.get("checks"))
    rules = read_rules(reader, sections.get("rules"), known_axes, checks)
    choices = None
    if "autotune_choices" in sections:
        choices = reader.integer(sections["autotune_choices"], "autotune_choices")
    if choices is None:
        choices = AUTOTUNE_CHOICES
    seconds = None
    if "fuzz_seconds" in sections:
        seconds = reader.number(sections["fuzz_seconds"], "fuzz_seconds", whole=False, least=1)
    strategy = read_strategy(reader, sections.get("strategy"))
    return _Sections(models, axes, axes_of, checks, rules, strategy, choices, seconds)


def _check_version(reader: Reader, node: yaml.Node) -> None:
    # A quoted 1 is a text, and a text is no version.
    known = isinstance(node, yaml.ScalarNode) and node.value == str(VERSION) and not node.style
    if not known:
        text = f"version: found {describe_node(node)}, expected {VERSION}, the only one that is read here"
        reader.wrong(node, text)


def _expand_sections(reader: Reader, node: yaml.Node, sections: _Sections,
                     today: datetime.date) -> tuple[Expansion, list[str]]:
    """Expand; note rules without effect, cells that share an id, and that no cell is left."""
    total = count_combinations(sections.axes_of)
    # Told before anything is multiplied.
    if total > MAX_CELLS:
        reader.wrong(node, f"the axes multiply to {total:,} cells, more than {MAX_CELLS:,}; take values out")
        reader.finish()
    rules = [rule for rule, _ in sections.rules]
    torch = torch_version()
    expired = frozenset(index for index, rule in enumerate(rules) if rule.is_expired(today))
    elsewhere = frozenset(index for index, rule in enumerate(rules) if not rule.is_for(torch))
    expansion = expand(sections.axes, sections.axes_of, rules, expired, default_limits(sections.checks), elsewhere)
    _note_idle_rules(reader, sections.rules, expansion)
    _note_idle_checks(reader, sections.rules, expansion)
    if not expansion.planned:
        reader.wrong(node, f"zero cells: the rules exclude all {total:,}; expected at least one that is left")
    times_of = Counter(planned.cell.id for planned in expansion.planned)
    for cell, times in times_of.items():
        if times > 1:
            reader.wrong(node, f"{times} cells have the id {cell!r}; rename a model, or a value of an axis")
    notes = list(reader.notes)
    for index in sorted(expired - elsewhere):
        rule = rules[index]
        notes.append(f"{rule.where}: this xfail expired on {rule.until}, its cells are expected to pass: {rule.reason}")
    return expansion, [*notes, *_notes_of_ranges(sections, expansion)]


def _notes_of_ranges(sections: _Sections, expansion: Expansion) -> Iterator[str]:
    """For each model with a dim of which only the bounds are known: one size of it is run, whatever its range promises.

    A model that some check draws sizes for has others as well.
    """
    drawn = set()
    for planned in expansion.planned:
        if any(CHECKS[name].draws for name in (*sections.checks, *planned.also)):
            drawn.add(planned.cell.model)
    for name, model in sections.models.items():
        row = first_sizes(model.dims)
        ranges = [dim for dim in model.dims if model.dims[dim].is_range]
        if not ranges or name in drawn:
            continue
        one = ", ".join(f"{dim} = {row[dim]}" for dim in ranges)
        listed = ", ".join(str(size) for size in sample_of_range(model.dims[ranges[0]], row[ranges[0]]))
        yield (f"{model.where}: {name} runs with {one} only, for min and max are the bounds of what the check fuzz "
               f"draws; {ranges[0]}: {{choices: [{listed}]}} has it vary")


def torch_version() -> str | None:
    """The version of the installed torch, which is not imported for it; None if there is none."""
    try:
        return metadata.version("torch")
    # A build of torch from source may have no metadata; a rule that names versions then holds for it.
    except metadata.PackageNotFoundError:
        return None


def _note_idle_rules(reader: Reader, rules: Sequence[tuple[Rule, yaml.Node]], expansion: Expansion) -> None:
    """Note every rule that matches no cell, or only cells that rules before it decide."""
    for index, (rule, place) in enumerate(rules):
        if not expansion.matches[index]:
            cells = "cell" if rule.verb in OUTCOMES else "cell that is left"
            reader.wrong(place, f"this {rule.verb} rule matches no {cells}: {_selector_text(rule)}; "
                                f"remove it, or correct a value")
        elif not expansion.hits[index]:
            reader.wrong(place, f"this {rule.verb} rule decides nothing: earlier rules decide every cell it "
                                f"matches; remove it, or move it up")


def _note_idle_checks(reader: Reader, rules: Sequence[tuple[Rule, yaml.Node]], expansion: Expansion) -> None:
    """Note every check that rules ask of cells in none of which it has something to judge."""
    for rule, place in rules:
        if rule.verb != "also":
            continue
        for name in rule.checks:
            cells = [planned.cell for planned in expansion.planned if name in planned.also]
            reasons = [CHECKS[name].idle(cell.axes) for cell in cells]
            if reasons and all(reasons):
                reader.wrong(place, f"also: {name} has nothing to judge in any cell that has it: {reasons[0]}")


def _selector_text(rule: Rule) -> str:
    wanted = _condition_text(rule.select) or "any"
    if rule.unless:
        return f"{wanted}, not ({_condition_text(rule.unless)})"
    return wanted


def _condition_text(select: Mapping[str, tuple[Scalar, ...]]) -> str:
    return ", ".join(f"{axis} = {' | '.join(map(str, values))}" for axis, values in select.items())
