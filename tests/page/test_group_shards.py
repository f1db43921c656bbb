"""Shards in a folder: which of them are of one run, by time alone where nothing else tells."""

from __future__ import annotations

from pytest_torchcompile.page.past_runs import group_shards
from pytest_torchcompile.report.reading import Report


def shard(index: int, hour: int | None, of: int = 2, commit: str = "a", matrix: str = "m") -> Report:
    run = None
    if hour is not None:
        run = {"started": f"2026-11-20T{hour:02}:00:00+00:00", "git": {"commit": commit}, "ci": {}}
    return Report(f"{index}of{of}@{hour}", {"run": run, "shard": {"index": index, "of": of},
                                            "matrix": {"sha256": matrix}})


def names(reports: list[Report]) -> list[list[str]]:
    return [[report.name for report in group] for group in group_shards(reports)]


def test_both_shards_of_two_runs():
    """In whatever order they are read."""
    shards = [shard(2, 9), shard(1, 8), shard(2, 8), shard(1, 9)]
    assert names(shards) == [["1of2@8", "2of2@8"], ["2of2@9", "1of2@9"]]


def test_a_shard_goes_to_the_last_run_that_lacks_it():
    """The first run has lost its second shard."""
    assert names([shard(1, 8), shard(1, 9), shard(2, 10)]) == [["1of2@8"], ["1of2@9", "2of2@10"]]


def test_what_differs_is_of_another_run():
    for other in (shard(2, 8, commit="b"), shard(2, 8, matrix="n"), shard(2, 8, of=3)):
        assert len(group_shards([shard(1, 8), other])) == 2
    assert len(group_shards([shard(1, 8), shard(2, 8)])) == 1


def test_a_shard_without_a_time_comes_first():
    """Schema 1.0 tells no beginning, and so no commit either: it is of no other run."""
    assert names([shard(1, 8), shard(1, None)]) == [["1of2@None"], ["1of2@8"]]


def test_no_shard_no_run():
    assert group_shards([]) == []
