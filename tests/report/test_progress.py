"""How far a run has come: what is done, what fails, what runs since when, and the time left."""

from __future__ import annotations

import pytest

from pytest_torchcompile.report.progress import RunProgress


def progress(seconds=None, workers=1, cells=("a", "b", "c"), checks=("compiles", "equivalence")):
    made = RunProgress(seconds or {}, workers)
    made.expect((cell, check) for cell in cells for check in checks)
    return made


def judge(made, cell, now, verdict="pass"):
    for check in list(made.left[cell]):
        made.judge(cell, check, verdict, now)


def test_a_run_from_its_beginning_to_its_end():
    """A cell is done with its last check; nothing is known of the time left before one is."""
    made = progress()
    assert made.line(0) == "compile matrix: 0/3 cells"
    made.begin("a", 0)
    made.begin("a", 5)
    made.judge("a", "compiles", "pass", 9)
    assert made.line(10) == "compile matrix: 0/3 cells, runs a (10 s)"
    made.judge("a", "equivalence", "fail", 10)
    assert made.line(11) == "compile matrix: 1/3 cells, 1 fails: a, about 20 s left"
    made.begin("b", 11)
    assert made.line(15) == "compile matrix: 1/3 cells, 1 fails: a, about 16 s left, runs b (4 s)"
    judge(made, "b", 20, "crash")
    judge(made, "c", 20)
    assert made.line(30) == "compile matrix: 3/3 cells, 2 fail: a and 1 more"


def test_the_time_left_is_told_from_earlier_runs():
    """One that nobody knows counts as the mean of those that are known; workers share; none is negative."""
    made = progress({"a": 100.0, "b": 300.0}, workers=2)
    assert made.seconds_left(0) == (100 + 300 + 200) / 2
    made.begin("a", 0)
    assert made.seconds_left(40) == (60 + 300 + 200) / 2
    assert made.seconds_left(4000) == (0 + 300 + 200) / 2
    late = progress({"a": 100.0, "b": 1.0, "c": 1.0}, workers=1)
    for cell in "bc":
        del late.left[cell]
    late.begin("a", 0)
    assert "about 60 s left" in late.line(40)
    assert "longer than expected" in late.line(400)
    assert "about 5 min left" in progress({"a": 100.0, "b": 100.0, "c": 100.0}).line(0)
    assert "about 2 h 5 min left" in progress(dict.fromkeys("abc", 2500.0)).line(0)


def test_a_cell_that_waits_for_a_gpu_does_not_run():
    """Its time begins with the GPU. Who else waits, in other runs, is of no interest."""
    made = progress()
    made.begin("a", 0)
    made.begin("b", 0)
    made.note_waiting({"b", "of another run"}, 5)
    assert made.line(10) == "compile matrix: 0/3 cells, runs a (10 s), waits for a GPU: b (10 s)"
    made.begin("c", 10)
    made.note_waiting({"a", "b", "c"}, 10)
    assert made.line(10) == "compile matrix: 0/3 cells, waits for a GPU: a (10 s) and 2 more"
    made.note_waiting({"a", "c"}, 30)
    assert "runs b (1 s), waits for a GPU: a (31 s) and 1 more" in made.line(31)
    judge(made, "b", 40)
    assert made.done == [("b", 10)]


def test_of_a_first_run_nothing_was_expected():
    """The last cell takes longer than those before, which were of other backends: no time left is told."""
    made = progress()
    for cell in "ab":
        made.begin(cell, 0)
        judge(made, cell, 2)
    made.begin("c", 2)
    assert made.line(60) == "compile matrix: 2/3 cells, runs c (58 s)"


def test_a_first_run_learns_from_what_still_runs():
    """The first cell was cheap; the second has run for 80 s, so the third may take as long."""
    made = progress()
    made.begin("a", 0)
    judge(made, "a", 20)
    made.begin("b", 20)
    assert made.seconds_left(30) == 10 + 20
    assert made.seconds_left(100) == 0 + (20 + 80) / 2


def test_of_the_last_cells_of_a_first_run_no_time_is_told():
    """Two cells took 20 s each; the last may be of another kind. It did take 33 s more where 2 s were promised."""
    made = progress()
    for cell in ("a", "b"):
        made.begin(cell, 0)
        judge(made, cell, 20)
    assert made.seconds_left(20) == 20
    made.begin("c", 20)
    assert made.seconds_left(38) is None
    assert made.line(38) == "compile matrix: 2/3 cells, runs c (18 s)"


def test_workers_tell_the_same_items():
    """What is expected a second time is no more than what was expected."""
    made = progress()
    judge(made, "a", 1)
    made.expect([("a", "compiles")])
    assert (made.total, len(made.left)) == (3, 2)


def test_what_is_no_cell_of_the_run_is_left_alone():
    made = progress()
    made.begin("other", 1)
    made.judge("other", "compiles", "fail", 1)
    assert made.line(1) == "compile matrix: 0/3 cells"


def test_a_line_fits_the_terminal():
    made = progress(cells=["a-long-name-of-a-cell-on-aot_eager", "b"])
    made.begin("a-long-name-of-a-cell-on-aot_eager", 0)
    assert made.line(1, 40) == "compile matrix: 0/2 cells, runs ..."
    assert all(len(made.line(1, width)) <= width for width in range(20, 100))


@pytest.mark.parametrize(("begun", "text"), [
    ([], "interrupted: 1 of 3 cells judged, 2 left"),
    (["b"], "interrupted: 1 of 3 cells judged, in the middle of b, 2 left"),
])
def test_an_interrupted_run_says_how_to_go_on(begun, text):
    made = progress()
    judge(made, "a", 1)
    for cell in begun:
        made.begin(cell, 1)
    assert made.interrupted_lines("pytest --compile-resume") == [text, "  go on  pytest --compile-resume"]
    for cell in ("b", "c"):
        judge(made, cell, 2)
    assert made.interrupted_lines("pytest --compile-resume") == []
