"""Whose report is it: of which commit, how old, sealed? What the command line and a policy may ask."""

from __future__ import annotations

import datetime
import os
import subprocess

import pytest
from runs import Run, stated

from pytest_torchcompile.cli import main
from pytest_torchcompile.errors import MatrixError, ReportError, UsageError
from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.gate.origin import OriginRequest, commit_named
from pytest_torchcompile.gate.policyfile import parse_policy
from pytest_torchcompile.report.provenance import add_seal, head_commit, run_provenance

COMMIT = "4f2c" * 10
CLEAN = {"commit": COMMIT, "changed": False, "diff_sha256": "", "prefix": ""}
ENDED = datetime.datetime(2026, 11, 21, 10, 20, tzinfo=datetime.timezone.utc)
"""When the runs of these tests end."""


def reports(git=None):
    run = Run()
    run.git = git
    return run.reports()


def policy(text, path="release.yaml"):
    return parse_policy(f"version: 1\n{text}\n".encode(), str(path))


def git(folder, *arguments):
    known = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    return subprocess.run(["git", "-c", "user.name=us", "-c", "user.email=us@example.org", *arguments], cwd=folder,
                          env=known, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "release.yaml").write_text("version: 1\ncommit: HEAD\n")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


@pytest.mark.parametrize(("state", "text"), [
    (CLEAN, ""),
    (None, "the reports do not tell their commit, and 4f2c4f2 is wanted"),
    (CLEAN | {"commit": "a" * 40}, "the reports are of commit aaaaaaaaaaaa, and 4f2c4f2 is wanted"),
    (CLEAN | {"changed": True},
     "the reports are of commit 4f2c4f2c4f2c with uncommitted changes, and 4f2c4f2 without any is wanted"),
], ids=["that one", "not told", "another", "changed"])
@pytest.mark.parametrize("by", ["option", "policy"])
def test_the_commit_that_is_wanted(state, text, by):
    request = OriginRequest(commit="4f2c4f2") if by == "option" else OriginRequest()
    wanted = policy("commit: 4f2c4f2") if by == "policy" else None
    outcome = gate(reports(state), wanted, request=request)
    assert outcome.code == (2 if text else 0)
    assert [finding.text for finding in outcome.findings] == [text] * bool(text)
    if text and by == "policy":
        assert (outcome.findings[0].file, outcome.findings[0].line) == ("release.yaml", 2)


def test_head_is_the_commit_that_is_checked_out(repository, tmp_path_factory, monkeypatch):
    commit = git(repository, "rev-parse", "HEAD")
    assert commit_named("HEAD", repository) == head_commit(repository) == commit
    assert commit_named("4F2C4F2", repository) == "4f2c4f2"
    path = repository / "release.yaml"
    assert gate(reports(CLEAN | {"commit": commit}), policy("commit: HEAD", path)).code == 0
    assert gate(reports(CLEAN), policy("commit: HEAD", path)).code == 2
    nowhere = tmp_path_factory.mktemp("nowhere")
    with pytest.raises(MatrixError, match=r"release.yaml:2:1: commit: HEAD: this file is in no git repository"):
        gate(reports(CLEAN), policy("commit: HEAD", nowhere / "release.yaml"))
    with pytest.raises(UsageError, match=r"--commit HEAD: .* is in no git repository; give the commit's SHA"):
        commit_named("HEAD", nowhere)
    with pytest.raises(UsageError, match="--commit main: expected a commit's SHA, of 7 letters"):
        commit_named("main", nowhere)


def test_a_note_where_head_of_the_folder_is_another_commit(repository, capsys):
    run = Run()
    run.git = CLEAN
    (path,) = run.write(repository)
    assert main(["gate", path]) == 0
    head = git(repository, "rev-parse", "HEAD")
    told = capsys.readouterr().out
    assert f"note      {path} is of commit 4f2c4f2c4f2c, and HEAD of its folder is {head[:12]}" in told
    run.git = CLEAN | {"commit": head}
    run.write(repository)
    assert main(["gate", path, "--commit", head]) == 0
    assert "HEAD" not in capsys.readouterr().out


@pytest.mark.parametrize(("after", "text"), [
    (datetime.timedelta(minutes=89), ""),
    (datetime.timedelta(minutes=91), "report.json ended 91 minutes ago, and release.yaml takes at most 90 minutes"),
    (datetime.timedelta(days=3), "report.json ended 3 days ago, and release.yaml takes at most 90 minutes"),
    (datetime.timedelta(hours=-2), "report.json ended at 2026-11-21T10:20:00+00:00, which is in the future"),
    (datetime.timedelta(minutes=-10), ""),
], ids=str)
def test_how_old_a_report_may_be(after, text):
    outcome = gate(reports(), policy("max_age: 90m"), request=OriginRequest(now=ENDED + after))
    assert outcome.code == (2 if text else 0)
    assert [finding.text for finding in outcome.findings] == [text] * bool(text)


@pytest.mark.parametrize("time", ["", "yesterday", "2026-11-21T10:20:00"])
def test_a_time_that_nobody_can_read(time):
    (report,) = reports()
    report.block["run"]["finished"] = time
    outcome = gate([stated(report)], policy("max_age: 7d"), request=OriginRequest(now=ENDED))
    assert (outcome.code, outcome.findings[0].text) == (2, "report.json does not tell when it ended")


def test_a_policy_may_want_seals(tmp_path, capsys):
    (path,) = Run().write(tmp_path)
    wanted = tmp_path / "release.yaml"
    wanted.write_text("version: 1\nsealed: required\n")
    assert main(["gate", path, "--policy", str(wanted)]) == 2
    assert f"{path} is not sealed, and {wanted} wants sealed reports" in capsys.readouterr().out
    text = (tmp_path / "report.json").read_text()
    (tmp_path / "report.json").write_text(add_seal(text))
    assert main(["gate", path, "--policy", str(wanted)]) == 0


@pytest.mark.parametrize(("text", "message"), [
    ("commit: main", "commit: found 'main', expected HEAD, or a commit's SHA of 7 letters"),
    ("max_age: 7 weeks", "max_age: found '7 weeks', expected minutes, hours or days, for example 90m, 24h or 7d"),
    ("max_age: 0h", "max_age: found '0h', expected"),
    ("sealed: true", "sealed|seals"),
])
def test_mistakes(text, message):
    with pytest.raises(MatrixError, match=message):
        policy(text)


@pytest.mark.parametrize("kept", [{"git": CLEAN}, {"git": CLEAN, "environment": {"torch": "2.0"}}, {"git": None},
                                  {"git": CLEAN | {"untracked_sha256": "a" * 64}}, {"git": CLEAN, "sources": "edited"},
                                  {"git": CLEAN, "sources": "unknown"}], ids=str)
def test_kept_verdicts(kept):
    """Those of the same sources count; others only where that is wanted, and never those of another environment."""
    (report,) = reports(CLEAN)
    cell = report.cells[0]
    cell["kept"] = [{"checks": list(cell["checks"]), "started": "2026-11-20T10:00:00+00:00",
                     "finished": "2026-11-20T10:20:00+00:00", "sources": "same", **kept}]
    if "environment" in kept:
        with pytest.raises(Exception, match="mixed environments: "):
            gate([stated(report)])
        return
    same = kept == {"git": CLEAN}
    outcome = gate([stated(report)], request=OriginRequest(now=ENDED))
    assert outcome.code == (0 if same else 2)
    state = "no commit told" if kept["git"] is None else "commit 4f2c4f2c4f2c"
    sources = " of the same sources" if same else ", which had other sources, or none that are known"
    assert outcome.findings[0].text == \
        f"1 of 4 cells has verdicts of an earlier run{sources} ({state}, 24 hours ago)"
    assert gate([report], request=OriginRequest(earlier=True)).code == 0
    assert gate([report], policy("max_age: 7d"), request=OriginRequest(earlier=True, now=ENDED)).code == 0
    outcome = gate([report], policy("max_age: 2h"), request=OriginRequest(earlier=True, now=ENDED))
    assert outcome.findings[0].text.startswith(f"the run before, of which {cell['id']} is, ended 24 hours ago")


@pytest.mark.parametrize("key", ["changed", "diff_sha256", "untracked_sha256"])
def test_shards_of_other_sources_are_not_one_run(key):
    """A file that git does not track is a source too."""
    run = Run()
    run.git = CLEAN
    one, other = run.reports(2)
    assert gate([one, other]).code == 0
    other.block["run"]["git"] = CLEAN | {key: True if key == "changed" else "b" * 64}
    with pytest.raises(ReportError, match="their states of the working tree differ"):
        gate([one, stated(other)])


def test_two_edits_of_a_submodule_are_told_apart(repository, tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    git(source, "init", "-q")
    (source / "models.py").write_text("one\n")
    git(source, "add", "-A")
    git(source, "commit", "-qm", "one")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(source), "sub")
    git(repository, "commit", "-qm", "two")
    told = [run_provenance(repository, {})["git"]]
    for text in ("two\n", "three\n"):
        (repository / "sub" / "models.py").write_text(text)
        told.append(run_provenance(repository, {})["git"])
    assert [each["changed"] for each in told] == [False, True, True]
    assert len({each["diff_sha256"] for each in told}) == 3
