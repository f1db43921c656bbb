"""Results that were reused: told, and bounded or forbidden by a policy."""

from __future__ import annotations

import datetime

import pytest
from runs import Run

from pytest_torchcompile.errors import MatrixError
from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.gate.origin import OriginRequest
from pytest_torchcompile.gate.policyfile import parse_policy
from pytest_torchcompile.report.provenance import cell_fingerprint

ENDED = datetime.datetime(2026, 11, 21, 10, 20, tzinfo=datetime.timezone.utc)
HOUR = 3600
TOLD = ("2 of 4 cells reused from earlier runs of what has not changed since (of commit 4f2c4f2c4f2c); the oldest is "
        "5 hours old: ")


def judge(policy="", ages=(HOUR, 3 * HOUR)):
    """Of a run that ended two hours ago, with a reused result for each age."""
    (report,) = Run().reports()
    for cell, age in zip(report.block["cells"], ages, strict=False):
        cell["reused"] = {"run": "2026-11-20T10:00:00+00:00", "commit": "4f2c" * 10, "changed": False, "age": age}
        cell["evidence_sha256"] = cell_fingerprint(cell)
    parsed = parse_policy(f"version: 1\n{policy}\n".encode(), "release.yaml")
    return gate([report], parsed, request=OriginRequest(now=ENDED + datetime.timedelta(hours=2)))


def test_what_was_reused_is_told():
    """Without a policy it is a note; where nothing was reused nothing is said."""
    outcome = judge()
    (finding,) = outcome.findings
    assert (outcome.code, finding.weight, finding.text.startswith(TOLD)) == (0, "note", True)
    assert len(finding.cells) == 2
    assert not judge(ages=()).findings


@pytest.mark.parametrize(("policy", "why"), [
    ("reuse: forbidden", "release.yaml takes none"),
    ("reuse: {max_age: 4h}", "release.yaml takes at most 4 hours"),
    ("max_age: 4h", "release.yaml takes at most 4 hours"),
    ("reuse: {at_most: 0.4}", "release.yaml takes at most 0.4 of them"),
    ("reuse: {at_most: 0}", "release.yaml takes at most 0 of them"),
    ("reuse: {at_most: 0.4, max_age: 4h}", "takes at most 0.4 of them and takes at most 4 hours"),
    ("reuse: {at_most: 0.5, max_age: 6h}", ""),
    ("reuse: {max_age: 6h}\nmax_age: 4h", ""),
])
def test_a_policy_bounds_it(policy, why):
    """The age is that of the result at the time of judging, not at that of the report."""
    outcome = judge(policy)
    (finding,) = outcome.findings
    assert outcome.code == (2 if why else 0)
    assert finding.text.endswith(why)
    if why:
        assert finding.file == "release.yaml"
        assert finding.hint == "run the matrix again, without --compile-reuse"
    assert judge(policy.replace("\nmax_age: 4h", ""), ages=()).code == 0


@pytest.mark.parametrize(("text", "message"), [
    ("reuse: never", "'never' is not what reuse may be"),
    ("reuse: {max_age: 7 weeks}", "max_age: found '7 weeks', expected"),
    ("reuse: {at_most: 2}", "at_most"),
    ("reuse: {most: 1}", "did you mean 'at_most'"),
])
def test_mistakes(text, message):
    """Each with its place."""
    with pytest.raises(MatrixError, match=message):
        judge(text)


def test_a_report_from_which_it_was_taken_out_is_not_as_it_was_written():
    """That a result was reused is part of the evidence."""
    (report,) = Run().reports()
    cell = report.block["cells"][0]
    cell["reused"] = {"run": "", "commit": None, "changed": False, "age": 5}
    cell["evidence_sha256"] = cell_fingerprint(cell)
    del cell["reused"]
    assert gate([report]).code == 2
