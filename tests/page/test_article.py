"""The numbers of a cell on its page: what is compared, which kernels there are, where the time went."""

from __future__ import annotations

import re

import pytest

from pytest_torchcompile.page.article import (
    LEAVES,
    article,
    benchmark_section,
    numbers_section,
    times_section,
)
from pytest_torchcompile.page.kernel_tables import kernels_section
from pytest_torchcompile.page.markup import ROWS
from pytest_torchcompile.report.facts import Facts


def facts(seconds=None, total=None, **sections):
    return Facts({"id": "x", "seconds": total, "observation": {"sections": sections, "seconds": seconds or {}}})


def shown(html):
    """The text without its elements."""
    return " ".join(re.sub(r"<[^>]*>", " ", str(html)).split())


LEAF = {"name": "out", "dtype": "float32", "call": "call 1", "rms": 1.25, "eager": 0.1, "compiled": 0.5, "expected": 1}


def numbers(*leaves, **more):
    return numbers_section(facts(equivalence={"leaves": list(leaves), "bitwise": 3, "compared": 5} | more))


def kernels(*graphs, source=""):
    return kernels_section(facts(kernels={"graphs": list(graphs)}), source, {})


KERNEL = {"name": "cpp_fused_relu", "ops": ["relu", "add"], "lines": ["net.py:7", "net.py:9"], "calls": 3}
GRAPH = {"compile_id": "0/0", "stage": "forward", "library": {"addmm": 2.0}, "fallbacks": {"aten.sort": 1},
         "generated": [KERNEL]}


@pytest.mark.parametrize(("section", "given"), [
    (numbers_section, facts()), (numbers_section, facts(compiles={"leaves_of": []})), (times_section, facts()),
    (times_section, facts(total=3.0)), (times_section, facts({"compile": "long"})), (benchmark_section, facts()),
    (benchmark_section, facts(worth={"text": ""})), (benchmark_section, facts(benchmark={"text": 3})),
    (lambda given: kernels_section(given, "", {}), facts()),
    (lambda given: kernels_section(given, "", {}), facts(kernels={"graphs": "x"})),
])
def test_what_has_nothing_to_tell_is_left_out(section, given):
    assert section(given) is None


# ------------------------------------------------------------------------------------------------------------- numbers
def test_each_comparing_check_says_how_much_is_equal():
    """One without counts, of another version, says so; a table is there only where something is not equal."""
    found = numbers_section(facts(equivalence={"leaves": [], "bitwise": 4, "compared": 4}, gradients={"leaves": []}))
    assert shown(found) == "Numbers equivalence: 4 of 4 bitwise equal; gradients: ? of ? bitwise equal"
    assert "<table" not in str(found)


@pytest.mark.parametrize(("change", "cells"), [
    ({}, ["1.25 ×", "0.1", "0.5", "1"]),
    ({"rms": None}, ["–", "0.1", "0.5", "1"]),
    ({"rms": "inf"}, ["inf ×", "0.1", "0.5", "1"]),
    ({"rms": 123456.0}, ["1.23e+05 ×", "0.1", "0.5", "1"]),
    ({"message": "has another shape"}, ["has another shape", "0.1", "0.5", "1"]),
    ({"eager": 0.123456789, "compiled": None, "expected": "nan"}, ["1.25 ×", "0.1234568", "", "nan"]),
])
def test_a_row_of_numbers(change, cells):
    """An error in units of the program's own noise, or what differs in words; seven digits of each value."""
    row = str(numbers(LEAF | change)).partition("<tbody>")[2]
    found = [shown(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)]
    assert found[0] == "out float32 call 1"
    assert found[1:] == cells


@pytest.mark.parametrize("number", [1, LEAVES, LEAVES + 1, LEAVES + 90])
def test_the_worst_numbers_are_shown(number):
    html = str(numbers(*[LEAF | {"name": f"out{place}"} for place in range(number)]))
    assert html.count("float32") == min(number, LEAVES)
    assert "out0<" in html
    assert (f"and {number - LEAVES} more" in html) == (number > LEAVES)


# ------------------------------------------------------------------------------------------------------------- kernels
def test_kernels_of_a_graph():
    """Those that were generated, then calls of libraries, then what was not generated at all."""
    assert shown(kernels(GRAPH)) == (
        "Generated kernels graph 0/0, forward kernel operators calls lines "
        "cpp_fused_relu relu, add 3 net.py:7 net.py:9 addmm library 2 aten.sort not generated 1")


@pytest.mark.parametrize(("line", "linked"), [
    ("net.py:7", True), ("a b/net.py:12", True), ("net.py", False), (":7", False), ("net.py:", False),
    ("net.py:x", False), ("net.py:²", False), ("net.py:-7", False), ("net.py:" + "1" * 5000, False), ("", False),
])
def test_a_line_of_the_source(line, linked):
    """What is no place is shown as it is, and links nowhere."""
    graph = GRAPH | {"generated": [KERNEL | {"lines": [line]}]}
    html = str(kernels(graph, source="https://example.org/{file}#L{line}"))
    assert ("<a " in html) == linked
    assert line in html


CALL = {"name": "cpp_fused_relu", "kind": "pointwise", "library": "",
        "operators": ["aten.relu.default", "aten.add.Tensor"],
        "reads": [{"name": "buf0", "of": "addmm", "tensor": "float32[4, 6]", "bytes": 96}],
        "writes": [{"name": "buf1", "of": "add", "tensor": "float32[4, 6]", "bytes": 96}],
        "kept_inside": [{"of": "relu", "bytes": 96}]}


def test_what_each_call_touches():
    """Its operators in order, tensors with their bytes, and what never reaches memory; sums above."""
    found = shown(kernels(GRAPH | {"calls": [CALL, CALL]}))
    row = "cpp_fused_relu pointwise: relu, add.Tensor buf0 float32[4, 6] 96 B buf1 float32[4, 6] 96 B relu 96 B"
    assert found.endswith("what each call touches: 384 B; 192 B never reach memory call reads writes never in memory "
                          f"{row} {row}")
    assert "what each call touches" not in shown(kernels(GRAPH | {"calls": "x"}))


def test_a_branch_is_told_and_not_counted():
    """Its call has its bytes, for one of the branches runs."""
    branch = CALL | {"where": "in true_graph_0, one of the branches of which one runs", "counted": False}
    found = shown(kernels(GRAPH | {"calls": [CALL, branch]}))
    assert "what each call touches: 192 B; 96 B never reach memory" in found
    assert "relu, add.Tensor in true_graph_0, one of the branches of which one runs buf0" in found


def test_a_list_of_kernels_stands_once_on_a_page():
    """Another cell with the same one leads to it; a cell with another one has its own."""
    listed = {}
    first, again, other = (
        article(Facts({"id": name, "observation": {"sections": {"kernels": {"graphs": [graph]}}}}), "", listed=listed)
        for name, graph in (("a", GRAPH), ("b", GRAPH), ("c", GRAPH | {"compile_id": "9/9"})))
    assert "graph 0/0, forward" in first
    assert "graph 0/0" not in again
    assert 'the same as at <a href="#cell:a">a</a>' in again
    assert "graph 9/9, forward" in other


@pytest.mark.parametrize("number", [ROWS, ROWS + 1])
def test_many_graphs_and_kernels_are_bounded(number):
    html = str(kernels(*[GRAPH] * number))
    assert html.count("<caption>") == ROWS
    assert (f"and {number - ROWS} more" in html) == (number > ROWS)
    many = str(kernels(GRAPH | {"generated": [KERNEL] * number}))
    assert many.count("cpp_fused_relu") == ROWS
    many = str(kernels(GRAPH | {"generated": [], "calls": [CALL] * number}))
    assert many.count("cpp_fused_relu") == ROWS


# --------------------------------------------------------------------------------------------------------------- times
@pytest.mark.parametrize(("seconds", "total", "compiles", "told"), [
    ({"eager": 1.0}, None, [], "run: eager 1.0 s"),
    ({"eager": 1.0, "compiled": 2.0}, 4.0, [], "run: whole cell 4.0 s eager 1.0 s compiled 2.0 s"),
    ({"eager": 1.0}, None, [{"seconds_in": {"dynamo": 1.0}}, {"seconds_in": {"dynamo": 0.5, "aot": 2.0}}],
     "run: eager 1.0 s compiling: dynamo 1.5 s aot 2.0 s"),
])
def test_times(seconds, total, compiles, told):
    """The whole first, as phases are parts of it; stages are those of all compiles together."""
    assert shown(times_section(facts(seconds, total, compiles={"compiles": compiles}))) == f"Time {told}"


def test_the_table_of_a_benchmark_is_text():
    html = str(benchmark_section(facts(worth={"text": "eager  1 ms\n<b>compiled</b>  2 ms"})))
    assert "<pre>eager  1 ms\n&lt;b&gt;compiled&lt;/b&gt;  2 ms</pre>" in html
