"""A folder stays within its bounds: what was used longest ago goes first, and what nobody finished writing."""

from __future__ import annotations

import os
import time

import pytest

from pytest_torchcompile.bounded_folder import beside_place, tidy_folder


@pytest.fixture
def folder(tmp_path):
    """Three files of 100 bytes, of an hour each; one of somebody else's; and two that were never finished."""
    inside = tmp_path / "inside"
    inside.mkdir()
    for age, name in enumerate(("new.txt", "inside/middle.txt", "old.txt", "foreign.md")):
        write_file(tmp_path / name, age * 3600 + 10)
    write_file(beside_place(tmp_path / "abandoned.txt"), 2 * 3600)
    write_file(beside_place(inside / "begun.txt"), 10)
    return tmp_path


def write_file(file, age):
    file.write_text("x" * 100)
    os.utime(file, (time.time() - age, time.time() - age))


@pytest.mark.parametrize(("largest", "oldest", "gone"), [
    (10_000, 10_000, set()), (400, 10_000, {"old"}), (299, 10_000, {"old", "middle"}), (0, 10_000, None),
    (10_000, 5000, {"old"}), (10_000, 0, None),
])  # fmt: skip
def test_what_goes(folder, largest, oldest, gone):
    """The oldest first. What one run writes at this moment counts, and a foreign file does not."""
    before = {file for file in folder.rglob("*") if file.is_file()}
    removed = tidy_folder(folder, ".txt", largest, oldest)
    after = {file for file in folder.rglob("*") if file.is_file()}
    assert removed == len(before - after)
    assert (folder / "foreign.md") in after
    assert beside_place(folder / "abandoned.txt") not in after
    if gone is None:
        assert after == {folder / "foreign.md"}
    else:
        expected = {file for file in before if file.stem in gone} | {beside_place(folder / "abandoned.txt")}
        assert before - after == expected


def test_a_folder_that_is_not_there(tmp_path):
    """Nothing is removed, and nothing is raised."""
    assert tidy_folder(tmp_path / "none", ".txt", 0) == 0
