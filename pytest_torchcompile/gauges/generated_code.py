"""Generated code: what the compiler has made of a cell, under keys that stay where the code stays. No torch.

A key is the hash of a text without what says nothing about the code: names of variables, symbols and kernels, their
numbers, comments, the lines of the user's code, paths, and what Inductor writes for its own benchmarks. Of a graph that
was traced it is also where sizes are computed, and when a value is freed. Two compiles of one model in two processes
have the same keys; a refactoring that the compiler does not see changes none.

Reads what :func:`pytest_torchcompile.ledger.observe` keeps with ``keep_texts`` (torch 2.13): Inductor's module
(PythonWrapperCodegen in torch/_inductor/codegen/wrapper.py), where there is none the graphs of AOTAutograd, and where
there are none of these Dynamo's.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from pytest_torchcompile.gauges.code_pieces import COMPILED_STAGES
from pytest_torchcompile.gauges.kernels import functions_of_graph, stage_of_code
from pytest_torchcompile.gauges.symbolic_lines import settle_symbolic_lines
from pytest_torchcompile.ledger.records import Text

__all__ = ["GeneratedCode", "GraphCode", "KernelCode", "read_generated_code", "stage_keys"]

_KEY_LENGTH: Final = 16
_STAGES: Final = (("code",), ("forward", "backward"), ("dynamo",))
"""From the last stage to the first: the last that there is stands for a graph."""
_GRAPH_CLASS: Final = re.compile(r"^class [^(\n]+\(", re.MULTILINE)
"""A graph is called as what was traced, which may be no name: ``class <lambda>(torch.nn.Module)``."""
_INCLUDED_PATH: Final = re.compile(r'(#include\s+")[^"]*/([^"/]+")')
_MACHINE: Final = re.compile(r"'backend_hash': '\w+',?\s*")
"""Triton's version and driver as a hash: what runs is told by the report's environment."""


@dataclass(frozen=True)
class KernelCode:
    """One generated kernel: what the compiler calls it, and its key."""

    name: str
    key: str


@dataclass(frozen=True)
class GraphCode:
    """One graph: the key of what calls its kernels, or of the graph itself where nothing was generated."""

    graph: str
    """Compile and stage: ``0/1 backward``."""
    key: str
    kernels: tuple[KernelCode, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data; a kernel is a pair of its name and its key."""
        return {"graph": self.graph, "key": self.key, "kernels": [[kernel.name, kernel.key] for kernel in self.kernels]}


@dataclass
class GeneratedCode:
    """All graphs of a cell in the order of their compiles, and each text by its key."""

    graphs: list[GraphCode] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    def keep(self, text: str) -> str:
        """Keep a text; returns its key."""
        key = hashlib.sha256(text.encode()).hexdigest()[:_KEY_LENGTH]
        self.texts[key] = text
        return key


def read_generated_code(texts: Iterable[Text]) -> GeneratedCode:
    """What the compiler has made, of the texts of an observation. A text that is no Python is kept as it is."""
    by_compile: dict[str, list[Text]] = {}
    for text in texts:
        by_compile.setdefault(text.compile_id, []).append(text)
    generated = GeneratedCode()
    for compile_id, of_compile in by_compile.items():
        for text in _last_stage(of_compile):
            generated.graphs.append(_read_graph(compile_id, text, generated))
    return generated


def stage_keys(texts: Iterable[Text]) -> dict[str, str]:
    """For each stage that the compiler went through, a key of all that it made there."""
    generated, made = GeneratedCode(), dict[str, list[Any]]()
    for text in texts:
        if text.stage in COMPILED_STAGES:
            made.setdefault(text.stage, []).append(_read_graph(text.compile_id, text, generated).to_dict())
    keys = {}
    for stage, graphs in made.items():
        with_kernels = []
        for graph in graphs:
            # A kernel's key, without its name.
            with_kernels.append((graph["key"], [key for _name, key in graph["kernels"]]))
        keys[stage] = generated.keep(repr(with_kernels))
    return keys


def _last_stage(texts: list[Text]) -> list[Text]:
    for stages in _STAGES:
        of_stage = [text for text in texts if text.stage in stages]
        if of_stage:
            return of_stage
    return []


def _read_graph(compile_id: str, text: Text, generated: GeneratedCode) -> GraphCode:
    stage = text.stage
    if stage == "code":
        stage = stage_of_code(text.text)
    graph = f"{compile_id} {stage}"
    try:
        kernels, calling = _neutral_texts(text.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # No Python, or nested too deeply for its parser, which calls that a lack of memory (Python 3.10 to 3.13).
        return GraphCode(graph, generated.keep(text.text))
    kept = tuple(KernelCode(name, generated.keep(source)) for name, source in kernels.items())
    return GraphCode(graph, generated.keep(calling), kept)


def _neutral_texts(code: str) -> tuple[dict[str, str], str]:
    """The neutral source of each kernel by its name, and the neutral text of what calls them."""
    module = ast.parse(_GRAPH_CLASS.sub("class Graph(", code))
    kernels = {name: _neutral_source(source, name) for name, source in _kernel_sources(module)}
    # Numbered, not by key: what calls a kernel is the same when only the kernel is another.
    names = {name: f"kernel_{number}" for number, name in enumerate(kernels)}
    return kernels, _NeutralNames(names).text_of(_functions_that_run(module))


def _kernel_sources(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and source of each kernel: ``name = async_compile.LANGUAGE(..., source, ...)``."""
    for statement in module.body:
        if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)):
            continue
        call, target = statement.value, statement.targets[0]
        is_compiled = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "async_compile"
        if is_compiled and isinstance(target, ast.Name) and target.id != "async_compile":
            parts = [ast.unparse(call.func)]
            for argument in call.args:
                is_text = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                parts.append(argument.value if is_text else ast.unparse(argument))  # type: ignore[attr-defined]
            yield target.id, "\n".join(parts)


def _neutral_source(source: str, name: str) -> str:
    """A kernel's source without its name, and without paths and hashes of the machine."""
    neutral = re.sub(rf"\b{re.escape(name)}\b", "kernel", source)
    return _MACHINE.sub("", _INCLUDED_PATH.sub(r"\1\2", neutral))


def _functions_that_run(module: ast.Module) -> list[ast.FunctionDef]:
    """Those of Inductor's module that run its graph, without what benchmarks them; else the ``forward`` of a graph."""
    of_inductor = functions_of_graph(module)
    if of_inductor:
        return of_inductor
    graphs = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    for graph in graphs:
        settle_symbolic_lines(graph, with_parameters=len(graphs) == 1)
    return graphs


class _NeutralNames(ast.NodeTransformer):
    """Numbers variables in the order in which they are bound; kernels have names already."""

    def __init__(self, kernels: dict[str, str]) -> None:
        self.names = dict(kernels)
        self._variables = 0

    def text_of(self, functions: list[ast.FunctionDef]) -> str:
        """The text of some functions with neutral names."""
        for function in functions:
            for node in ast.walk(function):
                if isinstance(node, ast.arg):
                    self._bind(node.arg)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    self._bind(node.id)
        return "\n".join(ast.unparse(self.visit(function)) for function in functions)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """A variable or a kernel."""
        return ast.copy_location(ast.Name(self.names.get(node.id, node.id), node.ctx), node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """A parameter; its annotation is a text like ``f32[s77, 8][8, 1]cpu``."""
        annotation = None if node.annotation is None else self.visit(node.annotation)
        return ast.copy_location(ast.arg(self.names.get(node.arg, node.arg), annotation), node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Symbols stand in annotations, which are texts."""
        if not isinstance(node.value, str):
            return node
        return ast.copy_location(ast.Constant(_SYMBOL.sub(self._neutral_symbol, node.value)), node)

    def _neutral_symbol(self, symbol: re.Match[str]) -> str:
        self._bind(symbol[0])
        return self.names[symbol[0]]

    def _bind(self, name: str) -> None:
        if name not in self.names and name != "self":
            self.names[name] = f"v{self._variables}"
            self._variables += 1


_SYMBOL: Final = re.compile(r"\b[su]\d+\b")
"""A symbolic size, as Dynamo names it."""
