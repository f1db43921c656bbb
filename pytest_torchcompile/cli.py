"""The command ``pytest-torchcompile``: one record in COMMANDS for each subcommand.

What a subcommand needs is imported when it runs, so that the others stay light; none here imports torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

from pytest_torchcompile import __version__
from pytest_torchcompile.adoption import (
    add_accept_arguments,
    add_benchmark_arguments,
    add_init_arguments,
    add_shapes_arguments,
)
from pytest_torchcompile.contract import add_hunt_arguments
from pytest_torchcompile.errors import TorchcompileError, UsageError, nearest
from pytest_torchcompile.explain import add_explain_arguments
from pytest_torchcompile.report.safe_output import harmless_text
from pytest_torchcompile.upgrade import add_history_arguments, add_upgrade_arguments

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
        # A reason may have letters that the terminal lacks. A stream that somebody has put there may be no text stream.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    try:
        given = _make_parser(arguments).parse_args(arguments)
        code = COMMANDS[given.command].run(given)
        sys.stdout.flush()
    except TorchcompileError as error:
        print(harmless_text(str(error)), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        # 128 + SIGINT, as a shell has it.
        return 130
    except BrokenPipeError:
        # `| head` has read enough; Python would complain at exit of what it cannot write any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # 128 + SIGPIPE.
        return 141
    return code


class _Parser(argparse.ArgumentParser):
    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """As ever; the help of an option that takes a value tells its default, also where it is none."""
        takes_value = names[0].startswith("-") and "action" not in settings
        if takes_value and "default" not in settings and "default" not in settings["help"]:
            settings["help"] += "; default: none"
        return super().add_argument(*names, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting with 2, which means an unusable report here."""
        raise UsageError(f"{self.prog}: {message}")


def _make_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    about = ("Matrices and reports of pytest-torchcompile; only `init`, `benchmark`, `explain`, `gates`, `shapes`, "
             "`upgrade`, `hunt` and `history --rerun` run models, and only `explain`, `gates` and `doctor` import "
             "torch.")
    parser = _Parser(prog="pytest-torchcompile", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"pytest-torchcompile {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = subparsers.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        command.arguments(sub)
    words = [argument for argument in arguments if not argument.startswith("-")]
    if words and words[0] not in COMMANDS:
        raise UsageError(f"{parser.prog}: {words[0]!r} is not a command; {nearest(words[0], COMMANDS)}")
    return parser


def _add_matrix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("matrix", nargs="?", metavar="MATRIX",
                        help="the file, or shipped:NAME; default: that of the ini key compile_matrix, else "
                             "matrix/default.yaml here, else shipped:default")


def _add_reports(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs="+", metavar="REPORT",
                        help="the JSON report of a run, or of each of its shards; or a journal")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for programs instead of text")


def _add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true",
                        help="replace files that are there and were not written by pytest-torchcompile")


def _attribute_of(target: str) -> Any:
    """What ``module:attribute`` names in this package."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def _call_later(target: str) -> Callable[[argparse.Namespace], int]:
    """The function of that name; its module is imported when the subcommand runs."""
    return lambda given: int(_attribute_of(target)(given))


# cells: what a matrix expands to
def _cells_arguments(parser: argparse.ArgumentParser) -> None:
    _add_matrix(parser)
    parser.add_argument("--json", action="store_true", help="a JSON list instead of a table")
    parser.add_argument("--shard", metavar="I/N", help="only the cells of one of N parts, for example 2/8")


def _print_cells(given: argparse.Namespace) -> int:
    from pytest_torchcompile.plan.selection import parse_shard
    from pytest_torchcompile.ranks.cell_list import print_cells

    # A wrong shard is told before a matrix is read.
    part = parse_shard(given.shard or "1/1")
    return print_cells(_matrix_path(given), part, as_json=given.json)


def _matrix_path(given: argparse.Namespace) -> Path:
    """The matrix that was named, else the one that pytest would take; then it is told which and why."""
    from pytest_torchcompile.plan.matrix_path import default_matrix

    if given.matrix is not None:
        return Path(given.matrix)
    chosen = default_matrix()
    if chosen.why:
        print(harmless_text(chosen.why), file=sys.stderr)
    return chosen.path


# doctor: what can this machine run?
def _examine_machine(given: argparse.Namespace) -> int:
    from pytest_torchcompile.ranks.doctor import examine_machine

    return examine_machine(_matrix_path(given), as_json=given.json)


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    _add_matrix(parser)
    _add_json(parser)


# schema: the forms that editors and other tools check against
SCHEMAS: Final = {
    "report": "pytest_torchcompile.report.schema:report_schema",
    "matrix": "pytest_torchcompile.plan.matrix_schema:matrix_schema",
    "policy": "pytest_torchcompile.gate.policy_schema:policy_schema",
}


def _schema_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--matrix", dest="form", action="store_const", const="matrix", default="report",
                        help="the schema of matrix files instead of that of reports")
    parser.add_argument("--policy", dest="form", action="store_const", const="policy",
                        help="the schema of policies instead of that of reports")


def _print_schema(given: argparse.Namespace) -> int:
    print(json.dumps(_attribute_of(SCHEMAS[given.form])(), indent=2))
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
    _add_force(parser)
    _add_json(parser)
    parser.add_argument("--github", action="store_true",
                        help="print annotations of GitHub Actions, and add the Markdown to the step's summary")
    parser.add_argument("--update-policy", action="store_true",
                        help="make the policy as strict as what was measured; it never gets less strict")


# html: the page that people look at
def _html_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs="*", metavar="REPORT",
                        help="the JSON report of a run, or of each of its shards; or a journal; or one folder of the "
                             "reports of several runs: then the newest is shown, and the others are its trend; "
                             "default: that of the last run here")
    parser.add_argument("-o", "--output", metavar="FILE", default="compile-matrix.html", help="default: %(default)s")
    parser.add_argument("--baseline", metavar="REPORT", nargs="+", help="reports of an earlier run to compare with")
    parser.add_argument("--policy", metavar="FILE", help="judge as `gate --policy` does")
    parser.add_argument("--svg", metavar="FILE", help="write the heat map alone too, for a README or a comment")
    parser.add_argument("--source", metavar="URL", help="link places in the code to this address, which has {file} and "
                                                        "{line} in it")
    _add_force(parser)


# table: the models of a report, for a page of documentation
def _table_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs="+", metavar="REPORT", help="reports of one run: one, or one of each shard")


def _print_models_table(given: argparse.Namespace) -> int:
    from pytest_torchcompile.page.models_table import models_table
    from pytest_torchcompile.report.merging import merge_reports
    from pytest_torchcompile.report.reading import read_report

    print(models_table(merge_reports([read_report(path) for path in given.reports])), end="")
    return 0


# costs: where the time of a run went
def _costs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("report", nargs="?", metavar="REPORT", default=".compile-matrix/report.json",
                        help="the JSON report of a run, or of one of its shards; default: %(default)s")
    _add_json(parser)


# code: which graphs and kernels are others than in an earlier run
def _code_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="OLD", help="the JSON report of the earlier run")
    parser.add_argument("new", nargs="?", metavar="NEW", default=".compile-matrix/report.json",
                        help="the JSON report of the later run; default: %(default)s")
    _add_json(parser)


# playbook: what a report says about compiling this repository's models
def _playbook_arguments(parser: argparse.ArgumentParser) -> None:
    _add_reports(parser)
    parser.add_argument("-o", "--output", metavar="FILE", default="docs/torch_compile.md",
                        help="default: %(default)s; - prints it")
    parser.add_argument("--policy", metavar="FILE", help="judge as `gate --policy` does")
    parser.add_argument("--shapes", metavar="FILE", action="append", default=[],
                        help="what the command `shapes` has written, for the chapter on sizes; may be repeated; "
                             "default: none")
    _add_force(parser)
    _add_json(parser)


# gates: the three gates of the production layer, alone
def _gates_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="where models run, for example cuda; default: cpu")
    parser.add_argument("--backend", help="what compiles healthy models; default: aot_eager, on a GPU inductor; with "
                                          "inductor torch's own planted faults are tried as well")
    _add_json(parser)


COMMANDS: Final[dict[str, Command]] = {
    "init": Command("Look at a model, write its matrix and what belongs to it, and run the first cells.",
                    add_init_arguments, _call_later("pytest_torchcompile.adoption.init_command:run_command")),
    "accept": Command("Write the limits and expected failures that a run needs into its matrix, as a diff; exit code 1 "
                      "if something is left.", add_accept_arguments,
                      _call_later("pytest_torchcompile.adoption.accept_command:run_command")),
    "cells": Command("Print the cells of a matrix, without running any.", _cells_arguments, _print_cells),
    "doctor": Command("Say what this machine can run of a matrix, and why not the rest; exit code 1 if nothing, or if "
                      "the training cell that it tries cannot be judged.",
                      _doctor_arguments, _examine_machine),
    "gate": Command("Judge reports: 0 pass, 1 fail, 2 unusable reports, 3 nothing to judge. It runs nothing; `gates` "
                    "is another command.", _gate_arguments,
                    _call_later("pytest_torchcompile.gate.gate_command:run_command")),
    "gates": Command("Run the three gates of the production layer (safe fallback, smoketest, shapes) on small models; "
                     "exit code 0 or 1. It reads no report; `gate` does.",
                     _gates_arguments, _call_later("pytest_torchcompile.gates:run_command")),
    "html": Command("Write a page of reports: heat map, findings, each cell's ledger.", _html_arguments,
                    _call_later("pytest_torchcompile.page.document:run_command")),
    "benchmark": Command("Time one model eagerly and in each mode of torch.compile, and say which pays; exit code 1 if "
                         "a mode could not be timed.", add_benchmark_arguments,
                         _call_later("pytest_torchcompile.adoption.benchmark_command:run_command")),
    "explain": Command("Compile one model and tell what became of it: graphs, kernels and what they touch; exit code "
                       "1 if it does not compile.", add_explain_arguments,
                       _call_later("pytest_torchcompile.explain.command:run_command")),
    "shapes": Command("Try four ways to compile one model for sizes that vary (static, auto, dynamic, buckets), each "
                      "with an empty cache, and say which pays; exit code 1 if one could not be tried.",
                      add_shapes_arguments,
                      _call_later("pytest_torchcompile.adoption.shapes_command:run_command")),
    "playbook": Command("Write down what reports say about compiling these models.", _playbook_arguments,
                    _call_later("pytest_torchcompile.playbook.chapters:run_command")),
    "table": Command("Print a table of the models of reports, as Markdown.", _table_arguments, _print_models_table),
    "costs": Command("Say where the time of a run went: unique and repeated compiling, judging, waiting; and the "
                     "dearest cells.", _costs_arguments,
                     _call_later("pytest_torchcompile.report.costs:run_command")),
    "code": Command("Say which graphs and kernels changed between two runs, and how; exit code 1 if any did.",
                    _code_arguments, _call_later("pytest_torchcompile.report.code_changes:run_command")),
    "upgrade": Command("Run a matrix with two versions of torch, or of another package, and write one page of what is "
                       "worse and what got better; exit code 1 if something is worse.", add_upgrade_arguments,
                       _call_later("pytest_torchcompile.upgrade.upgrade_command:run_command")),
    "history": Command("Say when a cell turned, with which commit or version, and whether it is a flake; exit code 1 "
                       "if it fails, or is one.", add_history_arguments,
                       _call_later("pytest_torchcompile.upgrade.cell_history:run_command")),
    "hunt": Command("Look for errors of torch itself: run histories of calls over the layers of torch.nn, chains of "
                    "functions and small models, for as long as it is given; exit code 1 if a new one is found.",
                    add_hunt_arguments, _call_later("pytest_torchcompile.contract.hunt_command:run_command")),
    "schema": Command("Print the JSON Schema of reports, or of matrix files or policies.", _schema_arguments,
                      _print_schema),
}
