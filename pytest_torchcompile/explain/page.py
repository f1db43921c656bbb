"""The page of an explanation: one file that loads nothing, with every stage side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from pytest_torchcompile.explain.columns import compile_columns, short_place
from pytest_torchcompile.explain.explanation import Explanation, calls_text, resumed_text
from pytest_torchcompile.explain.guards import Guard, count_kinds
from pytest_torchcompile.page.markup import Html, columns, tag
from pytest_torchcompile.page.shell import shell, themed
from pytest_torchcompile.quantity import count, readable_seconds

if TYPE_CHECKING:
    from pytest_torchcompile.explain.roofline import Roofline

__all__ = ["explanation_page"]

_HINT: Final = "Click a line, a node or a kernel: what belongs to it lights up in every stage. Esc ends it."


def explanation_page(explained: Explanation, roofline: Roofline | None = None) -> str:
    """The whole page; the figure of the roofline is on it where there is one."""
    places = _user_places(explained)
    parts: list[Html] = []
    for compile_id in explained.compile_ids:
        parts.append(_compile_section(explained, compile_id, places))
    return shell(
        f"{explained.name} explained", themed(_file_text("page.css")), Html(_file_text("page.js")),
        tag("header", tag("h1", explained.name), tag("p", _summary(explained)),
            tag("p", explained.settings, class_="quiet"), tag("p", _HINT, id="hint", class_="quiet js", role="status")),
        tag("p", f"The compiled step raised {explained.error}", class_="error") if explained.error else None,
        tag("p", explained.busy, class_="note") if explained.busy else None,
        tag("main", parts, _passes_section(explained), _roofline_section(roofline), _eager_section(explained),
            _lost_section(explained)),
    )  # fmt: skip


def _file_text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _user_places(explained: Explanation) -> list[str]:
    """Every line that a node comes from, by file and line."""
    found = {node.place for stage in explained.stages for node in stage.nodes if node.place}

    def by_line(place: str) -> tuple[str, int]:
        file, _, line = place.rpartition(":")
        return file, int(line)

    return sorted(found, key=by_line)


def _summary(explained: Explanation) -> str:
    graphs = sum(stage.stage == "code" for stage in explained.stages)
    return (f"{count(len(explained.compile_ids), 'frame')}, {count(graphs, 'generated graph')}, "
            f"{calls_text(explained.kernels)}, {count(len(explained.guards), 'guard')}, "
            f"{explained.breaks_text or 'no graph break'}; {readable_seconds(explained.seconds)} with torch "
            f"{explained.torch_version}")


def _compile_section(explained: Explanation, compile_id: str, places: Sequence[str]) -> Html:
    title = f"Compile {compile_id}"
    compiled = explained.compile_of(compile_id)
    if compiled is not None and compiled.function:
        place = short_place(f"{compiled.file}:{compiled.line}")
        title = f"{compiled.function}, {place}{resumed_text(compiled)} (compile {compile_id})"
    return tag("section", tag("h2", title), compile_columns(explained, compile_id, places),
               _guards_section(explained, compile_id), _texts_section(explained, compile_id), class_="compile")


def _guards_section(explained: Explanation, compile_id: str) -> Html | None:
    guards = [guard for guard in explained.guards if guard.compile_id == compile_id]
    if not guards:
        return None
    kinds = ", ".join(f"{number} {kind}" for kind, number in count_kinds(guards).items())
    cost = ""
    for compiled in explained.compiles:
        if compiled.compile_id == compile_id and compiled.guard_microseconds:
            cost = f"; asking them once took {compiled.guard_microseconds} µs"
    symbolic = [guard for guard in guards if guard.why]
    own = [guard for guard in guards if not guard.torchs_own and not guard.why]
    torchs = [guard for guard in guards if guard.torchs_own]
    return tag(
        "details", tag("summary", f"{len(guards)} guards{cost}: what must hold for this code to serve another call"),
        tag("p", kinds, class_="quiet"),
        _guard_table("On sizes", symbolic), _guard_table("On your objects and inputs", own),
        tag("details", tag("summary", f"{len(torchs)} on settings and functions of torch"), _guard_table("", torchs))
        if torchs else None,
    )  # fmt: skip


def _guard_table(title: str, guards: Sequence[Guard]) -> Html | None:
    if not guards:
        return None
    # Several that are alike, of one thing, have one row.
    alike: dict[tuple[str, str, str], list[Guard]] = {}
    for guard in guards:
        alike.setdefault((guard.source, guard.kind, guard.why), []).append(guard)
    rows = []
    for (source, kind, why), found in alike.items():
        texts = [tag("div", tag("code", guard.text)) for guard in found]
        rows.append(tag("tr", tag("td", tag("code", source)), tag("td", kind),
                        tag("td", why or f"broken by {found[0].broken_by}"), tag("td", texts),
                        tag("td", found[0].place, class_="quiet")))
    head = columns("what", "kind", "meaning", "guard", "asked for at")
    return tag("table", tag("caption", title) if title else None, head, tag("tbody", rows), class_="guards")


def _texts_section(explained: Explanation, compile_id: str) -> Iterator[Html]:
    for bytecode in explained.bytecode:
        if bytecode.compile_id == compile_id:
            yield tag("details", tag("summary", f"bytecode of {bytecode.function}, before and after Dynamo"),
                      tag("div", tag("pre", bytecode.before), tag("pre", bytecode.after), class_="pair"))
    for stage in explained.stages:
        if stage.compile_id == compile_id:
            lines = count(len(stage.text.splitlines()), "line")
            yield tag("details", tag("summary", f"{stage.stage} as torch writes it, {lines}"), tag("pre", stage.text))


def _passes_section(explained: Explanation) -> Html | None:
    """Of the toolkit: what each graph pass changed, and the graph behind it."""
    parts = []
    for change in explained.passes:
        parts.append(tag("details", tag("summary", f"{change.stem}: {change.told}"),
                         tag("pre", change.diff or change.after)))
    return tag("section", tag("h2", "What graph passes changed"), parts) if parts else None


def _roofline_section(roofline: Roofline | None) -> Html | None:
    """Where the time of the kernels goes, and how much of it could be won."""
    if roofline is None or not roofline.kernels:
        return None
    note = ("Each point is a kernel, where it was measured. Blue: bound by memory; red: by computing. "
            "A point far below the roof has time to win.")
    return tag("section", tag("h2", "Kernels below the machine's roof"), tag("p", note, class_="note"),
               roofline.figure(), tag("pre", "\n".join(roofline.lines())))


def _eager_section(explained: Explanation) -> Html | None:
    items = []
    for failed in explained.backend_failures:
        items.append(tag("li", "In ", _place_code(failed.file, failed.line), f": {failed.reason}"))
    for found in explained.own_breaks:
        hint = f" Torch's hint, not tried here: {found.hint}" if found.hint else ""
        items.append(tag("li", "Graph break at ", _place_code(found.file, found.line), f": {found.reason}{hint}"))
    for eager in explained.eager_frames:
        items.append(tag("li", "Ran eagerly: ", tag("code", eager.part), " at ", _place_code(eager.file, eager.line),
                         f": {eager.reason}"))
    return tag("section", tag("h2", "What was not compiled"), tag("ul", items)) if items else None


def _place_code(file: str, line: int) -> Html:
    return tag("code", short_place(f"{file}:{line}"))


def _lost_section(explained: Explanation) -> Html | None:
    if not explained.lost:
        return None
    return tag("section", tag("h2", "What could not be read"), tag("ul", [tag("li", text) for text in explained.lost]))
