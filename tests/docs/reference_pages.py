"""The pages of docs/reference, made from the tables that the code itself uses.

``python tests/docs/reference_pages.py`` writes them again; a test tells when that is due. Nothing here needs torch.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest_torchcompile
from pytest_torchcompile import _EXPORTS
from pytest_torchcompile.backends import BACKENDS
from pytest_torchcompile.cell import AXES
from pytest_torchcompile.checks import CHECKS, LIMITS, CheckEntry, Limit
from pytest_torchcompile.cli import COMMANDS
from pytest_torchcompile.errors import OWN_FAILURE, NothingToJudge, ReportError, UsageError
from pytest_torchcompile.gate.announcement import WORDS
from pytest_torchcompile.gate.policy import BASELINE, RATIOS
from pytest_torchcompile.gate.policyfile import KEYS as POLICY_KEYS
from pytest_torchcompile.observation import BAD, GOOD, VERDICTS
from pytest_torchcompile.plan.matrix import KEYS as MATRIX_KEYS
from pytest_torchcompile.plan.models import DIM_KEYS, MODEL_KEYS
from pytest_torchcompile.plan.rules import RULE_KEYS, VERBS
from pytest_torchcompile.report.metrics import METRICS
from pytest_torchcompile.report.record import GATES
from pytest_torchcompile.run.options import OPTIONS
from pytest_torchcompile.wrappers import WRAPPERS
from pytest_torchcompile.wrappers.wrapping import LANES, ORDERS

__all__ = ["FOLDER", "PAGES", "WRITER"]

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
WRITER = "python tests/docs/reference_pages.py"
PACKAGE = Path(pytest_torchcompile.__file__).parent
MADE = f"<!-- Made from the code by `{WRITER}`: edit the code's own texts, then run it. -->"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [row_of(head), "|" + "---|" * len(head)]
    lines += [row_of(row) for row in rows]
    return "\n".join(lines)


def row_of(words: Sequence[object]) -> str:
    """One row; a bar within a word would end its column."""
    return "| " + " | ".join(str(word).replace("|", "\\|").replace("\n", " ") for word in words) + " |"


def code(word: object) -> str:
    """The word in code style; nothing for nothing."""
    return f"`{word}`" if word not in ("", None) else ""


def codes(words: Iterable[object]) -> str:
    """Several words in code style."""
    return ", ".join(f"`{word}`" for word in words)


def keys(helps: dict[str, str]) -> str:
    """A table of keys and what each means."""
    return table(("key", "what"), ((code(name), text) for name, text in helps.items()))


def page(title: str, *parts: str) -> str:
    """A page: what made it, its title, and its parts."""
    return "\n\n".join((f"# {title}", MADE, *parts)) + "\n"


def options_page() -> str:
    """Options of pytest, and their ini keys."""
    rows = []
    for option in OPTIONS:
        value = f"={option.metavar}" if option.metavar else ""
        if option.optional:
            value = f"[{value}]"
        rows.append((code(option.flag + value), code(option.ini), code(option.default), option.help))
    return page(
        "Options of pytest",
        "Each option has an ini key, for `pytest.ini` or `[tool.pytest.ini_options]`. The command line wins. "
        "A flag's ini key is true or false.",
        table(("option", "ini key", "default", "what"), rows),
        "The JSON report has its place from pytest-json-report's `--json-report-file`. "
        "Without it the report of a matrix is `.compile-matrix/report.json`.",
    )


def arguments_of(add_arguments: Callable[[argparse.ArgumentParser], None]) -> list[tuple[str, str, str]]:
    """Each argument of a command: how it is written, its default, and what it does."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    rows = []
    for action in parser._actions:
        shown_default = ""
        takes_a_value = bool(action.option_strings) and action.nargs != 0
        if takes_a_value and action.default not in (None, False, argparse.SUPPRESS, []):
            shown_default = code(action.default)
        text = (action.help or "").replace("%(default)s", str(action.default))
        rows.append((code(written(action)), shown_default, text))
    return rows


def written(action: argparse.Action) -> str:
    """An argument as one types it."""
    name = ", ".join(action.option_strings)
    value = ""
    if action.nargs != 0:
        value = str(action.metavar or action.dest)
    if action.nargs in ("+", "*"):
        value += "..."
    return f"{name} {value}".strip()


def commands_page() -> str:
    """The subcommands of pytest-torchcompile."""
    parts = ["`pytest-torchcompile --version` tells the version. "
             "Only `init`, `benchmark`, `explain`, `gates`, `shapes`, `upgrade`, `hunt` and "
             "`history --rerun` run models."]
    for name, command in COMMANDS.items():
        parts.append(f"## {name}")
        parts.append(command.help)
        rows = arguments_of(command.arguments)
        if rows:
            parts.append(table(("argument", "default", "what"), rows))
    return page("Commands", *parts)


def matrix_page() -> str:
    """Keys of a matrix."""
    axes = [(code(axis.name), code(axis.default), codes(axis.values or ()), axis.help) for axis in AXES.values()]
    verbs = [(code(verb), codes(others)) for verb, others in VERBS.items()]
    wrappers = [(code(name), entry.ranks, codes(entry.orders), "yes" if entry.fake else "", entry.coverage)
                for name, entry in WRAPPERS.items()]
    backends = [(code(each.name), each.help, "yes" if each.modes else "") for each in BACKENDS.values()]
    return page(
        "Keys of a matrix",
        "`pytest-torchcompile schema --matrix` prints the same as a JSON Schema. "
        "How to write one: [Write a matrix](../how-to/matrix.md).",
        "## The file",
        keys(MATRIX_KEYS),
        "## A model",
        keys(MODEL_KEYS),
        "## A dim",
        "A number, an expression of other dims such as `S + 1`, or a mapping of these keys.",
        keys(DIM_KEYS),
        "## A rule",
        keys(RULE_KEYS),
        table(("verb", "keys beside it"), verbs),
        "## Axes",
        table(("axis", "default", "values", "what"), axes),
        "Where no values are listed any name is taken. An axis that is not listed is handed to the model's factory.",
        "## Wrappers",
        table(("wrapper", "ranks", "compile orders", "fake lane", "default of `coverage`"), wrappers),
        table(("compile order", "what"), ((code(name), text) for name, text in ORDERS.items())),
        table(("lane", "what"), ((code(name), text) for name, text in LANES.items())),
        "## Backends",
        table(("backend", "what", "`mode` matters"), backends),
        "Any other name that torch knows, or `module:attribute`, will do.",
    )


def checks_page() -> str:
    """Checks and limits."""
    checks = [(code(name), entry.help, entry.effect.severity.name.lower().replace("_", " "), where(entry),
               codes(limit.name for limit in entry.limits)) for name, entry in CHECKS.items()]
    limits = [(code(limit.name), bound(limit), limit.help, codes(judges(limit.name))) for limit in LIMITS.values()]
    numbers = []
    for name, entry in CHECKS.items():
        numbers += [(code(column.name), column.help, code(name)) for column in entry.columns]
    verdicts = [(code(verdict), strength(verdict)) for verdict in VERDICTS]
    logs = [(code(name), code(f"TORCH_LOGS={entry.logs}")) for name, entry in CHECKS.items() if entry.logs]
    return page(
        "Checks and limits",
        "What makes each one fail: [What each check judges](../explanation/checks.md).",
        "## Checks",
        table(("check", "holds when", "a failure is", "runs", "limits"), checks),
        "## Limits",
        table(("limit", "bound", "what", "judged by"), limits),
        "## Numbers that are shown",
        table(("number", "what", "measured by"), numbers),
        "## Verdicts",
        "From the best to the worst. A cell's status is the worst of its checks'.",
        table(("verdict", "for a release"), verdicts),
        "## Channels of TORCH_LOGS",
        table(("check", "shown by"), logs),
    )


def where(entry: CheckEntry) -> str:
    """In which cells a check runs, if not in all."""
    words = []
    if len(entry.phases) == 1:
        words.append(f"{entry.phases[0]} only")
    if entry.ranks != "any":
        words.append(f"{entry.ranks} rank{'s' * (entry.ranks == 'several')}")
    if entry.graphs:
        words.append("where CUDA graphs are promised")
    if entry.on_request:
        words.append("only where it is named")
    if entry.fake:
        words.append("in the fake lane too")
    return ", ".join(words)


def bound(limit: Limit) -> str:
    """Which way a limit bounds, and its default."""
    way = {"max": "at most", "min": "at least"}[limit.kind]
    return way if limit.default is None else f"{way} {limit.default:g}"


def judges(limit: str) -> list[str]:
    """The checks that judge by a limit."""
    return [name for name, entry in CHECKS.items() if any(each.name == limit for each in entry.limits)]


def strength(verdict: str) -> str:
    """What a release makes of a verdict."""
    if verdict in GOOD:
        return "good"
    if verdict in BAD:
        return "bad, unless a policy allows it"
    return {"skip": "proves nothing; a policy must allow it", "not_run": "can't be judged"}[verdict]


def policy_page() -> str:
    """Keys of a policy."""
    metrics = [(code(name), {"max": "at most", "min": "at least"}[metric.kind], metric.help)
               for name, metric in METRICS.items() if name not in LIMITS]
    ratios = [(code(name), f"times the baseline's `{of}`") for name, of in RATIOS.items()]
    return page(
        "Keys of a policy",
        "How to use one: [Gating a release](../gating.md#the-policy).",
        keys(POLICY_KEYS),
        "## Limits that only a policy has",
        "Besides these a policy takes every [limit of a matrix](checks.md#limits).",
        table(("limit", "bound", "what"), metrics),
        table(("limit", "what"), ratios),
        "## Changes against a baseline",
        table(("kind", "what"), ((code(name), text) for name, text in BASELINE.items())),
        "## Gates",
        f"The key `gates` takes {codes(GATES)}.",
    )


def exit_codes_page() -> str:
    """Exit codes of the commands."""
    meanings = {0: "everything planned was judged, and is good",
                1: "a check, a limit or a demand of the policy does not hold",
                ReportError.exit_code: "the reports can't be judged, or not as a whole",
                NothingToJudge.exit_code: "nothing to judge",
                UsageError.exit_code: "wrong usage, or a mistake in a file (`file:line:column`)",
                OWN_FAILURE: "a mistake of pytest-torchcompile, and no verdict"}
    rows = [(number, code(WORDS.get(number, "")), text) for number, text in meanings.items()]
    told = [(code(name), command.help) for name, command in COMMANDS.items() if "exit code" in command.help]
    return page(
        "Exit codes",
        "## pytest-torchcompile gate",
        table(("code", "first word", "meaning"), rows),
        "What CI should do about each is in [Gating a release](../gating.md).",
        "## Other commands",
        "They end with 0, with 4 for wrong usage or a mistake in a file, and with 130 after Ctrl-C. "
        "Where the reader of a pipe has gone the code is 141.",
        table(("command", "what else it says by its code"), told),
        "## pytest",
        "A matrix run has pytest's own codes: 0 where everything passed, 1 where something failed, 2 after Ctrl-C, "
        "and 4 for wrong usage or a mistake in the matrix. "
        "A run in which every cell was skipped ends with 0 too: judge it with `gate`.",
    )


def python_page() -> str:
    """Public names, with the first line of each one's docstring."""
    names = sorted(_EXPORTS, key=str.lower)
    rows = [(code(name), first_line(name, _EXPORTS[name])) for name in names]
    return page(
        "Python names",
        "All of these are in `pytest_torchcompile`. Importing the package costs nothing; a name is loaded on its first "
        "use.",
        table(("name", "what"), rows),
        "[Compile in production](../how-to/production-layer.md) and "
        "[Use it without pytest](../how-to/without-pytest.md) show them at work. "
        "`explain`, `explanation_lines` and `write_files` are in `pytest_torchcompile.explain`.",
    )


def first_line(name: str, module: str) -> str:
    """The first sentence of what the code says of a name."""
    path = PACKAGE / (module.replace(".", "/") + ".py")
    if not path.exists():
        path = PACKAGE / module.replace(".", "/") / "__init__.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            summary = (ast.get_docstring(node) or "").partition("\n\n")[0]
            # Roles of Sphinx are plain code here: :func:`~package.name` is `name`.
            return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", summary).replace("``", "`")
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            return first_line(name, node.module.removeprefix("pytest_torchcompile."))
    raise LookupError(f"{name} is not defined in {path}")


PAGES: dict[str, Callable[[], str]] = {
    "options.md": options_page,
    "commands.md": commands_page,
    "matrix-keys.md": matrix_page,
    "policy-keys.md": policy_page,
    "checks.md": checks_page,
    "exit-codes.md": exit_codes_page,
    "python.md": python_page,
}
"""File to what makes it."""

if __name__ == "__main__":
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")
