"""Next steps: what `init` and `accept` say comes next, with a time-out that is long enough for Inductor's cells.

No torch here: the report of the first cells is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.plan.matrix_path import DEFAULT
from pytest_torchcompile.report.safe_output import harmless_text
from pytest_torchcompile.run.options import OPTIONS

__all__ = ["POLICY_FILE", "excuse_text", "needed_timeout", "next_lines", "seconds_of_first_cells", "text_after_accept"]

POLICY_FILE: Final = "release.yaml"
"""As the workflow names it."""

_FIRST_BACKENDS: Final = ("eager", "aot_eager")
_TIMES_LONGER: Final = 10
"""A cold Inductor cell on a CPU took 9 to 10 times as long as the ``aot_eager`` one (a UNet, a small net)."""
_GRACE: Final = timedelta(days=90)
"""How long a failure is excused where nobody sets another day."""
_STEP: Final = 300
"""Time-outs are named in multiples of it."""
_DEFAULT_TIMEOUT: Final = float(next(option.default for option in OPTIONS if option.name == "timeout"))


def seconds_of_first_cells(report: Path) -> float:
    """What the dearest cell without Inductor took; 0 where the report does not say."""
    try:
        cells = json.loads(report.read_text(encoding="utf-8"))["compile_matrix"]["cells"]
        seconds = [_seconds_of(cell) for cell in cells if cell["axes"]["backend"] in _FIRST_BACKENDS]
    # It may be elsewhere by an option, or of a run that ended before its time; then nothing is advised.
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
    return max(seconds, default=0.0)


def _seconds_of(cell: dict[str, Any]) -> float:
    return float(cell.get("seconds") or 0.0)


def needed_timeout(seconds: float) -> int:
    """Seconds to give to ``--compile-timeout``, of what the dearest of the first cells took; 0: the default will do.

    >>> needed_timeout(3.0), needed_timeout(40.0)
    (0, 900)
    """
    # A busy machine doubles what is expected.
    needed = 2 * _TIMES_LONGER * seconds
    if needed <= _DEFAULT_TIMEOUT:
        return 0
    return math.ceil(needed / _STEP) * _STEP


def next_lines(seconds: float) -> Iterator[str]:
    """The commands that come next. ``seconds``: of the dearest of the first cells; 0: none was run."""
    timeout = needed_timeout(seconds)
    run = "pytest --compile-matrix"
    if timeout:
        run += f" --compile-timeout={timeout}"
    steps = (
        (run, f"all cells of {DEFAULT}, inductor too"),
        ("pytest-torchcompile accept", "allows what that finds, each with its reason, and prints it as a diff"),
        (run, "again, where accept wrote something: the gate judges the last run"),
        ("pytest-torchcompile gate", "the verdict on the report, for CI"),
    )
    # Padded, so that the explanations stand below each other in a terminal.
    width = max(len(command) for command, _ in steps)
    yield "Next:"
    for command, what in steps:
        yield f"  {command:<{width}}  {what}"
    if timeout:
        yield (f"A first cell took {seconds:.0f} s; with Inductor it may take {_TIMES_LONGER} times as long, and by "
               f"default a cell has {_DEFAULT_TIMEOUT:.0f} s.\nFor CI too: `compile_timeout = {timeout}` in pytest's "
               "ini file.")


def text_after_accept(shown: str) -> str:
    """The way from an edit to a green gate: it takes another run, for a report is of the matrix that was run.

    ``shown``: the matrix as its run named it.
    """
    matrix = "" if shown == DEFAULT else f"={shown}"
    policy = f" --policy {POLICY_FILE}" if Path(POLICY_FILE).is_file() else ""
    return f"\nNext:\n  pytest --compile-matrix{matrix}\n  pytest-torchcompile gate{policy}"


def excuse_text(rules: Iterable[Mapping[str, str]], today: date) -> str:
    """What a policy needs so that the gate passes where these rules, keys and values as YAML, expect failures.

    Who pastes it names an issue, and sets the day from which on it fails again.
    """
    lines = ["  allowed_failures:"]
    for rule in rules:
        issue = rule.get("issue", "WHERE IT IS LOOKED AFTER")
        lines += [f"    - cells: {rule['xfail']}", f"      reason: {rule['reason']}", f"      issue: {issue}",
                  f"      until: {today + _GRACE}"]
    return harmless_text("\n".join(lines))
