"""The page and the picture as files, and the command that writes them."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from sample_report import AXES, SMALL, cell, report, sample_report, written

from pytest_torchcompile.cli import main
from pytest_torchcompile.page.markup import VERDICT_STYLES


@pytest.fixture
def made(tmp_path, capsys):
    """Run the command html on a report; returns the page, the picture and what was printed."""
    def make(content, *arguments):
        page, picture = tmp_path / "out" / "page.html", tmp_path / "out" / "map.svg"
        report = str(written(content, tmp_path / "r.json"))
        assert main(["html", report, "-o", str(page), "--svg", str(picture), *arguments]) == 0
        return page.read_text(encoding="utf-8"), picture.read_text(encoding="utf-8"), capsys.readouterr().out

    return make


def test_the_page_says_what_the_gate_says(made):
    """The first line is the gate's sentence; the exit code is 0, because to judge is the gate's task."""
    page, picture, printed = made(sample_report(SMALL))
    sentence = printed.splitlines()[0]
    assert sentence.startswith("FAIL: 1 model has graph breaks (moe_lite, models.py:41); and 3 more findings")
    assert sentence in page
    assert sentence in picture


def test_everything_is_in_the_file(made):
    """No address is named that a browser would ask by itself, and the policy allows this one script and style only."""
    page, picture, _ = made(sample_report(SMALL))
    assert re.findall(r'<(?:script|img|link|iframe)[^>]*(?:src|href)=|url\(|@import', page) == []
    assert set(re.findall(r'https?://[\w.-]+', page)) == {"https://meta-pytorch.github.io"}  # torch's page of the break
    assert set(re.findall(r'https?://[\w.-]+', picture)) == {"http://www.w3.org"}  # the namespace of SVG
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src &#x27;none&#x27;;")
    for element in ("style", "script"):
        text = re.search(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)[1]
        assert f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}" in policy


def test_each_cell_has_a_square_and_an_article(made):
    """Every cell once, with its letter, and a link from the one to the other."""
    page, picture, _ = made(sample_report(AXES | {"wrapper": ["none", "autocast"]}, kernels=False))
    links = re.findall(r'<a href="#(cell:[^"]*)" class="s (\w+)"[^>]*>(.)</a>', page)
    assert len(links) == len(set(links)) == 720
    assert {anchor for anchor, *_ in links} == set(re.findall(r'<article id="(cell:[^"]*)"', page))
    assert {(verdict, letter) for _, verdict, letter in links} == \
        {(verdict, VERDICT_STYLES[verdict].letter) for verdict in ("pass", "fail", "crash", "skip")}
    assert picture.count("<rect") == 720 + 4 + 1  # squares, legend, ground


def test_the_picture_is_xml(made):
    """The picture is well-formed, says what it is to those who do not see it, and has both themes."""
    _, picture, _ = made(report([cell({"model": "<b>&\x00\ud83d", "backend": "x" * 900})]))
    root = ElementTree.fromstring(picture)
    assert root.get("role") == "img"
    assert root[0].tag.endswith("title")
    assert "prefers-color-scheme:dark" in picture
    assert "script" not in picture
    assert float(root.get("width")) < 1000
    assert "<b>&" in "".join(root.itertext())


def test_source(made):
    """Places in the user's code can be links; an address that is none, or has no place for the file, is refused."""
    page, _, _ = made(sample_report(SMALL), "--source", "https://example.org/{file}?plain=1#L{line}")
    assert 'href="https://example.org/models.py?plain=1#L41"' in page


@pytest.mark.parametrize("address", ["javascript:alert({file})", "https://example.org/", "file:///{file}",
                                     "//x/{file}"])
def test_source_mistakes(address, tmp_path, capsys):
    """Only an address of the web, with the file in it."""
    path = written(sample_report(SMALL), tmp_path / "r.json")
    assert main(["html", str(path), "-o", str(tmp_path / "p.html"), "--source", address]) == 4
    assert f"--source {address}: expected an address with {{file}} and {{line}} in it" in capsys.readouterr().err
    assert not (tmp_path / "p.html").exists()


def test_mistakes(tmp_path, capsys):
    """What cannot be read or written is one line, and the exit code says which."""
    assert main(["html", str(tmp_path / "none.json")]) == 2
    assert "none.json: no such file" in capsys.readouterr().err
    path = written(sample_report(SMALL), tmp_path / "r.json")
    assert main(["html", str(path), "-o", str(path / "page.html")]) == 4
    assert "page.html: cannot be written: " in capsys.readouterr().err
    assert main(["html", str(path), str(path), "-o", str(tmp_path / "p.html")]) == 2
    assert "are both the whole run; give each shard once" in capsys.readouterr().err


def test_two_shards_and_a_baseline(tmp_path, capsys):
    """Shards make one page; a baseline marks what is new."""
    cells = sample_report(SMALL)["compile_matrix"]["cells"]
    names = [each["id"] for each in cells]
    shards = []
    for index in (1, 2):
        block = report(cells[index - 1 :: 2], shard={"index": index, "of": 2})
        block["compile_matrix"]["matrix"]["cells_planned"] = names
        shards.append(str(written(block, tmp_path / f"{index}.json")))
    before = written(report(cells[:-1]), tmp_path / "before.json")
    page = tmp_path / "p.html"
    assert main(["html", *shards, "--baseline", str(before), "-o", str(page)]) == 0
    text = page.read_text()
    assert text.count("<article") == 12
    assert re.findall(r'class="s fail added" aria-label="([^:]*)', text) == ["moe_lite-aot_eager-dynamic"]
    assert "not in the baseline 1" in text
    assert "Not in the baseline." in text
    capsys.readouterr()
    assert main(["html", shards[0], "-o", str(page)]) == 0
    assert "shard 2 of 2 is missing" in page.read_text()


def test_without_torch(tmp_path):
    """The command works where torch is not installed."""
    path = written(sample_report(SMALL), tmp_path / "r.json")
    code = ("import sys; sys.modules['torch'] = sys.modules['jinja2'] = None\n"
            "from pytest_torchcompile.cli import main\n"
            f"sys.exit(main(['html', {str(path)!r}, '-o', 'p.html', '--svg', 'm.svg']))")
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=tmp_path)
    assert (tmp_path / "p.html").stat().st_size > 50_000
