"""Kernels as they were noted, beside the code that came of them: what is in memory, and what never is.

The scheduler plans a buffer for every node. Which of them exist is decided while code is written: a result that only
its own kernel reads is kept in registers, or in a buffer on the stack. So the generated code is asked for its names.

A planned node also names everything that its inputs were made of, whichever kernel made those. So a kernel's operators
are those between what it writes and what it reads.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from pytest_torchcompile.gauges.kernels import functions_of_graph, stage_of_code
from pytest_torchcompile.lowering.kernel_records import KernelCall, Operator, TensorAccess

if TYPE_CHECKING:
    from pytest_torchcompile.lowering.scheduler_notes import KernelNote

__all__ = ["complete_calls", "names_in_memory", "reused_memory"]

_REUSE: Final = re.compile(r"^\s*(\w+) = (?:reinterpret_tensor\()?\w+.*; del (\w+)  # reuse$", re.M)
"""A buffer that is given the memory of another (``ReuseLine`` in torch/_inductor/codegen/wrapper.py, torch 2.13)."""


def complete_calls(notes: Sequence[KernelNote], codes: Sequence[str]) -> list[KernelCall]:
    """The call of each note with its stage, what of it is really in memory, and what its code tells.

    :param notes: as the hooks made them, each with the number of its generated graph.
    :param codes: the generated code of each graph.
    """
    complete: list[KernelCall] = []
    for number, code in enumerate(codes):
        graph = _GeneratedGraph(stage_of_code(code), names_in_memory(code), reused_memory(code))
        of_graph = [note for note in notes if note.call.graph == number]
        for note in of_graph:
            if note.call.kind in ("library", "extern"):
                graph.by_libraries.update(operator.node for operator in note.call.operators)
        complete += [graph.complete(note) for note in of_graph]
    return complete


def names_in_memory(code: str) -> frozenset[str]:
    """Names of tensors in the function that runs a graph, and in subgraphs: inputs, and the buffers that it makes.

    >>> sorted(names_in_memory("def call(args):\\n    a, = args\\n    buf0 = empty()\\n    kernel(a, buf0)"))
    ['a', 'args', 'buf0', 'empty', 'kernel']
    """
    module = ast.parse(code)
    subgraphs = {statement.name: statement for statement in module.body if isinstance(statement, ast.FunctionDef)}
    names: set[str] = set()
    waiting = functions_of_graph(module)
    while waiting:
        found = {node.id for node in ast.walk(waiting.pop()) if isinstance(node, ast.Name)}
        # Subgraphs are functions beside it, with tensors of their own.
        waiting += [subgraphs[name] for name in found - names if name in subgraphs]
        names |= found
    return frozenset(names)


def reused_memory(code: str) -> dict[str, str]:
    """Buffers that are given the memory of another one, each to that one.

    >>> reused_memory("    buf2 = buf1; del buf1  # reuse\\n    buf3 = empty_strided_cpu((4,))")
    {'buf2': 'buf1'}
    """
    return dict(_REUSE.findall(code))


@dataclass
class _GeneratedGraph:
    """One generated graph, kernel after kernel."""

    stage: str
    in_memory: frozenset[str]
    reused: Mapping[str, str]
    """Buffer to the one whose memory it is given."""
    by_libraries: set[str] = field(default_factory=set)
    """Nodes that a library computes, whoever prepares their inputs."""
    made: dict[str, TensorAccess] = field(default_factory=dict)
    """What kernels have written so far, by name."""

    def complete(self, note: KernelNote) -> KernelCall:
        """The call of a note; notes come in the order of the code."""
        call = note.call
        reads = []
        for tensor in call.reads:
            if tensor.name in self.in_memory:
                made = self.made.get(tensor.name, tensor)
                reads.append(replace(tensor, of=made.of, partly=made.partly))
        lost = self._overwritten(call.writes)
        writes = []
        for tensor in call.writes:
            # A library writes each of its results, also one that nobody reads and no code names.
            if (tensor.name in self.in_memory or not call.source) and tensor.name not in lost:
                writes.append(self._origin_found(tensor, note))
        self.made.update((tensor.name, tensor) for tensor in writes)
        completed = replace(call, stage=self.stage, reads=tuple(reads), writes=tuple(writes))
        if not call.source:
            return completed
        computation = _Computation(note, self.by_libraries)
        operators = computation.operators_between(reads, writes)
        if not reads:
            operators, writes = computation.operators_of_nothing(operators, writes)
            self.made.update((tensor.name, tensor) for tensor in writes)
            completed = replace(completed, writes=tuple(writes))
        operators = operators or _copies(writes)
        places = dict.fromkeys(operator.place for operator in operators if operator.place)
        in_cpp = 'extern "C"' in call.source
        return replace(
            completed, operators=operators, places=tuple(places),
            kept_inside=_kept_inside(operators, writes, note.unchanged, self.by_libraries),
            vectorised="at::vec::" in call.source if in_cpp else None,
            parallel="#pragma omp parallel" in call.source if in_cpp else None,
        )  # fmt: skip

    def _overwritten(self, writes: Iterable[TensorAccess]) -> set[str]:
        """Of what a kernel writes that which it overwrites itself: the sum behind a mean, say.

        It takes the place of a result of the kernel, so nobody else ever sees it.
        """
        written = {tensor.name for tensor in writes}
        lost: set[str] = set()
        for name in written:
            while (name := self.reused.get(name, "")) in written:
                lost.add(name)
        return lost

    def _origin_found(self, tensor: TensorAccess, note: KernelNote) -> TensorAccess:
        """The tensor with the node whose result it is."""
        # An input that is written in place: the graph says so by a copy into it at its end.
        for operator in note.call.operators:
            if operator.target.startswith("aten.copy_") and operator.inputs[:1] == (tensor.name,):
                return replace(tensor, of=operator.node)
        if tensor.of or not note.call.source:
            return tensor
        # What is made for a library names that one's other inputs too, as a weight that is permuted.
        of_others = set(self.by_libraries)
        for operator in note.call.operators:
            if operator.view and _type_and_size(operator) != _type_and_size(tensor):
                of_others.add(operator.node)
        for origin in note.origins.get(tensor.name, ()):
            if origin not in of_others:
                return replace(tensor, of=origin, partly=True)
        return tensor


@dataclass(frozen=True)
class _Computation:
    """The nodes of the graph that one kernel may compute."""

    note: KernelNote
    by_libraries: Collection[str]

    def operators_between(
        self, reads: Iterable[TensorAccess], writes: Iterable[TensorAccess]
    ) -> tuple[Operator, ...]:
        """Of the kernel's operators those that the writes need, and that are not read as they are."""
        known = {operator.node: operator for operator in self.note.call.operators}
        finished = {self._value_of(tensor.of) for tensor in reads if not tensor.partly} | set(self.by_libraries)
        half_made = {self._value_of(tensor.of) for tensor in reads if tensor.partly}
        waiting = [self._value_of(tensor.of) for tensor in writes if tensor.of]
        needed: set[str] = set()
        while waiting:
            node = waiting.pop()
            if node in needed or node not in known:
                continue
            if node in self.by_libraries:
                # Its inputs were the library's. It is finished here, by a bias, or only copied into another layout.
                if self._reads_input_of(known[node], reads):
                    needed.add(node)
                continue
            needed.add(node)
            # What is half made by another kernel is finished here, out of nothing else.
            if node not in half_made:
                given = set(map(self._value_of, known[node].inputs))
                waiting += given - finished
        return tuple(operator for name, operator in known.items() if name in needed)

    def _reads_input_of(self, operator: Operator, reads: Iterable[TensorAccess]) -> bool:
        given = set(map(self._value_of, operator.inputs))
        return any((self._value_of(tensor.of) or tensor.name) in given for tensor in reads)

    def operators_of_nothing(
        self, operators: Iterable[Operator], writes: Iterable[TensorAccess]
    ) -> tuple[tuple[Operator, ...], list[TensorAccess]]:
        """Of a kernel that reads no tensor the operators that take none, and what it writes as results of those.

        It fills memory, mostly with zeros that another kernel adds to. Inductor notes the operator that adds as the
        origin of both, and with it all that was computed before.
        """
        computed: dict[str, Operator] = {}
        for operator in operators:
            if all(given in computed or given in self.note.numbers for given in operator.inputs):
                computed[operator.node] = operator
        filled = []
        for tensor in writes:
            if self._value_of(tensor.of) not in computed:
                alike = [each.node for each in computed.values() if (each.shape, each.dtype) == _type_of(tensor)]
                tensor = replace(tensor, of=alike[-1] if alike else "", partly=False)
            filled.append(tensor)
        needed = tuple(computed.values())
        for tensor in filled:
            if not tensor.of:
                needed += (Operator(tensor.name, "fill", "fill", tensor.shape, tensor.dtype, tensor.bytes),)
        return needed, filled

    def _value_of(self, node: str) -> str:
        """The node that made what a node hands on."""
        return self.note.unchanged.get(node, node)


def _copies(writes: Iterable[TensorAccess]) -> tuple[Operator, ...]:
    """What a kernel does that computes nothing: it copies into another layout, mostly for a library."""
    return tuple(Operator(tensor.of or tensor.name, "copy", "copy", tensor.shape, tensor.dtype, tensor.bytes)
                 for tensor in writes)


def _kept_inside(
    operators: Iterable[Operator], writes: Iterable[TensorAccess], unchanged: Mapping[str, str],
    by_libraries: Collection[str],
) -> tuple[Operator, ...]:
    """Operators whose result is none of what is written; what a library has computed came out of memory."""
    stored: set[str] = set(by_libraries)
    for tensor in writes:
        # What is only copied has no node, and the tensor's own name.
        stored.update(unchanged.get(node, node) for node in (tensor.name, tensor.of, *tensor.overwritten))
    by_node = {operator.node: operator for operator in operators}
    for operator in by_node.values():
        # What is copied into an input, as at the end of `x.mul_(2)`, is in memory there, unless it is cast for that.
        if operator.target.startswith("aten.copy_") and len(operator.inputs) > 1:
            copied = by_node.get(unchanged.get(operator.inputs[1], operator.inputs[1]))
            if copied is not None and copied.dtype == operator.dtype:
                stored.add(copied.node)
    kept = []
    for operator in operators:
        if operator.node not in stored and not operator.view and not _in_place(operator) and operator.bytes:
            kept.append(operator)
    return tuple(kept)


def _type_of(tensor: TensorAccess) -> tuple[tuple[int | str, ...], str]:
    return tensor.shape, tensor.dtype


def _type_and_size(value: Operator | TensorAccess) -> tuple[str, int]:
    """Dtype and elements, which a view keeps; sizes that are open count as 1."""
    return value.dtype, math.prod(size for size in value.shape if isinstance(size, int))


def _in_place(operator: Operator) -> bool:
    """It has no result of its own: ``aten.copy_.default`` writes into what it is given."""
    return operator.target.partition(".")[2].partition(".")[0].endswith("_")
