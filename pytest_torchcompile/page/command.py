"""The command ``pytest-torchcompile html``: reads reports, writes the page and the picture."""

from __future__ import annotations

import argparse
import re

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.gate.announcement import sentence
from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.gate.policyfile import read_policy
from pytest_torchcompile.page.document import page
from pytest_torchcompile.page.svg import svg
from pytest_torchcompile.report.files import write_output
from pytest_torchcompile.report.merging import merge_reports
from pytest_torchcompile.report.reading import read_report

__all__ = ["run"]


def run(given: argparse.Namespace) -> int:
    """Write what was asked for. The exit code is 0 whatever the page says: to judge is the gate's task.

    :raises ReportError: the reports cannot be read, or are not of one run.
    :raises UsageError: a file cannot be written, or `--source` is no address.
    """
    source = _source(given.source)
    reports = [read_report(path) for path in given.reports]
    baseline = [read_report(path) for path in given.baseline or ()]
    outcome = gate(reports, None if given.policy is None else read_policy(given.policy), baseline)
    before = merge_reports(baseline) if baseline else None
    write_output(given.output, page(outcome, before, source=source), force=given.force)
    if given.svg is not None:
        write_output(given.svg, svg(outcome), force=given.force)
    print(sentence(outcome))
    print(" and ".join(filter(None, (given.output, given.svg))), "written")
    return 0


def _source(given: str | None) -> str:
    if given is None:
        return ""
    if not re.match(r"https?://[^\s{}]", given) or "{file}" not in given:
        raise UsageError(f"--source {given}: expected an address with {{file}} and {{line}} in it, for example "
                         "https://github.com/OWNER/REPO/blob/main/{file}#L{line}")
    return given
