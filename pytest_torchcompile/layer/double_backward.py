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

from pytest_torchcompile.layer.copies import getter

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

    def tensors(self) -> list[Any] | None:
        """The inputs, if all are still there and none was written to."""
        found = [held() if isinstance(held, weakref.ref) else held for held in self.inputs]
        for held, value in zip(self.inputs, found, strict=True):
            if isinstance(held, weakref.ref) and value is None:
                return None
        versions = [value._version for value in found if isinstance(value, Tensor)]
        return found if versions == self.versions else None


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
        self._weak = [place for place in tensors if not _outlives(args[place])]
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                          for kind in ("cpu", "cuda")]

    @classmethod
    def of(cls, graph: Callable[..., Any], result: Any, args: Sequence[Any]) -> Differentiable | None:
        """``result``: what a compiled run of ``graph`` gave for ``args``.

        None where its gradients come from several places.
        """
        if not isinstance(result, (tuple, list)):
            return None
        tensors = [(place, out) for place, out in enumerate(result) if isinstance(out, Tensor)]
        graded = [(place, out) for place, out in tensors if out.grad_fn is not None]
        nodes = {out.grad_fn for _, out in graded}
        if len(nodes) != 1 or not hasattr(nodes.pop(), "_forward_cls"):
            return None
        return cls(graph, [(place, out.output_nr) for place, out in graded], args)

    def note(self, result: Any, args: Sequence[Any]) -> None:
        """Remember at the outputs of a call what it was given."""
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


def _outlives(tensor: Tensor) -> bool:
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
        if not torch.is_grad_enabled():  # no create_graph: nobody can differentiate it
            return once(ctx, *grads)
        outer = list(grads[0]) if len(grads) == 1 and isinstance(grads[0], list) else list(grads)
        with torch.no_grad():
            first = list(once(ctx, *grads))
        call = _Call.of(ctx, first, outer, guard)
        values = _Twice.apply(call, [first[place] for place in call.places], *call.inputs)  # type: ignore[no-untyped-call]
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

    @classmethod
    def of(cls, node: Any, first: Sequence[Any], outer: Sequence[Any], guard: weakref.ref[Guard]) -> _Call:
        edges = _edges(node)
        places = tuple(place for place in edges if isinstance(first[place], Tensor))
        tangents = tuple(grad for grad in outer if isinstance(grad, Tensor))
        given = getattr(node, _GIVEN, None)
        args = given.tensors() if given is not None else None
        sources = [_index_of(edges[place], args or ()) for place in places]
        if given is None or args is None or None in sources:
            leads = tuple(torch.empty(0, requires_grad=True) for _ in places)  # backward passes lead to the refusal
            return cls(guard, places, tuple(outer), (*leads, *tangents))
        needed = tuple(args[source] for source in sources if source is not None)
        numbers = {id(tensor): _Number(number) for number, tensor in enumerate(needed)}
        return cls(guard, places, tuple(outer), (*needed, *tangents),
                   tuple(numbers.get(id(arg), arg) for arg in args), given.graph)


@dataclass(frozen=True)
class _Number:
    """Stands for one of the inputs that a gradient is taken by."""

    of: int


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
        if call.graph is None:
            why = ("the gradient of this step was differentiated, and the call cannot be computed again: it draws "
                   "random numbers, writes to its inputs, or they are gone or changed")
            guard.refuse(error, why, "backward")
        found = _second_order(call, ctx.saved_tensors, second, torch.is_grad_enabled())
        guard.failed_backward(error)
        return (None, None, *found)


def _second_order(call: _Call, inputs: Sequence[Tensor], second: Sequence[Any], further: bool) -> list[Any]:
    graph, count = call.graph, len(call.places)
    if graph is None:
        raise RuntimeError("asked for by a call that can be computed again alone")
    with graph.as_called():
        # Views: a gradient by one input must not go through another one that was computed from it.
        views = [tensor.view_as(tensor) for tensor in inputs]
        tangents = iter(views[count:])
        outer = [next(tangents) if isinstance(grad, Tensor) else None for grad in call.outer]
        result = graph.graph(*[views[arg.of] if isinstance(arg, _Number) else arg for arg in call.args])
        outs = [(result[place], outer[number]) for place, number in graph.outputs if outer[number] is not None]
    with torch.enable_grad():
        first = torch.autograd.grad([out for out, _ in outs], views[:count], [grad for _, grad in outs],
                                    create_graph=True, allow_unused=True)
        pairs = [(mine, given) for mine, given in zip(first, second, strict=True) if _depends(mine, given)]
        wanted = [view for view in views if view.requires_grad]
        found = iter(torch.autograd.grad([mine for mine, _ in pairs], wanted, [given for _, given in pairs],
                                         create_graph=further, allow_unused=True) if pairs else [None] * len(wanted))
    return [next(found) if view.requires_grad else None for view in views]


def _depends(first: Tensor | None, second: Tensor | None) -> bool:
    return first is not None and second is not None and first.requires_grad
