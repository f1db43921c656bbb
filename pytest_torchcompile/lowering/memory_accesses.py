"""Memory accesses: which tensors a planned kernel reads and writes, and how many bytes of each.

A kernel that reads or writes where other numbers say (an embedding, ``index_copy_``) touches one element for each step
of its loops, however large the tensor is. What is written in place is not read for that, unless it is added to.

A library is given views, as a slice of columns, and can touch no more than those. Where it looks up rows by numbers, it
reads at most as many as there are numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pytest_torchcompile.gauges.memory_regions import LOOKS_UP, LOOKS_UP_ROWS
from pytest_torchcompile.lowering.kernel_records import TensorAccess

__all__ = ["accesses_of", "current_lowering", "dtype_name", "node_name", "product_of", "shown_size", "subgraph_name"]


def accesses_of(
    nodes: Sequence[Any], origins: Sequence[str]
) -> tuple[tuple[TensorAccess, ...], tuple[TensorAccess, ...]]:
    """What a kernel reads that it has not made itself, and what it writes, in the order of its nodes.

    :param origins: for each node that of the graph which was computed last for it; empty where there is none.
    """
    memory = _KernelMemory()
    for node, origin in zip(nodes, origins, strict=True):
        touching = _mutated_by(node), _Loops.of(node), _numbers_read(node)
        memory.add_reads(node, *touching)
        memory.add_writes(node, origin, *touching)
    reads = [_tensor_of(name, found, "") for name, found in memory.read.items()]
    writes = []
    for name, found in memory.written.items():
        if found:
            writes.append(_tensor_of(name, found, memory.in_place.get(name, ""), memory.origins.get(name, ())))
    return tuple(filter(None, reads)), tuple(filter(None, writes))


class _KernelMemory:
    """What the nodes of a kernel so far have touched, by the name of the memory."""

    def __init__(self) -> None:
        self.read: dict[str, list[_Access]] = {}
        """What the kernel has not made itself."""
        self.written: dict[str, list[_Access]] = {}
        """Empty for a name under which the kernel itself knows memory that has another one outside."""
        self.in_place: dict[str, str] = {}
        """Memory that was there before: the origin of the node that changes it."""
        self.origins: dict[str, list[str]] = {}
        """Those of the nodes that write."""
        self._parts: dict[str, list[_Access]] = {}
        """Writes into a part, by the memory that it lies in."""

    def add_reads(self, node: Any, mutated: frozenset[str], loops: _Loops, numbers: frozenset[Any]) -> None:
        """Note what a node reads, before what it writes."""
        for dependency in node.read_writes.reads:
            if _only_ordered(dependency, mutated):
                continue
            for actual in _memory_read(dependency.name):
                known = _elements_of(actual, (*self.written.get(actual, ()), *self._parts.get(actual, ())))
                access = _Access(dependency, loops.all, known, _elements_given(node.node, dependency.name), numbers)
                if self._comes_from_outside(actual, dependency.name, access):
                    self.read.setdefault(actual, []).append(access)

    def _comes_from_outside(self, actual: str, name: str, access: _Access) -> bool:
        """Whether a read touches elements that the kernel has not written; ``name`` is what the node calls it."""
        if actual in self._parts and not _touched(access, _whole_of(actual)):
            return False
        if name not in self.written and actual not in self.written:
            return True
        # Of memory that it wrote a part of in place it may read the rest, which others have written.
        return actual in self.in_place and _touched(access, _whole_of(actual)) > 0

    def add_writes(self, node: Any, origin: str, mutated: frozenset[str], loops: _Loops,
                   numbers: frozenset[Any]) -> None:
        """Note what a node writes."""
        for dependency in node.read_writes.writes:
            for actual in _memory_of(dependency.name):
                access = _Access(dependency, loops.outer, numbers=numbers)
                # What is added to is read, but for what this kernel wrote itself.
                if getattr(dependency, "mode", None) == "atomic_add" and actual not in self.written:
                    self.read.setdefault(actual, []).append(access)
                self.written.setdefault(actual, []).append(access)
                self._parts.setdefault(_lies_in(actual), []).append(access)
                self.origins.setdefault(actual, []).append(origin)
                if actual in mutated:
                    self.in_place[actual] = origin
            # Later nodes of the kernel read it under this name.
            self.written.setdefault(dependency.name, [])


@dataclass(frozen=True)
class _Loops:
    """How often the body of a node's loops is run, at the sizes of this call."""

    outer: int
    """Without those that it reduces: as often it writes."""
    all: int

    @classmethod
    def of(cls, node: Any) -> _Loops:
        """Private: ``get_ranges`` of ``torch/_inductor/scheduler.py: SchedulerNode``, torch 2.11 and 2.13.

        It has the sizes, and those reduced. A library call has no loops of ours. Torch 2.11 asks for its accesses too.
        """
        if not hasattr(node, "get_ranges"):
            return cls(1, 1)
        outer, reduced = node.get_ranges()
        return cls(product_of(outer), product_of(outer) * product_of(reduced))


@dataclass(frozen=True)
class _Access:
    """One place of a node's code that reads or writes."""

    dependency: Any
    times: int
    """How often."""
    known: int = 0
    """Elements that the kernel itself has written there before."""
    given: int | None = None
    """Elements that a library can touch of what it is given; None where that is all of the tensor."""
    numbers: frozenset[Any] = frozenset()
    """The whole numbers that its node reads: they say where an indirect access is."""

    @property
    def place(self) -> Any:
        """Equal for those that touch the same elements: a layer norm reads its input in each of its loops."""
        if type(self.dependency).__name__ != "MemoryDep":
            return self.dependency
        place = _place_of(self.dependency)
        return (place, self.times, self.numbers) if self.dependency.is_indirect() else place


def _mutated_by(node: Any) -> frozenset[str]:
    """Memory that generated code writes in place; a library may read all of what it writes.

    ``get_mutation_names`` of ``torch/_inductor/ir.py: ComputedBuffer`` (torch 2.13).
    """
    if type(node.node).__name__ != "ComputedBuffer":
        return frozenset()
    return frozenset(node.node.get_mutation_names())


def _place_of(dependency: Any) -> Any:
    """The elements behind an index, whatever loops run over them: in another order, merged, or not moving it.

    ``MemoryDep.index``, ``var_names`` and ``size`` of ``torch/_inductor/dependencies.py`` (torch 2.13).
    """
    index = dependency.index.expand()
    start, loops = index, []
    for name, size in zip(dependency.var_names, dependency.size, strict=True):
        step = index.coeff(name)
        start = (start - step * name).expand()
        if step != 0 and size != 1:
            loops.append((step, size))
    if not start.free_symbols.isdisjoint(dependency.var_names):
        # It is not linear: a remainder, for example.
        return dependency.index, dependency.var_names, dependency.size
    if not all(step.is_Integer for step, _size in loops):
        return start, frozenset(loops)
    merged: list[tuple[Any, Any]] = []
    for step, size in sorted(loops, key=lambda loop: loop[0]):
        # It goes on where the loop before it ends.
        if merged and step == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((step, size))
    return start, tuple(merged)


def _numbers_read(node: Any) -> frozenset[Any]:
    """Of a node's reads those of whole numbers, each with its place."""
    found = set()
    for dependency in node.read_writes.reads:
        if type(dependency).__name__ == "MemoryDep" and _holds_whole_numbers(dependency.name):
            found.add((dependency.name, _place_of(dependency)))
    return frozenset(found)


def _holds_whole_numbers(name: str) -> bool:
    try:
        dtype: torch.dtype = current_lowering().try_get_buffer(name).get_dtype()
    except (AttributeError, NotImplementedError):
        # No tensor: a token, a random state, a number.
        return False
    return not dtype.is_floating_point


def _only_ordered(dependency: Any, mutated: frozenset[str]) -> bool:
    """Whether it says what comes first, and nothing is read (``WeakDep``, torch 2.13).

    So does a ``StarDep`` of what the node writes in place: what it reads of it has a ``MemoryDep`` of its own.
    """
    kind = type(dependency).__name__
    return kind == "WeakDep" or (kind == "StarDep" and not mutated.isdisjoint(_memory_of(dependency.name)))


def _memory_of(name: str) -> list[str]:
    """The tensors that a buffer of this name is: itself, what it mutates in place, or its several results."""
    buffer = current_lowering().try_get_buffer(name)
    mutated = list(getattr(buffer, "get_mutation_names", list)())
    if mutated:
        return mutated
    layout = type(getattr(buffer, "layout", None)).__name__
    if layout == "MultiOutputLayout":
        results = []
        for other in current_lowering().buffers:
            inputs = getattr(other, "inputs", ())
            if type(other).__name__ == "MultiOutput" and any(given is buffer for given in inputs):
                results.append(other.get_name())
        return results
    return [name] if layout != "NoneLayout" else []


def _lies_in(name: str) -> str:
    """The tensor whose part a buffer is, as the whole of a concatenation; empty for one with memory of its own.

    ``NonOwningLayout.view`` of ``torch/_inductor/ir.py`` (torch 2.13).
    """
    layout: Any = getattr(current_lowering().try_get_buffer(name), "layout", None)
    return str(layout.view.get_name()) if type(layout).__name__ == "NonOwningLayout" else ""


def _memory_read(name: str) -> list[str]:
    """The tensors that are read under this name: a buffer that is written in place is another's memory."""
    buffer = current_lowering().try_get_buffer(name)
    mutated = list(getattr(buffer, "get_mutation_names", list)())
    return mutated or [name]


def _tensor_of(
    name: str, accesses: Sequence[_Access], of: str, before: Sequence[str] = ()
) -> TensorAccess | None:
    """The access by all of a kernel's code; ``before`` are the nodes that were stored there one after the other."""
    tensor = current_lowering().try_get_buffer(name)
    if tensor is None or not hasattr(tensor, "get_size"):
        return None
    try:
        sizes, dtype = list(tensor.get_size()), tensor.get_dtype()
    except NotImplementedError:
        # No tensor: a token, a random state, a number.
        return None
    whole = product_of(sizes)
    touched = _sum_of_places(accesses, whole)
    origin = getattr(tensor, "origin_node", None)
    made = "" if origin is None else node_name(origin)
    of = of or made
    overwritten = tuple(node for node in dict.fromkeys((made, *before)) if node and node != of)
    return TensorAccess(name, tuple(map(shown_size, sizes)), dtype_name(dtype), min(whole, touched) * dtype.itemsize,
                        of, overwritten=overwritten)


def _touched(access: _Access, whole: int) -> int:
    """Elements behind an access; the whole tensor where it is a library's (``MemoryDep``, torch 2.13).

    Where the place is itself a number that is read, ``get_numel`` tells the whole tensor, and ``size`` lacks the inner
    loops that only this number depends on.
    """
    dependency = access.dependency
    if type(dependency).__name__ != "MemoryDep":
        touched = whole if access.given is None else access.given
    elif dependency.is_indirect():
        touched = access.times
    else:
        touched = _number(dependency.get_numel())
    return max(0, touched - access.known)


def _elements_given(operation: Any, name: str) -> int | None:
    """Elements that a library can touch of a tensor; None for generated code, and where nobody knows.

    ``InputsKernel.inputs`` of ``torch/_inductor/ir.py`` (torch 2.13): what a call is given, views as
    ``ReinterpretView`` with sizes and strides of their own.
    """
    inputs = getattr(operation, "inputs", None)
    if type(operation).__name__ == "ComputedBuffer" or not isinstance(inputs, (list, tuple)):
        return None
    elements, found = 0, False
    for number, given in enumerate(inputs):
        if hasattr(given, "get_name") and given.get_name() == name:
            found = True
            seen = _elements_of_view(given)
            elements += seen if number else min(seen, _elements_looked_up(operation, inputs, seen))
    return elements if found else None


def _elements_of_view(given: Any) -> int:
    """Elements in memory behind an input: along a dimension without a stride there is one."""
    sizes = list(given.get_size())
    strides = list(given.get_stride()) if hasattr(given, "get_stride") else [1] * len(sizes)
    in_memory = [size for size, stride in zip(sizes, strides, strict=True) if stride != 0]
    return product_of(in_memory)


def _elements_looked_up(operation: Any, inputs: Sequence[Any], whole: int) -> int:
    """Of the first tensor of an operator as many elements as its numbers can address; ``whole`` for any other."""
    overload = getattr(operation, "op_overload", None)
    namespace, _, operator = str(getattr(overload, "_overloadpacket", "")).partition(".")
    if namespace != "aten" or len(inputs) < 2:
        return whole
    if operator in LOOKS_UP_ROWS:
        return product_of(inputs[1].get_size()) * product_of(list(inputs[0].get_size())[1:])
    if operator in LOOKS_UP:
        try:
            return product_of(operation.get_size())
        except NotImplementedError:
            return whole
    return whole


def _whole_of(name: str) -> int:
    """Elements of a tensor; 0 where it is none, or nobody knows."""
    tensor = current_lowering().try_get_buffer(name)
    try:
        return product_of(tensor.get_size())
    except (AttributeError, NotImplementedError):
        return 0


def _elements_of(name: str, accesses: Sequence[_Access]) -> int:
    """Elements behind accesses, each counted once where they are of different places."""
    if not accesses:
        return 0
    whole = _whole_of(name)
    return min(whole, _sum_of_places(accesses, whole))


def _sum_of_places(accesses: Sequence[_Access], whole: int) -> int:
    """Elements behind accesses, those of one place once; where places overlap in part, these are counted twice."""
    by_place: dict[Any, int] = {}
    for access in accesses:
        touched = _touched(access, whole)
        by_place[access.place] = max(touched, by_place.get(access.place, 0))
    return sum(by_place.values())


# ------------------------------------------------------------------------------------------------ sizes
def current_lowering() -> Any:
    """The graph that is being lowered (``torch._inductor.virtualized.V.graph``, torch 2.13)."""
    from torch._inductor.virtualized import V

    return V.graph


def subgraph_name() -> str:
    """Of the graph that is being lowered: ``true_graph_0``, and within another ``a.b``; empty for a whole graph.

    ``SubgraphLowering`` in torch/_inductor/graph.py, whose name begins with its parent's (torch 2.13).
    """
    lowering, names = current_lowering(), []
    while (parent := getattr(lowering, "parent", None)) is not None:
        names.append(str(lowering.name).removeprefix(f"{parent.name}_"))
        lowering = parent
    return ".".join(reversed(names))


def node_name(node: Any) -> str:
    """Of a node of the graph that is being lowered: in a subgraph as ``explain`` reads it, ``true_graph_0.sin``."""
    subgraph = subgraph_name()
    return f"{subgraph}.{node.name}" if subgraph else str(node.name)


def _number(size: Any) -> int:
    """A size as a number: that of this call where the compiler keeps it open.

    ``SizeVarAllocator.optimization_hint`` in torch 2.13; where that is missing, the older ``size_hint``.
    """
    if isinstance(size, int):
        return size
    sizes = current_lowering().sizevars
    hint = getattr(sizes, "optimization_hint", None) or sizes.size_hint
    return int(hint(size, fallback=1))


def product_of(sizes: Any) -> int:
    """Elements of a tensor of these sizes, in this call."""
    count = 1
    for size in sizes:
        count *= _number(getattr(getattr(size, "node", None), "expr", size))
    return count


def shown_size(size: Any) -> int | str:
    """A number, or the name of what is open."""
    try:
        return int(size) if isinstance(size, int) or not getattr(size, "free_symbols", True) else str(size)
    except TypeError:
        return str(size)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")
