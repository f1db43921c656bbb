"""Kernels with their operators and with what they read and write. Plain data, no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["COLLECTIVE", "KINDS", "KernelCall", "Operator", "TensorAccess", "call_facts", "calls_that_move",
           "kernel_name", "readable_bytes", "readable_shape", "subgraph_text", "sum_bytes"]

KINDS: Final = {
    "pointwise": "generated: each element by itself",
    "reduction": "generated: elements are summed up or compared along a dimension",
    "template": "generated from a template, with operators fused to its end",
    "library": "a library computes it",
    "extern": "an operator is called as eager does",
}
"""What a kernel is, and what that means."""

COLLECTIVE: Final = "collective"
"""The library of what ranks do together, NCCL or gloo, and of the wait for it."""

_NAMESPACES: Final = re.compile(r"^torch\.ops\.|^extern_kernels\.")
"""What the generated code writes before the name of a library's kernel."""


@dataclass(frozen=True)
class TensorAccess:
    """A tensor in memory that a kernel reads or writes."""

    name: str
    """As the generated code calls it: ``buf3``, ``primals_1``."""
    shape: tuple[int | str, ...]
    """A size that the compiler keeps open is a text, like ``s0``."""
    dtype: str
    bytes: int
    """What the kernel touches of it, at the sizes of this call."""
    of: str = ""
    """The node of the graph whose result it is; empty for an input."""
    partly: bool = False
    """It is no result of that node yet: the sum behind a mean, or a copy in another layout."""
    overwritten: tuple[str, ...] = ()
    """Nodes whose results the kernel stored in the same place before: the zeros that are added to, say."""


@dataclass(frozen=True)
class Operator:
    """One node of the graph that Inductor was given."""

    node: str
    target: str
    """``aten.exp.default``."""
    original: str
    """The ATen operator that it was decomposed from: ``aten._softmax``; the same operator where it was not."""
    shape: tuple[int | str, ...]
    dtype: str
    bytes: int
    """Of its result, if that were written."""
    view: bool = False
    """Its result is another look at the same memory."""
    place: str = ""
    """``file:line`` of the user's code."""
    module: str = ""
    """The user's module that called it: ``blocks.0.attention``."""
    inputs: tuple[str, ...] = ()
    """Nodes whose results it takes."""


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel in a generated graph."""

    name: str
    kind: str
    """One of :data:`KINDS`."""
    compile_id: str
    graph: int
    """Which generated graph of the explanation, in order of time."""
    stage: str = ""
    """``forward``, ``backward`` or ``inference``."""
    library: str = ""
    """Whose: ``BLAS``, ``mkldnn``, ``SDPA``, ``convolution``, ``collective``, ``Triton by hand``, ``custom op``,
    ``ATen``; empty if generated."""
    operators: tuple[Operator, ...] = ()
    """What is computed, in the order of the graph."""
    reads: tuple[TensorAccess, ...] = ()
    writes: tuple[TensorAccess, ...] = ()
    kept_inside: tuple[Operator, ...] = ()
    """Results that never reach memory: fusion keeps them in registers, or in a buffer of the kernel's own."""
    loops: tuple[tuple[tuple[int | str, ...], tuple[int | str, ...]], ...] = ()
    """Of each loop nest the sizes that it runs over, and those that it reduces."""
    vectorised: bool | None = None
    """Whether the C++ uses vector instructions; None where the code does not tell."""
    parallel: bool | None = None
    """Whether the C++ has a parallel loop."""
    places: tuple[str, ...] = ()
    """``file:line`` of the user's code, in the order of the graph."""
    source: str = field(default="", repr=False)
    """The generated code; empty for library calls."""
    subgraph: str = ""
    """That it is called in, as ``true_graph_0``; empty for the graph itself."""
    called_by: tuple[str, ...] = ()
    """The operators that call the subgraph: ``cond``."""
    seconds: float | None = None
    """The median of some warm calls, with what Python takes to make one; None: it was not timed."""

    @property
    def in_branch(self) -> bool:
        """Nobody knows whether it runs: of the branches of ``torch.cond`` one does."""
        return "cond" in self.called_by

    @property
    def waits(self) -> bool:
        """It waits for a collective, and moves nothing itself."""
        return self.name.startswith("_c10d_functional.wait_tensor")

    @property
    def bytes_read(self) -> int:
        """All that it reads."""
        return sum_bytes(self.reads)

    @property
    def bytes_written(self) -> int:
        """All that it writes."""
        return sum_bytes(self.writes)

    @property
    def bytes_kept_inside(self) -> int:
        """What writing the intermediates would have cost, and reading them once."""
        return sum(operator.bytes for operator in self.kept_inside)


def calls_that_move(calls: Iterable[KernelCall]) -> list[KernelCall]:
    """Those that have each byte once: kernels of a subgraph, or the call of it, which has its inputs and outputs.

    For the branches of ``torch.cond`` the call stands, since one of them runs.
    """
    known = list(calls)
    callers = {name for call in known for name in call.called_by if not call.in_branch}
    moving = []
    for call in known:
        calls_subgraph = any(operator.target in callers for operator in call.operators)
        if not call.in_branch and not (call.kind == "extern" and calls_subgraph):
            moving.append(call)
    return moving


def subgraph_text(kernel: KernelCall) -> str:
    """Where a kernel is called that is not always, or not once; empty for one of the graph itself."""
    if kernel.in_branch:
        return f"in {kernel.subgraph}, one of the branches of which one runs"
    if kernel.subgraph:
        return f"in the subgraph {kernel.subgraph} of {', '.join(kernel.called_by) or 'the graph'}"
    return ""


def kernel_name(called: str) -> str:
    """The name of a kernel by what the generated code calls.

    >>> kernel_name("extern_kernels.addmm"), kernel_name("torch.ops.aten.sort.stable"), kernel_name("cpp_fused_add_0")
    ('addmm', 'aten.sort.stable', 'cpp_fused_add_0')
    """
    return _NAMESPACES.sub("", called)


def call_facts(call: KernelCall, counted: bool) -> dict[str, Any]:
    """What a report holds of a call: all but the code, and operators by their names alone.

    :param counted: whether its bytes are part of a sum (:func:`calls_that_move`).
    """
    return {
        "name": call.name, "kind": call.kind, "library": call.library, "where": subgraph_text(call), "counted": counted,
        "operators": [operator.target for operator in call.operators],
        "reads": [_tensor_facts(tensor) for tensor in call.reads],
        "writes": [_tensor_facts(tensor) for tensor in call.writes],
        "kept_inside": [{"of": operator.node, "bytes": operator.bytes} for operator in call.kept_inside],
        "vectorised": call.vectorised, "parallel": call.parallel, "lines": list(call.places),
    }  # fmt: skip


def _tensor_facts(tensor: TensorAccess) -> dict[str, Any]:
    return {"name": tensor.name, "of": tensor.of, "tensor": readable_shape(tensor.shape, tensor.dtype),
            "bytes": tensor.bytes}


def sum_bytes(tensors: tuple[TensorAccess, ...]) -> int:
    """Bytes of all of them."""
    return sum(tensor.bytes for tensor in tensors)


def readable_bytes(count: int) -> str:
    """A number of bytes with three digits and a unit.

    >>> readable_bytes(512), readable_bytes(9600), readable_bytes(3 << 20)
    ('512 B', '9.38 KiB', '3.00 MiB')
    """
    if count < 1000:
        return f"{count} B"
    size, unit = count / 1024, "KiB"
    for larger in ("MiB", "GiB"):
        if size >= 1000:
            size, unit = size / 1024, larger
    return f"{format(size, '#.3g').rstrip('.')} {unit}"


def readable_shape(shape: tuple[int | str, ...], dtype: str) -> str:
    """A tensor's type in short.

    >>> readable_shape((4, "s0"), "float32")
    'float32[4, s0]'
    """
    return f"{dtype}[{', '.join(map(str, shape))}]"
