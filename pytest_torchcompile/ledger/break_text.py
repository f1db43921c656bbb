"""A graph break out of the text that torch records for it.

Format: ``InstructionTranslatorBase.log_graph_break`` (torch/_dynamo/symbolic_convert.py) and
``format_graph_break_message`` (torch/_dynamo/exc.py), torch 2.8 to 2.15; ids and links since 2.9.
"""

from __future__ import annotations

import os
import re
from typing import Final

from pytest_torchcompile.ledger.records import GraphBreak
from pytest_torchcompile.ledger.sites import code_owner, read_code_name

__all__ = ["disabled_function", "headlines", "is_limit", "parse_break", "same_place"]

Frame = tuple[str, int, str]
"""File, line, function."""

_ANY: Final = (0, 1 << 30)
"""Lines of code that nothing is known of."""
_LINK: Final = re.compile(r"https?://\S+/(gb\d{4,})\S*")
_FRAME: Final = re.compile(r'^  File "(.+?)", line (\d+), in (.+)$', re.M)
_PREFIXES: Final = re.compile(
    r"^(Graph Break Reason: |Encountered graph break when attempting to trace [^\n]*\n+"
    r"|Failed to handle graph break gracefully[^\n]*\n+)+"
)
_SKIPPED: Final = re.compile(r"[Ss]kipping the (func|frame)|skip tracing the frame")
_DISABLED: Final = re.compile(r"Skip \w+ing function `?<(?:bound method|function) (.+?)(?: of <| at 0x)")
_ANOTHER: Final = "*** While handling this graph break, another graph break occurred: ***"
_LIMIT: Final = re.compile(r"\b(recompile|cache)[ _](size[ _])?limit\b", re.I)


def is_limit(text: str) -> bool:
    """Whether torch speaks of the recompile limit, which it reports as if it were a break."""
    return any(_LIMIT.search(line) for line in headlines(text)[:1])


def headlines(body: str) -> list[str]:
    """First line of each message in a text: what broke, then what kept torch from resuming after it."""
    parts = (part.strip() for part in body.split(_ANOTHER))
    return [" ".join(part.splitlines()[0].split()) for part in parts if part]


def parse_break(
    text: str, *, root: str | None = None, during: str = "", compile_id: str = "",
    traced: tuple[str, str] = ("", ""), lines: tuple[int, int] = _ANY, outermost: Frame = ("", 0, ""),
) -> GraphBreak:
    """Read one ``dynamo_graph_break_reason`` record. Parts that torch left out are empty, never an error.

    The place is the innermost frame that somebody can change: not torch's, not Python's own library.

    :param traced: file and name of the code that is traced; frames further out are its callers.
    :param lines: first and last line of that code, which tell it from another of the same name.
    :param outermost: the user's function that is traced, for a break in torch's own code around it.
    """  # fmt: skip
    body = _body(text)
    frames = _frames(text, traced, lines)
    ours = [frame for frame in frames if code_owner(frame[0], root) in ("mine", "third_party")]
    file, line, function = (ours or [outermost] if outermost[0] else ours or frames or [outermost])[-1]
    if frames[:1] == [(file, line, function)] and (file, read_code_name(function)[0]) == traced:
        function = outermost[2] or function
    link = _LINK.search(body)
    return GraphBreak(
        reason=next(iter(headlines(body)), "unknown"),
        gb_id=link[1] if link else "",
        file=file,
        line=line,
        hint=_labelled(body, "Hint"),
        owner=code_owner(file, root),
        function=read_code_name(function)[0],
        whole_frame=bool(_SKIPPED.search(text.partition("\nUser code traceback")[0])),
        explanation=_labelled(body, "Explanation"),
        link=link[0] if link else "",
        during=during,
        compile_id=compile_id,
        stack=tuple(f"{os.path.basename(f)}:{n} in {read_code_name(name)[0]}" for f, n, name in reversed(ours)),
    )


def same_place(found: GraphBreak) -> tuple[str, int, str]:
    """Breaks with the same key are one: torch records a place again for each caller, retry and recompile."""
    return (found.file, found.line, found.gb_id or found.reason)


def disabled_function(found: GraphBreak) -> str:
    """Name of the function that ``torch.compiler.disable`` keeps out of the graph, or an empty text."""
    match = _DISABLED.search(found.explanation)
    return read_code_name(match[1])[0] if match else ""


def _body(text: str) -> str:
    """The message alone. Other formats: ``ConvertFrame.__call__`` and ``unimplemented_with_warning``."""
    if "Graph Break Reason: " in text:
        body = text.partition("Graph Break Reason: ")[2].partition("\nUser code traceback")[0]
        return _PREFIXES.sub("", body.partition("\nStack variable source attribution")[0]).strip()
    return text.rpartition("torch._dynamo.exc.Unsupported: ")[2].partition("\nfrom user code")[0].strip()


def _labelled(body: str, label: str) -> str:
    """What stands after ``label:`` in the first message of a body, on one line."""
    found, inside = [], False
    for line in body.partition(_ANOTHER)[0].splitlines():
        if match := re.match(r"\s+(Explanation|Hint|Developer debug context): ?(.*)$", line):
            inside, line = match[1] == label, match[2]
        inside = inside and bool(line.strip())
        if inside:
            found.append(line.strip())
    return " ".join(found)


def _frames(text: str, traced: tuple[str, str], lines: tuple[int, int]) -> list[Frame]:
    """The traced part of the user's stack, innermost last; all of it where the traced code is not in it."""
    stack = re.split(r"User code traceback:|occurred in the following user code:", text)[-1]
    stack = stack.partition("\nTraceback (most recent call last)")[0]
    frames = [(m[1], int(m[2]), m[3]) for m in _FRAME.finditer(stack)]
    roots = [i for i, (file, line, name) in enumerate(frames)
             if (file, read_code_name(name)[0]) == traced and lines[0] <= line <= lines[1]]  # fmt: skip
    return frames[roots[-1] :] if roots else frames
