"""The command ``pytest-torchcompile``: one record in COMMANDS for each subcommand.

What a subcommand needs is imported when it runs, so that the others stay light; none here imports torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pytest_torchcompile.errors import TorchcompileError, UsageError, nearest
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.harmless import harmless_text

if TYPE_CHECKING:
    from pytest_torchcompile.plan.matrix import Excluded, Matrix, PlannedCell

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True)
class Command:
    """One subcommand: its help, its arguments, and what it does; returns the exit code."""

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code; a mistake of the user is one line on stderr."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")  # a reason with letters that the terminal lacks
    try:
        given = _parser(arguments).parse_args(arguments)
        code = COMMANDS[given.command].run(given)
        sys.stdout.flush()
    except TorchcompileError as error:
        print(harmless_text(str(error)), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at exit
        return 141  # 128 + SIGPIPE
    return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting with 2, which means an unusable report here."""
        raise UsageError(f"{self.prog}: {message}")


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    about = "Matrices and reports of pytest-torchcompile; only `gates` runs models, and it and `doctor` import torch."
    parser = _Parser(prog="pytest-torchcompile", description=about, allow_abbrev=False)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = subparsers.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        command.arguments(sub)
    first = next((argument for argument in arguments if not argument.startswith("-")), None)
    if first is not None and first not in COMMANDS:
        raise UsageError(f"{parser.prog}: {first!r} is not a command; {nearest(first, COMMANDS)}")
    return parser


# cells: what a matrix expands to


def _cells_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("matrix", nargs="?", metavar="MATRIX",
                        help="the file, or shipped:NAME; default: that of the ini key compile_matrix, else "
                             "matrix/default.yaml here, else shipped:default")
    parser.add_argument("--json", action="store_true", help="a JSON list instead of a table")
    parser.add_argument("--shard", metavar="I/N", help="only the cells of one of N parts, for example 2/8")


def _cells(given: argparse.Namespace) -> int:
    from pytest_torchcompile.plan.matrix import load_matrix
    from pytest_torchcompile.plan.shards import cells_of_shard, parse_shard

    part = parse_shard(given.shard) if given.shard else None
    try:
        matrix = load_matrix(_matrix_path(given))
    except UsageError as error:
        if "no module" in str(error):  # pytest has its own way to find them
            print("pytest's setting `pythonpath` is not read here: PYTHONPATH=src finds modules in src",
                  file=sys.stderr)
        raise
    planned = cells_of_shard(matrix.cells, *part) if part else matrix.cells
    excluded = () if part else matrix.excluded  # they are no one's part
    if given.json:
        records = [*map(_record, planned), *map(_record, excluded)]
        print(json.dumps(records, indent=1))
    else:
        for line in _table(planned):
            print(line)
        for line in _totals(matrix, planned):
            print(line)
    return 0


def _matrix_path(given: argparse.Namespace) -> Path:
    """The matrix that was named, else the one that pytest would take; then it is told which and why."""
    from pytest_torchcompile.plan.matrix_path import default_matrix

    if given.matrix is not None:
        return Path(given.matrix)
    chosen = default_matrix()
    if chosen.why:
        print(harmless_text(chosen.why), file=sys.stderr)
    return chosen.path


def _record(cell: PlannedCell | Excluded) -> dict[str, Any]:
    """A cell as the JSON list has it; what only planned cells have is empty for excluded ones."""
    return {
        "id": cell.cell.id,
        "axes": cell.cell.axes,
        "outcome": getattr(cell, "outcome", "exclude"),
        "reason": cell.reason,
        "issue": cell.issue,
        "until": getattr(cell, "until", ""),
        "checks": list(getattr(cell, "checks", ())),
        "also": list(getattr(cell, "also", ())),
        "rule": cell.rule,
        "limits": getattr(cell, "limits", {}),
    }


def _table(planned: Sequence[PlannedCell]) -> Iterator[str]:
    width = max((len(each.cell.id) for each in planned), default=0)
    for each in planned:
        also = f"also {', '.join(each.also)}" if each.also else ""
        found = (each.issue, each.until and f"until {each.until}", *each.checks, also, _needs(each))
        details = "; ".join(filter(None, found))
        why = f"{each.reason} ({details})".lstrip() if details else each.reason
        yield f"{each.cell.id:{width}}  {each.outcome:5}  {why}".rstrip()


def _needs(planned: PlannedCell) -> str:
    """What a cell needs more of than most do."""
    from pytest_torchcompile.ranks.execution import gpus_of
    from pytest_torchcompile.wrappers.wrapping import Wrapping

    ranks = Wrapping.read(planned.cell.wrapper).processes
    gpus = gpus_of(planned.cell)
    return f"needs {gpus} GPUs" if gpus > 1 else f"needs {ranks} processes" if ranks > 1 else ""


def _totals(matrix: Matrix, planned: Sequence[PlannedCell]) -> Iterator[str]:
    part = f" (of {len(matrix.cells)})" if len(planned) < len(matrix.cells) else ""
    yield f"{count(len(planned), 'cell')}{part}: {_counts(each.outcome for each in planned) or 'none'}"
    if matrix.left_out:
        yield f"{matrix.left_out} more are left out by the strategy: {matrix.strategy}"
    excluded = Counter((each.rule, each.reason) for each in matrix.excluded)
    for rule, reason in sorted(excluded, key=lambda each: int(each[0].rpartition(":")[2])):
        yield f"{excluded[rule, reason]} excluded by {rule}: {reason}"
    for note in (*matrix.notes, *_too_many(planned)):
        yield f"note: {note}"


_FEW: Final = 8
"""Processes of a cell that are nothing to speak of, on any machine."""


def _too_many(planned: Sequence[PlannedCell]) -> Iterator[str]:
    """Ranks on the CPU share the cores of the machine, however many: such cells run, and take their time."""
    from pytest_torchcompile.wrappers.wrapping import Wrapping

    cores = os.cpu_count() or 1
    found = [ranks for each in planned if not each.cell.device.startswith("cuda") and each.outcome != "skip"
             and (ranks := Wrapping.read(each.cell.wrapper).processes) > max(cores, _FEW)]
    if found:
        yield (f"{count(len(found), 'cell runs', 'cells run')} up to {max(found)} processes at once, each with "
               f"torch in it, and this machine has {count(cores, 'core')}")


def _counts(words: Iterable[str]) -> str:
    return ", ".join(f"{times} {word}" for word, times in Counter(words).most_common())


# doctor: what can this machine run?


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("matrix", nargs="?", metavar="MATRIX",
                        help="the file, or shipped:NAME; default: that of the ini key compile_matrix, else "
                             "matrix/default.yaml here, else shipped:default")


def _doctor(given: argparse.Namespace) -> int:
    from pytest_torchcompile.plan.matrix import load_matrix
    from pytest_torchcompile.ranks.doctor import machine_lines, survey_cells, try_training
    from pytest_torchcompile.ranks.serving import set_environment

    path = _matrix_path(given)
    matrix = load_matrix(path)
    set_environment()
    from pytest_torchcompile.run.environment import environment

    for line in machine_lines(environment()):
        print(line)
    survey = survey_cells(matrix)
    tried = try_training(matrix, survey.runnable)
    failed = tried is not None and bool(tried.problems)
    if tried is not None and tried.problems:
        print(f"{path}: a training cell was tried and could not be judged here: {tried.cell}")
        print("\n".join(f"  {line}" for line in tried.problems))
    else:
        if tried is not None:
            print(f"one training cell was tried and ran ({tried.seconds:.1f} s): {tried.cell}")
        print(f"{path}: {len(survey.runnable)} of {count(len(matrix.cells), 'cell')} can run here")
    for why, number in survey.why_not.most_common():
        print(f"  {number} cannot: {why}")
    return 0 if survey.runnable and not failed else 1


# schema: the forms that editors and other tools check against


SCHEMAS: Final = {
    "report": "pytest_torchcompile.report.schema:report_schema",
    "matrix": "pytest_torchcompile.plan.matrix_schema:matrix_schema",
}


def _schema_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--matrix", dest="form", action="store_const", const="matrix", default="report",
                        help="the schema of matrix files instead of that of reports")


def _schema(given: argparse.Namespace) -> int:
    module, _, name = SCHEMAS[given.form].partition(":")
    print(json.dumps(getattr(import_module(module), name)(), indent=2))
    return 0


# gate: may this run be released?


def _gate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs="*", metavar="REPORT",
                        help="the JSON report of a run, or of each of its shards; or a journal; default: "
                             ".compile-matrix/report.json, or the journal beside it where a run left no report")
    parser.add_argument("--policy", metavar="FILE", help="what a release asks, and what it lets pass (docs/gating.md)")
    parser.add_argument("--baseline", metavar="REPORT", nargs="+", help="reports of an earlier run to compare with")
    parser.add_argument("--commit", metavar="SHA", help="the reports must be of this commit, without uncommitted "
                                                        "changes; HEAD: the one checked out here")
    parser.add_argument("--earlier", action="store_true",
                        help="judge what earlier runs left too, of whatever commit; else that is unusable")
    parser.add_argument("--junit", metavar="FILE", help="write JUnit XML, a test case for each cell")
    parser.add_argument("--summary", metavar="FILE", help="write the verdict as Markdown")
    parser.add_argument("--force", action="store_true",
                        help="replace files that are there and were not written by pytest-torchcompile")
    parser.add_argument("--github", action="store_true",
                        help="print annotations of GitHub Actions, and add the Markdown to the step's summary")
    parser.add_argument("--update-policy", action="store_true",
                        help="make the policy as strict as what was measured; it never gets less strict")


def _gate(given: argparse.Namespace) -> int:
    from pytest_torchcompile.gate.command import run

    return run(given)


# html: the page that people look at


def _html_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs="+", metavar="REPORT",
                        help="the JSON report of a run, or of each of its shards; or a journal")
    parser.add_argument("-o", "--output", metavar="FILE", default="compile-matrix.html", help="default: %(default)s")
    parser.add_argument("--baseline", metavar="REPORT", nargs="+", help="reports of an earlier run to compare with")
    parser.add_argument("--policy", metavar="FILE", help="judge as `gate --policy` does")
    parser.add_argument("--svg", metavar="FILE", help="write the heat map alone too, for a README or a comment")
    parser.add_argument("--source", metavar="URL", help="link places in the code to this address, which has {file} and "
                                                        "{line} in it")
    parser.add_argument("--force", action="store_true",
                        help="replace files that are there and were not written by pytest-torchcompile")


def _html(given: argparse.Namespace) -> int:
    from pytest_torchcompile.page.document import run_command

    return run_command(given)


# table: the models of a report, for a page of documentation


def _models_table_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs="+", metavar="REPORT", help="reports of one run: one, or one of each shard")


def _models_table(given: argparse.Namespace) -> int:
    from pytest_torchcompile.page.models_table import models_table
    from pytest_torchcompile.report.merging import merge_reports
    from pytest_torchcompile.report.reading import read_report

    print(models_table(merge_reports([read_report(path) for path in given.reports])), end="")
    return 0


# playbook: what a report says about compiling this repository's models


def _playbook_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs="+", metavar="REPORT",
                        help="the JSON report of a run, or of each of its shards; or a journal")
    parser.add_argument("-o", "--output", metavar="FILE", default="docs/torch_compile.md",
                        help="default: %(default)s; - prints it")
    parser.add_argument("--policy", metavar="FILE", help="judge as `gate --policy` does")
    parser.add_argument("--force", action="store_true",
                        help="replace files that are there and were not written by pytest-torchcompile")


def _playbook(given: argparse.Namespace) -> int:
    from pytest_torchcompile.playbook.chapters import run_command

    return run_command(given)


# gates: the three gates of the production layer, alone


def _gates_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="where models run, for example cuda; default: cpu")
    parser.add_argument("--backend", help="what compiles healthy models; default: aot_eager, on a GPU inductor; with "
                                          "inductor torch's own planted faults are tried as well")


def _gates(given: argparse.Namespace) -> int:
    from pytest_torchcompile.gates import Place, run
    from pytest_torchcompile.ranks.serving import set_environment

    set_environment()
    _refuse_missing(given.device)
    backend = given.backend or ("aot_eager" if given.device == "cpu" else "inductor")
    _refuse_unknown(backend)
    failed = 0
    for outcome in run(Place(given.device, backend)):
        print(outcome, flush=True)
        failed += not outcome.ok
    return int(failed > 0)


def _refuse_unknown(backend: str) -> None:
    """Raises UsageError for a backend that torch does not know: what has to fail would fail with it for nothing."""
    import torch

    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise UsageError(f"--backend {backend!r} is no backend of torch {torch.__version__}; {nearest(backend, known)}")


def _refuse_missing(device: str) -> None:
    """Raises UsageError for a device that this machine, or torch, does not have."""
    import torch

    try:
        torch.ones(1, device=device)
    except Exception as error:  # each device has its own way to say no
        text = " ".join(str(error).split())
        raise UsageError(f"--device {device}: torch {torch.__version__} can't use it here: {text[:200]}") from error


COMMANDS: Final[dict[str, Command]] = {
    "cells": Command("Print the cells of a matrix, without running any.", _cells_arguments, _cells),
    "doctor": Command("Say what this machine can run of a matrix, and why not the rest; exit code 1 if nothing, or if "
                      "the training cell that it tries cannot be judged.",
                      _doctor_arguments, _doctor),
    "gate": Command("Judge reports: 0 pass, 1 fail, 2 unusable reports, 3 nothing to judge.", _gate_arguments, _gate),
    "html": Command("Write a page of reports: heat map, findings, each cell's ledger.", _html_arguments, _html),
    "playbook": Command("Write down what reports say about compiling these models.", _playbook_arguments, _playbook),
    "table": Command("Print a table of the models of reports, as Markdown.", _models_table_arguments, _models_table),
    "schema": Command("Print the JSON Schema of reports, or of matrix files.", _schema_arguments, _schema),
    "gates": Command("Run the three gates of the production layer on small models; exit code 0 or 1.",
                     _gates_arguments, _gates),
}
