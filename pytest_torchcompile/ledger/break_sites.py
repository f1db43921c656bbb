"""Whose code is it, and where did a graph end? User names and lines for frames, from plain names and paths.

And a graph break out of the text that torch records for it. Format: ``InstructionTranslatorBase.log_graph_break``
(torch/_dynamo/symbolic_convert.py) and ``format_graph_break_message`` (torch/_dynamo/exc.py), torch 2.8 to 2.15; ids
and links since 2.9.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from pytest_torchcompile.ledger.records import GraphBreak

__all__ = [
    "BACKEND_FAILED", "CodeName", "Frame", "TracedCode", "code_owner", "disabled_function", "headlines", "is_limit",
    "is_torch", "parse_break", "raising_line", "read_code_name",
]

_RESUME: Final = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)$")
"""Dynamo's name for the rest of a function after a graph break (resume_execution.py, torch 2.8 to 2.15)."""
_TORCH: Final = re.compile(
    r"/(site|dist)-packages/(torch|functorch|torchgen|triton)/"
    # A build from source is not below site-packages. These folders are torch's alone; torch/ may be a user's.
    r"|/torch/(_dynamo|_inductor|_functorch|_higher_order_ops|_refs|fx|nn/modules)/"
)
_LIBRARIES: Final = tuple(
    {os.path.normpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")}
)

_HOME: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ROOMS: Final = ("ledger", "gauges", "state", "oracle", "layer", "run", "ranks", "explain")
"""Our rooms whose code calls models and watches them. A frame of theirs was once told as the caller of a break."""
_OURS: Final = tuple(os.path.join(_HOME, room) + os.sep for room in _ROOMS)


class CodeName(NamedTuple):
    """The name of a code object, taken apart."""

    function: str
    """As its author knows it."""
    resumed_at: int
    """For a resume function the line of the graph break; else 0."""


def read_code_name(name: str) -> CodeName:
    """Take the name of a code object apart.

    >>> read_code_name("torch_dynamo_resume_in_forward_at_17")
    CodeName(function='forward', resumed_at=17)
    >>> read_code_name("test_x.<locals>.Net.forward").function
    'Net.forward'
    """
    short = name.rsplit("<locals>.", 1)[-1]
    match = _RESUME.search(short)
    return CodeName(match[1], int(match[2])) if match else CodeName(short, 0)


def _is_installed(path: str) -> bool:
    folders = path.replace("\\", "/").split("/")
    return "site-packages" in folders or "dist-packages" in folders


def is_torch(path: str) -> bool:
    """Whether a file belongs to torch itself (or to the compilers that it ships)."""
    return bool(_TORCH.search(path.replace("\\", "/")))


def code_owner(path: str, root: str | None = None) -> str:
    """``mine``, ``third_party``, ``python``, ``torch`` or ``ours``. ``root``: the project's (default: the current).

    ``python`` is the standard library: nobody's to change. ``ours`` are the frames of this package that call models and
    watch them: never the user's, wherever it is installed. A file that is none of these is ``mine`` too, also
    outside the root: test files live in temporary folders, and source given as ``<string>`` has no folder.
    """
    if is_torch(path):
        return "torch"
    full = os.path.normpath(path)
    # Before the installed packages: ours is one of them.
    if full.startswith(_OURS):
        return "ours"
    if _is_installed(full):
        return "third_party"
    base = os.path.normpath(root or os.getcwd()) + os.sep
    # A project may lie inside of an environment's folder, and an environment inside of the project, as conda makes it.
    # The former is the user's; of the latter the library folder is Python's.
    if full.startswith(base) and base.startswith(_LIBRARIES):
        return "mine"
    if full.startswith(_LIBRARIES) or path.startswith("<frozen "):
        return "python"
    return "mine"


_GRAPH_CODE: Final = "<eval_with_key>"
"""How the file of a graph's generated code begins (torch/fx/graph_module.py, torch 2.8 to 2.15)."""
_RESULT: Final = re.compile(r"\s*(\w+)\b[^=]*=")
"""``view_3`` of the line ``view_3 = torch.ops.aten.view.default(...)``: the name of the graph's node."""
_FRAME: Final = re.compile(r'^  File "(.+?)", line (\d+), in .+\n(.*)$', re.M)


def raising_line(error: BaseException | None, root: Path | None = None) -> tuple[str, int, str] | None:
    """File, line and source of the user's code whose operator raised in a graph; None where no graph tells.

    The traceback of a graph that ran has generated code alone. The graph's nodes know the user's stack
    (``meta["stack_trace"]``, torch 2.8 to 2.15). Files below ``root`` are named from there, as in the ledger.
    """
    project = str(root) if root else None
    innermost = None
    for graph, name in _graph_frames(error):
        for file, line, source in _FRAME.findall(_node_stack(graph, name)):
            if code_owner(file, project) in ("mine", "third_party"):
                innermost = file, int(line), source.strip()
    if innermost is None:
        return None
    file, number, source = innermost
    return file.removeprefix(f"{root or Path.cwd()}{os.sep}"), number, source


def _node_stack(graph: Any, name: str) -> str:
    """The user's stack that a graph's node was traced from; empty where none was noted."""
    for node in graph.graph.nodes:
        if node.name == name:
            return node.meta.get("stack_trace") or ""
    return ""


def _graph_frames(error: BaseException | None) -> Iterator[tuple[Any, str]]:
    """Graph modules that were running, the outermost first, each with the name of the node that raised."""
    if error is None:
        return
    trace = error.__traceback__
    while trace is not None:
        code, graph = trace.tb_frame.f_code, trace.tb_frame.f_locals.get("self")
        if code.co_filename.startswith(_GRAPH_CODE) and hasattr(graph, "graph"):
            # torch.fx puts the generated source into linecache, or there would be no line to read.
            match = _RESULT.match(linecache.getline(code.co_filename, trace.tb_lineno))
            if match:
                yield graph, match[1]
        trace = trace.tb_next


# --------------------------------------------------------------------------------------------------------- graph breaks
class Frame(NamedTuple):
    """One frame of a recorded stack."""

    file: str
    line: int
    function: str


_NO_FRAME: Final = Frame("", 0, "")


@dataclass(frozen=True)
class TracedCode:
    """What Dynamo was tracing when a graph broke. Empty where no attempt is known."""

    file: str = ""
    name: str = ""
    """Of the frame's own code, which may be a wrapper of torch's around the user's function."""
    first_line: int = 0
    last_line: int = 1 << 30
    """They tell the code from another of the same name, such as the forward of a base class."""
    function: Frame = _NO_FRAME
    """The user's function that is traced, for a break in torch's own code around it."""

    def holds(self, frame: Frame) -> bool:
        """Whether a frame of a stack runs this very code."""
        name = read_code_name(frame.function).function
        return (frame.file, name) == (self.file, self.name) and self.first_line <= frame.line <= self.last_line


_NOTHING: Final = TracedCode()
_LINK: Final = re.compile(r"https?://\S+/(gb\d{4,})\S*")
_TRACED_FRAME: Final = re.compile(r'^  File "(.+?)", line (\d+), in (.+)$', re.M)
_PREFIXES: Final = re.compile(
    r"^(Graph Break Reason: |Encountered graph break when attempting to trace [^\n]*\n+"
    r"|Failed to handle graph break gracefully[^\n]*\n+)+"
)
_SKIPPED: Final = re.compile(r"[Ss]kipping the (func|frame)|skip tracing the frame")
_DISABLED: Final = re.compile(r"Skip \w+ing function `?<(?:bound method|function) (.+?)(?: of <| at 0x)")
_OF_BACKEND: Final = "Backend compiler `"
"""How torch explains that it ran a graph eagerly because the backend raised
(``OutputGraph.call_user_compiler`` in torch/_dynamo/output_graph.py, torch 2.8 to 2.13)."""
BACKEND_FAILED: Final = "the backend failed, and torch ran what it was given eagerly: "
"""How the reason of such a break begins: no line of the model is to blame."""
_ANOTHER: Final = "*** While handling this graph break, another graph break occurred: ***"
_LIMIT: Final = re.compile(r"\b(recompile|cache)[ _](size[ _])?limit\b", re.I)
_LABEL: Final = re.compile(r"\s+(Explanation|Hint|Developer debug context): ?(.*)$")


def is_limit(text: str) -> bool:
    """Whether torch speaks of the recompile limit, which it reports as if it were a break."""
    return any(_LIMIT.search(line) for line in headlines(text)[:1])


def headlines(body: str) -> list[str]:
    """First line of each message in a text: what broke, then what kept torch from resuming after it."""
    lines = []
    for message in body.split(_ANOTHER):
        if message.strip():
            lines.append(" ".join(message.strip().splitlines()[0].split()))
    return lines


def parse_break(
    text: str, *, root: str | None = None, during: str = "", compile_id: str = "", traced: TracedCode = _NOTHING
) -> GraphBreak:
    """Read one ``dynamo_graph_break_reason`` record. Parts that torch left out are empty, never an error.

    The place is the innermost frame that somebody can change: not torch's, not Python's own library.
    """
    body = _message_of(text)
    stack = _traced_stack(text, traced)
    changeable = [frame for frame in stack if code_owner(frame.file, root) in ("mine", "third_party")]
    place = _place_of(changeable, stack, traced)
    reason, explanation = next(iter(headlines(body)), "unknown"), _labelled_text(body, "Explanation")
    if explanation.startswith(_OF_BACKEND):
        # The graph was complete, so that the stack is that of the caller.
        reason = BACKEND_FAILED + explanation.removesuffix(" Adding a graph break.")
        if traced.function.file:
            place = traced.function
    gb_id = link = ""
    if match := _LINK.search(body):
        link, gb_id = match[0], match[1]
    return GraphBreak(
        reason=reason,
        gb_id=gb_id,
        file=place.file,
        line=place.line,
        hint=_labelled_text(body, "Hint"),
        owner=code_owner(place.file, root),
        function=read_code_name(place.function).function,
        # Not in the user's own lines of the stack, which may hold such words too.
        whole_frame=bool(_SKIPPED.search(text.partition("\nUser code traceback")[0])),
        explanation=explanation,
        link=link,
        during=during,
        compile_id=compile_id,
        stack=tuple(_short_frame(frame, root) for frame in reversed(changeable)),
    )


def _place_of(changeable: list[Frame], stack: list[Frame], traced: TracedCode) -> Frame:
    """The frame that a break is told to be in."""
    if changeable:
        place = changeable[-1]
    # The stack is torch's or Python's alone: the user's function around it is what somebody can change.
    elif traced.function.file or not stack:
        place = traced.function
    else:
        place = stack[-1]
    # Torch writes bare names. Of the traced function itself the full one is known, Net.forward.
    in_traced_code = (place.file, read_code_name(place.function).function) == (traced.file, traced.name)
    if stack[:1] == [place] and in_traced_code and traced.function.function:
        return place._replace(function=traced.function.function)
    return place


def _short_frame(frame: Frame, root: str | None) -> str:
    """A frame as one reads it: the project's files are named from its root, so that two of one name are told apart."""
    base = os.path.normpath(root or os.getcwd()) + os.sep
    shown = os.path.basename(frame.file)
    if frame.file.startswith(base) and code_owner(frame.file, root) == "mine":
        shown = frame.file.removeprefix(base)
    return f"{shown}:{frame.line} in {read_code_name(frame.function).function}"


def disabled_function(found: GraphBreak) -> str:
    """Name of the function that ``torch.compiler.disable`` keeps out of the graph, or an empty text."""
    match = _DISABLED.search(found.explanation)
    return read_code_name(match[1]).function if match else ""


def _message_of(text: str) -> str:
    """The message alone. Other formats: ``ConvertFrame.__call__`` and ``unimplemented_with_warning``."""
    if "Graph Break Reason: " in text:
        body = text.partition("Graph Break Reason: ")[2].partition("\nUser code traceback")[0]
        return _PREFIXES.sub("", body.partition("\nStack variable source attribution")[0]).strip()
    return text.rpartition("torch._dynamo.exc.Unsupported: ")[2].partition("\nfrom user code")[0].strip()


def _labelled_text(body: str, label: str) -> str:
    """What stands after ``label:`` in the first message of a body, on one line."""
    lines: list[str] = []
    inside = False
    for line in body.partition(_ANOTHER)[0].splitlines():
        content = line
        if match := _LABEL.match(line):
            inside, content = match[1] == label, match[2]
        # An empty line ends what a label speaks of.
        inside = inside and bool(content.strip())
        if inside:
            lines.append(content.strip())
    return " ".join(lines)


def _traced_stack(text: str, traced: TracedCode) -> list[Frame]:
    """The traced part of the user's stack, innermost last; all of it where the traced code is not in it.

    Frames further out are callers of the traced code: the break is not theirs.
    """
    stack = re.split(r"User code traceback:|occurred in the following user code:", text)[-1]
    stack = stack.partition("\nTraceback (most recent call last)")[0]
    frames = [Frame(file, int(line), function) for file, line, function in _TRACED_FRAME.findall(stack)]
    # From the inside: a recursive function is in the stack several times.
    for index in range(len(frames) - 1, -1, -1):
        if traced.holds(frames[index]):
            return frames[index:]
    return frames
