"""What changed of the code between two runs: each change once, with its cells and what differs."""

from __future__ import annotations

import json
import os

import pytest
from sample_report import sample_report, written

from pytest_torchcompile.cli import main
from pytest_torchcompile.report.code_changes import CodeStore, change_lines, compare_code


def cell(name, *graphs):
    """A cell of a report; a graph is (name, key, {kernel: key})."""
    code = [{"graph": graph, "key": key, "kernels": [[*kernel] for kernel in kernels.items()]}
            for graph, key, kernels in graphs]
    return {"id": name, "observation": {"sections": {"compiles": {"code": code}}}}


ONE = ("0/0 forward", "g1", {"add_0": "k1", "relu_1": "k2"})


def found_in(old, new):
    return compare_code([cell("net", *old)], [cell("net", *new)])


def test_the_same_code_is_no_change():
    """In another order too, and with kernels called otherwise: keys count."""
    other = ("0/1 forward", "g1", {"relu_0": "k2", "add_1": "k1"})
    found = found_in([ONE], [other])
    assert (found.is_same, found.kernels, found.graphs, found.compared) == (True, 2, 1, 1)
    assert list(change_lines(found, None, None)) == ["0 of 2 kernels and 0 of 1 graph changed in 1 cell"]


@pytest.mark.parametrize(("new", "kernels", "graphs", "told"), [
    ([("0/0 forward", "g1", {"add_0": "k9", "relu_1": "k2"})], 1, 0, ["kernel 0/0 forward: add_0 k1 k9"]),
    ([("0/0 forward", "g9", {"add_0": "k1", "tanh_1": "k9"})], 1, 1,
     ["kernel 0/0 forward: tanh_1 k2 k9", "graph 0/0 forward g1 g9"]),
    # A kernel that is called as before takes its own partner, though another one comes first.
    ([("0/0 forward", "g1", {"mul_0": "k8", "add_0": "k9"})], 2, 0,
     ["kernel 0/0 forward: add_0 k1 k9", "kernel 0/0 forward: mul_0 k2 k8"]),
    ([("0/0 forward", "g1", {"add_0": "k1"})], 0, 0, ["kernel 0/0 forward: relu_1 k2 "]),
    ([ONE, ("1/0 forward", "g7", {"mul_0": "k7"})], 1, 1,
     ["kernel 1/0 forward: mul_0  k7", "graph 1/0 forward  g7"]),
    # The same kernel twice is one more than once.
    ([("0/0 forward", "g1", {"add_0": "k1", "relu_1": "k2", "relu_2": "k2"})], 1, 0,
     ["kernel 0/0 forward: relu_2  k2"]),
])  # fmt: skip
def test_each_change(new, kernels, graphs, told):
    """Counted where it is in the new run; what is gone is told too."""
    found = found_in([ONE], new)
    assert (found.changed_kernels, found.changed_graphs) == (kernels, graphs)
    assert [f"{each.kind} {each.name} {each.old} {each.new}" for each in found.changes] == told
    assert not found.is_same


def test_one_change_of_many_cells_is_told_once(tmp_path):
    """And what only one of both runs has, or recorded no code of, is named."""
    nothing = {"id": "skipped", "observation": None}
    old = [cell("a", ONE), cell("b", ONE), cell("gone", ONE), nothing]
    changed = ("0/0 forward", "g1", {"add_0": "k9", "relu_1": "k2"})
    new = [cell("a", changed), cell("b", changed), cell("come"), cell("skipped", ONE)]
    found = compare_code(old, new)
    (change,) = found.changes
    assert change.cells == ("a", "b")
    assert (found.only_old, found.only_new, found.unknown) == (["gone"], ["come"], ["skipped"])
    lines = list(change_lines(found, CodeStore(tmp_path), CodeStore(tmp_path)))
    assert lines[:4] == [
        "2 of 4 kernels and 0 of 2 graphs changed in 2 cells",
        "1 cell with no code recorded in one of the runs: skipped",
        "1 cell only in the old run: gone", "1 cell only in the new run: come"]
    assert lines[5] == "changed kernel 0/0 forward: add_0, in 2 cells: a, b"


def test_what_is_new_and_what_is_gone_is_counted_apart():
    """Of the graphs of the new run some changed and some are new; what is gone is of none of them."""
    old = [cell("a", ONE, ("1/0 forward", "g2", {}), ("2/0 forward", "g3", {})), cell("b", ONE)]
    other = ("0/0 forward", "g8", {"add_0": "k1", "relu_1": "k2"})
    found = compare_code(old, [cell("a", other, ("7/0 forward", "g7", {"mul_0": "k7"})), cell("b", other)])
    assert {happened: found.places("graph", happened) for happened in ("changed", "new", "gone")} == {
        "changed": 2, "new": 1, "gone": 2}
    # One change in two cells is two graphs.
    assert (found.changed_graphs, len(found.changes)) == (3, 5)
    assert next(change_lines(found, None, None)) == (
        "1 of 5 kernels and 3 of 3 graphs changed or new, 2 graphs gone in 2 cells")


def test_texts_are_kept_and_compared(tmp_path):
    """The difference is shown where both texts are there; a key of a report cannot lead out of the folder."""
    store = CodeStore(tmp_path / "code")
    store.keep({"k1": "one\ntwo", "k9": "one\nthree"})
    (tmp_path / "secret.txt").write_text("secret")
    assert store.read("../secret") is None
    found = found_in([ONE], [("0/0 forward", "g1", {"add_0": "k9", "relu_1": "k2"})])
    lines = list(change_lines(found, store, store))
    assert lines[-4:] == ["  @@ -1,2 +1,2 @@", "   one", "  -two", "  +three"]
    gone = list(change_lines(found, store, CodeStore(tmp_path)))
    assert gone[-1] == f"  the text of k9 is not in {tmp_path}"


def test_a_store_stays_small(tmp_path):
    """What was written longest ago goes first, and what a killed run left half-written."""
    store = CodeStore(tmp_path)
    for age, key in enumerate(("new", "middle", "old")):
        store.keep({key: "x" * 100})
        os.utime(tmp_path / f"{key}.txt", (1e9 - age, 1e9 - age))
    (tmp_path / ".half.txt.1").write_text("")
    os.utime(tmp_path / ".half.txt.1", (1, 1))
    store.tidy(largest=250)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["middle.txt", "new.txt"]
    CodeStore(tmp_path / "none").tidy()


def test_an_unwritable_store_is_no_error(tmp_path):
    """A run does not fail because its code cannot be kept."""
    (tmp_path / "code").write_text("a file")
    CodeStore(tmp_path / "code").keep({"k1": "text"})


def written_report(path, code):
    """The file of a report whose only cell has recorded this code; None: none."""
    content = sample_report({"model": ["net"]})
    (only,) = content["compile_matrix"]["cells"]
    if code is not None:
        only["observation"]["sections"]["compiles"]["code"] = code
    return str(written(content, path))


def test_the_command(tmp_path, capsys):
    """Exit code 0 where nothing changed, 1 where something did, and an error where nothing can be said."""
    before, now = ([{"graph": "0/0 forward", "key": key, "kernels": []}] for key in ("a1", "b2"))
    old, new = written_report(tmp_path / "old.json", before), written_report(tmp_path / "new.json", now)
    assert main(["code", old, old]) == 0
    assert capsys.readouterr().out.startswith("0 of 0 kernels and 0 of 1 graph changed in 1 cell")
    assert main(["code", old, new, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["same"], told["changed_graphs"], told["changes"][0]["new"]) == (False, 1, "b2")
    assert main(["code", old, written_report(tmp_path / "none.json", None)]) == 2
    assert "no cell of which both have code, so nothing can be said" in capsys.readouterr().err
