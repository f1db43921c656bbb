"""The ledger of a cell on the page, section by section: what is told once, bounded, escaped, or left out."""

from __future__ import annotations

import re

import pytest

from pytest_torchcompile.page.ledger_tables import (
    KINDS,
    OWNERS,
    compiles_section,
    eager_frames_section,
    graph_breaks_section,
)
from pytest_torchcompile.page.markup import ROWS
from pytest_torchcompile.report.facts import Facts


def facts(checks=None, **sections):
    return Facts({"id": "x", "checks": checks or {}, "observation": {"sections": sections}})


def breaks(*records, checks=None):
    return str(graph_breaks_section(facts(checks, graph_breaks={"graph_breaks": list(records)}), "") or "")


def compiled(*records, graphs=(), **more):
    section = {"compiles": list(records), "graphs": list(graphs), **more}
    return str(compiles_section(facts(compiles=section), "") or "")


def frames(*records):
    return str(eager_frames_section(facts(compiles={"eager_frames": list(records)}), "") or "")


def shown(html):
    """The text without its elements."""
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


BREAK = {"reason": "a branch", "gb_id": "gb0170", "file": "net.py", "line": 8, "hint": "use torch.where",
         "function": "Net.forward", "explanation": "data decides"}
COMPILE = {"function": "Net.forward", "file": "net.py", "line": 3, "compile_id": "0/0", "kind": "first", "ops": 12,
           "seconds": 2.0, "seconds_in": {"dynamo": 0.5, "inductor": 1.5}, "during": "call 1"}
RECOMPILE = COMPILE | {"compile_id": "0/1", "kind": "recompile", "reason": "x.size(0) == 4", "cause": "shape",
                       "what": "x.size(0)", "expected": "4", "actual": "6"}


@pytest.mark.parametrize("section", [graph_breaks_section, compiles_section, eager_frames_section])
@pytest.mark.parametrize("sections", [
    {}, {"compiles": {}, "graph_breaks": {}}, {"compiles": {"compiles": [], "eager_frames": []}},
    {"compiles": 3, "graph_breaks": {"graph_breaks": "x"}},
])
def test_what_has_nothing_to_tell_is_left_out(section, sections):
    assert section(facts(**sections), "") is None


# ------------------------------------------------------------------------------------------------------- graph breaks
def test_a_graph_break():
    told = shown(breaks(BREAK))
    assert told.startswith("Graph breaks (1)")
    for part in ("net.py:8", "in Net.forward", "your code", "gb0170", "a branch", "data decides", "use torch.where"):
        assert told.count(part) == 1, part


@pytest.mark.parametrize("owner", [*OWNERS, "somebody"])
def test_whose_code_breaks(owner):
    assert OWNERS.get(owner, owner) in shown(breaks(BREAK | {"owner": owner}))


@pytest.mark.parametrize(("link", "number"), [
    ("https://example.org/gb", '<a href="https://example.org/gb">gb0170</a>'), ("", " gb0170"),
    ("javascript:alert(1)", " gb0170"), ("http://example.org", " gb0170"), ("HTTPS://example.org", " gb0170"),
])
def test_only_a_safe_link_is_one(link, number):
    """A report is data from elsewhere."""
    html = breaks(BREAK | {"link": link})
    assert number in html
    assert ("<a href" in html) == link.startswith("https:")


def test_what_a_check_has_said_is_not_said_again():
    problem = {"message": "a branch at net.py:8", "hint": "use torch.where"}
    told = shown(breaks(BREAK, checks={"graph_breaks": {"verdict": "fail", "problems": [problem]}}))
    assert "a branch" not in told
    assert "use torch.where" not in told
    assert "data decides" in told


@pytest.mark.parametrize("whole", [True, False])
def test_a_frame_that_torch_gives_up(whole):
    assert ("the whole function ran eagerly" in breaks(BREAK | {"whole_frame": whole})) == whole


def test_markup_of_strangers_is_text():
    odd = "<script>alert(1)</script>"
    html = breaks(dict.fromkeys(("reason", "gb_id", "file", "hint", "function", "explanation", "owner"), odd))
    html += compiled(dict.fromkeys(("function", "file", "compile_id", "kind", "during"), odd))
    html += compiled(RECOMPILE | dict.fromkeys(("reason", "what", "expected", "actual", "cause"), odd))
    html += frames(dict.fromkeys(("function", "file", "kind", "reason"), odd))
    assert "<script" not in html
    assert html.count("&lt;script") >= 20


@pytest.mark.parametrize(("number", "more"), [(1, False), (ROWS, False), (ROWS + 1, True), (ROWS + 900, True)])
def test_long_lists_are_bounded(number, more):
    """Each names how many there are; only so many are shown."""
    broken = [BREAK | {"line": line} for line in range(number)]
    eager = [{"function": f"f{line}", "kind": "limit", "reason": "r"} for line in range(number)]
    shortened = {"<li>": (breaks(*broken), frames(*eager)), "<tr class": (compiled(*[COMPILE] * number),)}
    for row, sections in shortened.items():
        for html in sections:
            assert html.count(row) == min(number, ROWS)
            assert (f"and {number - ROWS} more" in html) == more


# ------------------------------------------------------------------------------------------------------------ compiles
@pytest.mark.parametrize(("kind", "words"), [*KINDS.items(), ("of a newer version", "of a newer version")])
def test_kinds_of_compiles(kind, words):
    html = compiled(COMPILE | {"kind": kind})
    assert f"<td>{words}</td>" in html
    assert (f'<tr class="{kind}">' in html) == (kind in KINDS)


@pytest.mark.parametrize(("record", "told"), [
    (RECOMPILE, "shape: x.size(0) 4 → 6"),
    (RECOMPILE | {"actual": ""}, "shape: x.size(0) 4 → ?"),
    (RECOMPILE | {"expected": ""}, "shape: x.size(0) ? → 6"),
    (RECOMPILE | {"what": ""}, "shape: x.size(0) == 4"),
])
def test_why_it_was_compiled_again(record, told):
    assert told in shown(compiled(COMPILE, record))


def test_the_same_advice_is_given_once():
    """Each recompile has its row of reasons all the same."""
    html = compiled(COMPILE, RECOMPILE, RECOMPILE | {"compile_id": "0/2", "actual": "8"})
    assert html.count('<tr class="why">') == 2
    assert html.count('class="try"') == 1


@pytest.mark.parametrize(("section", "told"), [
    ({"graphs": [{"runs": 1}]}, "0 compiles; none of them recompiles; 1 graph ran 1 time in all"),
    ({"compiles": [COMPILE], "graphs": [{"runs": 2}, {"runs": 3}]},
     "1 compile; none of them recompiles; 2 graphs ran 5 times in all"),
    ({"compiles": [COMPILE, RECOMPILE]}, "2 compiles; 1 of them recompiles; 0 graphs ran 0 times in all"),
    ({"compiles": [COMPILE], "coverage": [{"share": 0.5}, {"share": 0.123}]},
     "1 compile; none of them recompiles; 0 graphs ran 0 times in all; 12% of the operator calls ran inside them"),
    ({"compiles": [COMPILE | {"caches": ["fx miss", "aot miss"]}, RECOMPILE | {"caches": ["fx miss"]}]},
     "caches: 2 fx miss, 1 aot miss"),
])
def test_the_summary(section, told):
    html = str(compiles_section(facts(compiles=section), ""))
    first = shown(html.partition("<p>")[2].partition("</p>")[0])
    # The answers of caches come last.
    assert first.endswith(f"; {told}") if told.startswith("caches") else first == told


def widths(html):
    bars = re.findall(r'<svg[^>]*class="bar"[^>]*>.*?</svg>', html, re.DOTALL)
    return [[float(width) for width in re.findall(r"h([\d.]+)\"", bar)] for bar in bars]


@pytest.mark.parametrize(("records", "expected"), [
    ([COMPILE], [[15, 45]]),
    ([COMPILE, COMPILE | {"seconds": 1.0, "seconds_in": {"aot": 0.5, "kernels": 0.5}}], [[15, 45], [15, 15]]),
    ([COMPILE | {"seconds": 0}], [[]]),
    ([COMPILE | {"seconds_in": {}}], [[]]),
    # A report may claim a stage longer than the longest compile, or of no time.
    ([COMPILE | {"seconds_in": {"dynamo": 99.0, "aot": 1.0, "inductor": -1.0, "kernels": 0}}], [[30]]),
    ([COMPILE | {"seconds_in": {"a stage of a newer version": 1.0}}], [[]]),
])
def test_the_bar_of_a_compile(records, expected):
    """Sixty units for the longest compile of the cell."""
    assert widths(compiled(*records)) == expected


@pytest.mark.parametrize(("given", "told"), [(0, ""), (17, ", from line 17")])
def test_the_rest_after_a_break_says_where_it_begins(given, told):
    html = compiled(COMPILE | {"resumed_at": given, "kind": "resume"})
    assert (", from line" in html) == bool(told)
    assert told in html


# -------------------------------------------------------------------------------------------------------- eager frames
@pytest.mark.parametrize("file", ["net.py", ""])
def test_an_eager_frame(file):
    """One without a file, such as that of a switch, has no place."""
    told = shown(frames({"function": "f", "file": file, "line": 3, "kind": "limit", "reason": "limit hit"}))
    assert told == " ".join(f"Ran eagerly (1) limit f {file and f'{file}:3'} limit hit".split())
