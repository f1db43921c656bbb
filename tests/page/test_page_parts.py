"""The pure parts of the page: escaping, the order of axes, the grid, colours, causes, facts of odd sections."""

from __future__ import annotations

import itertools
import json

import pytest
from sample_report import SMALL, cell, check, problem, sample_report

from pytest_torchcompile.checks import compiles
from pytest_torchcompile.observation import VERDICTS
from pytest_torchcompile.page import markup
from pytest_torchcompile.page.article import article
from pytest_torchcompile.page.controls import measure_cells
from pytest_torchcompile.page.heatmap import WIDTH, HeatMap, arrange, influence, order_axes, split_axes
from pytest_torchcompile.page.markup import Html, data, join, link, place, tag, text
from pytest_torchcompile.quantity import readable_seconds
from pytest_torchcompile.report.causes import group_causes
from pytest_torchcompile.report.facts import Facts

# markup


def test_text_is_escaped_and_markup_is_not():
    """Only what is markup by its type goes into a page as it is."""
    assert tag("p", "<b>", Html("<b>"), 3, None, ["&", 'x"'], class_="a b", title='"<', hidden=True, id=None) == \
        '<p class="a b" title="&quot;&lt;" hidden>&lt;b&gt;<b>3&amp;x&quot;</p>'
    assert join("<", Html("<")) == "&lt;<"


@pytest.mark.parametrize("odd", ["\x00", "\x1b", "\ud83d", "\ufffe", "\x9f"])
def test_what_no_page_can_hold(odd):
    """Control characters and lone surrogates are shown as U+FFFD, so that the file is UTF-8 and XML."""
    assert text(f"a{odd}b") == "a\ufffdb"
    text(odd).encode()


@pytest.mark.parametrize("plain", ["models.py:11", "naïve 模型 🔥", "a\nb\tc", "x=(1, [2]) {3} $ % ~ `"])
def test_what_needs_no_escape(plain):
    """Other text stays as it is."""
    assert text(plain) == plain


def test_data_cannot_end_its_element():
    """JSON within a script element holds no markup, and reads back as what it was."""
    given = {"</script><!--": ["<script>", 1, None, "\ud83d"]}
    assert "<" not in data(given)
    assert json.loads(data(given)) == given
    with pytest.raises(ValueError, match="not JSON compliant"):
        data([float("nan")])


def test_places():
    """A place in the user's code is a link only with a known source, and never outside of it."""
    assert place("a b.py", 3, "") == '<code class="place">a b.py:3</code>'
    assert 'href="https://x/a%20b.py#L3"' in place("a b.py", 3, "https://x/{file}#L{line}")
    assert "href" not in place("/etc/passwd", 3, "https://x/{file}#L{line}")
    assert link("a b\ud83d%") == "#cell:a%20b%EF%BF%BD%25"


def test_seconds():
    """Times have the unit that one reads them in."""
    assert [readable_seconds(s) for s in (0, 0.0123, 2.34, 300)] == ["0 ms", "12 ms", "2.3 s", "5.0 min"]


# the order of axes


def cells_of(**axes):
    names = list(axes)
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*axes.values())]


AXES = {"a": "12", "b": "1234", "c": "12", "d": "123"}


def test_the_axes_that_tell_most_come_first():
    """A planted failure of two values of two axes makes these two rows and columns; the larger one gives the rows."""
    found = order_axes([(c, c["b"] == "2" and c["d"] == "3") for c in cells_of(**AXES)])
    assert (found.rows, found.columns, set(found.rest)) == ("b", "d", {"a", "c"})
    assert found.explained == 1


def test_two_axes_that_tell_only_together():
    """Neither of the two axes tells anything alone: exclusive or."""
    found = order_axes([(c, (c["a"] == "1") != (c["c"] == "1")) for c in cells_of(**AXES)])
    assert {found.rows, found.columns} == {"a", "c"}


@pytest.mark.parametrize("fails", [True, False, None])
def test_where_nothing_differs(fails):
    """All fail, none fails, none ran: the order of the matrix."""
    found = order_axes([(c, fails) for c in cells_of(**AXES)])
    assert (found.axes, found.explained) == (("b", "a", "c", "d"), 0)  # a and b; b has more values


def test_axes_with_one_value_are_left_out():
    """What does not vary is no axis of the map; where nothing varies, one axis is left."""
    assert order_axes([({"x": "1", "y": v}, True) for v in "ab"]).axes == ("y",)
    assert order_axes([({"x": "1", "y": "1"}, True)]).axes == ("x",)
    assert order_axes([]).axes == ()


def test_chance_is_not_taken_for_influence():
    """Many groups explain much by chance: an axis with a value for each cell tells nothing."""
    assert influence((i, i % 3 == 0) for i in range(30)) == 0
    assert influence((i % 3 == 0, i % 3 == 0) for i in range(30)) == pytest.approx(1)


def test_a_hundred_axes_are_ordered_soon():
    """Pairs are tried of the best axes only."""
    cells = [({f"x{i}": str(n >> i % 8 & 1) for i in range(100)}, n % 7 == 0) for n in range(256)]
    assert len(order_axes(cells).axes) == 100


# the grid


def test_grid():
    """Bands keep the order of values; places where no cell is are missing; the rest goes within."""
    cells = [(c, i) for i, c in enumerate(cells_of(model=["x", "y"], mode=["m", "n"], phase=["t", "i"]))]
    values = {"model": ["x", "y"], "mode": ["m", "n"], "phase": ["t", "i"]}
    grid = arrange([c for c in cells if c[0] != {"model": "y", "mode": "n", "phase": "i"}], "model", "mode", ["phase"],
                   values)
    assert [band.value for band in grid.rows] == ["x", "y"]
    assert [(band.value, band.labels) for band in grid.columns] == [("m", ("t", "i")), ("n", ("t", "i"))]
    assert grid.places[("x",), ("m", "i")] == [1]
    assert (("y",), ("n", "i")) not in grid.places
    assert sorted(cell for found in grid.places.values() for cell in found) == list(range(7))


def test_values_in_which_most_cells_fail_come_first():
    """Of rows and of columns; equals stay in the order of the report."""
    cells = [Facts(each) for each in sample_report(SMALL)["compile_matrix"]["cells"]]
    assert HeatMap(cells).values["model"] == ["moe_lite", "scorer"]
    assert HeatMap(cells).values["dynamic"] == ["auto", "static", "dynamic"]


def test_split():
    """The least telling axes go across while a row has room, the others to lines."""
    values = {"a": "12", "b": "1234", "c": ["1"] * WIDTH}
    assert split_axes(["a", "b"], values, 3) == ([], ["a", "b"])
    assert split_axes(["a", "b"], values, 8) == (["a"], ["b"])
    assert split_axes(["a", "b"], values, 100) == (["a", "b"], [])
    assert split_axes(["c", "a"], values, 3) == (["c"], ["a"])


# colours


@pytest.mark.parametrize("dark", [False, True])
def test_contrast(dark):
    """Letters on squares, and text on each ground of the page: at least 4.5 (WCAG 2.2, 1.4.3)."""
    colours = markup.variables(dark)
    pairs = [(name, colours[name], colours[name.replace("-ground", "-text")]) for name in colours if "-ground" in name]
    pairs += [(f"{front} on {back}", colours[back], colours[front]) for back in ("ground", "panel")
              for front in ("text", "quiet", "accent", "bad", "good")]
    assert {name: markup.contrast(*pair) for name, *pair in pairs if markup.contrast(*pair) < 4.5} == {}


def test_every_verdict_has_its_own_letter():
    """Verdicts are told apart without colour."""
    assert set(markup.VERDICT_STYLES) == set(VERDICTS)
    assert len({style.letter for style in markup.VERDICT_STYLES.values()}) == len(VERDICTS)


def test_good_and_bad_differ_in_lightness():
    """A grey print, and an eye that sees no hue, tell failures from passes."""
    for dark in (False, True):
        colours = markup.variables(dark)
        for bad in ("fail", "error", "timeout", "crash", "xpass"):
            assert markup.contrast(colours["pass-ground"], colours[f"{bad}-ground"]) > 3


# causes


def failing(name, *verdicts):
    checks = {check_name: check(verdict, *problems) for check_name, verdict, *problems in verdicts}
    return Facts({"id": name, "axes": {"model": "net"}, "status": "fail", "checks": checks})


def test_one_line_is_one_cause():
    """Problems at one place of the user's code are one, whatever their numbers; of equals most cells come first."""
    found = group_causes([
        failing("a", ("graph_breaks", "fail", problem("graph break (1 place)", file="m.py", line=4))),
        failing("b", ("recompiles", "fail", problem("3 recompiles", file="m.py", line=9))),
        failing("c", ("graph_breaks", "fail", problem("graph break (2 places)", file="m.py", line=4),
                      problem("graph break (2 places)", file="m.py", line=5))),
    ])
    assert [(c.problem.place, c.cells) for c in found] == [
        ("m.py:9", ["b"]), ("m.py:4", ["a", "c"]), ("m.py:5", ["c"])]


def test_numbers_and_names_do_not_part_causes():
    """The same thing wrong with several outputs, in several cells, at several steps, by some checks, is one cause."""
    found = group_causes([
        failing("a", ("equivalence", "fail", problem("loss: error is 3.1e6 times the noise at [0]"),
                      problem("output: error is 9 times the noise"))),
        failing("b", ("equivalence", "fail", problem("output[1]: error is 77.5 times the noise")),
                ("training_steps", "fail", problem("step 3: loss: error is 4 times the noise"),
                 problem("step 1: gradient of w: error is 4 times the noise"))),
        failing("c", ("equivalence", "fail", problem("output: dtype is float32, eager float64"))),
    ])
    assert [(c.checks, c.cells) for c in found] == [
        (["equivalence", "training_steps"], ["a", "b"]), (["equivalence"], ["c"])]


def of_model(model, name, check_name, verdict, message):
    return Facts({"id": name, "axes": {"model": model}, "status": "fail",
                  "checks": {check_name: check(verdict, problem(message))}})


@pytest.mark.parametrize(("check_name", "verdict", "ones", "others"), [
    ("equivalence", "fail", "output: error is 3.1e6 times the noise", "output: error is 9 times the noise"),
    ("smoketest", "fail", "the smoketest says False: 3 of 4", "the smoketest says False: 3 of 4"),
    ("compiles", "xpass", "passed, although m.yaml:10 says not", "passed, although m.yaml:13 says not"),
    ("compiles", "error", "m.yaml:5:3: factory 'c:Bad' raised", "m.yaml:6:3: factory 'c:Bad' raised"),
])
def test_what_may_be_two_things_is_two(check_name, verdict, ones, others):
    """Values that differ in two models, two rules of one file: whoever mends the first must see the second."""
    found = group_causes([of_model("a", "a-1", check_name, verdict, ones),
                          of_model("a", "a-2", check_name, verdict, ones),
                          of_model("b", "b-1", check_name, verdict, others)])
    assert [c.cells for c in found] == [["a-1", "a-2"], ["b-1"]]


def test_an_exception_of_a_backend_is_one_cause_whatever_the_model():
    text = "the compiled run raised BackendCompilerFailed in forward; eager did not: line 7: unsupported"
    found = group_causes([of_model(model, f"{model}-1", "compiles", "fail", text) for model in ("a", "b")])
    assert [c.cells for c in found] == [["a-1", "b-1"]]


def test_what_several_ranks_have_is_one_cause():
    """Whichever of them have it, in which cell; what follows from it on one of them is none."""
    found = group_causes([
        failing("a", ("compiles", "fail", problem("every rank: the compiled run raised ValueError in forward: no")),
                ("recompiles", "fail", problem("ranks 0, 1: nothing to judge: the compiled run raised ValueError"))),
        failing("b", ("compiles", "fail", problem("rank 1: the compiled run raised ValueError in forward: no"))),
        failing("c", ("graph_breaks", "fail", problem("rank 0: graph break (1 place(s), 0 allowed): print"),
                      problem("ranks 1, 2, 3: graph break (2 place(s), 0 allowed): print"))),
        failing("d", ("graph_breaks", "fail", problem("every rank: graph break (1 place(s), 0 allowed): print")),
                ("compiles", "fail",
                 problem("every rank: 80% of the model's operator calls ran inside compiled graphs"))),
        failing("e", ("equivalence", "fail", problem("rank 0: output: error is 9 times the noise"),
                      problem("every rank: loss: error is 3 times the noise"))),
    ])
    assert [(c.checks, c.cells) for c in found] == [
        (["equivalence"], ["e"]), (["compiles"], ["a", "b"]), (["graph_breaks"], ["c", "d"])]


def test_a_crash_is_one_cause_for_all_checks():
    """Each check of a crashed cell carries the crash; what there was nothing to judge of is no cause beside another."""
    crash = problem("process 4711 died")
    found = group_causes([
        failing("a", ("compiles", "crash", crash), ("equivalence", "crash", crash)),
        failing("b", ("compiles", "fail", problem("it raised")),
                ("recompiles", "fail", problem("nothing to judge: the compiled run raised ValueError"))),
        failing("c", ("recompiles", "fail", problem("nothing to judge: no graph was compiled"))),
    ])
    assert [(c.verdict, c.checks, c.cells) for c in found] == [
        ("crash", ["compiles", "equivalence"], ["a"]), ("fail", ["compiles"], ["b"]), ("fail", ["recompiles"], ["c"])]


def test_coverage_that_a_graph_break_takes_is_no_cause():
    """The line of the break is; without a break that fails, the coverage is the cause itself."""
    section = {"error": None, "graphs": [{"runs": 1}], "eager_frames": [], "lost": [], "all_zero": [],
               "eager_all_zero": [], "coverage": [{"call": "call 1", "share": 0.8, "outside": 1, "total": 5}]}
    low = next(iter(compiles.judge(section, {})))
    uncovered = problem(low.message, low.evidence, low.hint)
    broken = problem("graph break", file="m.py", line=4)
    found = group_causes([failing("a", ("compiles", "fail", uncovered), ("graph_breaks", "fail", broken))])
    assert [(c.checks, c.problem.place) for c in found] == [(["graph_breaks"], "m.py:4")]
    found = group_causes([failing("a", ("compiles", "fail", uncovered), ("graph_breaks", "xfail", broken))])
    assert [c.checks for c in found] == [["compiles"]]


def test_expected_failures_are_no_causes():
    """Unless they are asked for."""
    known = [failing("a", ("recompiles", "xfail", problem("again")))]
    assert group_causes(known) == []
    assert len(group_causes(known, ["xfail"])) == 1


# facts


def test_facts():
    """What a section holds, as records."""
    facts = Facts(cell({"model": "moe_lite", "backend": "inductor"}, 1))
    assert [c.kind for c in facts.compiles] == ["first", "backward", "recompile"]
    assert [(r.what, r.expected, r.actual) for r in facts.recompiles] == [("x.size(0)", "4", "6")]
    assert [(b.file, b.line) for b in facts.graph_breaks] == [("models.py", 41)]
    assert facts.coverage == 0.8
    assert [leaf.call for leaf in facts.leaves] == ["call 3 (B=12)"]
    assert facts.generated[0].generated[2].name == "cpp_fused_relu_2"
    assert facts.generated[0].library == {"addmm": 2}
    assert [v.check for v in facts.failed] == ["compiles", "graph_breaks"]


@pytest.mark.parametrize("sections", [
    {}, {"compiles": 3}, {"compiles": {"compiles": [3, {}, {"seconds": "x", "caches": 4, "line": True}]}},
    {"compiles": {"coverage": 3, "graphs": [{}], "eager_frames": {}}}, {"kernels": {"graphs": [7, {"generated": 3}]}},
    {"equivalence": {"leaves": [{"rms": "inf", "index": 3}, {"rms": [], "eager": {}}]}},
    {"graph_breaks": {"graph_breaks": [{"line": 10**400, "stack": "x"}]}},
])  # fmt: skip
def test_facts_of_odd_sections(sections):
    """A section of another version is read as far as it goes; nothing raises."""
    facts = Facts({"id": "x", "axes": {}, "status": "pass", "checks": {}, "observation": {"sections": sections}})
    for name in ("compiles", "recompiles", "graphs", "eager_frames", "graph_breaks", "coverage", "leaves", "generated"):
        getattr(facts, name)
    measure_cells([facts])


def test_measures():
    """Every number that the policy knows, and those at the top of sections that nobody knows."""
    made = [Facts(each) for each in sample_report(SMALL)["compile_matrix"]["cells"]]
    made[0].sections["mine"] = {"speedup": 1.5, "queries": 3, "name": "x", "flag": True}
    found = measure_cells(made)
    assert {"recompiles", "graph_breaks", "compile_seconds", "kernels", "speedup", "coverage, %"} <= set(found)
    assert found["mine: queries"] == [3] + [None] * 11
    assert found["speedup"] == [1.5] + [None] * 11
    assert "mine: flag" not in found
    assert "mine: name" not in found


def test_the_table_of_a_benchmark_is_shown():
    """As it is printed, escaped; a section of another version without one is no reason to fail."""
    def shown(content):
        facts = Facts({"id": "a", "axes": {}, "status": "pass", "checks": {},
                       "observation": {"sections": {"worth": content}}})
        return str(article(facts, ""))

    assert "<pre>faster: 2 &lt; 3" in shown({"text": "faster: 2 < 3"})
    assert "side by side" not in shown({"text": 3})


def test_ranks():
    """Of several ranks the page says whose ledger stands open, and has those of the others folded."""
    one = cell({"model": "scorer", "backend": "inductor", "wrapper": "ddp"})
    other = cell({"model": "moe_lite", "backend": "inductor"})["observation"]
    one["observation"]["ranks"] = [{"sections": other["sections"], "failure": None}, None]
    page = article(Facts(one), "pytest")
    assert "below them is what rank 0 recorded" in page
    head, _, folded = page.partition("<details><summary>rank 1</summary>")
    assert "<h3>Compiles</h3>" in head
    assert "Graph breaks" not in head
    assert "Graph breaks (1)" in folded
    assert "<h3>Compiles</h3>" in folded
    assert "rank 2" not in page  # it recorded nothing


@pytest.mark.parametrize(("wrapper", "said"), [("tp*fake8", True), ("tp", False), ("none", False)])
def test_the_fake_lane_is_named(wrapper, said):
    """A green cell of the fake lane says at its top that no number was judged."""
    page = article(Facts(cell({"model": "scorer", "backend": "inductor", "wrapper": wrapper})), "pytest")
    assert ("Fake lane: one process compiled as rank 0 of so many would. No number is judged." in page) is said
