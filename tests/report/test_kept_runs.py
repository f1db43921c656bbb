"""Reports of the last runs: so many are kept, and the newest of another commit is found."""

from __future__ import annotations

import json

import pytest
from runs import Run

from pytest_torchcompile.report.kept_runs import RUNS, keep_run, kept_runs, newest_of_other_commit


@pytest.fixture
def keep(tmp_path):
    """Keep a report of a run that began on a day, of a commit."""
    def run(day, commit="", shard=(1, 1), most=3):
        block = Run().blocks()[0]
        block["run"]["started"] = f"2026-11-{day:02}T10:00:00+00:00"
        if commit:
            block["run"]["git"] = {"commit": commit * 40, "changed": False, "prefix": ""}
        block["shard"] = {"index": shard[0], "of": shard[1]}
        report = tmp_path / "report.json"
        report.write_text(json.dumps({"day": day}))
        keep_run(tmp_path, report, block, most)

    return run


def days(paths):
    return [json.loads(path.read_text())["day"] for path in paths]


def test_so_many_are_kept_and_the_oldest_goes(keep, tmp_path):
    """A folder with another name is not ours. The day is that of the run, not of the file."""
    other = tmp_path / RUNS / "by-hand"
    other.mkdir(parents=True)
    for day in (5, 1, 9, 7):
        keep(day, "a")
    assert days(kept_runs(tmp_path)) == [9, 7, 5]
    assert sorted(path.name for path in (tmp_path / RUNS).iterdir()) == [
        "20261105T100000-aaaaaaaaaaaa", "20261107T100000-aaaaaaaaaaaa", "20261109T100000-aaaaaaaaaaaa", "by-hand"]


def test_none_is_kept_where_nobody_wants_any(keep, tmp_path):
    keep(1)
    keep(2, most=0)
    assert days(kept_runs(tmp_path)) == [1]


def test_the_newest_of_another_commit(keep, tmp_path):
    """Of a folder that is no repository the newest one."""
    assert newest_of_other_commit(tmp_path, "a" * 40) is None
    for day, commit in ((1, "b"), (2, "b"), (3, "a")):
        keep(day, commit)
    assert days([newest_of_other_commit(tmp_path, "a" * 40)]) == [2]
    assert days([newest_of_other_commit(tmp_path, "c" * 40)]) == [3]
    assert days([newest_of_other_commit(tmp_path, "")]) == [3]


def test_a_shard_is_compared_with_its_own_kind(keep, tmp_path):
    """Each has its own bound, too."""
    for day in (1, 2, 3, 4):
        keep(day, "b", (1, 2))
    keep(9, "b", (2, 2))
    assert days(kept_runs(tmp_path, (1, 2))) == [4, 3, 2]
    assert days([newest_of_other_commit(tmp_path, "a" * 40, (2, 2))]) == [9]
    assert newest_of_other_commit(tmp_path, "a" * 40) is None
