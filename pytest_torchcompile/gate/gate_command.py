"""The command ``pytest-torchcompile gate``: reads, judges, writes what was asked for, and returns the exit code.

The ratchet, for ``--update-policy``: a policy file is made as strict as what was measured, never less strict. Comments
and layout stay.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from pytest_torchcompile.errors import OWN_FAILURE, MatrixError, ReportError, TorchcompileError, UsageError
from pytest_torchcompile.gate import ci_formats, markdown
from pytest_torchcompile.gate.announcement import announcement, outcome_record, refusal, refusal_record
from pytest_torchcompile.gate.gate import GateOutcome, gate
from pytest_torchcompile.gate.origin import OriginRequest, commit_named
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.gate.policy_limits import Slack, slack_numbers
from pytest_torchcompile.gate.policyfile import parse_policy, read_policy
from pytest_torchcompile.plan.nodes import offsets_of_entry
from pytest_torchcompile.report.provenance import changed_by_policy_alone, edited_since_run, head_commit
from pytest_torchcompile.report.reading import Report, default_report, read_report
from pytest_torchcompile.report.safe_output import harmless_text, replace_file, write_output

__all__ = ["SUMMARY_VARIABLE", "PolicyEdit", "apply_edits", "possible_edits", "run_command", "update"]


@dataclass(frozen=True)
class PolicyEdit:
    """One change of the policy file; offsets are of characters in the file's text."""

    text: str
    start: int
    end: int
    new: str
    line: int
    removes: bool = False


def possible_edits(outcome: GateOutcome, text: str) -> list[PolicyEdit]:
    """What could be stricter in the policy with this text.

    Allowed failures that nothing needs any more or that cover fewer cells, counts that are lower than their limits,
    more cells that ran. Raises :class:`~pytest_torchcompile.errors.UsageError` for an entry that can't be taken out.
    """
    policy, ran = outcome.policy, sum(cell.ran for cell in outcome.cells.values())
    numbers = list(slack_numbers(policy, outcome.cells, outcome.allowed.used))
    if policy.ran_at_least is not None and ran > policy.ran_at_least:
        numbers.append(Slack("ran_at_least", policy.ran_at_least, ran, policy.places["ran_at_least"]))
    edits = list(_removed_entries(outcome, text))
    for slack in numbers:
        edits.append(PolicyEdit(slack.text, slack.node.start_mark.index, slack.node.end_mark.index, str(slack.new),
                                policy.line(slack.node)))
    return edits


def update(outcome: GateOutcome, path: Path) -> list[str]:
    """Write the stricter policy to its file, and return what was taken over.

    Raises :class:`~pytest_torchcompile.errors.UsageError` where the file's form does not allow it, or where the run is
    not whole, so that it can't be told what is no longer needed.
    """
    # A cell that is missing could be the one that still needs an entry.
    if any(finding.weight in ("unusable", "nothing") for finding in outcome.findings):
        raise UsageError(f"{path}: not updated: the run is not whole, so it can't be told what is no longer needed")
    # The marks of YAML count characters, without a byte order mark.
    text = path.read_bytes().decode("utf-8-sig")
    edits = possible_edits(outcome, text)
    if edits:
        text = apply_edits(text, edits)
        _check_edited(text, outcome.policy, edits, path)
        replace_file(path, text)
    return [f"{outcome.policy.path}:{edit.line}: {edit.text}" for edit in edits]


def apply_edits(text: str, edits: list[PolicyEdit]) -> str:
    """The text with the edits made, from the end so that the offsets hold."""
    for edit in sorted(edits, key=lambda each: -each.start):
        text = text[:edit.start] + edit.new + text[edit.end:]
    return text


def _removed_entries(outcome: GateOutcome, text: str) -> Iterator[PolicyEdit]:
    """Allowed failures that nothing needs any more."""
    policy = outcome.policy
    section = policy.places.get("allowed_failures")
    if not isinstance(section, yaml.SequenceNode):
        return
    unneeded = outcome.allowed.unneeded
    none_left = len(unneeded) == len(section.value)
    for number in unneeded:
        entry, node = policy.allowed_failures[number], section.value[number]
        if section.flow_style:
            raise UsageError(f"{policy.path}:{policy.line(node)}: the allowed failure is no longer needed, but the "
                             "list is written in brackets: take the entry out by hand")
        start, end = offsets_of_entry(node, text)
        new = ""
        # A key with nothing behind it would be another mistake, so the first entry leaves an empty list.
        if none_left and number == unneeded[0]:
            new = f"{' ' * max(2, section.start_mark.column)}[]\n"
        yield PolicyEdit(f"allowed failure taken out: {entry}", start, end, new, policy.line(node), removes=True)


def _check_edited(text: str, old: Policy, edits: list[PolicyEdit], path: Path) -> None:
    """A text edit that went wrong must not reach the file."""
    new = parse_policy(text.encode(), str(path))
    removed = sum(edit.removes for edit in edits)
    same = (len(new.allowed_failures) == len(old.allowed_failures) - removed
            and _selectors_of_limits(new) == _selectors_of_limits(old)
            and len(new.allowed_skips) == len(old.allowed_skips) and new.places.keys() == old.places.keys())
    if not same:
        raise UsageError(f"{path}: not updated: its form is too unusual to edit; take over by hand: "
                         + "; ".join(edit.text for edit in edits))


def _selectors_of_limits(policy: Policy) -> list[str]:
    return [str(rule.when) for rule in policy.limits]


# ---------------------------------------------------------------------------------------------------------- the command
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
            print(ci_formats.workflow_command(error.text, error.path, error.line))
        raise
    # `| head -1` has read enough: the command line's own affair.
    except BrokenPipeError:
        raise
    # The last line of defence: a traceback of ours must not end with pytest's or Python's exit code 1, which says FAIL.
    except Exception:
        traceback.print_exc()
        print("pytest-torchcompile gate: this is a mistake of pytest-torchcompile, and no verdict: please report it "
              "with the lines above", file=sys.stderr)
        return OWN_FAILURE


def _judge_and_write(given: argparse.Namespace) -> int:
    _refuse_contradictions(given)
    given.reports = given.reports or [default_report("gate")]
    policy = Policy()
    if given.policy is not None:
        policy = read_policy(given.policy)
    try:
        reports, baseline = list(map(read_report, given.reports)), list(map(read_report, given.baseline or ()))
        request = _origin_request(given, reports)
        outcome = gate(reports, policy, baseline, request=request)
    except ReportError as error:
        return _refuse_reports(given, error)
    taken: list[str] = []
    if given.update_policy:
        taken = update(outcome, Path(given.policy))
        # What is announced is the verdict by the policy that is there now.
        if taken:
            outcome = gate(reports, read_policy(given.policy), baseline, request=request)
    lines = _lines_to_print(given, outcome, taken)
    _write_files(given, outcome)
    # After the files: the reader of a pipe may leave early.
    for line in lines:
        print(line)
    return outcome.code


def _refuse_contradictions(given: argparse.Namespace) -> None:
    """Options of which each alone makes sense."""
    if given.json and given.github:
        raise UsageError("--json: --github prints annotations where the JSON would be; run the gate once for each")
    if given.update_policy and given.policy is None:
        raise UsageError("--update-policy: there is no policy to update; give one by --policy")


def _lines_to_print(given: argparse.Namespace, outcome: GateOutcome, taken: Sequence[str]) -> list[str]:
    """``taken``: what the policy has taken over."""
    taken_over = [harmless_text(f"taken over: {text}") for text in taken]
    if given.json:
        return [json.dumps({**outcome_record(outcome), "taken_over": taken_over}, indent=1)]
    lines = [*announcement(outcome), *taken_over]
    if given.github:
        lines += ci_formats.annotate_findings(outcome)
    return lines


def _write_files(given: argparse.Namespace, outcome: GateOutcome) -> None:
    if given.junit is not None:
        write_output(given.junit, ci_formats.junit(outcome), force=given.force)
    if given.summary is not None:
        write_output(given.summary, markdown.markdown(outcome), force=given.force)
    if given.github:
        _append_to_summary(markdown.markdown(outcome))


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


def _origin_request(given: argparse.Namespace, reports: list[Report]) -> OriginRequest:
    """What the command line asks of the origin of the reports."""
    commit = ""
    if given.commit is not None:
        commit = commit_named(given.commit, Path())
    # Shards lie in one folder as a rule, and each question costs a run of git.
    commits: dict[Path, str] = {}
    heads: dict[str, str] = {}
    edited: dict[str, str] = {}
    policy = None
    if given.policy is not None:
        policy = Path(given.policy)
    for report in reports:
        folder = Path(report.name).parent
        if folder not in commits:
            commits[folder] = head_commit(folder) or ""
        heads[report.name] = commits[folder]
        what = edited_since_run(report.block["run"], folder, policy)
        if what:
            edited[report.name] = what
    by_policy = set()
    for report in reports:
        if changed_by_policy_alone(report.block["run"], Path(report.name).parent, policy):
            by_policy.add(report.name)
    return OriginRequest(commit, given.earlier, heads, edited, frozenset(by_policy))


def _refuse_reports(given: argparse.Namespace, error: ReportError) -> int:
    text = refusal(error, error.exit_code)
    print(json.dumps(refusal_record(text, error.exit_code), indent=1) if given.json else text)
    if given.junit is not None:
        write_output(given.junit, ci_formats.junit_of_refusal(str(error), error.exit_code), force=given.force)
    if given.summary is not None:
        write_output(given.summary, markdown.markdown_of_refusal(text, error.exit_code), force=given.force)
    if given.github:
        _append_to_summary(markdown.markdown_of_refusal(text, error.exit_code))
        print(ci_formats.workflow_command(text))
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
