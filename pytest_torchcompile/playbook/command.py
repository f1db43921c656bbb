"""The command ``pytest-torchcompile playbook``: reads reports, writes the playbook."""

from __future__ import annotations

import argparse

from pytest_torchcompile.errors import NothingToJudge
from pytest_torchcompile.gate.announcement import sentence
from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.gate.policyfile import read_policy
from pytest_torchcompile.playbook.chapters import playbook
from pytest_torchcompile.playbook.choice import ran
from pytest_torchcompile.report.files import write_output
from pytest_torchcompile.report.reading import read_report

__all__ = ["run"]


def run(given: argparse.Namespace) -> int:
    """Write the playbook; ``-`` is the terminal.

    :raises ReportError: the reports cannot be read, or are not of one run.
    :raises NothingToJudge: no cell ran, so there is nothing that a playbook could say.
    """
    policy = None if given.policy is None else read_policy(given.policy)
    outcome = gate([read_report(path) for path in given.reports], policy)
    if not any(map(ran, outcome.facts)):
        raise NothingToJudge(f"{', '.join(given.reports)}: no cell ran, so there is nothing to write a playbook of; "
                             f"{sentence(outcome)}")
    if given.output == "-":
        print(playbook(outcome), end="")
    else:
        write_output(given.output, playbook(outcome), force=given.force)
        print(given.output, "written")
    return 0
