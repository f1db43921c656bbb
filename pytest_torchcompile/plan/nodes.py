"""A YAML text as a tree of nodes that know their line, bounded in size; no object is ever built from it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from pytest_torchcompile.errors import MatrixError, nearest

__all__ = ["compose", "describe_node", "offsets_of_entry", "read_bytes", "scalar_text"]

# A matrix is read before anything is trusted, also one of a pull request: these bound time and memory.
MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 32
MAX_NODES: Final = 50_000
"""After aliases are expanded: nine lines of YAML can otherwise stand for 10**9 nodes."""

# libyaml where PyYAML was built with it.
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG: Final = "tag:yaml.org,2002:"
_PLAIN: Final = frozenset(
    f"{_TAG}{name}"
    for name in ("str", "int", "float", "bool", "null", "timestamp", "seq", "map", "merge", "value")
)
_NEEDS_NO_QUOTES: Final = re.compile(r"[A-Za-z_][\w.+/-]*")
_WORDS: Final = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf"})
"""What YAML 1.1 takes for something else than text, or somebody might."""


def read_bytes(path: Path, shown: str, what: str = "matrix") -> bytes:
    """Return the bytes of a file, which is to be a ``what``.

    Raises :class:`MatrixError` for what is no readable file of at most 1 MiB.
    """
    try:
        if path.is_dir():
            raise MatrixError(shown, 1, 1, f"is a folder; expected a {what} file{_files_inside(path)}")
        if not path.exists():
            raise MatrixError(shown, 1, 1, f"no such file{_files_beside(path, shown)}")
        # A pipe or a device would be waited for without an end.
        if not path.is_file():
            raise MatrixError(shown, 1, 1, f"is no regular file; expected a {what} file")
        with path.open("rb") as file:
            # One byte more than allowed is enough to know that it is too long.
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise MatrixError(shown, 1, 1, f"cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise MatrixError(shown, 1, 1, f"is longer than {MAX_BYTES:,} bytes, too long for a {what}")
    return data


def _files_inside(folder: Path) -> str:
    names = sorted(child.name for child in folder.iterdir() if child.suffix in (".yaml", ".yml"))
    if not names:
        return ""
    # Enough to find a misspelt name in, and short enough for one line of a terminal or two.
    return f"; it holds {', '.join(names[:20])}"


def _files_beside(path: Path, shown: str) -> str:
    paths = [str(Path(shown).parent / child.name) for child in path.parent.glob("*.y*ml")]
    if not paths:
        return ""
    return f"; {nearest(shown, paths)}"


def compose(data: bytes, shown: str, required: str = "the keys version and models") -> yaml.Node:
    """Return the root node of the only document. ``required``: what an empty file lacks.

    Raises :class:`MatrixError` for bytes that are no UTF-8, for malformed YAML, an empty file, more than one
    document, deep nesting, aliases that expand beyond bounds or contain themselves, and tags that would build
    objects.
    """
    text = _decode_text(data, shown)
    try:
        _check_depth(text, shown, _LOADER)
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        problem = str(error.problem)
        if "nesting depth" in problem:
            # The library of PyYAML 6.0.4 gives up by itself at 1,000 levels, before it tells of the first one.
            _check_depth(text, shown, yaml.SafeLoader)
        if error.context:
            problem = f"{problem} ({error.context})"
        raise _error_at(error.problem_mark or error.context_mark, shown, f"malformed YAML: {problem}") from None
    # This error of PyYAML names no line, so the place is looked up anew.
    except yaml.reader.ReaderError as error:
        unprintable = re.search(yaml.reader.Reader.NON_PRINTABLE, text)
        line, column = _line_and_column(text, unprintable.start() if unprintable else 0)
        raise MatrixError(shown, line, column, f"malformed YAML: {error.reason}") from None
    if node is None:
        raise MatrixError(shown, 1, 1, f"the file is empty; expected at least {required}")
    _check_nodes(node, shown)
    return node


def describe_node(node: yaml.Node) -> str:
    """What the node is, for error texts: ``a mapping``, ``a list``, ``'abc'``, ``nothing``."""
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    # A key with nothing behind it; a quoted empty text is a text.
    text: str = node.value
    if not text and isinstance(node, yaml.ScalarNode) and not node.style:
        return "nothing"
    # A whole paragraph pasted under the wrong key would push the message itself out of sight.
    if len(text) > 60:
        text = text[:57] + "..."
    return repr(text)


def _decode_text(data: bytes, shown: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode("utf-8", errors="replace")
        line, column = _line_and_column(before, len(before))
        text = f"byte 0x{error.object[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise MatrixError(shown, line, column, text) from None


def _check_depth(text: str, shown: str, loader: Any) -> None:
    """Walk the events, which takes no recursion, before PyYAML composes nodes, which does."""
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise _error_at(event.start_mark, shown, f"nested deeper than {MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _check_nodes(root: yaml.Node, shown: str) -> None:
    """Refuse foreign tags and trees that are too large, counting a node once for each alias to it."""
    sizes: dict[int, int] = {}

    # This goes no deeper than the text is nested: what an alias stands for has been counted before.
    def count_nodes(node: yaml.Node) -> int:
        known = sizes.get(id(node))
        if known == 0:
            raise _error_at(node.start_mark, shown, "an alias that contains itself")
        if known is None:
            if node.tag not in _PLAIN:
                text = f"tag {node.tag.replace(_TAG, '!!')!r} would build an object; expected plain data"
                raise _error_at(node.start_mark, shown, text)
            # While its children are counted, so that one that contains itself is noticed.
            sizes[id(node)] = 0
            known = 1 + sum(map(count_nodes, _children_of(node)))
            sizes[id(node)] = known
        if known > MAX_NODES:
            raise _error_at(node.start_mark, shown, f"aliases expand to more than {MAX_NODES:,} nodes")
        return known

    count_nodes(root)


def _children_of(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _error_at(mark: Any, shown: str, text: str) -> MatrixError:
    if mark is None:
        return MatrixError(shown, 1, 1, text)
    return MatrixError(shown, mark.line + 1, mark.column + 1, text)


def _line_and_column(text: str, position: int) -> tuple[int, int]:
    """Where a character is, both counted from 1."""
    before = text[:position]
    line_start = before.rfind("\n") + 1
    return before.count("\n") + 1, len(before) - line_start + 1


def offsets_of_entry(node: yaml.Node, text: str) -> tuple[int, int]:
    """Offsets of the whole lines that an entry of a list takes, from its dash; comments behind it stay."""
    last = node
    # A block's own end is where the next begins, with the comments between; the end of its last scalar is exact.
    while isinstance(last, (yaml.MappingNode, yaml.SequenceNode)) and last.value and not last.flow_style:
        if isinstance(last, yaml.MappingNode):
            _, last = last.value[-1]
        else:
            last = last.value[-1]
    start = text.rfind("\n", 0, text.rindex("-", 0, node.start_mark.index)) + 1
    end = last.end_mark.index
    # A block scalar ends behind its line; all else ends within it.
    if text[end - 1:end] != "\n":
        end = text.find("\n", end) + 1 or len(text)
    return start, end


def scalar_text(value: Any) -> str:
    """A value as YAML writes it, in quotes only where a text needs them."""
    if isinstance(value, str) and _NEEDS_NO_QUOTES.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)
