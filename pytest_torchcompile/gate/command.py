"""The command ``pytest-torchcompile gate``: reads, judges, writes what was asked for, and returns the exit code."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pytest_torchcompile.errors import MatrixError, ReportError, TorchcompileError, UsageError
from pytest_torchcompile.gate import github, junit, markdown
from pytest_torchcompile.gate.announcement import announcement, refusal
from pytest_torchcompile.gate.gate import Outcome, gate
from pytest_torchcompile.gate.origin import Asked, commit_named
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.gate.policyfile import read_policy
from pytest_torchcompile.report.files import JOURNAL_FILE, REPORT_FILE, write_output
from pytest_torchcompile.report.harmless import harmless_text
from pytest_torchcompile.report.provenance import edited_since_run, head_commit
from pytest_torchcompile.report.reading import Report, read_report

__all__ = ["INTERNAL", "SUMMARY_VARIABLE", "run"]

INTERNAL: Final = 70
"""Exit code for a mistake of ours (EX_SOFTWARE of sysexits.h): Python's own 1 would read as a verdict."""
SUMMARY_VARIABLE: Final = "GITHUB_STEP_SUMMARY"
"""Names the file whose Markdown GitHub shows on the page of the run."""


def run(given: argparse.Namespace) -> int:
    """Run the gate; the meaning of the exit code is in docs/gating.md."""
    try:
        with _without_collecting():
            return _run(given)
    except TorchcompileError as error:
        if given.github and isinstance(error, MatrixError):
            print(github.command(error.text, error.path, error.line))
        raise
    except BrokenPipeError:  # `| head -1` has read enough: the command line's own affair
        raise
    except Exception:
        traceback.print_exc()
        print("pytest-torchcompile gate: this is a mistake of pytest-torchcompile, and no verdict: please report it "
              "with the lines above", file=sys.stderr)
        return INTERNAL


def _run(given: argparse.Namespace) -> int:
    if given.update_policy and given.policy is None:
        raise UsageError("--update-policy: there is no policy to update; give one by --policy")
    given.reports = given.reports or [_default_report()]
    policy = Policy() if given.policy is None else read_policy(given.policy)
    try:
        reports, baseline = _read(given.reports), _read(given.baseline or ())
        asked = _asked(given, reports)
        outcome = gate(reports, policy, baseline, asked=asked)
    except ReportError as error:
        return _refuse(given, error)
    taken: list[str] = []
    if given.update_policy:
        taken, outcome = _updated(given, outcome, reports, baseline, asked)
    lines = [*announcement(outcome), *(harmless_text(f"taken over: {text}") for text in taken)]
    if given.junit is not None:
        write_output(given.junit, junit.junit(outcome), force=given.force)
    if given.summary is not None:
        write_output(given.summary, markdown.markdown(outcome), force=given.force)
    if given.github:
        _summarise(markdown.markdown(outcome))
        lines += github.commands(outcome)
    for line in lines:  # after the files: the reader of a pipe may leave early
        print(line)
    return outcome.code


def _default_report() -> str:
    """The report of the last run here; where it left none, its journal."""
    for name in (REPORT_FILE, JOURNAL_FILE):
        if Path(name).exists():
            return name
    raise UsageError(f"there is no {REPORT_FILE} here: run `pytest --compile-matrix` first, or name a report, as in "
                     "`pytest-torchcompile gate report.json`")


def _read(paths: Iterable[str]) -> list[Report]:
    return [read_report(path) for path in paths]


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Reports are millions of objects and no garbage; the collector would walk them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _updated(given: argparse.Namespace, outcome: Outcome, reports: list[Report],
             baseline: list[Report], asked: Asked) -> tuple[list[str], Outcome]:
    """Take over what improved, and judge again by the policy that is there now."""
    from pytest_torchcompile.gate.ratchet import update

    taken = update(outcome, Path(given.policy))
    if not taken:
        return taken, outcome
    return taken, gate(reports, read_policy(given.policy), baseline, asked=asked)


def _asked(given: argparse.Namespace, reports: list[Report]) -> Asked:
    """What the command line asks of the origin of the reports."""
    commit = "" if given.commit is None else commit_named(given.commit, Path())
    folders = {report.name: Path(report.name).parent for report in reports}
    commits = {folder: head_commit(folder) for folder in set(folders.values())}
    heads = {name: commits[folder] or "" for name, folder in folders.items()}
    since = {report.name: edited_since_run(report.block["run"], Path(report.name).parent) for report in reports}
    return Asked(commit, given.earlier, heads, {name: what for name, what in since.items() if what})


def _refuse(given: argparse.Namespace, error: ReportError) -> int:
    text = refusal(error, error.exit_code)
    print(text)
    if given.junit is not None:
        write_output(given.junit, junit.refused(str(error), error.exit_code), force=given.force)
    if given.summary is not None:
        write_output(given.summary, markdown.short(text, error.exit_code), force=given.force)
    if given.github:
        _summarise(markdown.short(text, error.exit_code))
        print(github.command(text))
    return error.exit_code


def _summarise(text: str) -> None:
    """Append to the summary of the step; GitHub gives a file of its own to each."""
    path = os.environ.get(SUMMARY_VARIABLE)
    if path:
        try:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise UsageError(f"{SUMMARY_VARIABLE}={path}: cannot be written: {error.strerror or error}") from None
