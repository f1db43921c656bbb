"""A graph break out of the text that torch records for it.

Format: ``InstructionTranslatorBase.log_graph_break`` (torch/_dynamo/symbolic_convert.py) and
``format_graph_break_message`` (torch/_dynamo/exc.py), torch 2.8 to 2.15; ids and links since 2.9.
"""

from __future__ import annotations

import re
from typing import Final

from pytest_torchcompile.instruments.records import GraphBreak
from pytest_torchcompile.instruments.sites import is_torch, owner, readable

__all__ = ["disabled_function", "headline", "parse", "same_place"]

_AT: Final = re.compile(r"Graph break in user code at (.+?):(\d+)$", re.M)
_LINK: Final = re.compile(r"https?://\S+/(gb\d{4,})\S*")
_FRAME: Final = re.compile(r'^  File "(.+?)", line (\d+), in (.+)$', re.M)
_PREFIXES: Final = re.compile(
    r"^(Graph Break Reason: |Encountered graph break when attempting to trace [^\n]*\n+"
    r"|Failed to handle graph break gracefully[^\n]*\n+)+"
)
_WHOLE: Final = re.compile(r"[Ss]kipping the (func|frame)|skip tracing the frame")
_DISABLED: Final = re.compile(r"Skip \w+ing function `<(?:bound method|function) (.+?)(?: of <| at 0x)")


def _body(text: str) -> str:
    body = text.partition("Graph Break Reason: ")[2] or text
    return _PREFIXES.sub("", body.partition("\nUser code traceback")[0]).strip()


def headline(body: str) -> str:
    """First line of a break's message that says something."""
    return next((line.strip() for line in body.splitlines() if line.strip()), "")


def _after(body: str, word: str) -> str:
    """What stands after ``word:`` on its lines, joined; only of the first message in the body."""
    found, inside = [], False
    for line in body.splitlines():
        label = re.match(r"\s+(Explanation|Hint|Developer debug context): ?(.*)$", line)
        if label:
            inside = label[1] == word
            line = label[2]
        elif not line.strip():
            inside = False
        if inside:
            found.append(line.strip())
        if line.startswith("***"):
            break
    return " ".join(found)


def _user_frame(text: str) -> tuple[str, int, str]:
    """Innermost frame of the user's stack that is not torch's own; torch's innermost where all are."""
    stack = text.partition("User code traceback:")[2].partition("Traceback (most recent call last)")[0]
    frames = [(m[1], int(m[2]), m[3]) for m in _FRAME.finditer(stack)]
    ours = [f for f in frames if not is_torch(f[0])]
    return (ours or frames or [("", 0, "")])[-1]


def parse(text: str, *, root: str | None = None, during: str = "", compile_id: str = "") -> GraphBreak:
    """Read one ``dynamo_graph_break_reason`` record. Parts that torch left out are empty, never an error."""
    body = _body(text)
    file, line, function = _user_frame(text)
    if not file and (at := _AT.search(text)):
        file, line = at[1], int(at[2])
    link = _LINK.search(body)
    return GraphBreak(
        reason=headline(body),
        gb_id=link[1] if link else "",
        file=file,
        line=line,
        hint=_after(body, "Hint"),
        owner=owner(file, root),
        function=readable(function)[0],
        whole_frame=bool(_WHOLE.search(text.partition("\nUser code traceback")[0])),
        explanation=_after(body, "Explanation"),
        link=link[0] if link else "",
        during=during,
        compile_id=compile_id,
    )


def same_place(found: GraphBreak) -> tuple[str, int, str]:
    """Breaks with the same key are one: torch records a place again for each caller, retry and recompile."""
    return (found.file, found.line, found.gb_id or found.reason)


def disabled_function(found: GraphBreak) -> str:
    """Name of the function that ``torch.compiler.disable`` keeps out of the graph, or an empty text."""
    match = _DISABLED.search(found.explanation)
    return readable(match[1])[0] if match else ""
