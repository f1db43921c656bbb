"""Origin: which run, of which commit, how long ago? A green report of another one is no green of this one."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.errors import MatrixError, UsageError
from pytest_torchcompile.gate.policy import COMMIT, HEAD, Policy
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.evidence import head_fingerprint
from pytest_torchcompile.report.finding import Finding, Weight
from pytest_torchcompile.report.merging import Merged
from pytest_torchcompile.report.provenance import head_commit
from pytest_torchcompile.report.reading import Report
from pytest_torchcompile.report.takeover import SAME

__all__ = ["Asked", "commit_named", "origin"]

SHOWN: Final = 12
"""Letters of a commit that are shown."""
CLOCKS: Final = datetime.timedelta(hours=1)
"""By so much the clocks of two machines may differ."""
_SOURCES: Final = ("commit", "changed", "diff_sha256", "untracked_sha256")


@dataclass(frozen=True)
class Asked:
    """What the command line asks of the origin of reports."""

    commit: str = ""
    """The reports must be of this commit, without changes; empty: of any."""
    earlier: bool = False
    """May reports and verdicts be of earlier runs, and of other commits?"""
    heads: Mapping[str, str] = field(default_factory=dict)
    """Report to the commit that is checked out in the folder in which it lies."""
    edited: Mapping[str, str] = field(default_factory=dict)
    """Report to what of its sources is not any more, in its folder, as its run had it; only where something is not."""
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


def origin(merged: Merged, policy: Policy, asked: Asked) -> Iterator[Finding]:
    """Is the run the one that is to be released? Raises MatrixError for a policy whose HEAD nobody knows."""
    for report in merged.reports:
        yield from _as_written(report, policy)
        yield from _edited_meanwhile(report)
        if report.later_run:
            text = f"{report.name} is of an earlier run: a later one began, {report.later_run}, and left no report"
            yield Finding("earlier", _weight(asked), text, hint=_hint(asked))
    yield from _kept(merged, asked)
    yield from _commit(merged, policy, asked)
    yield from _age(merged, policy, asked)
    yield from _head(merged, asked)


def _weight(asked: Asked) -> Weight:
    return "note" if asked.earlier else "unusable"


def _hint(asked: Asked) -> str:
    return "" if asked.earlier else "run the matrix again, or judge earlier runs too by --earlier"


def _as_written(report: Report, policy: Policy) -> Iterator[Finding]:
    """Is the file as its run wrote it?"""
    if report.seal_broken:
        text = f"{report.name}: its seal is wrong: the file was changed or formatted anew since its run wrote it"
        yield Finding("seal", "unusable", text, hint="use the report as the run wrote it")
    elif policy.sealed and not report.sealed:
        what = "a journal, which has no seal" if report.journal else "not sealed"
        yield Finding("seal", "unusable", f"{report.name} is {what}, and {policy.path} wants sealed reports",
                      file=policy.path, line=policy.line(policy.places["sealed"]))
    stated = report.block["head_sha256"]
    if stated is not None and stated != _fingerprint(report.block):
        text = f"{report.name}: its environment, run or matrix is not as it was written: it was damaged or edited since"
        yield Finding("contradiction", "unusable", text, hint="use the report as the run wrote it")


def _edited_meanwhile(report: Report) -> Iterator[Finding]:
    """Were sources edited while the run went on? Then nobody knows of which state its verdicts are."""
    edited = (report.block["run"] or {}).get("sources_edited", ())
    if edited:
        text = f"{report.name}: sources were edited while its run went on: {first_names(edited)}"
        yield Finding("sources", "unusable", text,
                      hint="run the matrix again, and edit no .py or .yaml file until it has ended")


def _fingerprint(block: dict[str, Any]) -> str:
    try:
        return head_fingerprint(block)
    except ValueError:  # a number too large for a float
        return ""


def _kept(merged: Merged, asked: Asked) -> Iterator[Finding]:
    """Verdicts that a run of a part of the matrix left as an earlier run had found them."""
    same: dict[str, str] = {}
    other: dict[str, str] = {}
    runs = {report.name: (report.block["run"] or {}).get("git") for report in merged.reports}
    for name, kept, file in _kept_verdicts(merged):
        told = f"{_shown(kept['git'])}, {_ago(kept['finished'], asked)}"
        alike = kept.get("sources") == SAME and _same_sources(kept["git"], runs[file])
        (same if alike else other)[name] = told
    of = _all(merged)
    if other:
        has = "has" if len(other) == 1 else "have"
        text = f"{len(other)} of {of} {has} verdicts of an earlier run, which had other sources, or none that are " \
               f"known ({first_names(dict.fromkeys(other.values()), 2)})"
        yield Finding("earlier", _weight(asked), text, tuple(other), hint=_hint(asked))
    if alone := [name for name in same if name not in other]:
        has = "has" if len(alone) == 1 else "have"
        told = first_names(dict.fromkeys(same[name] for name in alone), 2)
        yield Finding("earlier", "note", f"{len(alone)} of {of} {has} verdicts of an earlier run of the same sources "
                                         f"({told})", tuple(alone))


def _kept_verdicts(merged: Merged) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Cell or test, what is told of the earlier run, and the file."""
    for name, cell in merged.cells.items():
        for kept in cell.get("kept", ()):
            yield name, kept, merged.origin[name]
    for report in merged.reports:
        for kept in report.block.get("tests_kept", ()):
            for name in kept["tests"]:
                yield name, kept, report.name


def _all(merged: Merged) -> str:
    cells = count(len(merged.cells), "cell")
    return f"{cells} and {count(len(merged.tests), 'test')}" if merged.tests else cells


def _same_sources(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    if not one or not other:
        return False
    return all(one.get(key) == other.get(key) for key in _SOURCES)


def _shown(git: Mapping[str, Any] | None) -> str:
    if not git:
        return "no commit told"
    return f"commit {git['commit'][:SHOWN]}" + (" with changes" if git["changed"] else "")


def _commit(merged: Merged, policy: Policy, asked: Asked) -> Iterator[Finding]:
    wanted: list[tuple[str, str, int]] = []
    if asked.commit:
        wanted.append((asked.commit, "", 0))
    if policy.commit:
        line = policy.line(policy.places["commit"])
        commit: str | None = policy.commit
        if commit == HEAD:
            commit = head_commit(Path(policy.path).parent)
        if commit is None:
            raise MatrixError(policy.path, line, 1, "commit: HEAD: this file is in no git repository")
        wanted.append((commit, policy.path, line))
    git = merged.git
    for commit, file, line in wanted:
        if git is None:
            text = f"the reports do not tell their commit, and {commit[:SHOWN]} is wanted"
        elif not git["commit"].startswith(commit):
            text = f"the reports are of commit {git['commit'][:SHOWN]}, and {commit[:SHOWN]} is wanted"
        elif git["changed"]:
            text = f"the reports are of commit {git['commit'][:SHOWN]} with uncommitted changes, and " \
                   f"{commit[:SHOWN]} without any is wanted"
        else:
            continue
        yield Finding("commit", "unusable", text, file=file, line=line)


def _age(merged: Merged, policy: Policy, asked: Asked) -> Iterator[Finding]:
    if policy.max_age is None:
        return
    now = asked.now or datetime.datetime.now(datetime.timezone.utc)
    place: dict[str, Any] = {"file": policy.path, "line": policy.line(policy.places["max_age"])}
    for name, finished in _times(merged):
        time = _time(finished)
        if time is None:
            yield Finding("max_age", "unusable", f"{name} does not tell when it ended", **place)
        elif now - time > policy.max_age:
            text = f"{name} ended {_duration(now - time)} ago, and {policy.path} takes at most " \
                   f"{_duration(policy.max_age)}"
            yield Finding("max_age", "unusable", text, **place)
        elif time - now > CLOCKS:
            yield Finding("max_age", "unusable", f"{name} ended at {finished}, which is in the future", **place)


def _times(merged: Merged) -> Iterator[tuple[str, Any]]:
    """What is judged, and when its run ended; of kept verdicts that of each earlier run."""
    for report in merged.reports:
        yield report.name, (report.block["run"] or {}).get("finished")
    kept = {each["finished"]: name for name, each, _ in _kept_verdicts(merged)}
    for finished, name in kept.items():
        yield f"the run before, of which {name} is,", finished


def _time(text: Any) -> datetime.datetime | None:
    try:
        time = datetime.datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return time if time.tzinfo else None


def _ago(finished: Any, asked: Asked) -> str:
    time = _time(finished)
    if time is None:
        return "at a time that is not told"
    now = asked.now or datetime.datetime.now(datetime.timezone.utc)
    return f"{_duration(max(now - time, datetime.timedelta()))} ago"


def _duration(span: datetime.timedelta) -> str:
    minutes = int(span.total_seconds() // 60)
    if minutes < 120:
        return count(minutes, "minute")
    return count(minutes // 60, "hour") if minutes < 48 * 60 else count(minutes // (24 * 60), "day")


def _head(merged: Merged, asked: Asked) -> Iterator[Finding]:
    """A report that lies in a folder of another commit may be of what nobody has any more."""
    for report in merged.reports:
        git, head = (report.block["run"] or {}).get("git"), asked.heads.get(report.name)
        if git and head and git["commit"] != head:
            text = f"{report.name} is of commit {git['commit'][:SHOWN]}, and HEAD of its folder is {head[:SHOWN]}"
            yield Finding("commit", "note", text)
        if what := asked.edited.get(report.name):
            text = f"{report.name} is older than edits in its folder: {what}"
            yield Finding("sources", "note", text, hint="run the matrix again to have them judged")
