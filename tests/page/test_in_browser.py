"""The page as somebody uses it: filtered, clicked through, by keyboard, without JavaScript, in light and dark."""

from __future__ import annotations

import copy

import pytest
from sample_report import AXES, SMALL, cell, report, sample_report

SHOWN = "[...document.querySelectorAll('#map .s:not(.dim)')].map(s => s.getAttribute('aria-label'))"
OPEN = "document.querySelector('#side .cell')?.innerText ?? ''"
FOCUS = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.id"
TABLE = """[...document.querySelectorAll('#map tr')].map(row => [...row.children].map(c =>
    [c.tagName, c.className, c.scope ?? '', c.colSpan, c.rowSpan, c.title,
     [...c.querySelectorAll('.s')].map(s => s.dataset.i)]))
    .concat([document.querySelector('#map caption').textContent])"""
CONTRASTS = """(() => {
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
  const low = [];
  for (const e of document.body.querySelectorAll('*')) {
    const text = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!text || !e.checkVisibility() || ['SCRIPT', 'NOSCRIPT', 'TITLE', 'OPTION'].includes(e.tagName)) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push([e.tagName, e.className, e.textContent.slice(0, 30), ratio]);
  }
  return low; })()"""


@pytest.fixture
def small(opened):
    """The page of 12 cells."""
    return opened(sample_report(SMALL))


def test_nothing_but_the_file_is_asked(small):
    """The page opens without an error, and asks for no address but its own."""
    assert [address.partition("page.html")[1] for address in small.asked()] == ["page.html"]
    assert small.complaints() == []
    assert small.evaluate("document.title").startswith("FAIL: 1 model has graph breaks (moe_lite, models.py:41)")
    assert len(small.evaluate(SHOWN)) == 12


@pytest.mark.parametrize("axes", [SMALL, AXES, {"model": ["a", "b"]}], ids=["12", "1080", "one axis"])
def test_both_makers_of_the_map_agree(opened, axes):
    """The map that page.js draws is the one that the page came with."""
    page = opened(sample_report(axes, kernels=False), scripts=False)
    static = page.evaluate(TABLE)
    page = opened(sample_report(axes, kernels=False))
    page.evaluate("document.getElementById('by').dispatchEvent(new Event('change'))")
    assert page.evaluate(TABLE) == static


def test_any_two_axes(small):
    """The map is drawn by any two axes; no cell gets lost."""
    small.choose("#rows", "dynamic")
    small.choose("#columns", "model")
    heads = "[...document.querySelectorAll('#map thead tr:first-child th')].map(h => h.textContent)"
    assert small.evaluate(heads) == ["moe_lite", "scorer"]  # what fails comes first
    assert small.evaluate("document.querySelector('#map caption').textContent") == \
        "Rows: dynamic. Columns: model, within it backend"
    assert len(small.evaluate(SHOWN)) == 12
    small.choose("#rows", "model")  # the axis of the columns: they change places
    assert small.evaluate("document.getElementById('columns').value") == "dynamic"
    assert len(small.evaluate(SHOWN)) == 12


def test_filter_by_the_rest(small):
    """A value of another axis leaves only its cells."""
    small.choose("[data-axis=dynamic]", "2")
    assert len(small.evaluate(SHOWN)) == 4
    assert all("dynamic" in name for name in small.evaluate(SHOWN))
    assert small.evaluate("document.getElementById('count').textContent") == "4 of 12 cells"


def test_search_and_verdicts(small):
    """What does not match is dimmed, in its place; a search looks into the articles."""
    small.choose("#search", "models.py:41")
    assert all(name.startswith("moe_lite") for name in small.evaluate(SHOWN))
    assert len(small.evaluate(SHOWN)) == 6
    small.choose("#search", "")
    small.click(".legend input[value=fail]")
    assert all(name.startswith("scorer") for name in small.evaluate(SHOWN))


def test_only_the_cells_of_a_finding(small):
    """A finding leads to its cells, and back."""
    small.click("[data-group='0']")
    assert len(small.evaluate(SHOWN)) == 6
    small.click("#all")
    assert len(small.evaluate(SHOWN)) == 12


@pytest.mark.parametrize("allowed", [True, False], ids=["allowed", "refused"])
def test_a_command_is_copied(small, allowed):
    """By its button; where a browser does not let a page do that, the command is selected."""
    answer = "async text => { window.taken = text }" if allowed else "async () => { throw new Error('no') }"
    small.evaluate(f"Object.defineProperty(navigator, 'clipboard', {{value: {{writeText: {answer}}}}})")
    small.click("#overview .copy")
    small.wait("(window.taken ?? getSelection().toString()) !== ''")
    assert small.evaluate("window.taken ?? getSelection().toString()") == \
        "pytest --compile-matrix=matrix/default.yaml 'matrix/default.yaml::moe_lite-inductor-auto::graph_breaks'"
    assert small.evaluate("'taken' in window") is allowed
    assert small.complaints() == []


def test_cards_lead_to_their_findings(small):
    """Also while a cell is open; what is good leads to the map."""
    small.click("a[aria-label^='moe_lite-inductor-static']")
    small.wait(f"({OPEN}).length > 0")
    small.click(".card.bad")
    small.wait("document.getElementById('group-0').checkVisibility()")
    assert small.evaluate(OPEN) == ""
    assert small.evaluate("document.getElementById('group-0').getBoundingClientRect().top < innerHeight")
    assert small.evaluate("[...document.querySelectorAll('.card')].every(card => "
                          "document.querySelector(card.getAttribute('href')) !== null)")


def test_click_to_the_verdict(small):
    """A click opens what is known of the cell: verdicts, the user's line, compiles, kernels, times, the command."""
    small.click("a[aria-label^='moe_lite-inductor-static']")
    small.wait(f"({OPEN}).length > 0")
    told = small.evaluate(OPEN)
    for text in ("moe_lite-inductor-static", "Unsupported Tensor.item() call", "models.py:41", "x.size(0) 4 → 6",
                 "mark_dynamic", "36 bitwise equal", "compiled 3.0 s",
                 "again pytest --compile-matrix=matrix/default.yaml 'matrix/default.yaml::moe_lite-inductor-static'"):
        assert text in told
    assert small.evaluate("document.getElementById('overview').checkVisibility()") is False
    assert small.evaluate("decodeURIComponent(location.hash)") == "#cell:moe_lite-inductor-static"
    assert small.evaluate("document.querySelector('.s.now').getAttribute('aria-current')") == "true"
    # Its kernels are listed at the first cell that has the same ones, which a click opens.
    small.click("#open a[href^='#cell:']")
    small.wait(f"({OPEN}).includes('cpp_fused_relu_2')")
    assert small.evaluate(OPEN).startswith("pass scorer-inductor-auto")
    small.click("#side .close a")
    small.wait("document.getElementById('overview').checkVisibility()")


def test_a_link_to_a_cell_opens_it(opened):
    """The address of a page with a cell in it can be sent to somebody."""
    page = opened(sample_report(SMALL), at="#cell:scorer-inductor-auto")
    assert page.evaluate(OPEN).startswith("pass scorer-inductor-auto")


def test_keyboard_alone(small):
    """Tab leads into the map, arrows through it, Enter opens, Escape goes back; n to a failure, / to the search."""
    for _ in range(40):
        small.key("Tab")
        if small.evaluate("document.activeElement.matches('#map .s')"):
            break
    assert small.evaluate(FOCUS).startswith("moe_lite-inductor-auto")
    assert small.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    small.key("ArrowRight")
    assert small.evaluate(FOCUS).startswith("moe_lite-inductor-static")
    small.key("ArrowDown")
    assert small.evaluate(FOCUS).startswith("scorer-inductor-static")
    small.key("End")
    assert small.evaluate(FOCUS).startswith("scorer-aot_eager-dynamic")
    small.key("Enter")
    small.wait("document.activeElement.matches('.cell')")
    small.key("Escape")
    small.wait(f"({OPEN}) === ''")
    assert small.evaluate(FOCUS).startswith("scorer-aot_eager-dynamic")
    small.key("n")
    small.wait(f"({OPEN}).startsWith('fail moe_lite-inductor-auto')")
    small.key("p")
    small.wait(f"({OPEN}).startsWith('fail moe_lite-aot_eager-dynamic')")
    small.key("/")
    assert small.evaluate("document.activeElement.id") == "search"
    small.key("n")  # now a letter
    assert small.evaluate("document.getElementById('search').value") == "n"


def test_without_javascript(opened):
    """The page is whole without JavaScript: map, findings, and each cell's article behind its link."""
    page = opened(sample_report(SMALL), scripts=False)
    assert page.evaluate("[...document.querySelectorAll('.js')].some(e => e.checkVisibility())") is False
    assert page.evaluate("document.getElementById('overview').checkVisibility()")
    page.click("a[aria-label^='moe_lite-inductor-static']")
    page.wait("document.querySelector('.cell:target')?.checkVisibility()")
    assert "models.py:41" in page.evaluate("document.querySelector('.cell:target').innerText")
    assert page.evaluate("document.getElementById('overview').checkVisibility()") is False


def test_colours_by_a_number_and_by_a_check(small):
    """Squares can show another check's verdict, or a number."""
    small.choose("#by", "check gradients")
    assert small.evaluate("[...document.querySelectorAll('#map .s')].every(s => s.textContent === 'P')")
    small.choose("#by", "check graph_breaks")
    assert small.evaluate("document.querySelectorAll('#map .s.fail').length") == 6
    options = small.evaluate("[...document.querySelectorAll('#by option')].map(o => o.value)")
    assert {f"number {name}" for name in ("recompiles", "compile_seconds", "kernels", "cell_seconds")} <= set(options)
    small.choose("#by", "number compile_seconds")
    labels = small.evaluate(SHOWN)
    assert all("compile_seconds" in label for label in labels)
    assert small.evaluate("document.querySelectorAll('#map .step5').length") >= 1
    assert small.evaluate("document.getElementById('ramp').checkVisibility()")
    small.choose("#by", "")
    assert small.evaluate("[...document.querySelectorAll('#map .s')].map(s => s.textContent).sort().join('')") == \
        "FFFFFFPPPPPP"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_contrast(opened, dark):
    """Every visible text has a contrast of at least 4.5, in both themes, with a cell open too."""
    now = sample_report(AXES | {"mode": ["default", "reduce-overhead"], "phase": ["training"]})
    before = copy.deepcopy(now)
    before["compile_matrix"]["cells"].pop()
    before["compile_matrix"]["matrix"]["cells_planned"].pop()
    page = opened(now, baseline=before, dark=dark)
    assert page.evaluate("getComputedStyle(document.body).colorScheme") == ("dark" if dark else "light")
    assert page.evaluate(CONTRASTS) == []
    page.key("n")
    page.wait(f"({OPEN}).length > 0")
    assert page.evaluate(CONTRASTS) == []
    page.choose("#by", "number cell_seconds")
    assert page.evaluate(CONTRASTS) == []


def test_theme_by_hand(small):
    """The theme can be chosen against the system's."""
    small.click("#theme")
    assert small.evaluate("getComputedStyle(document.body).colorScheme") == "dark"
    small.click("#theme")
    assert small.evaluate("getComputedStyle(document.body).colorScheme") == "light"


def test_baseline(opened):
    """Cells that are worse, better or new are outlined and say so; the article says what they were."""
    now = sample_report(SMALL)
    before = copy.deepcopy(now)["compile_matrix"]["cells"]
    for i, model in ((0, "moe_lite"), (7, "scorer")):  # one failed and holds now, one held and fails now
        other = cell({**before[i]["axes"], "model": model})
        other["observation"]["cell"] = before[i]["id"]
        before[i] = other | {"id": before[i]["id"], "axes": before[i]["axes"]}
    page = opened(now, baseline=report(before[:-1]))
    told = page.evaluate(SHOWN)
    assert [name.partition(":")[0] for name in told if name.endswith("worse")] == ["moe_lite-inductor-static"]
    assert [name.partition(":")[0] for name in told if name.endswith("better")] == ["scorer-inductor-auto"]
    assert [name.partition(":")[0] for name in told if name.endswith("added")] == ["moe_lite-aot_eager-dynamic"]
    overview = page.evaluate("document.getElementById('overview').innerText")
    assert overview.index("moe_lite has graph breaks") < overview.index("new since 4f2c9d, 2026-11-20") \
        < overview.index("graph_breaks: graph break")
    assert overview.count("new since") == 1
    assert "new graph break" not in overview  # one cause is one finding
    page.click("a[aria-label^='moe_lite-inductor-static']")
    page.wait(f"({OPEN}).includes('In the baseline: pass')")


@pytest.mark.parametrize("width", [360, 800, 1400])
def test_window_widths(opened, width):
    """The page itself never scrolls sideways; only the map and code in it may."""
    page = opened(sample_report(), width=width)
    # The bar at the right takes its part of the width.
    beyond = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(beyond) <= 0
    page.key("n")
    page.wait(f"({OPEN}).length > 0")
    assert page.evaluate(beyond) <= 0
    if width > 1000:
        assert page.evaluate("(s => s.scrollWidth <= s.clientWidth)(document.getElementById('side'))")


def test_a_thousand_cells_are_few_elements(opened):
    """Only what is looked at is made into elements: that is why a large page opens at once."""
    page = opened(sample_report())
    assert len(page.evaluate(SHOWN)) == 1080
    assert page.evaluate("document.querySelectorAll('*').length") < 6000
