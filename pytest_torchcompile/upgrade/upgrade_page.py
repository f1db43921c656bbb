"""The page of an upgrade: an outline as one HTML file that loads nothing, as Markdown, and as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pytest_torchcompile.page.markup import Html, columns, hint, tag
from pytest_torchcompile.page.shell import shell, themed
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.safe_output import harmless_text
from pytest_torchcompile.upgrade.outline import SECTIONS, Outline, OutlineLine

__all__ = ["markdown", "terminal_lines", "upgrade_page"]

_CELLS: Final = 40
"""Cells of a line that the page names."""
_STYLE: Final = """
body{max-width:64rem;margin:2rem auto;padding:0 1rem;background:var(--ground);color:var(--text);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.6rem}h2{font-size:1.15rem;margin:2rem 0 .3rem;border-bottom:1px solid var(--line)}
.quiet{color:var(--quiet)}.worse{color:var(--bad)}.good{color:var(--good)}code,pre{background:var(--code)}
pre{padding:.6rem;overflow-x:auto}table{border-collapse:collapse}td,th{text-align:left;padding:.2rem .8rem .2rem 0}
li{margin:.5rem 0}summary{cursor:pointer}.cells{overflow-wrap:anywhere}
"""


# ----------------------------------------------------------------------------------------------------------------- HTML
def upgrade_page(outline: Outline) -> str:
    """The whole page."""
    parts: list[Html | None] = []
    for name in SECTIONS:
        parts.append(_section(outline, name))
    return shell(
        outline.title, themed(_STYLE), Html(""),
        tag("header", tag("h1", outline.title), tag("p", outline.sentence, class_="worse" if outline.code else "good"),
            tag("p", _about(outline), class_="quiet")),
        tag("main", parts, _differences(outline)),
    )  # fmt: skip


def _section(outline: Outline, name: str) -> Html:
    lines = outline.lines_of(name)
    heading = tag("h2", SECTIONS[name].title, " ", tag("span", len(lines) or "", class_="quiet"))
    note = tag("p", note_of(outline, name), class_="quiet") if note_of(outline, name) else None
    if not lines:
        return tag("section", heading, note or tag("p", SECTIONS[name].nothing, class_="quiet"), id=name)
    edit = None
    if name == "better" and outline.edit:
        edit = tag("p", "As an edit of the matrix: ", tag("code", outline.edit))
    return tag("section", heading, note, tag("ul", [_item(line) for line in lines]), edit, id=name)


def _item(line: OutlineLine) -> Html:
    place = tag("p", tag("code", line.place)) if line.place else None
    bad = tag("p", line.first_bad) if line.first_bad else None
    return tag("li", tag("p", line.text, class_="worse" if line.fails else None), place, hint(line.remedy), bad,
               _cells(line))


def _cells(line: OutlineLine) -> Html | None:
    if not line.cells:
        return None
    more = f" and {len(line.cells) - _CELLS} more" if len(line.cells) > _CELLS else ""
    return tag("details", tag("summary", count(len(line.cells), "cell")),
               tag("p", ", ".join(line.cells[:_CELLS]), more, class_="cells"))


def _differences(outline: Outline) -> Html:
    rows = []
    for name, old, new in outline.differences:
        rows.append(tag("tr", tag("th", name, scope="row"), tag("td", old or "–"), tag("td", new or "–")))
    head = columns("package", outline.old, outline.new)
    return tag("details", tag("summary", f"{count(len(rows), 'package differs', 'packages differ')}"),
               tag("table", head, tag("tbody", rows)), id="environments")


# ------------------------------------------------------------------------------------------------ Markdown and terminal
def note_of(outline: Outline, name: str) -> str:
    """What is said of a section as a whole."""
    if name == "code":
        return outline.code_summary
    return outline.notes.get(name, "")


def _about(outline: Outline) -> str:
    old, new = outline.runs
    return (f"{count(outline.cells, 'cell')} of {outline.matrix}, run {count(old, 'time')} with {outline.package} "
            f"{outline.old} and {count(new, 'time')} with {outline.new}, in turn; {outline.machine}")


def markdown(outline: Outline) -> str:
    """The page as Markdown, for an issue or a pull request."""
    parts = [f"# {outline.title}", f"**{_plain(outline.sentence)}**", _plain(_about(outline))]
    for name, section in SECTIONS.items():
        lines = outline.lines_of(name)
        parts.append(f"## {section.title}")
        note = note_of(outline, name)
        if note:
            parts.append(_plain(note))
        if lines:
            parts.append("\n".join(f"- {_in_markdown(line)}" for line in lines))
        elif not note:
            parts.append(section.nothing)
        if name == "better" and lines and outline.edit:
            parts.append(f"As an edit of the matrix: `{outline.edit}`")
    if outline.differences:
        rows = [f"| {name} | {old or '–'} | {new or '–'} |" for name, old, new in outline.differences]
        parts += ["## What differs between the environments",
                  "\n".join([f"| package | {outline.old} | {outline.new} |", "|---|---|---|", *rows])]
    return "\n\n".join([*parts, ""])


def _in_markdown(line: OutlineLine) -> str:
    words = [_plain(line.text)]
    if line.place:
        words.append(f"at `{line.place}`")
    if line.cells:
        words.append(f"({count(len(line.cells), 'cell')}: {_plain(first_names(line.cells))})")
    text = " ".join(words)
    if line.remedy:
        text += f"  \n  Try: {_plain(line.remedy)}"
    if line.first_bad:
        text += f"  \n  {_plain(line.first_bad)}"
    return text


def _plain(text: str) -> str:
    """Text that Markdown takes for nothing else: no tags, no tables, no emphasis by underscores."""
    text = harmless_text(text).replace("\\", "\\\\")
    for letter in "<>|*_[]":
        text = text.replace(letter, f"\\{letter}")
    return text


def terminal_lines(outline: Outline) -> Iterator[str]:
    """What the command prints: the answer, and each line that says something."""
    yield harmless_text(outline.sentence)
    for name, section in SECTIONS.items():
        lines = outline.lines_of(name)
        if not lines:
            continue
        yield ""
        yield f"{section.title}:"
        for line in lines:
            where = f" at {line.place}" if line.place else ""
            yield harmless_text(f"  {line.text}{where} ({first_names(line.cells)})")
            if line.remedy:
                yield harmless_text(f"    try {line.remedy}")
            if line.first_bad:
                yield harmless_text(f"    {line.first_bad}")
    for name, note in outline.notes.items():
        yield harmless_text(f"{SECTIONS[name].title}: {note}")
