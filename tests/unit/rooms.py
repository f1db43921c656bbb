"""The rooms of the package and who imports whom, read from the syntax trees. As a script it draws docs/rooms.svg.

``python tests/unit/rooms.py`` after a room has begun, or ceased, to import another one; a test tells when.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest_torchcompile

__all__ = ["MODULES", "PACKAGE", "PICTURE", "ROOMS", "edges", "imports", "picture", "room_of"]

PACKAGE = Path(pytest_torchcompile.__file__).parent
MODULES = {p.relative_to(PACKAGE).with_suffix("").as_posix().replace("/__init__", ""): p
           for p in sorted(PACKAGE.rglob("*.py"))}
ROOMS = (
    "ground", "ledger", "gauges", "lowering", "state", "backends", "zoo", "oracle", "layer", "wrappers", "fuzz",
    "culprit", "contract", "artifacts", "checks", "plan", "run", "reuse", "ranks", "gates", "faults", "report", "gate",
    "page", "playbook", "adoption", "explain", "upgrade", "plugin", "cli",
)
"""From the bottom to the top: a room imports from those before it, and from itself."""
PICTURE = Path(__file__).parents[2] / "docs" / "rooms.svg"


@functools.cache
def imports(path: Path, whole: bool) -> tuple[str, ...]:
    """Names of imported modules: of the whole file, or only those that importing it runs."""
    return tuple(_imports(path, whole))


def _imports(path: Path, whole: bool) -> Iterator[str]:
    nodes = ast.walk(ast.parse(path.read_text())) if whole else _at_the_top(ast.parse(path.read_text()).body)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name} imports relatively: write the module's full name"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _at_the_top(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        for inner in ("body", "orelse", "handlers", "finalbody"):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield from _at_the_top(getattr(node, inner, []))


def room_of(module: str) -> str:
    """The room of a module; what lies in the package's own folder is the ground, but for the command line on top."""
    if module in {"cli", "__main__"}:
        return "cli"
    folder = module.partition("/")[0]
    return folder if folder in ROOMS else "ground"


def edges(modules: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """Each import of one of our modules by another, also inside of functions and for types."""
    for module, path in modules.items():
        for name in imports(path, whole=True):
            target = name.removeprefix("pytest_torchcompile").removeprefix(".").replace(".", "/")
            if name.startswith("pytest_torchcompile.") and target in modules and target != module:
                yield module, target


# ------------------------------------------------------------------------------------------------ the picture
SQUARE, LEFT, TOP = 22, 92, 96
"""Pixels: the side of a square, and the room that names take to the left and above."""
STYLE = """
  text { font: 13px sans-serif; fill: #24292f }
  .own { fill: #8c959f } .import { fill: #0969da } .none { fill: #eaeef2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #d1d7e0 } .own { fill: #656c76 } .import { fill: #4493f8 } .none { fill: #21262d }
  }
"""


def picture() -> str:
    """The SVG: a row for each room, from the top to the bottom, with a square for each room that it imports.

    As rooms import only those below them, nothing is left of the diagonal.
    """
    pairs = {(room_of(module), room_of(target)) for module, target in edges(MODULES) if module != "__init__"}
    rooms = ROOMS[::-1]
    width, height = LEFT + SQUARE * len(rooms) + 70, TOP + SQUARE * len(rooms) + 10
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
             'aria-label="Which room imports which">', f"<style>{STYLE}</style>"]
    for row, room in enumerate(rooms):
        y = TOP + row * SQUARE
        parts.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{room}</text>')
        x = LEFT + row * SQUARE
        parts.append(f'<text transform="translate({x + 15} {TOP - 8}) rotate(-50)">{room}</text>')
        for column, other in enumerate(rooms):
            kind = "none"
            if room == other:
                kind = "own"
            elif (room, other) in pairs:
                kind = "import"
            if kind != "none" or column > row:
                parts.append(f'<rect class="{kind}" x="{LEFT + column * SQUARE + 1}" y="{y + 1}" width="{SQUARE - 2}" '
                             f'height="{SQUARE - 2}" rx="3"/>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture())
