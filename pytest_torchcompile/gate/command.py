"""The command ``pytest-torchcompile gate``: reads, judges, writes what was asked for, and returns the exit code."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pytest_torchcompile.errors import MatrixError, ReportError, TorchcompileError, UsageError
from pytest_torchcompile.gate import github, junit, markdown
from pytest_torchcompile.gate.announcement import announcement, refusal
from pytest_torchcompile.gate.gate import GateOutcome, gate
from pytest_torchcompile.gate.origin import OriginRequest, commit_named
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.gate.policyfile import read_policy
from pytest_torchcompile.report.files import JOURNAL_FILE, REPORT_FILE, write_output
from pytest_torchcompile.report.harmless import harmless_text
from pytest_torchcompile.report.provenance import edited_since_run, head_commit
from pytest_torchcompile.report.reading import Report, read_report

__all__ = ["INTERNAL", "SUMMARY_VARIABLE", "run_command"]

INTERNAL: Final = 70
"""Exit code for a mistake of ours (EX_SOFTWARE of sysexits.h): Python's own 1 would read as a verdict."""
SUMMARY_VARIABLE: Final = "GITHUB_STEP_SUMMARY"
"""Names the file whose Markdown GitHub shows on the page of the run."""


def run_command(given: argparse.Namespace) -> int:
    """Run the gate; the meaning of the exit code is in docs/gating.md."""
    try:
        with _garbage_collector_off():
            return _judge_and_write(given)
    except TorchcompileError as error:
        # A mistake in the policy is shown at its line in the pull request.
        if given.github and isinstance(error, MatrixError):
            print(github.workflow_command(error.text, error.path, error.line))
        raise
    # `| head -1` has read enough: the command line's own affair.
    except BrokenPipeError:
        raise
    except Exception:
        traceback.print_exc()
        print("pytest-torchcompile gate: this is a mistake of pytest-torchcompile, and no verdict: please report it "
              "with the lines above", file=sys.stderr)
        return INTERNAL


def _judge_and_write(given: argparse.Namespace) -> int:
    if given.update_policy and given.policy is None:
        raise UsageError("--update-policy: there is no policy to update; give one by --policy")
    given.reports = given.reports or [_default_report()]
    policy = Policy()
    if given.policy is not None:
        policy = read_policy(given.policy)
    try:
        reports, baseline = list(map(read_report, given.reports)), list(map(read_report, given.baseline or ()))
        request = _origin_request(given, reports)
        outcome = gate(reports, policy, baseline, request=request)
    except ReportError as error:
        return _refuse_reports(given, error)
    lines: list[str] = []
    if given.update_policy:
        taken = _update_policy(given, outcome)
        # What is announced is the verdict by the policy that is there now.
        if taken:
            outcome = gate(reports, read_policy(given.policy), baseline, request=request)
        lines = [harmless_text(f"taken over: {text}") for text in taken]
    lines = [*announcement(outcome), *lines]
    if given.junit is not None:
        write_output(given.junit, junit.junit(outcome), force=given.force)
    if given.summary is not None:
        write_output(given.summary, markdown.markdown(outcome), force=given.force)
    if given.github:
        _append_to_summary(markdown.markdown(outcome))
        lines += github.annotate_findings(outcome)
    # After the files: the reader of a pipe may leave early.
    for line in lines:
        print(line)
    return outcome.code


def _default_report() -> str:
    """The report of the last run here; where it left none, its journal."""
    for name in (REPORT_FILE, JOURNAL_FILE):
        if Path(name).exists():
            return name
    raise UsageError(f"there is no {REPORT_FILE} here: run `pytest --compile-matrix` first, or name a report, as in "
                     "`pytest-torchcompile gate report.json`")


@contextmanager
def _garbage_collector_off() -> Iterator[None]:
    """Reports are millions of objects and no garbage; the collector would walk them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _update_policy(given: argparse.Namespace, outcome: GateOutcome) -> list[str]:
    from pytest_torchcompile.gate.ratchet import update

    return update(outcome, Path(given.policy))


def _origin_request(given: argparse.Namespace, reports: list[Report]) -> OriginRequest:
    """What the command line asks of the origin of the reports."""
    commit = ""
    if given.commit is not None:
        commit = commit_named(given.commit, Path())
    # Shards lie in one folder as a rule, and each question costs a run of git.
    commits: dict[Path, str] = {}
    heads: dict[str, str] = {}
    edited: dict[str, str] = {}
    for report in reports:
        folder = Path(report.name).parent
        if folder not in commits:
            commits[folder] = head_commit(folder) or ""
        heads[report.name] = commits[folder]
        what = edited_since_run(report.block["run"], folder)
        if what:
            edited[report.name] = what
    return OriginRequest(commit, given.earlier, heads, edited)


def _refuse_reports(given: argparse.Namespace, error: ReportError) -> int:
    text = refusal(error, error.exit_code)
    print(text)
    if given.junit is not None:
        write_output(given.junit, junit.junit_of_refusal(str(error), error.exit_code), force=given.force)
    if given.summary is not None:
        write_output(given.summary, markdown.markdown_of_refusal(text, error.exit_code), force=given.force)
    if given.github:
        _append_to_summary(markdown.markdown_of_refusal(text, error.exit_code))
        print(github.workflow_command(text))
    return error.exit_code


def _append_to_summary(text: str) -> None:
    """To the summary of the step; GitHub gives a file of its own to each."""
    path = os.environ.get(SUMMARY_VARIABLE)
    if not path:
        return
    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{SUMMARY_VARIABLE}={path}: cannot be written: {error.strerror or error}") from None
