"""A folder of reports: which runs there are, since when a cell is red, and numbers over time."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from runs import ENVIRONMENT, Run, compiled

from pytest_torchcompile.cli import main
from pytest_torchcompile.errors import ReportError
from pytest_torchcompile.page.past_runs import History, PastRun, read_folder
from pytest_torchcompile.page.trend import find_turns, trend_section
from pytest_torchcompile.report.provenance import head_fingerprint


def run_of_day(day: int, *, broken: tuple[str, ...] = (), torch: str = "2.13.0", seconds: float = 1.0,
               shard: tuple[int, int] = (1, 1), matrix: str = "m.yaml") -> dict[str, Any]:
    """The report of a run of two models on a day of November, with its own commit; ``broken``: have a graph break."""
    run = Run(model=["net", "gpt"], backend=["inductor"])
    for name, given in run.cells.items():
        run.section(name, "compiles")["compiles"] = [compiled(seconds)]
        run.section(name, "graph_breaks")["speedup"] = 2.0 + day
        if given.model in broken:
            run.breaks(name)
    block = copy.deepcopy(run.blocks(shard[1])[shard[0] - 1])
    block["run"] |= {"started": f"2026-11-{day:02}T10:00:00+00:00", "finished": f"2026-11-{day:02}T10:05:00+00:00",
                     "git": {"commit": f"{day:02}" * 20, "changed": False, "prefix": ""}}
    block["environment"] = ENVIRONMENT | {"torch": torch}
    block["matrix"]["path"] = matrix
    return {"compile_matrix": block | {"head_sha256": head_fingerprint(block)}}


def put(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    """Four runs: gpt breaks with the third, under another torch; net broke in the second alone."""
    put(run_of_day(1), tmp_path / "1" / "report.json")
    put(run_of_day(2, broken=("net",)), tmp_path / "2" / "report.json")
    put(run_of_day(3, broken=("gpt",), torch="2.14.0"), tmp_path / "3" / "report.json")
    # In the folder itself, and in two shards.
    put(run_of_day(4, broken=("gpt",), torch="2.14.0", shard=(1, 2)), tmp_path / "a.json")
    put(run_of_day(4, broken=("gpt",), torch="2.14.0", shard=(2, 2)), tmp_path / "b.json")
    return tmp_path


def test_runs_of_a_folder(folder):
    """Those in it and one level below, by their dates; shards are one run, and a copy of a report is none."""
    put(run_of_day(2, broken=("net",)), folder / "copy" / "report.json")
    put(run_of_day(5), folder / "too" / "deep" / "report.json")
    reports, history = read_folder(folder)
    assert [report.name for report in reports] == [str(folder / "a.json"), str(folder / "b.json")]
    assert [run.label for run in history.runs] == [f"0{day}0{day}0{day}0{day}, 2026-11-0{day}" for day in range(1, 5)]
    assert history.notes == ()


def test_kept_shards_are_one_run(tmp_path):
    """A run keeps each shard in a folder of its own; a second run of the same commit is another one."""
    for hour in (1, 2):
        for shard in (1, 2):
            content = run_of_day(3, broken=("gpt",), shard=(shard, 2))
            block = content["compile_matrix"]
            block["run"]["started"] = f"2026-11-03T0{hour}:0{shard}:00+00:00"
            block["head_sha256"] = head_fingerprint({key: block[key] for key in block if key != "head_sha256"})
            put(content, tmp_path / f"20261103T0{hour}0{shard}00-{'03' * 6}-{shard}of2" / "report.json")
    reports, history = read_folder(tmp_path)
    assert [Path(report.name).parent.name[9:13] for report in reports] == ["0201", "0202"]
    assert [(run.started[11:16], sorted(run.statuses.values())) for run in history.runs] == [
        ("01:01", ["fail", "pass"]), ("02:01", ["fail", "pass"])]
    assert history.notes == ()


def test_other_files_are_named_and_left_out(folder):
    """Damaged and foreign files, in one sentence; runs of another matrix, in another one."""
    (folder / "2" / "bad.json").write_text("{")
    (folder / "notes.json").write_text('{"<b>": 1}')
    put(run_of_day(2, matrix="nightly.yaml"), folder / "nightly" / "report.json")
    _, history = read_folder(folder)
    assert len(history.runs) == 4
    other, left_out = history.notes
    assert other == "1 run is of another matrix, and not shown: nightly.yaml."
    assert left_out.startswith(f"2 files were left out: {folder / 'notes.json'}: holds no block 'compile_matrix'")
    assert f"{folder / '2' / 'bad.json'}: cannot be read as JSON" in left_out


def test_since_when_a_finding_is_there(folder, capsys):
    """The page of the newest run says with which commit and version it came, and what the run before had."""
    page = folder / "page.html"
    assert main(["html", str(folder), "-o", str(page)]) == 0
    assert "FAIL: 1 model has graph breaks (gpt" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert '<p class="since">since 03030303, 2026-11-03, torch 2.13.0 to 2.14.0</p>' in text
    assert '<span class="detail">none new since 03030303, 2026-11-03</span>' in text
    trend = text[text.index('id="trend"'):text.index('id="map"')]
    turns = re.findall(r'<tr><th scope="row"><(?:a|span)[^>]*>([\w-]+)</.*?<td>(<b.*?)</td></tr>', trend)
    assert [(cell, re.sub("(<[^>]*>| )+", " ", words)) for cell, words in turns] == [
        ("gpt-inductor-default-auto-none", " red since 03030303, 2026-11-03 torch 2.13.0 to 2.14.0 "),
        ("net-inductor-default-auto-none", " green again since 03030303, 2026-11-03 torch 2.13.0 to 2.14.0 ")]
    assert re.findall(r'class="s (\w+)" role="img"', trend) == ["pass", "pass", "fail", "fail",
                                                                "pass", "fail", "pass", "pass"]


def test_what_is_new_in_the_newest_run(folder):
    """A failure that the run before did not have is new; a baseline that is named decides instead."""
    put(run_of_day(6, broken=("gpt", "net"), torch="2.14.0"), folder / "6.json")
    page = folder / "page.html"
    assert main(["html", str(folder), "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.count('<b class="new">new</b>') == 0  # both models break at one place, which is one finding
    put(run_of_day(7, broken=("net",), torch="2.14.0"), folder / "7.json")
    put(run_of_day(8, broken=("gpt",), torch="2.14.0"), folder / "8.json")
    assert main(["html", str(folder), "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert '<b class="new">new</b> with 08080808, 2026-11-08</p>' in text
    assert '<span class="detail">1 new since 07070707, 2026-11-07</span>' in text
    assert main(["html", str(folder), "-o", str(page), "--baseline", str(folder / "3" / "report.json")]) == 0
    text = page.read_text(encoding="utf-8")
    assert '<span class="detail">none new since 03030303, 2026-11-03</span>' in text


def test_new_is_what_the_last_other_commit_did_not_have(folder):
    """A second run of the same commit does not make an old failure of that commit."""
    put(run_of_day(7), folder / "7.json")
    for name in ("8", "9"):
        again = run_of_day(8, broken=("gpt",))
        again["compile_matrix"]["run"]["started"] = f"2026-11-0{name}T10:00:00+00:00"
        block = again["compile_matrix"]
        block["head_sha256"] = head_fingerprint({key: value for key, value in block.items() if key != "head_sha256"})
        put(again, folder / f"{name}.json")
    _, history = read_folder(folder)
    assert history.runs[history.reference].label == "07070707, 2026-11-07"
    page = folder / "page.html"
    assert main(["html", str(folder), "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert '<b class="new">new</b> with 08080808, 2026-11-08' in text
    assert '<span class="detail">1 new since 07070707, 2026-11-07</span>' in text


def test_cells_that_went_alike_are_told_by_what_they_share():
    """By values that others do not have; by the first name where they share none, or where one is gone."""
    def past(**statuses: str) -> PastRun:
        axes = {name: {"model": name[0], "backend": name[1], "dtype": "float32"} for name in statuses}
        return PastRun(("r.json",), "", None, {}, "m.yaml", statuses, axes)

    old = past(xa="pass", xb="pass", ya="fail", yb="fail", za="pass", zb="pass")
    new = past(xa="fail", xb="fail", ya="pass", za="pass", zb="pass")
    text = str(trend_section(History((old, new))))
    assert re.findall("<summary>([^<]*)</summary>", text) == ["x: 2 cells", "every run"]
    before = past(xa="pass", xb="pass", ya="pass", yb="pass")
    now = past(xa="fail", xb="pass", ya="pass", yb="fail")
    assert "<summary>xa and 1 more</summary>" in str(trend_section(History((before, now))))


def test_a_policy_judges_the_last_run_in_the_trend_too(folder):
    """The trend never says otherwise than the map."""
    policy = folder / "release.yaml"
    policy.write_text("version: 1\nlimits:\n  - {compile_seconds: 0.5}\n")
    page = folder / "page.html"
    assert main(["html", str(folder), "-o", str(page), "--policy", str(policy)]) == 0
    text = page.read_text(encoding="utf-8")
    trend = text[text.index('id="trend"'):text.index('id="map"')]
    squares = re.findall(r'class="s (\w+)" role="img"', trend)
    on_map = re.findall(r'class="s (\w+)" aria-label="(\w+)', text)
    assert sorted(set(on_map)) == [("fail", "gpt"), ("fail", "net")]
    assert (squares[3], squares[7]) == ("fail", "fail")


def test_a_folder_that_cannot_be_read(tmp_path, monkeypatch):
    """One sentence, no traceback."""
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ReportError, match=f"^{tmp_path}: cannot be read: Permission denied$"):
        read_folder(tmp_path)


def test_numbers_over_time(folder):
    """A point for each run, of the cells that all have measured; times that a cache answered are left out."""
    slow = run_of_day(5, seconds=9.0)
    for each in slow["compile_matrix"]["cells"]:
        each["observation"]["sections"]["compiles"]["compiles"][0]["caches"] = ["fx hit"]
    put(slow, folder / "5.json")
    kept = run_of_day(6, seconds=9.0)
    for each in kept["compile_matrix"]["cells"]:
        each["reused"] = {"run": "2026-11-05T10:00:00+00:00", "commit": None, "changed": False, "age": 60}
    put(kept, folder / "6.json")
    _, history = read_folder(folder)
    text = str(trend_section(history))
    labels = re.findall(r'class="chart" role="img" aria-label="([^"]*)"', text)
    assert [label.partition(":")[0] for label in labels] == ["Cells that fail", "Speed-up", "Compile time"]
    assert labels[0].endswith("04040404, 2026-11-04: 1; 05050505, 2026-11-05: 0; 06060606, 2026-11-06: 0")
    assert labels[1].endswith("06060606, 2026-11-06: 8.00 ×")
    assert labels[2].endswith("04040404, 2026-11-04: 2.0 s")
    assert "9.0 s" not in text


def test_a_line_ends_where_the_machine_is_another_one():
    """Times of two machines are not compared."""
    def past(day: int, cores: int) -> PastRun:
        return PastRun((f"{day}",), f"2026-11-0{day}T00:00:00+00:00", None, ENVIRONMENT | {"cores": cores}, "m.yaml",
                       {"a": "pass"}, speedups={"a": 2.0})

    charts = str(trend_section(History((past(1, 2), past(2, 2), past(3, 64)))))
    # Of each of the two charts: the line of zero, and one from the first to the second run.
    assert charts.count("<line") == 4
    assert charts.count("<circle") == 6


@pytest.mark.parametrize(("statuses", "red", "at"), [
    (("pass", "fail", "fail"), True, 1), (("fail", "not_run", "fail"), True, 0), (("pass", "", "crash"), True, 2),
    (("fail", "pass", "pass"), False, 1), (("fail", "pass", "fail"), True, 2), (("fail", "pass", "not_run"), False, 1),
])
def test_turns(statuses, red, at):
    """A run that did not judge a cell tells nothing of it."""
    runs = [PastRun((str(day),), "", None, {}, "m.yaml", {"a": status} if status else {})
            for day, status in enumerate(statuses)]
    (turn,) = find_turns(runs)
    assert (turn.red, turn.at) == (red, at)


@pytest.mark.parametrize(("statuses", "since"), [
    (("pass", "fail", "fail"), 1), (("fail", "fail", "fail"), 0), (("fail", "pass", "fail"), 2),
    (("fail", "fail", "pass"), None), (("pass", "fail", "skip", "fail"), 1), (("fail", "", "not_run", "fail"), 0),
])
def test_red_since(statuses, since):
    """The first run of those up to the last in which the check fails; what did not judge the cell is no break."""
    runs = []
    for status in statuses:
        red = {"a": frozenset({"compiles"})} if status == "fail" else {}
        runs.append(PastRun(("r.json",), "", None, {}, "m.yaml", {"a": status} if status else {}, red=red))
    history = History(tuple(runs))
    assert history.red_since("a", ["compiles", "recompiles"]) == since
    assert history.red_since("a", ["equivalence"]) is None


def test_one_run_and_none(tmp_path, capsys):
    """One run is no trend; a folder without a report, or one beside other reports, is a mistake."""
    put(run_of_day(1), tmp_path / "one" / "report.json")
    page = tmp_path / "page.html"
    assert main(["html", str(tmp_path / "one"), "-o", str(page)]) == 0
    assert "The folder has one run of this matrix; a trend needs two." in page.read_text(encoding="utf-8")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "x.json").write_text("[]")
    assert main(["html", str(tmp_path / "none"), "-o", str(page)]) == 2
    told = capsys.readouterr().err
    assert f"{tmp_path / 'none'}: holds no report of ours, nor does a folder in it; 1 file was left out: " in told
    assert "expected reports of `pytest --compile-matrix`" in told
    assert main(["html", str(tmp_path / "one"), str(tmp_path / "one" / "report.json"), "-o", str(page)]) == 4
    assert f"html: {tmp_path / 'one'} is a folder; expected it alone, or the reports of one run" in \
        capsys.readouterr().err


def test_stored_reports(tmp_path):
    """Reports of earlier versions are runs too; one that does not say when it ran comes first."""
    for name in ("shard-1", "shard-2"):
        content = json.loads((Path(__file__).parents[1] / "reports" / f"{name}.json").read_text())
        put(content, tmp_path / "new" / f"{name}.json")
        block = content["compile_matrix"]
        block = {key: value for key, value in block.items() if key not in ("run", "tests", "tests_planned",
                                                                           "head_sha256")}
        block["schema_version"] = "1.0"
        block["cells"] = [{key: value for key, value in each.items() if key not in ("planned", "evidence_sha256")}
                          for each in block["cells"]]
        put({"compile_matrix": block}, tmp_path / "old" / f"{name}.json")
    reports, history = read_folder(tmp_path)
    assert [report.name for report in reports] == [str(tmp_path / "new" / f"shard-{n}.json") for n in (1, 2)]
    assert history.runs[0].label == "no commit, day not told"
    assert history.notes == ()
    assert "No cell failed in any of them." in str(trend_section(history))
