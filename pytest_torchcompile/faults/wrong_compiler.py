"""Planted faults of torch's own compiler: wrong lowerings, patterns, fusions, vectors and decompositions, while a block
runs. What is asked of them is not whether they are caught, but whether the right part and operator are named.

Private names of ``torch._inductor``, torch 2.13: what is planted in has no public ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["WRONG_COMPILERS", "WrongCompiler"]

Plant = Callable[[], AbstractContextManager[None]]


class Between(nn.Module):
    """An operation between two linear layers. (B, 16) -> (B, 8)."""

    def __init__(self, operation: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)
        self.operation = operation

    def forward(self, x: Tensor) -> Any:
        x = self.operation(self.norm(self.first(x)))
        return self.last(x)


@dataclass(frozen=True)
class WrongCompiler:
    """One fault, a model that meets it, and who is to be named."""

    name: str
    kind: str
    """``lowering``, ``pattern``, ``fusion``, ``vector`` or ``decomposition``."""
    operation: Callable[[Tensor], Any]
    """What the model does between its layers."""
    plant: Plant
    subsystem: str
    """Of torch's bisector."""
    word: str
    """In the name of the operator, or of those that are left."""
    backend: str = "inductor"
    """The first stage that shows it."""

    def build_model(self) -> nn.Module:
        """The same model each time."""
        torch.manual_seed(0)
        return Between(self.operation)

    def make_batch(self) -> Tensor:
        """The same (4, 16) each time."""
        torch.manual_seed(1)
        return torch.randn(4, 16)


def _aten(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


@contextlib.contextmanager
def _wrong_lowering(name: str, spoil: Callable[..., Any]) -> Iterator[None]:
    """``spoil(lowering, arguments...)`` is called in place of an operator's lowering."""
    from torch._inductor.lowering import lowerings

    operator = _aten(name)
    with mock.patch.dict(lowerings, {operator: partial(spoil, lowerings[operator])}):
        yield


def _shifted(lowering: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from torch._inductor.lowering import lowerings

    return lowerings[_aten("add.Tensor")](lowering(*args, **kwargs), 0.25)


def _swapped(lowering: Callable[..., Any], one: Any, other: Any, **kwargs: Any) -> Any:
    return lowering(other, one, **kwargs)


def _reversed(lowering: Callable[..., Any], parts: Any, *args: Any, **kwargs: Any) -> Any:
    return lowering(parts[::-1], *args, **kwargs)


@contextlib.contextmanager
def _dropping_pattern(passes: Callable[[], Any], target: Any) -> Iterator[None]:
    """A pattern in a pass that takes an operator of one input for one that does nothing."""
    from torch._inductor.pattern_matcher import CallFunction, KeywordArg, register_graph_pattern

    where = passes()
    before = {key: list(entries) for key, entries in where.patterns.items()}

    def drop(match: Any, x: Any) -> None:
        node = match.output_node()
        node.replace_all_uses_with(x)
        node.graph.erase_node(node)

    register_graph_pattern(CallFunction(target, KeywordArg("x")), pass_dict=where)(drop)
    try:
        yield
    finally:
        where.patterns.clear()
        where.patterns.update(before)


def _post_grad() -> Any:
    from torch._inductor.fx_passes import post_grad

    return post_grad.pass_patterns[1]


def _joint_graph() -> Any:
    from torch._inductor.fx_passes import joint_graph

    return joint_graph.pass_patterns[-1]


def _pre_grad() -> Any:
    from torch._inductor.fx_passes import pre_grad

    return pre_grad.efficient_conv_bn_eval_pass


@contextlib.contextmanager
def _wrong_pass(target: str) -> Iterator[None]:
    """Inductor's pass that drops assertions drops one operator too many."""
    from torch._inductor.fx_passes import post_grad

    theirs = post_grad.remove_assert_ops

    def remove(graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=_aten(target)):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        theirs(graph)

    with mock.patch.object(post_grad, "remove_assert_ops", remove):
        yield


@contextlib.contextmanager
def _wrong_when_fused(operator: str) -> Iterator[None]:
    """C++ for an operator is wrong in kernels that are made of several nodes."""
    from torch._inductor.codegen import cpp

    theirs = cpp.CppScheduling.codegen_node
    fused: list[bool] = [False]

    def codegen_node(self: Any, node: Any) -> Any:
        fused.append(len(node.get_nodes()) > 1)
        try:
            return theirs(self, node)
        finally:
            fused.pop()

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(cpp.CppScheduling, "codegen_node", codegen_node))
        for overrides in (cpp.CppOverrides, cpp.CppVecOverrides):
            patches.enter_context(_wrong_code(overrides, operator, lambda: fused[-1]))
        yield


@contextlib.contextmanager
def _wrong_vectors(operator: str) -> Iterator[None]:
    """C++ with vector instructions is wrong for an operator."""
    from torch._inductor.codegen import cpp

    with _wrong_code(cpp.CppVecOverrides, operator, lambda: True):
        yield


def _wrong_code(overrides: Any, operator: str, wrong: Callable[[], bool]) -> AbstractContextManager[Any]:
    right = getattr(overrides, operator)

    def code(x: Any) -> Any:
        text = right(x)
        # A vector is made of the number for each of its elements.
        return f"({text} + decltype({text})(0.25))" if wrong() else text

    return mock.patch.object(overrides, operator, staticmethod(code))


@contextlib.contextmanager
def _wrong_decomposition(name: str) -> Iterator[None]:
    """Inductor's table has a wrong decomposition of an operator."""
    from torch._inductor.decomposition import decompositions, fast_random_decomps

    operator = _aten(name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return decompositions_right(*args, **kwargs) + 0.25

    decompositions_right = decompositions[operator]
    # The table is copied once, and the copy kept.
    fast_random_decomps.cache_clear()
    try:
        with mock.patch.dict(decompositions, {operator: wrong}):
            yield
    finally:
        fast_random_decomps.cache_clear()


def _fault(kind: str, word: str, operation: Callable[[Tensor], Any], plant: Plant, subsystem: str,
           backend: str = "inductor") -> WrongCompiler:
    return WrongCompiler(f"{kind} of {word}", kind, operation, plant, subsystem, word, backend)


# One operation a line: the line is what has to be named.
WRONG_COMPILERS: Final = (
    _fault("lowering", "relu",
           lambda x: torch.relu(x) * 2,
           partial(_wrong_lowering, "relu.default", _shifted), "lowerings"),
    _fault("lowering", "sub",
           lambda x: x.square() - 3 * x,
           partial(_wrong_lowering, "sub.Tensor", _swapped), "lowerings"),
    _fault("lowering", "exp",
           lambda x: torch.softmax(x, -1) * 2,
           partial(_wrong_lowering, "exp.default", _shifted), "lowerings"),
    _fault("lowering", "tanh",
           lambda x: torch.tanh(x) + x,
           partial(_wrong_lowering, "tanh.default", _shifted), "lowerings"),
    _fault("lowering", "cat",
           lambda x: torch.cat([x[:, :16], x[:, 16:] * 2], 1),
           partial(_wrong_lowering, "cat.default", _reversed), "lowerings"),
    _fault("pattern", "neg",
           lambda x: torch.neg(x).exp(),
           partial(_dropping_pattern, _post_grad, torch.ops.aten.neg.default), "post_grad_passes"),
    _fault("pattern", "abs",
           lambda x: torch.abs(x) + 1,
           partial(_dropping_pattern, _joint_graph, torch.ops.aten.abs.default), "joint_graph_passes"),
    _fault("pattern", "sin",
           lambda x: torch.sin(x) + 1,
           partial(_dropping_pattern, _pre_grad, torch.sin), "pre_grad_passes"),
    _fault("pattern", "floor",
           lambda x: torch.floor(x * 4) + x,
           partial(_wrong_pass, "floor.default"), "post_grad_passes"),
    _fault("fusion", "softmax",
           lambda x: torch.softmax(x, -1) + x,
           partial(_wrong_when_fused, "exp"), "inductor_max_fusion_size"),
    _fault("fusion", "sigmoid",
           lambda x: torch.sigmoid(x) / torch.sigmoid(x).sum(-1, keepdim=True).add(9),
           partial(_wrong_when_fused, "sigmoid"), "inductor_max_fusion_size"),
    _fault("fusion", "cos",
           lambda x: torch.cos(x) / torch.cos(x).sum(-1, keepdim=True).add(9),
           partial(_wrong_when_fused, "cos"), "inductor_max_fusion_size"),
    _fault("vector", "erf",
           lambda x: torch.erf(x) + 1,
           partial(_wrong_vectors, "erf"), "inductor_cpp.simdlen"),
    _fault("decomposition", "silu",
           lambda x: functional.silu(x) * 2,
           partial(_wrong_decomposition, "silu.default"), "decomposition", "aot_eager_decomp_partition"),
)
