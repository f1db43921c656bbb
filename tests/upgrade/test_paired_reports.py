"""What is told of two versions: planted differences one by one, noise in one run alone, and equal runs silent."""

from __future__ import annotations

import pytest
from planted import planted
from runs import Run, compiled

from pytest_torchcompile.errors import NothingToJudge
from pytest_torchcompile.report.code_changes import CodeStore
from pytest_torchcompile.report.merging import merge_reports
from pytest_torchcompile.upgrade.outline import SECTIONS, Outline, environment_differences, make_outline
from pytest_torchcompile.upgrade.paired_reports import compare_versions
from pytest_torchcompile.upgrade.upgrade_page import markdown, terminal_lines, upgrade_page


def merged(run: Run):
    return merge_reports(run.reports())


def outline_of(olds: list[Run], news: list[Run], store: CodeStore | None = None) -> Outline:
    old_runs, new_runs = [merged(run) for run in olds], [merged(run) for run in news]
    empty = Outline("torch", "2.12.1", "2.13.0", "m.yaml", 0, (0, 0), "a machine")
    return make_outline(empty, compare_versions(old_runs, new_runs), new_runs[0], [], store)


def timed(factor: float = 1.0, **axes) -> Run:
    """Twelve cells, whose compiles take a second each, or so many."""
    run = Run(**(axes or {"model": [f"m{number}" for number in range(12)]}))
    for number, name in enumerate(run.ids):
        run.section(name, "compiles")["compiles"] = [compiled((1 + number / 100) * factor)]
    return run


def test_equal_runs_are_silent():
    """Exit code 0, and every section says that there is nothing."""
    found = outline_of([timed(), timed()], [timed(), timed()])
    assert (found.lines, found.code) == ([], 0)
    assert found.sentence == "torch 2.12.1 to 2.13.0: nothing is worse, nothing better, in 12 cells of m.yaml"
    text = markdown(found)
    for name, section in SECTIONS.items():
        assert section.nothing in text or name in found.notes or "0 of 0 kernels" in text


def sections_of(found: Outline) -> list[str]:
    return [line.section for line in found.lines]


def test_wrong_numbers_come_first():
    """As the gate groups causes, with the cells in which each is new."""
    found = outline_of([planted(faulty=False)] * 2, [planted()] * 2)
    assert found.code == 1
    assert found.lines[0].section == "wrong"
    assert found.lines[0].text.startswith("liar computes wrong numbers: output:")
    assert set(found.lines[0].cells) == {name for name in planted().ids if "liar" in name}
    breaks = found.lines_of("breaks")
    assert len(breaks) == 9
    assert (breaks[0].place, breaks[0].remedy[:5]) == ("models.py:20", "don't")
    # And the other way round all of it is good news.
    back = outline_of([planted()] * 2, [planted(faulty=False)] * 2)
    assert back.code == 0
    assert {"equivalence failed and holds now", "no graph break any more: Tensor.item()"} <= {
        line.text for line in back.lines_of("better")}


def plant_break_within_limits(run):
    run.plan(run.ids[0], "run", limits={"coverage": 1.0, "graph_breaks": 3})
    run.breaks(run.ids[0], {"line": 30})


def plant_recompile_within_limits(run):
    run.plan(run.ids[0], "run", limits={"coverage": 1.0, "graph_breaks": 0, "recompiles": 3})
    run.recompiles(run.ids[0], 1, advice="mark_dynamic")


def plant_error(run):
    run.section(run.ids[0], "compiles")["error"] = {
        "type": "InductorError", "text": "InductorError: no kernel", "traceback": "", "phase": "forward"}


def plant_eager(run):
    run.section(run.ids[0], "compiles")["coverage"][0] |= {"share": 0.5, "outside": 2}


def plant_crash(run):
    run.fails(run.ids[0], "crash", "ended by SIGSEGV")


def plant_skip(run):
    run.skips(run.ids[0])


@pytest.mark.parametrize(("plant", "section", "text"), [
    (plant_break_within_limits, "breaks", "graph break: Tensor.item()"),
    (plant_recompile_within_limits, "recompiles", "recompile of Net.forward, cause: value"),
    (plant_error, "failing", "net raises when compiled: the compiled run raised InductorError"),
    (plant_eager, "eager", "silently runs eagerly"),
    (plant_crash, "failing", "ended by SIGSEGV"),
    (plant_skip, "gone", "1 cell not run"),
])
def test_each_planted_fault_has_its_section(plant, section, text):
    """In the new version it is told and fails; in both it is not told; in one run of two it is not decided."""
    bad = Run()
    plant(bad)
    found = outline_of([Run(), Run()], [bad, bad])
    assert (sections_of(found), found.code) == ([section], 1)
    assert text in found.lines[0].text
    assert found.lines[0].cells == (bad.ids[0],)
    assert outline_of([bad, bad], [bad, bad]).lines == []
    once = outline_of([Run(), Run()], [bad, Run()])
    assert once.code == 0
    assert set(sections_of(once)) <= {"wavers"}
    swapped = outline_of([bad, bad], [Run(), Run()])
    assert set(sections_of(swapped)) <= {"better"}


def test_a_flake_is_told_and_never_fails():
    """Two verdicts with one version."""
    bad = Run()
    bad.breaks(bad.ids[0])
    (line,) = outline_of([Run(), bad], [bad, bad]).lines
    assert line.text == "graph_breaks: pass, fail with the old version, fail, fail with the new one: a flake, or a race"


def test_figures_need_every_pair():
    """Slower in both runs is told; in one of them, or where the old version's own runs differ as much, it is not."""
    told = outline_of([timed(), timed()], [timed(2.0), timed(2.1)])
    assert (sections_of(told), told.code) == (["compile_seconds"], 0)
    assert "the median of 12 cells is 2.00, 2.10 times that of the first old run, and in the old runs 1.00, 1.00" in \
        told.lines[0].text
    assert outline_of([timed(), timed()], [timed(2.0), timed()]).lines == []
    assert outline_of([timed(), timed(1.9)], [timed(4.0), timed(4.0)]).lines == []
    faster = outline_of([timed(2.0), timed(2.0)], [timed(), timed()])
    assert sections_of(faster) == ["better"]
    alone = outline_of([timed()], [timed(2.0)])
    assert (alone.lines, alone.notes["compile_seconds"][:31]) == ([], "each version was run once, so t")


def begun(minute: int, factor: float) -> Run:
    """The run of :func:`timed` that began in a minute."""
    run = timed(factor)
    run.started = f"2026-11-21T10:{minute:02}:00+00:00"
    return run


def test_figures_need_runs_in_turn():
    """A load that comes between runs that were not made in turn looks as another version does: it is not told."""
    quiet, busy = [begun(1, 1.0), begun(2, 1.0)], [begun(3, 2.0), begun(4, 2.0)]
    found = outline_of(quiet, busy)
    assert (found.lines, found.code) == ([], 0)
    assert found.notes["compile_seconds"] == (
        "the runs of both versions were not made in turn, so the load of the machine would look like the version, and "
        "times and sizes are not compared")
    in_turn = outline_of([begun(1, 1.0), begun(3, 1.0)], [begun(2, 2.0), begun(4, 2.0)])
    assert sections_of(in_turn) == ["compile_seconds"]


def slowed(*factors: float) -> Run:
    """The first cells' compiles take so many times as long as those of :func:`timed`."""
    run = timed()
    for name, factor in zip(run.ids, factors, strict=False):
        (compile,) = run.section(name, "compiles")["compiles"]
        run.section(name, "compiles")["compiles"] = [compile | {"seconds": compile["seconds"] * factor}]
    return run


def test_one_cell_is_slower():
    """By more than any cell differs between two runs of one version; else it is an outlier like theirs."""
    (line,) = outline_of([timed(), timed()], [slowed(3.0), slowed(3.1)]).lines
    assert line.cells == (timed().ids[0],)
    assert outline_of([timed(), slowed(1, 2.0)], [slowed(3.0), slowed(3.1)]).lines == []


def test_all_cells_are_slower_by_more_than_noise():
    """Twice the largest difference between two runs of one version."""
    assert sections_of(outline_of([timed(), timed(1.2)], [timed(1.9), timed(1.9)])) == ["compile_seconds"]
    assert outline_of([timed(), timed(1.2)], [timed(1.6), timed(1.6)]).lines == []


def test_a_load_that_grows_is_no_slower_version():
    """In turn: each new run is slower than the old one before it, and each old one than the new one before it."""
    assert outline_of([begun(1, 1.0), begun(3, 2.0)], [begun(2, 1.5), begun(4, 2.5)]).lines == []


def test_what_was_not_looked_at_is_said():
    """A section without a line says that nothing is there only where something looked."""
    found = outline_of([timed(), timed()], [timed(), timed()])
    assert found.notes == {
        "wrong": "not looked at: no cell has the check equivalence",
        "run_time": "not measured: no cell has step_ms, which the check worth measures",
        "memory": "not measured: no cell has memory_mib, which the check worth measures",
        "guards": "not measured: no cell has guard_microseconds, which the check compiles measures"}
    assert "no cell computes other numbers" not in markdown(found)
    assert "not looked at: no cell has the check equivalence" in upgrade_page(found)


def test_changed_kernels_are_told_and_never_fail(tmp_path):
    """By name, with their cells; code that wavers with one version is left out and told."""
    def run_with(key):
        run = Run(model=["net"], backend=["inductor"])
        run.section(run.ids[0], "compiles")["code"] = [
            {"graph": "0/0 forward", "key": "g1", "kernels": [["cpp_fused_add_0", key]]}]
        return run

    found = outline_of([run_with("k1")] * 2, [run_with("k2")] * 2)
    assert [(line.section, line.text) for line in found.lines] == [
        ("code", "changed kernel 0/0 forward: cpp_fused_add_0")]
    assert (found.code, found.code_summary) == (0, "1 of 1 kernel and 0 of 1 graph changed")
    store = CodeStore(tmp_path)
    # Types of arguments come first, and are not told apart from the head of the function.
    store.keep({"k1": "['float*']\none\ntwo\n", "k2": "['int*']\none\ntwo\nand three\n"})
    assert "1 kernel changed (0/0 forward: cpp_fused_add_0): + and three" in \
        [line.text for line in outline_of([run_with("k1")], [run_with("k2")], store).lines]
    wavering = outline_of([run_with("k1"), run_with("k3")], [run_with("k2")] * 2)
    assert sections_of(wavering) == ["wavers"]


def test_lines_of_code_add_up_to_their_summary(tmp_path):
    """The same change in two cells is two; what is gone is none of the new version's graphs."""
    def run_with(graphs):
        run = Run(model=["net", "other"], backend=["inductor"])
        for name in run.ids:
            run.section(name, "compiles")["code"] = [
                {"graph": graph, "key": key, "kernels": [["cpp_fused_add_0", kernel]] if kernel else []}
                for graph, key, kernel in graphs]
        return run

    old = run_with([("0/0 forward", "g1", "k1"), ("1/0 forward", "g2", ""), ("2/0 forward", "g3", "")])
    new = run_with([("0/0 forward", "g9", "k2"), ("7/0 forward", "g7", "")])
    store = CodeStore(tmp_path)
    store.keep({"k1": "one", "k2": "one\ntwo"})
    found = outline_of([old], [new], store)
    assert found.code_summary == "2 of 2 kernels and 4 of 4 graphs changed or new, 4 graphs gone"
    assert [line.text for line in found.lines] == [
        "2 kernels changed by the same lines (0/0 forward: cpp_fused_add_0): + two",
        "2 graphs that call kernels or are captured otherwise, 2 new graphs, 4 graphs that are gone"]
    assert next(line.text for line in outline_of([old], [new]).lines) == (
        "changed kernel 0/0 forward: cpp_fused_add_0, 2 times")


def test_nothing_to_judge():
    """No cell that both have judged is no green page."""
    run = Run()
    run.skips(*run.ids)
    with pytest.raises(NothingToJudge, match="no cell was judged with both versions"):
        outline_of([Run()], [run])


def test_the_pages_have_every_line():
    """HTML, Markdown and terminal; text of a report is no markup."""
    bad = Run()
    bad.breaks(bad.ids[0], {"reason": "<script>alert(1)</script>"})
    found = outline_of([Run()], [bad])
    found.differences = environment_differences({"torch": "2.12.1", "triton": "3.7.1"}, {"torch": "2.13.0"})
    html, text = upgrade_page(found), markdown(found)
    assert "<script>alert" not in html
    assert "models.py:12" in html
    assert "&lt;script&gt;" in html
    assert "at `models.py:12`" in text
    assert "\\<script\\>" in text
    assert "| triton | 3.7.1 | – |" in text
    printed = "\n".join(terminal_lines(found))
    assert "Newly breaking graphs:" in printed
    assert "try don't" in printed


def test_a_break_whose_words_have_an_address_is_told():
    """Its reason is another text in each run; its line is not."""
    def breaking(address):
        run = Run()
        run.plan(run.ids[0], "run", limits={"coverage": 1.0, "graph_breaks": 3})
        run.breaks(run.ids[0], {"line": 30, "reason": f"call of <function f at {address}>"})
        return run

    found = outline_of([Run(), Run()], [breaking("0x7f01"), breaking("0x7f02")])
    assert (sections_of(found), found.lines[0].place) == (["breaks"], "models.py:30")
    assert outline_of([breaking("0x7f01"), breaking("0x7f02")], [breaking("0x7f03"), breaking("0x7f04")]).lines == []


def test_a_cell_that_is_judged_at_times_is_told():
    """It fails in one new run and is skipped in the other: no pair of runs shows both, and it was silent."""
    bad, skipped = Run(), Run()
    bad.breaks(bad.ids[0])
    skipped.skips(skipped.ids[0])
    found = outline_of([Run(), Run()], [bad, skipped])
    (line,) = found.lines
    assert (line.section, line.cells) == ("wavers", (bad.ids[0],))
    assert line.text == "judged in some runs of one version, and not in others of it"


def test_a_cell_without_a_verdict_of_the_old_version_is_nothing_better():
    """No process answered in time, on a busy machine: the new version has mended nothing, and is not said to."""
    def unanswered() -> Run:
        run = Run()
        run.fails(run.ids[0], "no_rank", "no rank process has answered in 180 s")
        return run

    found = outline_of([unanswered(), unanswered()], [Run(), Run()])
    assert (found.code, sections_of(found)) == (0, ["wavers"])
    assert "nothing is worse, nothing better" in found.sentence
    (line,) = found.lines
    assert line.text == "came to no verdict with the old version, so nothing of them is better"
    assert line.cells == (unanswered().ids[0],)
    # With the new version the same is told as worse; in both it is no difference.
    assert outline_of([Run(), Run()], [unanswered(), unanswered()]).code == 1
    assert sections_of(outline_of([unanswered()], [unanswered()])) == ["wavers"]


def test_a_crash_that_is_gone_is_better():
    """The process ended by a signal in every old run: the new version mended that."""
    broken = Run()
    plant_crash(broken)
    told = outline_of([broken, broken], [Run(), Run()]).lines_of("better")
    assert {line.cells for line in told} == {(broken.ids[0],)}


def test_a_failure_that_is_gone_beside_such_a_cell_is_better():
    broken = Run()
    broken.fails(broken.ids[0], "no_rank", "no rank process has answered in 180 s")
    broken.breaks(broken.ids[1])
    found = outline_of([broken], [Run()])
    assert {line.cells for line in found.lines_of("better")} == {(broken.ids[1],)}
