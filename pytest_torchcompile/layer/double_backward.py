"""Double backward: the derivative of a gradient, which AOTAutograd refuses when it is asked for.

The gradient itself is what compiled code computes. Only where somebody differentiates it, the captured graph is run
eagerly on the inputs of that very call, and both derivatives are taken of that. It is exact where the inputs are still
what they were and the graph draws and writes nothing; else it is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from pytest_torchcompile.layer.graph_effects import getter

if TYPE_CHECKING:
    from pytest_torchcompile.layer.guarded_model import Guard

__all__ = ["Differentiable", "differentiable_twice"]

_GIVEN: Final = "_torchcompile_given"
"""The attribute of an autograd node that holds what its call was given."""
_VERSION: Final = attrgetter("_version")
_REFUSED: Final = "torch.compile with aot_autograd does not support double backward"


class _Given(NamedTuple):
    """One call of a graph: its inputs, held so that no memory lives longer for it, and their versions."""

    graph: Differentiable
    inputs: list[Any]
    versions: list[int]
    """Of the tensors among the inputs, in their order."""

    def unchanged_inputs(self) -> list[Any] | None:
        """The inputs, if all are still there and none was written to."""
        inputs: list[Any] = []
        for held in self.inputs:
            value = held
            if isinstance(held, weakref.ref):
                value = held()
                if value is None:
                    return None
            inputs.append(value)
        versions = [value._version for value in inputs if isinstance(value, Tensor)]
        return inputs if versions == self.versions else None


class Differentiable:
    """A captured graph whose outputs all come from one compiled function of AOTAutograd."""

    def __init__(self, graph: Callable[..., Any], outputs: Sequence[tuple[int, int]], args: Sequence[Any]) -> None:
        """``outputs``: the place of each output that has a gradient, and its number in the compiled function.

        ``args`` of a run: Dynamo guards the type of each tensor and whether it needs a gradient, so that they are
        asked here once, and not of a hundred parameters in each run.
        """
        self.graph, self.outputs = graph, outputs
        self._first = outputs[0][0]
        tensors = [place for place, arg in enumerate(args) if isinstance(arg, Tensor)]
        self._tensors = getter(tensors)
        self._weak = [place for place in tensors if not _outlives_call(args[place])]
        self._autocast: list[tuple[str, bool, torch.dtype]] = []
        for kind in ("cpu", "cuda"):
            self._autocast.append((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)))

    @classmethod
    def of(cls, graph: Callable[..., Any], result: Any, args: Sequence[Any]) -> Differentiable | None:
        """``result``: what a compiled run of ``graph`` gave for ``args``.

        None where its gradients come from several places.
        """
        if not isinstance(result, (tuple, list)):
            return None
        nodes: set[Any] = set()
        outputs: list[tuple[int, int]] = []
        for place, output in enumerate(result):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                nodes.add(output.grad_fn)
                outputs.append((place, output.output_nr))
        if len(nodes) != 1 or not hasattr(nodes.pop(), "_forward_cls"):
            return None
        return cls(graph, outputs, args)

    def note(self, result: Any, args: Sequence[Any]) -> None:
        """Remember at the outputs of a call what it was given."""
        # In every call: one list and one C loop, however many parameters there are.
        held = list(args)
        for place in self._weak:
            held[place] = weakref.ref(args[place])
        versions = list(map(_VERSION, self._tensors(args)))
        setattr(result[self._first].grad_fn, _GIVEN, _Given(self, held, versions))

    @contextmanager
    def as_called(self) -> Iterator[None]:
        """Gradients on, and autocast as it was: Dynamo guards it, so it was the same in every call."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


def _outlives_call(tensor: Tensor) -> bool:
    """Whether it may be held: a parameter is held by its gradient's node anyway. Of others a weak reference is kept."""
    return type(tensor) is nn.Parameter and tensor.requires_grad


def differentiable_twice(function: Any, guard: weakref.ref[Guard]) -> Callable[..., Any]:
    """``function.backward`` of AOTAutograd's ``CompiledFunction``, but what it gives can be differentiated.

    The gradients of the outputs come one by one, or in one list (``boxed_grads_call``, torch 2.13). The node is the
    ``ctx``, and ``next_functions`` belong to its tensors, one by one (torch/_functorch/_aot_autograd/
    runtime_wrappers.py, torch 2.8 to 2.15).
    """
    once = function.backward

    def backward(ctx: Any, *grads: Any) -> Any:
        # Without create_graph nobody can differentiate it.
        if not torch.is_grad_enabled():
            return once(ctx, *grads)
        boxed = len(grads) == 1 and isinstance(grads[0], list)
        outer = list(grads[0]) if boxed else list(grads)
        with torch.no_grad():
            first = list(once(ctx, *grads))
        call = _call_behind(ctx, first, outer, guard)
        gradients = [first[place] for place in call.places]
        values = _Twice.apply(call, gradients, *call.inputs)  # type: ignore[no-untyped-call]
        for place, value in zip(call.places, values, strict=True):
            first[place] = value
        return tuple(first)

    return backward


@dataclass(frozen=True)
class _Call:
    """What is needed to compute the gradients of one call again."""

    guard: weakref.ref[Guard]
    places: tuple[int, ...]
    """Where the compiled function's gradients are tensors."""
    outer: tuple[Any, ...]
    """The gradients of its outputs, by number."""
    inputs: tuple[Tensor, ...]
    """What the gradients can be differentiated by: inputs that need one, in the order of places; then ``outer``."""
    args: tuple[Any, ...] = ()
    """The graph's inputs; where one is among ``inputs``, its number."""
    graph: Differentiable | None = None
    """None where it cannot be computed again."""


@dataclass(frozen=True)
class _Number:
    """Stands for one of the inputs that a gradient is taken by."""

    of: int


def _call_behind(node: Any, first: Sequence[Any], outer: Sequence[Any], guard: weakref.ref[Guard]) -> _Call:
    """The call whose gradients are ``first``, as its node remembers it."""
    edges = _edges(node)
    places = tuple(place for place in edges if isinstance(first[place], Tensor))
    tangents = tuple(grad for grad in outer if isinstance(grad, Tensor))
    given: _Given | None = getattr(node, _GIVEN, None)
    args = given.unchanged_inputs() if given is not None else None
    sources = [_index_of(edges[place], args or ()) for place in places]
    if given is None or args is None or None in sources:
        # Tensors that lead backward passes to the refusal.
        leads = tuple(torch.empty(0, requires_grad=True) for _ in places)
        return _Call(guard, places, tuple(outer), (*leads, *tangents))
    needed = tuple(args[source] for source in sources if source is not None)
    numbers = {id(tensor): _Number(number) for number, tensor in enumerate(needed)}
    numbered = tuple(numbers.get(id(arg), arg) for arg in args)
    return _Call(guard, places, tuple(outer), (*needed, *tangents), numbered, given.graph)


def _edges(node: Any) -> dict[int, tuple[Any, int]]:
    """Where the gradients of a node's inputs go, by place. ``next_functions`` leaves out what is no tensor."""
    needed = [place for place, needs in enumerate(node.needs_input_grad) if needs]
    followed = [edge for edge in node.next_functions if edge[0] is not None]
    return dict(zip(needed, followed, strict=True))


def _index_of(edge: tuple[Any, int], args: Sequence[Any]) -> int | None:
    """Which argument a gradient with this edge belongs to."""
    node, number = edge
    for place, arg in enumerate(args):
        if not isinstance(arg, Tensor) or not arg.requires_grad:
            continue
        # The edge of a leaf leads to its AccumulateGrad node, which holds the leaf itself.
        if arg.grad_fn is None:
            if getattr(node, "variable", None) is arg:
                return place
        elif arg.grad_fn is node and arg.output_nr == number:
            return place
    return None


class _Twice(torch.autograd.Function):
    """Gradients that compiled code has computed; their derivative is taken of the graph, run eagerly."""

    @staticmethod
    def forward(ctx: Any, call: _Call, values: Sequence[Tensor], *inputs: Tensor) -> Any:
        """Give the gradients as they are."""
        ctx.call = call
        ctx.save_for_backward(*inputs)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *second: Any) -> Any:
        """Compute the graph and its gradients again, differentiably, and differentiate them."""
        call: _Call = ctx.call
        guard, error = call.guard(), RuntimeError(_REFUSED)
        if guard is None:
            raise error
        # Refused here and not before: gradients may be differentiable and nobody differentiates them.
        if call.graph is None:
            why = ("the gradient of this step was differentiated, and the call cannot be computed again: it draws "
                   "random numbers, writes to its inputs, or they are gone or changed")
            guard.refuse(error, why, "backward")
        derivatives = _second_order(call, ctx.saved_tensors, second, torch.is_grad_enabled())
        guard.failed_backward(error)
        return (None, None, *derivatives)


def _second_order(call: _Call, inputs: Sequence[Tensor], second: Sequence[Any], further: bool) -> list[Any]:
    """The derivatives of a call's gradients by its inputs, given those by the gradients, ``second``."""
    graph = call.graph
    if graph is None:
        raise RuntimeError("asked for by a call that can be computed again alone")
    sources = len(call.places)
    with graph.as_called():
        # Views: a gradient by one input must not go through another one that was computed from it.
        views = [tensor.view_as(tensor) for tensor in inputs]
        outputs, tangents = _computed_again(call, graph, views)
    with torch.enable_grad():
        first = torch.autograd.grad(outputs, views[:sources], tangents, create_graph=True, allow_unused=True)
        wanted = [view for view in views if view.requires_grad]
        # Only of what depends on anything can a derivative be taken.
        differentiable = [pair for pair in zip(first, second, strict=True) if _depends(*pair)]
        derivatives: Sequence[Any] = [None] * len(wanted)
        if differentiable:
            gradients, weights = zip(*differentiable, strict=True)
            derivatives = torch.autograd.grad(gradients, wanted, weights, create_graph=further, allow_unused=True)
    # Derivatives were taken by those views alone that require one.
    remaining = iter(derivatives)
    return [next(remaining) if view.requires_grad else None for view in views]


def _computed_again(call: _Call, graph: Differentiable, views: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
    """The graph's outputs that have gradients, run eagerly on views of its inputs; and those gradients."""
    given = iter(views[len(call.places):])
    outer = [next(given) if isinstance(grad, Tensor) else None for grad in call.outer]
    args = [views[arg.of] if isinstance(arg, _Number) else arg for arg in call.args]
    result = graph.graph(*args)
    outputs: list[Any] = []
    tangents: list[Any] = []
    for place, number in graph.outputs:
        if outer[number] is not None:
            outputs.append(result[place])
            tangents.append(outer[number])
    return outputs, tangents


def _depends(first: Tensor | None, second: Tensor | None) -> bool:
    return first is not None and second is not None and first.requires_grad
