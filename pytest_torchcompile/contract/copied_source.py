"""Functions and classes as their files have them, each with what it uses of its file; what a script is made of."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["Source", "copied_source"]

_OURS: Final = "pytest_torchcompile"


class Source:
    """Pieces of files, each once, in an order in which Python can run them."""

    def __init__(self) -> None:
        self.imports: dict[str, None] = {}
        self.pieces: dict[tuple[str, str], str] = {}

    def add(self, function: Any) -> str:
        """Add a function or class with what it uses of its file; returns its name there."""
        path = Path(inspect.getsourcefile(inspect.unwrap(function)) or "")
        name: str = inspect.unwrap(function).__qualname__.partition(".")[0]
        text = path.read_text(encoding="utf-8")
        self._add_named(str(path), text, _definitions(ast.parse(text)), name)
        return name

    def add_used(self, function: Any, lines: Iterable[str]) -> None:
        """Add what some lines of a function use of its file, without the function."""
        path = Path(inspect.getsourcefile(inspect.unwrap(function)) or "")
        text = path.read_text(encoding="utf-8")
        defined = _definitions(ast.parse(text))
        for node in ast.walk(ast.parse("\n".join(lines).replace("return ", ""))):
            # Torch is imported in any case.
            if isinstance(node, ast.Name) and node.id not in ("torch", function.__name__):
                self._add_named(str(path), text, defined, node.id)

    def _add_named(self, path: str, text: str, defined: Mapping[str, ast.stmt], name: str) -> None:
        node = defined.get(name)
        if node is None or (path, name) in self.pieces:
            return
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._add_import(node, name)
            return
        # Its place is taken before what it uses, which may use it in turn; it is filled after that.
        self.pieces[path, name] = ""
        for used in _names_in(node):
            if used != name:
                self._add_named(path, text, defined, used)
        del self.pieces[path, name]
        self.pieces[path, name] = _source_of(text, node)

    def _add_import(self, node: ast.Import | ast.ImportFrom, name: str) -> None:
        if isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] == _OURS:
                return
            chosen = next(alias for alias in node.names if name in (alias.asname, alias.name))
            self.imports[ast.unparse(ast.ImportFrom(node.module, [chosen], node.level))] = None
        else:
            chosen = next(alias for alias in node.names if name in (alias.asname, alias.name.partition(".")[0]))
            self.imports[ast.unparse(ast.Import([chosen]))] = None

    def lines(self) -> Iterator[str]:
        """The imports, then everything else."""
        # Annotations may name what is imported for types only.
        yield "from __future__ import annotations"
        yield from sorted({*self.imports, "import functools", "import torch"})
        for piece in self.pieces.values():
            yield f"\n\n{piece}"


def _definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    defined: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                defined[alias.asname or alias.name.partition(".")[0]] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        defined[part.id] = node
    return defined


def _names_in(node: ast.stmt) -> list[str]:
    """The names that a piece uses when it runs: not those in annotations, nor in a decorator of ours."""
    names: dict[str, None] = {}
    waiting: list[ast.AST] = [node]
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, ast.Name):
            names[each.id] = None
        for role, value in ast.iter_fields(each):
            if role in ("annotation", "returns"):
                continue
            if each is node and role == "decorator_list" and isinstance(node, ast.FunctionDef):
                continue
            values = value if isinstance(value, list) else [value]
            waiting += [part for part in values if isinstance(part, ast.AST)]
    return list(names)


def _source_of(text: str, node: ast.stmt) -> str:
    """As written, without decorators of a function: those of a test are ours."""
    lines = text.splitlines()
    first = node.lineno
    if isinstance(node, ast.ClassDef) and node.decorator_list:
        first = node.decorator_list[0].lineno
    return "\n".join(lines[first - 1:node.end_lineno])


def copied_source(function: Any) -> str:
    """A function or class as a script has it, with its imports."""
    source = Source()
    source.add(function)
    return "\n".join(source.lines())
