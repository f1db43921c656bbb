"""Inductor while it writes code: which nodes of its scheduler become which kernel, noted as it happens.

A cache hands out code without scheduling anything, so what ``explain`` tells of is compiled with Inductor's caches off
(:func:`compile_anew`). Kernels that g++ has built already are found by their source all the same. A cell of a matrix
leaves the caches on, for its warm runs: of graphs that they serve nothing is noted.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Final

import torch

from pytest_torchcompile.gauges.library_operators import is_custom
from pytest_torchcompile.ledger.torch_internals import private_name
from pytest_torchcompile.lowering.kernel_records import COLLECTIVE, KernelCall, Operator, kernel_name
from pytest_torchcompile.lowering.memory_accesses import (
    accesses_of,
    current_lowering,
    dtype_name,
    node_name,
    product_of,
    shown_size,
    subgraph_name,
)
from pytest_torchcompile.lowering.places import module_name, place_of_stack

__all__ = ["KernelNote", "KernelNotes", "compile_anew"]

_PLACEHOLDERS: Final = re.compile(r"(?:Placeholder\.|\b)(?:(?:KERNEL_NAME|triton_)(?=\()|DESCRIPTIVE_NAME\b)")
_CONSEQUENCE: Final = "kernels can't be explained"
_LIBRARIES: Final = (
    (COLLECTIVE, re.compile(r"_c10d_functional(?:_autograd)?\.|_dtensor\.|symm_mem\.")),
    ("SDPA", re.compile(r"scaled_dot_product|flash_attn|efficient_attention")),
    ("mkldnn", re.compile(r"mkldnn|onednn|mkl\.")),
    ("convolution", re.compile(r"convolution|\bconv\d?d?\b|cudnn")),
    ("BLAS", re.compile(r"(?:^|\.)(?:addmm|mm|bmm|baddbmm|_int_mm|_scaled_mm|addmv|mv|dot|bias_addmm)(?:$|\.)")),
)
"""Whose kernel an extern call is, by its name; what fits none is an operator of ATen's own, or a custom one."""
_NUMBERS: Final = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Types of what a node gives that is no tensor."""


@contextlib.contextmanager
def compile_anew() -> Iterator[None]:
    """Have everything scheduled here and now, whatever caches hold.

    ``torch._inductor.config.fx_graph_cache`` and ``torch._functorch.config.enable_autograd_cache``: torch 2.8 to 2.15;
    the same of caches that machines share: torch 2.13.
    """
    switches = (
        ("torch._inductor.config", "fx_graph_cache"), ("torch._inductor.config", "fx_graph_remote_cache"),
        ("torch._functorch.config", "enable_autograd_cache"),
        ("torch._functorch.config", "enable_remote_autograd_cache"),
    )  # fmt: skip
    with contextlib.ExitStack() as patched:
        for module, name in switches:
            private_name(module, name, "switches a cache of compiled graphs", "nothing can be compiled anew")
            patched.enter_context(import_module(module).patch(**{name: False}))
        yield


@dataclass(frozen=True)
class KernelNote:
    """A kernel as the scheduler planned it; :mod:`.kernel_facts` has what came of it."""

    call: KernelCall
    origins: dict[str, tuple[str, ...]]
    """Tensor that is written to the nodes of the graph that it was made of, the last first."""
    unchanged: dict[str, str] = field(default_factory=dict)
    """A node whose result is its input as it is, to the node of that input: Inductor makes nothing of such a node."""
    numbers: frozenset[str] = frozenset()
    """Inputs of nodes that no kernel reads: open sizes, and constants, which the code has as numbers."""


@dataclass
class KernelNotes:
    """Kernels in the order in which Inductor wrote them."""

    notes: list[KernelNote]
    lost: list[str]
    """What could not be read, each text once; never silently dropped."""
    current: Callable[[], tuple[str, int]]
    """Tells the compile id and the number of the graph whose code is being written."""
    _side_by_side: list[Any] = field(default_factory=list)
    """Nodes of the scheduler that hold loops side by side, and have been noted."""

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Note kernels while the block runs."""
        with contextlib.ExitStack() as hooks:
            for maker in _kernel_makers():
                hooks.enter_context(_wrapped(maker, "define_kernel", self._harmless(self._after_definition)))
            hooks.enter_context(_wrapped(_scheduler(), "codegen_extern_call", self._harmless(self._after_extern_call)))
            yield

    def _harmless(self, after: Callable[..., None]) -> Callable[..., None]:
        """``after``, which must neither fail the compile that is watched nor be hidden where it fails."""

        def note(result: Any, *given: Any, **named: Any) -> None:
            try:
                after(result, *given, **named)
            except Exception as error:
                # What a kernel is called is a text, and a call of a library returns nothing.
                text = f"{f'kernel {result}' if result else 'a library call'}: {type(error).__name__}: {error}"
                if text not in self.lost:
                    self.lost.append(text)

        return note

    def _after_definition(self, name: Any, source: str, nodes: Any, *rest: Any, **more: Any) -> None:
        side_by_side = [node for node in nodes if hasattr(node, "get_subkernel_nodes")]
        if any(node in self._side_by_side for node in side_by_side):
            # Torch splits them where they have too many arguments, and says nowhere which are in which part.
            self.lost.append(f"kernel {name}: a part of loops side by side, told with the first part")
            return
        self._side_by_side += side_by_side
        self._note(str(name), _single_nodes(nodes), source)

    def _after_extern_call(self, result: Any, node: Any, *rest: Any, **more: Any) -> None:
        # An output of a call that was noted before it: nothing is computed.
        if type(node.node).__name__ != "MultiOutput":
            self._note(_extern_name(node.node), [node], "")

    def _note(self, name: str, nodes: list[Any], source: str) -> None:
        compile_id, graph = self.current()
        self.notes.append(_described(KernelCall(name, "", compile_id, graph), nodes, source))


# ------------------------------------------------------------------------------------------------ torch's private names
def _kernel_makers() -> list[type]:
    """Classes whose ``define_kernel(source, scheduler_nodes, ...)`` names a kernel.

    ``CppScheduling`` and ``TritonScheduling`` in torch/_inductor/codegen: torch 2.13.
    """
    makers: list[type] = []
    for module, name in (("cpp", "CppScheduling"), ("triton", "TritonScheduling")):
        path = f"torch._inductor.codegen.{module}"
        private_name(path, f"{name}.define_kernel", "names the kernels that it generates", _CONSEQUENCE)
        makers.append(getattr(import_module(path), name))
    return makers


def _scheduler() -> type:
    """The class whose ``codegen_extern_call(scheduler_node)`` writes a call of a library (torch 2.13)."""
    private_name("torch._inductor.scheduler", "Scheduler.codegen_extern_call", "writes calls of libraries",
                 _CONSEQUENCE)
    from torch._inductor.scheduler import Scheduler

    return Scheduler


def _single_nodes(nodes: Iterable[Any]) -> list[Any]:
    """Nodes of the scheduler, those inside of others in their place; marks between nodes are none.

    A kernel of several loops side by side, such as a ``cat`` on a GPU, is one ``ForeachKernelSchedulerNode`` that has
    the others in ``get_nodes()`` (torch/_inductor/scheduler.py, torch 2.8 to 2.13).
    """
    single: list[Any] = []
    for node in nodes:
        if hasattr(node, "read_writes"):
            single.extend(node.get_nodes())
    return single


def _extern_name(operation: Any) -> str:
    """What the generated code calls (``ExternKernel.python_kernel_name``, torch 2.13)."""
    name = getattr(operation, "python_kernel_name", None)
    if name:
        return kernel_name(str(name))
    kernel = getattr(operation, "op_overload", None) or getattr(operation, "kernel", None)
    return str(kernel or type(operation).__name__)


@contextlib.contextmanager
def _wrapped(owner: type, name: str, after: Callable[..., None]) -> Iterator[None]:
    """Call ``after(result, *arguments)`` whenever the method has returned."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        after(result, *args, **kwargs)
        return result

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, original)


# ------------------------------------------------------------------------------------------------ one kernel, described
def _described(call: KernelCall, nodes: list[Any], source: str) -> KernelNote:
    origins = _Origins.of(nodes)
    computing = origins.sorted(nodes)
    if not source:
        computing = _called(call.name, nodes, computing)
    operators = tuple(map(_operator_of, computing))
    reads, writes = accesses_of(nodes, [origins.last_of(node) for node in nodes])
    if call.waits:
        # It hands on what the collective has moved.
        reads, writes = (), ()
    places = dict.fromkeys(operator.place for operator in operators if operator.place)
    described = replace(
        call, subgraph=subgraph_name(), called_by=origins.callers(nodes),
        kind=_kind_of(call.name, nodes, source), library="" if source else _library_of(call.name, nodes),
        operators=operators, reads=reads, writes=writes, loops=_loops_of(nodes) if source else (), places=tuple(places),
        source=_PLACEHOLDERS.sub(call.name, source),
    )  # fmt: skip
    made_of: dict[str, tuple[str, ...]] = {}
    for node in nodes:
        names = tuple(node_name(origin) for origin in reversed(origins.sorted([node])))
        made_of.update(dict.fromkeys((write.name for write in node.read_writes.writes), names))
    return KernelNote(described, made_of, origins.unchanged(computing), _numbers_given(computing))


def _numbers_given(computing: Iterable[Any]) -> frozenset[str]:
    """Of what nodes take that which is no tensor, and constants: those that are in memory are read under their names.
    """
    numbers = set()
    for node in computing:
        for given in node.all_input_nodes:
            if given.op == "get_attr" or isinstance(given.meta.get("val"), _NUMBERS):
                numbers.add(node_name(given))
    return frozenset(numbers)


def _called(name: str, nodes: list[Any], origins: list[Any]) -> list[Any]:
    """Of what an extern call was made of, in order, the node that it is: its inputs brought theirs along."""
    collective = _of_collective(name, origins)
    if collective:
        return collective
    own = [node.node.origin_node for node in nodes if node.node.origin_node is not None]
    # Of a call with several results no node is told, and it is the last.
    return [origin for origin in own if origin.op == "call_function"] or origins[-1:]


def _of_collective(name: str, origins: Iterable[Any]) -> list[Any]:
    """The node of a collective that is called, and not the wait for it; none of another call.

    Inductor calls some in place, whose names end with ``_``: ``all_reduce_`` for ``all_reduce``.
    """
    called = name.removesuffix(".default").removesuffix("_")
    return [origin for origin in origins if str(origin.target).removesuffix(".default") == called]


def _kind_of(name: str, nodes: list[Any], source: str) -> str:
    if not source:
        library = _library_of(name, nodes)
        return "extern" if library in ("ATen", "custom op") else "library"
    if any(node.is_template() for node in nodes):
        return "template"
    if any(node.is_reduction() for node in nodes):
        return "reduction"
    return "pointwise"


def _library_of(name: str, nodes: list[Any]) -> str:
    if type(nodes[0].node).__name__ == "UserDefinedTritonKernel":
        return "Triton by hand"
    for library, pattern in _LIBRARIES:
        if pattern.search(name):
            return library
    return "custom op" if is_custom(name.replace(".", "::", 1)) else "ATen"


@dataclass(frozen=True)
class _Origins:
    """Nodes of a graph, and their order in it."""

    order: dict[Any, int]

    @classmethod
    def of(cls, nodes: list[Any]) -> _Origins:
        # What a subgraph's nodes were made of names the call of the subgraph too, which is of another graph.
        graph = current_lowering().graph if subgraph_name() else None
        for node in nodes:
            for origin in node.node.origins:
                if graph is None or origin.graph is graph:
                    return cls({known: number for number, known in enumerate(origin.graph.nodes)})
        return cls({})

    def sorted(self, nodes: list[Any]) -> list[Any]:
        """What scheduler nodes were made of (``IRNode.origins``, torch 2.13); placeholders compute nothing."""
        found: dict[Any, None] = {}
        inside = bool(subgraph_name())
        for node in nodes:
            for origin in node.node.origins:
                if origin.op == "call_function" and (origin in self.order or not inside):
                    found[origin] = None
        return sorted(found, key=lambda origin: self.order.get(origin, -1))

    def callers(self, nodes: list[Any]) -> tuple[str, ...]:
        """Of a subgraph's nodes the operators that it is called by: ``cond``."""
        found: dict[str, None] = {}
        if subgraph_name():
            for node in nodes:
                for origin in node.node.origins:
                    if origin not in self.order and isinstance(origin.target, torch._ops.HigherOrderOperator):
                        found[_short_name(origin.target)] = None
        return tuple(found)

    def last_of(self, node: Any) -> str:
        """Of what a scheduler node was made of the last; empty where that is nothing."""
        made_of = self.sorted([node])
        return node_name(made_of[-1]) if made_of else ""

    def unchanged(self, named: Iterable[Any]) -> dict[str, str]:
        """Views of the graph that the scheduler does not name, each with its input: ``expand`` to the same size, say.

        Inductor's lowering of such a view returns the value that it was given, and nobody notes the node (torch 2.13,
        ``torch/_inductor/lowering.py: expand``). Without this an operator before it would look like one of nobody's.
        """
        known = set(named)
        found: dict[str, str] = {}
        for node in self.order:
            if node.op != "call_function" or node in known or not _is_view(node.target):
                continue
            given = node.all_input_nodes
            if len(given) == 1 and _value_of(given[0])[2] == _value_of(node)[2]:
                source = node_name(given[0])
                found[node_name(node)] = found.get(source, source)
        return found


def _operator_of(node: Any) -> Operator:
    shape, dtype, size = _value_of(node)
    target = _short_name(node.target)
    original = node.meta.get("original_aten")
    modules = list((node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}).values())
    return Operator(
        node_name(node), target, _short_name(original) if original is not None else target, shape, dtype, size,
        _is_view(node.target), place_of_stack(node.meta.get("stack_trace") or ""),
        module_name(modules[-1][0]) if modules else "", tuple(map(node_name, node.all_input_nodes)),
    )  # fmt: skip


def _short_name(target: Any) -> str:
    name = getattr(target, "__name__", None)
    # An overload's own name lacks its namespace.
    return str(target) if isinstance(target, torch._ops.OpOverload) or name is None else str(name)


def _is_view(target: Any) -> bool:
    """Whether the schema says that the result shares the memory of an argument, unwritten."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        # operator.getitem takes one of several results.
        return getattr(target, "__name__", "") == "getitem"
    returned = [result.alias_info for result in schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def _value_of(node: Any) -> tuple[tuple[int | str, ...], str, int]:
    """Shape, dtype and bytes of a node's result; of several results the first, and the bytes of all."""
    value = node.meta.get("val")
    tensors = [value] if isinstance(value, torch.Tensor) else []
    if isinstance(value, (tuple, list)):
        tensors = [part for part in value if isinstance(part, torch.Tensor)]
    if not tensors:
        return (), type(value).__name__, 0
    size = 0
    for tensor in tensors:
        size += product_of(tensor.shape) * tensor.element_size()
    return tuple(map(shown_size, tensors[0].shape)), dtype_name(tensors[0].dtype), size


def _loops_of(nodes: list[Any]) -> tuple[tuple[tuple[int | str, ...], tuple[int | str, ...]], ...]:
    """Each loop nest once: what it runs over, and what it reduces (``SchedulerNode.group``, torch 2.13)."""
    nests: dict[tuple[tuple[int | str, ...], tuple[int | str, ...]], None] = {}
    for node in nodes:
        _device, (outer, reduced) = node.group
        sizes = outer if isinstance(outer, (tuple, list)) else (outer,)
        inner = reduced if isinstance(reduced, (tuple, list)) else (reduced,)
        nests[tuple(map(shown_size, sizes)), tuple(map(shown_size, inner))] = None
    return tuple(nests)
