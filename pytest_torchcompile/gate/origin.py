"""Origin: which run, of which commit, how long ago? A green report of another one is no green of this one."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.errors import MatrixError, UsageError
from pytest_torchcompile.gate.policy import COMMIT, HEAD, Policy
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.finding import Finding
from pytest_torchcompile.report.merging import Merged
from pytest_torchcompile.report.provenance import TRACKED_FILES, head_commit, head_fingerprint
from pytest_torchcompile.report.reading import Report
from pytest_torchcompile.report.safe_output import PART_FILE
from pytest_torchcompile.report.takeover import SAME

__all__ = ["OriginRequest", "check_origin", "commit_named"]

SHOWN: Final = 12
"""Letters of a commit that are shown."""
CLOCKS: Final = datetime.timedelta(hours=1)
"""By so much the clocks of two machines may differ."""
_SOURCES: Final = ("commit", "changed", "diff_sha256", "untracked_sha256")


@dataclass(frozen=True)
class OriginRequest:
    """What the command line asks of the origin of reports."""

    commit: str = ""
    """The reports must be of this commit, without changes; empty: of any."""
    earlier: bool = False
    """May reports and verdicts be of earlier runs, and of other commits?"""
    heads: Mapping[str, str] = field(default_factory=dict)
    """Report to the commit that is checked out in the folder in which it lies."""
    edited: Mapping[str, str] = field(default_factory=dict)
    """Report to what of its sources is not any more, in its folder, as its run had it; only where something is not."""
    changed_by_policy: Collection[str] = ()
    """Reports whose run had no uncommitted changes but those of the policy, which is read only now."""
    now: datetime.datetime | None = None
    """The time of judging; None: this moment."""


def commit_named(text: str, folder: Path) -> str:
    """The commit that ``--commit`` names: a SHA of at least 7 letters, or HEAD, which is that of ``folder``.

    Raises :class:`~pytest_torchcompile.errors.UsageError`.
    """
    if text == HEAD:
        commit = head_commit(folder)
        if commit is None:
            raise UsageError(f"--commit HEAD: {folder} is in no git repository; give the commit's SHA")
        return commit
    if not COMMIT.fullmatch(text.lower()):
        raise UsageError(f"--commit {text}: expected a commit's SHA, of 7 letters (0-9, a-f) or more, or HEAD")
    return text.lower()


def check_origin(merged: Merged, policy: Policy, request: OriginRequest) -> Iterator[Finding]:
    """Is the run the one that is to be released? Raises MatrixError for a policy whose HEAD nobody knows."""
    for report in merged.reports:
        # From what is wrong with the file itself to what is wrong with its age: the first tells more.
        yield from _check_as_written(report, policy)
        yield from _check_edited_meanwhile(report)
        if report.later_run:
            text = (f"{report.name} is of an earlier run: a later one began, {report.later_run}, and left no report in "
                    f"its place (a run of some of the cells leaves {PART_FILE})")
            yield _earlier_finding(text, (), request)
    yield from _check_kept_verdicts(merged, request)
    yield from _check_reused(merged, policy, request)
    yield from _check_commit(merged, policy, request)
    yield from _check_age(merged, policy, request)
    yield from _check_folders(merged, request)


def _earlier_finding(text: str, cells: tuple[str, ...], request: OriginRequest) -> Finding:
    if request.earlier:
        return Finding("earlier", "note", text, cells)
    hint = "run the matrix again, or judge earlier runs too by --earlier"
    return Finding("earlier", "unusable", text, cells, hint=hint)


# is the file as its run wrote it?


def _check_as_written(report: Report, policy: Policy) -> Iterator[Finding]:
    if report.seal_broken:
        text = f"{report.name}: its seal is wrong: the file was changed or formatted anew since its run wrote it"
        yield Finding("seal", "unusable", text, hint="use the report as the run wrote it")
    # A broken seal is told in any case, a missing one only where the policy wants it.
    elif policy.sealed and not report.sealed:
        what = "not sealed"
        if report.journal:
            what = "a journal, which has no seal"
        yield Finding("seal", "unusable", f"{report.name} is {what}, and {policy.path} wants sealed reports",
                      file=policy.path, line=policy.line_of("sealed"))
    stated = report.block["head_sha256"]
    if stated is not None and stated != _fingerprint_of_head(report.block):
        text = f"{report.name}: its environment, run or matrix is not as it was written: it was damaged or edited since"
        yield Finding("contradiction", "unusable", text, hint="use the report as the run wrote it")


def _check_edited_meanwhile(report: Report) -> Iterator[Finding]:
    """Were sources edited while the run went on? Then nobody knows of which state its verdicts are."""
    edited = _run_block(report).get("sources_edited", ())
    if edited:
        text = f"{report.name}: sources were edited while its run went on: {first_names(edited)}"
        yield Finding("sources", "unusable", text,
                      hint="run the matrix again, and edit no .py or .yaml file until it has ended")


def _run_block(report: Report) -> Mapping[str, Any]:
    """What the report tells of its run; of schema 1.0 it tells nothing."""
    return report.block["run"] or {}


def _fingerprint_of_head(block: dict[str, Any]) -> str:
    try:
        return head_fingerprint(block)
    except ValueError:  # a number too large for a float
        return ""


# verdicts that a run of a part of the matrix left as an earlier run had found them


@dataclass(frozen=True)
class KeptVerdict:
    """A cell or a test whose verdict is of an earlier run."""

    name: str
    earlier: Mapping[str, Any]
    """What the report tells of that run."""
    report: Report


def _check_kept_verdicts(merged: Merged, request: OriginRequest) -> Iterator[Finding]:
    same: dict[str, str] = {}
    other: dict[str, str] = {}
    for kept in _kept_verdicts(merged):
        git = kept.earlier["git"]
        run = f"{_shown_commit(git)}, {_time_ago(kept.earlier['finished'], request)}"
        # The run itself compared its sources; the commit is compared here once more.
        if kept.earlier.get("sources") == SAME and _same_sources(git, _run_block(kept.report).get("git")):
            same[kept.name] = run
        else:
            other[kept.name] = run
    # A name may have kept verdicts of several runs; the worse of the two findings tells of it.
    for name in other:
        same.pop(name, None)
    if other:
        runs = first_names(dict.fromkeys(other.values()), 2)
        text = f"{_share_of(other, merged)} verdicts of an earlier run, which had other sources, or none that are " \
               f"known ({runs})"
        yield _earlier_finding(text, tuple(other), request)
    if same:
        runs = first_names(dict.fromkeys(same.values()), 2)
        text = f"{_share_of(same, merged)} verdicts of an earlier run of the same sources ({runs})"
        yield Finding("earlier", "note", text, tuple(same))


def _kept_verdicts(merged: Merged) -> Iterator[KeptVerdict]:
    reports = {report.name: report for report in merged.reports}
    for name, cell in merged.cells.items():
        for earlier in cell.get("kept", ()):
            yield KeptVerdict(name, earlier, reports[merged.origin[name]])
    for report in merged.reports:
        for earlier in report.block.get("tests_kept", ()):
            for name in earlier["tests"]:
                yield KeptVerdict(name, earlier, report)


# results of earlier runs, of cells of which nothing has changed since


def _check_reused(merged: Merged, policy: Policy, request: OriginRequest) -> Iterator[Finding]:
    found = {}
    for name, cell in merged.cells.items():
        # A cell without this key was run here and now.
        if "reused" in cell:
            found[name] = _age_of_reused(cell["reused"], merged, name, request)
    if not found:
        return
    rule, oldest = policy.reuse, max(found, key=found.__getitem__)
    share = f"{len(found)} of {count(len(merged.cells), 'cell')}"
    commits = dict.fromkeys((merged.cells[name]["reused"]["commit"] or "none")[:SHOWN] for name in found)
    text = f"{share} reused from earlier runs of what has not changed since (of commit {first_names(commits, 2)}); " \
           f"the oldest is {_shown_duration(found[oldest])} old: {oldest}"
    max_age = rule.max_age or policy.max_age
    reasons = []
    if rule.forbidden:
        reasons.append("takes none")
    if len(found) > rule.at_most * len(merged.cells):
        reasons.append(f"takes at most {rule.at_most:g} of them")
    if max_age is not None and found[oldest] > max_age:
        reasons.append(f"takes at most {_shown_duration(max_age)}")
    if not reasons:
        yield Finding("reuse", "note", text, tuple(found))
        return
    section = "reuse" if "reuse" in policy.places else "max_age"
    yield Finding("reuse", "unusable", f"{text}; {policy.path} {' and '.join(reasons)}", tuple(found),
                  file=policy.path, line=policy.line_of(section), hint="run the matrix again, without --compile-reuse")


def _age_of_reused(origin: Mapping[str, Any], merged: Merged, name: str, request: OriginRequest) -> datetime.timedelta:
    """How long ago the cell ran: its age when its report was written, and the report's own."""
    report = next(report for report in merged.reports if report.name == merged.origin[name])
    finished = _parse_time(_run_block(report).get("finished"))
    since = datetime.timedelta()
    if finished is not None:
        since = max(since, _time_of_judging(request) - finished)
    return since + datetime.timedelta(seconds=origin["age"])


def _share_of(names: Collection[str], merged: Merged) -> str:
    """``2 of 8 cells have``; ``7 of 7 (5 cells and 2 tests) have``."""
    everything = count(len(merged.cells), "cell")
    if merged.tests:
        total = len(merged.cells) + len(merged.tests)
        everything = f"{total} ({everything} and {count(len(merged.tests), 'test')})"
    if len(names) == 1:
        return f"1 of {everything} has"
    return f"{len(names)} of {everything} have"


def _same_sources(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    if not one or not other:
        return False
    return all(one.get(key) == other.get(key) for key in _SOURCES)


def _shown_commit(git: Mapping[str, Any] | None) -> str:
    if not git:
        return "no commit told"
    shown = f"commit {git['commit'][:SHOWN]}"
    if git["changed"]:
        return f"{shown} with changes"
    return shown


# is it of the wanted commit?


@dataclass(frozen=True)
class WantedCommit:
    """A commit that the command line or the policy asks for."""

    sha: str
    file: str = ""
    """The policy that asks for it, and the line there."""
    line: int = 0


def _check_commit(merged: Merged, policy: Policy, request: OriginRequest) -> Iterator[Finding]:
    by_policy = all(report.name in request.changed_by_policy for report in merged.reports)
    for wanted in _wanted_commits(policy, request):
        text = _why_not_of_commit(merged.git, wanted.sha, by_policy)
        if text:
            yield Finding("commit", "unusable", text, file=wanted.file, line=wanted.line)


def _wanted_commits(policy: Policy, request: OriginRequest) -> Iterator[WantedCommit]:
    if request.commit:
        yield WantedCommit(request.commit)
    if not policy.commit:
        return
    line = policy.line_of("commit")
    if policy.commit != HEAD:
        yield WantedCommit(policy.commit, policy.path, line)
        return
    # That of the policy: it lies in the repository that is to be released, the report may lie anywhere.
    head = head_commit(Path(policy.path).parent)
    if head is None:
        raise MatrixError(policy.path, line, 1, "commit: HEAD: this file is in no git repository")
    yield WantedCommit(head, policy.path, line)


def _why_not_of_commit(git: Mapping[str, Any] | None, wanted: str, by_policy: bool) -> str:
    """Empty if the reports are of the commit that is wanted; ``by_policy``: what was changed is the policy alone."""
    if git is None:
        return f"the reports do not tell their commit, and {wanted[:SHOWN]} is wanted"
    shown = git["commit"][:SHOWN]
    if not git["commit"].startswith(wanted):
        return f"the reports are of commit {shown}, and {wanted[:SHOWN]} is wanted"
    if git["changed"] and not by_policy:
        return f"the reports are of commit {shown} with uncommitted changes, and {wanted[:SHOWN]} without any is wanted"
    return ""


# how long ago did it end?


def _check_age(merged: Merged, policy: Policy, request: OriginRequest) -> Iterator[Finding]:
    if policy.max_age is None:
        return
    line, now = policy.line_of("max_age"), _time_of_judging(request)
    for name, finished in _ends_of_runs(merged):
        text = _why_too_old(name, finished, policy, policy.max_age, now)
        if text:
            yield Finding("max_age", "unusable", text, file=policy.path, line=line)


def _why_too_old(name: str, finished: Any, policy: Policy, max_age: datetime.timedelta,
                 now: datetime.datetime) -> str:
    """Empty if the run is young enough."""
    time = _parse_time(finished)
    if time is None:
        return f"{name} does not tell when it ended"
    if now - time > max_age:
        return f"{name} ended {_shown_duration(now - time)} ago, and {policy.path} takes at most " \
               f"{_shown_duration(max_age)}"
    if time - now > CLOCKS:
        return f"{name} ended at {finished}, which is in the future"
    return ""


def _time_of_judging(request: OriginRequest) -> datetime.datetime:
    return request.now or datetime.datetime.now(datetime.timezone.utc)


def _ends_of_runs(merged: Merged) -> Iterator[tuple[str, Any]]:
    """What is judged, and when its run ended; of kept verdicts that of each earlier run."""
    for report in merged.reports:
        yield report.name, _run_block(report).get("finished")
    # Of verdicts of one earlier run one is named.
    earlier = {kept.earlier["finished"]: kept.name for kept in _kept_verdicts(merged)}
    for finished, name in earlier.items():
        yield f"the run before, of which {name} is,", finished


def _parse_time(text: Any) -> datetime.datetime | None:
    try:
        time = datetime.datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    # Python compares no time without a zone with one that has one.
    if time.tzinfo is None:
        return None
    return time


def _time_ago(finished: Any, request: OriginRequest) -> str:
    time = _parse_time(finished)
    if time is None:
        return "at a time that is not told"
    return f"{_shown_duration(max(_time_of_judging(request) - time, datetime.timedelta()))} ago"


def _shown_duration(span: datetime.timedelta) -> str:
    # Up to two units of the next size the smaller one is told: `90 minutes` says more than `1 hour`.
    minutes = int(span.total_seconds() // 60)
    if minutes < 2 * 60:
        return count(minutes, "minute")
    if minutes < 48 * 60:
        return count(minutes // 60, "hour")
    return count(minutes // (24 * 60), "day")


def _check_folders(merged: Merged, request: OriginRequest) -> Iterator[Finding]:
    """A report that lies in a folder of another commit may be of what nobody has any more."""
    for report in merged.reports:
        run = _run_block(report)
        yield from _check_head(report.name, run.get("git"), request.heads.get(report.name))
        edited = request.edited.get(report.name, "")
        # An edit while the run went on is told already.
        if edited and not run.get("sources_edited"):
            yield _finding_of_edits(report.name, edited, request)


def _check_head(report: str, git: Mapping[str, Any] | None, head: str | None) -> Iterator[Finding]:
    """``git``: what the run has noted of its own checkout; ``head``: the commit that its folder is at now."""
    # Nothing can be told of a run outside of a checkout, nor of a report that was taken elsewhere.
    if not git or not head or git["commit"] == head:
        return
    # The report may be of a checkout elsewhere, so this is a note.
    yield Finding("commit", "note", f"{report} is of commit {git['commit'][:SHOWN]}, and HEAD of its folder is "
                                    f"{head[:SHOWN]}")


def _finding_of_edits(report: str, edited: str, request: OriginRequest) -> Finding:
    text = f"{report} is older than edits in its folder: {edited}"
    # Of tracked files that the run has not imported nobody knows whether it would read them.
    if edited == TRACKED_FILES:
        return Finding("sources", "note", text, hint="run the matrix again to have them judged")
    # What the run has imported is what it judged.
    return _earlier_finding(text, (), request)
