"""A report is somebody else's text: names that are markup, scripts, huge or odd are shown, and never run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from sample_report import SMALL, cell, check, graph_break, problem, report, sample_report, written

from pytest_torchcompile.cli import main
from pytest_torchcompile.report.safe_output import harmless_text

NAMES = {
    "script": "<script>window.hit=1</script>",
    "end of script": "</script><img src=x onerror=window.hit=1>",
    "end of noscript": "</noscript></style></title><svg onload=window.hit=1>",
    "comment": "<!--<script>",
    "quotes": """'"` onmouseover=window.hit=1 x='""",
    "entity": "&lt;b&gt; &amp;amp; &#x27;",
    "emoji": "🔥 naïve 模型 \U0001f468‍\U0001f469‍\U0001f467",
    "right to left": "\u202eevil\u202c \u05e2\u05d1",
    "controls": "a\x00b\x1b[31mc\x7f",
    "surrogate": "half \ud83d a pair",
    "address": "javascript:window.hit=1",
    "percent": "100%25 %00 %zz #hash ?query",
    "prototype": "__proto__",
    "template": "${window.hit=1} {{7*7}} __proto__",
}


def hostile(text: str) -> dict[str, Any]:
    """A report with the text everywhere where a report has text."""
    cells, environment = [], {"torch": text, "devices": [text], text: text}
    for number, axes in enumerate(({"model": text, "backend": "inductor", "mine": 1}, {"model": "other", text: text})):
        each = cell(axes, number)
        each["id"] = f"{text}-{number}"
        each["checks"] = {
            "compiles": check("fail", problem(text, text, text, text, 3)),
            text: check("crash", problem(text, text, text), note=text),
        }
        each["status"] = "crash"
        seen = each["observation"]
        seen["leaks"] = [text]
        seen["environment"] = environment
        seen["seconds"] = {text: 1.0}
        seen["sections"][text] = {text: [text], "number": 3}
        seen["sections"]["graph_breaks"]["graph_breaks"] = [graph_break(
            reason=text, gb_id=text, link=text, file=text, hint=text, owner=text, function=text, explanation=text)]
        seen["sections"]["compiles"]["eager_frames"] = [
            {"function": text, "file": text, "line": 1, "reason": text, "kind": text}]
        for found in seen["sections"]["compiles"]["compiles"]:
            found |= {"kind": "recompile", "function": text, "file": text, "cause": text, "what": text,
                      "expected": text, "actual": text, "during": text, "caches": [text],
                      "seconds_in": {text: 1.0}, "compile_id": text}
        graph = seen["sections"]["kernels"]["graphs"][0]
        graph |= {"library": {text: 1}, "stage": text, "compile_id": text}
        graph["generated"][0] |= {"name": text, "ops": [text], "lines": [text, f"{text}:3"]}
        tensor = {"name": text, "of": text, "tensor": text, "bytes": 4}
        graph["calls"] = [{"name": text, "kind": text, "library": text, "operators": [text], "reads": [tensor],
                           "writes": [tensor], "kept_inside": [tensor]}]
        seen["sections"]["equivalence"]["leaves"] = [{"name": text, "call": text, "dtype": text, "message": text}]
        cells.append(each)
    made = report(cells)
    block = made["compile_matrix"]
    block["environment"] = environment
    block["matrix"] |= {"path": text, "excluded": {text: 2}}
    block["run"]["git"]["commit"] = text
    return made


@pytest.mark.parametrize("text", NAMES.values(), ids=NAMES)
def test_shown_and_not_run(opened, text):
    """Nothing in a report is run, asked for, or able to leave its place; the text itself is on the page."""
    page = opened(hostile(text), "--source", "https://example.org/{file}#L{line}")
    harmless = harmless_text(text)
    shown = "".join(letter if letter.isprintable() or letter == "\u200d" else "�" for letter in harmless)
    shown = shown.replace("\ud83d", "�")
    assert shown.split("\x1b")[0][:3] in page.evaluate("document.body.textContent")
    for number in (0, 1):
        page.evaluate(f"document.querySelector('.s[data-i=\"{number}\"]').click()")
        page.wait("document.getElementById('open').childElementCount === 1")
        assert page.evaluate("document.querySelector('#open bdi').textContent") == f"{shown}-{number}"
        page.choose("#search", text)
        assert page.evaluate("document.querySelectorAll('#map .s:not(.dim)').length") in (0, 2)
    page.choose("#rows", "model")
    page.evaluate("""document.querySelectorAll('[data-axis]').forEach(s => { s.selectedIndex = 1;
        s.dispatchEvent(new Event('change')); })""")  # no cell has the first value of every axis
    page.evaluate("""document.querySelectorAll('[data-axis]').forEach(s => { s.selectedIndex = 0;
        s.dispatchEvent(new Event('change')); })""")
    for option in page.evaluate("[...document.querySelectorAll('#by option')].map(o => o.value)"):
        page.choose("#by", option)
    assert page.evaluate("window.hit ?? null") is None
    assert page.evaluate("document.querySelectorAll('script').length") == 2
    foreign = "img, iframe, object, embed, link, [onerror], [onload], [onmouseover]"
    assert page.evaluate(f"document.querySelectorAll('{foreign}').length") == 0
    links = page.evaluate("[...document.querySelectorAll('a')].map(a => a.getAttribute('href').split(/[:#/]/)[0])")
    assert set(links) <= {"", "https"}
    assert page.complaints() == []
    assert [address for address in page.asked() if not address.startswith("file:")] == []


def test_shown_and_not_run_without_javascript(opened):
    """Nor does a report's text leave its place where the articles are part of the page."""
    page = opened(hostile(NAMES["end of noscript"]), scripts=False)
    assert page.evaluate("document.querySelectorAll('noscript > article').length") == 2
    assert page.evaluate("document.querySelectorAll('[onload], [onerror], body > svg').length") == 0


@pytest.mark.parametrize("name", ["script", "end of noscript", "quotes", "surrogate"])
def test_a_folder_of_hostile_reports(browser, tmp_path, name):
    """Nor does a trend run anything: commits, versions, cells, limits, the names of files and of other matrices."""
    text = NAMES[name]
    folder, page = tmp_path / "runs", tmp_path / "page.html"
    folder.mkdir()
    (folder / "<img src=x onerror=window.hit=1>.json").write_text("{")
    for day, path in ((1, text), (2, f"{text} of another matrix"), (3, text)):
        content = hostile(text)
        block = content["compile_matrix"]
        block["run"]["started"] = f"2026-11-0{day}T10:00:00+00:00"
        block["matrix"]["path"] = path
        block["environment"] = {**block["environment"], "torch": f"{text}{day}"}
        for each in block["cells"]:
            each["planned"] = {
                "outcome": "xfail", "reason": text, "issue": text, "until": text, "expected": [text], "rule": text,
                "limits": {text: 1}, "checks": [text], "also": [text]}
            each["observation"]["environment"] = block["environment"]
            each["reused"] = {"run": text, "commit": text, "changed": True, "age": 3}
        block["cells"][0]["status"] = "pass" if day == 1 else "crash"
        written(content, folder / f"{day}.json")
    assert main(["html", str(folder), "-o", str(page)]) == 0
    browser.open(page.as_uri())
    assert browser.evaluate("document.querySelectorAll('.turns tbody tr').length") == 2
    assert "1 run is of another matrix" in browser.evaluate("document.querySelector('.trend').innerText")
    browser.evaluate("document.querySelectorAll('.copy, .card, .turns a').forEach(each => each.click())")
    assert browser.evaluate("window.hit ?? null") is None
    assert browser.evaluate("document.querySelectorAll('script').length") == 2
    assert browser.evaluate("document.querySelectorAll('img, [onerror], [onload], [onmouseover]').length") == 0
    assert browser.complaints() == []


def test_a_smuggled_script_would_not_run(opened, tmp_path):
    """Even were a text not escaped, the page's policy lets no script run but its own. (The page is tampered with.)"""
    page = opened(sample_report(SMALL))
    file = tmp_path / "page.html"
    tampered = file.read_text().replace("<h1>", "<script>window.hit=1</script><img src=x onerror=window.hit=1><h1>")
    file.write_text(tampered)
    page.open(file.as_uri())
    assert page.evaluate("window.hit ?? null") is None
    assert "Content Security Policy" in " ".join(page.complaints())


def test_very_long_names(opened):
    """A name of thousands of letters neither breaks the page's width nor hides the others."""
    made = sample_report(SMALL)
    for each in made["compile_matrix"]["cells"]:
        each["axes"]["model"] *= 500
    page = opened(made)
    assert page.evaluate("document.documentElement.scrollWidth") <= 1400
    assert page.evaluate("Math.max(...[...document.querySelectorAll('#map th')].map(h => h.offsetWidth))") < 400
    page.key("n")
    page.wait("document.getElementById('open').childElementCount === 1")
    assert page.evaluate("document.getElementById('side').scrollWidth <= document.getElementById('side').clientWidth")


def partial(content: dict[str, Any]) -> dict[str, Any]:
    """As of a run that was killed: no observation of some cells, others never judged."""
    block = content["compile_matrix"]
    block["run"] |= {"finished": None, "exit_status": None}
    block["finished"] = False
    for each in block["cells"][4:]:
        each |= {"status": "not_run", "observation": None, "seconds": None,
                 "checks": {name: check("not_run") for name in each["checks"]}}
    return content


def repeated(content: dict[str, Any]) -> dict[str, Any]:
    """Cells with the same axes: the page must not lose one."""
    for each in content["compile_matrix"]["cells"]:
        each["axes"] = {"model": "scorer", "backend": "inductor"}
    return content


def empty(content: dict[str, Any]) -> dict[str, Any]:
    """A run in which nothing was planned."""
    content["compile_matrix"]["cells"] = []
    content["compile_matrix"]["matrix"]["cells_planned"] = []
    return content


def odd(content: dict[str, Any]) -> dict[str, Any]:
    """Sections of another version or of no sense."""
    for number, each in enumerate(content["compile_matrix"]["cells"]):
        sections = each["observation"]["sections"]
        for name in sections:
            sections[name] = [{}, {"compiles": 7}, {"compiles": [7, {}, {"seconds": "x", "seconds_in": 3}]},
                              {"graphs": [{"runs": "many"}], "coverage": [{"share": None}, 7]},
                              {"leaves": [{"rms": "inf", "index": 4}], "compared": "all"},
                              {"graph_breaks": [{}], "eager_frames": [{"line": 1e300}]}][number % 6]
    return content


@pytest.mark.parametrize("change", [partial, repeated, empty, odd])
def test_reports_that_lack_things(opened, change):
    """A page is made of whatever a report has; it says that the run is not whole."""
    page = opened(change(copy.deepcopy(sample_report(SMALL))))
    assert page.complaints() == []
    assert not page.evaluate("document.title").startswith("PASS")
    assert page.evaluate("document.querySelectorAll('#map .s').length") == (0 if change is empty else 12)
    page.key("n")
    page.choose("#search", "models")
    assert page.complaints() == []
