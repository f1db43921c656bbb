"""The backward pass of a compiled graph, which AOTAutograd compiles when it is first needed, in ``.backward()``.

A ``try`` around the forward pass never sees it fail. AOTAutograd keeps the backward graph; where compiling or running
it fails, that very graph is run eagerly on the same saved tensors, which is what ``aot_eager`` does.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from pytest_torchcompile.layer.double_backward import differentiable_twice
from pytest_torchcompile.layer.graph_effects import SMALL, Before, Effects, copied_before, effects_of
from pytest_torchcompile.state.random_operators import node_draws

if TYPE_CHECKING:
    from pytest_torchcompile.layer.guarded_model import Guard

__all__ = ["guard_backward"]

_NOTHING: Final = Before((), ())
_DEPTH = 3
"""Nodes between an output and the compiled function: AOTAutograd makes views and copies of what it returns."""


def guard_backward(tensors: Iterable[Any], guard: weakref.ref[Guard]) -> None:
    """Guard the backward pass of the compiled functions that ``tensors`` come from.

    ``CompiledFunction._backward_impl(ctx, all_args)``, looked up at each backward pass, and ``_lazy_backward_info``
    with ``bw_module`` (torch/_functorch/_aot_autograd/runtime_wrappers.py, torch 2.8 to 2.15). Where they are missing,
    or the backend does not use AOTAutograd, torch's exception goes through ``.backward()`` as it is.
    """
    nodes = {tensor.grad_fn for tensor in tensors if isinstance(tensor, Tensor) and tensor.grad_fn is not None}
    for _ in range(_DEPTH):
        for node in nodes:
            function = getattr(node, "_forward_cls", None)
            if "_backward_impl" in vars(function or object) and not hasattr(function, "_guarded"):
                _put_guard(function, guard)
        nodes = {after for node in nodes for after, _ in node.next_functions if after is not None}


def _put_guard(function: Any, guard: weakref.ref[Guard]) -> None:
    backward = _GuardedBackward(function, guard)
    function._guarded = backward
    function._backward_impl = staticmethod(backward.run)
    function.backward = staticmethod(differentiable_twice(function, guard))


class _GuardedBackward:
    """The backward pass of one compiled function."""

    def __init__(self, function: Any, guard: weakref.ref[Guard]) -> None:
        self.compiled, self.info, self.guard = function._backward_impl, function._lazy_backward_info, guard
        self.fresh = True
        self.failed = False
        self.effects: Effects | None = Effects()
        """What a run changes besides the gradients; None where nobody knows."""

    def run(self, ctx: Any, args: list[Any]) -> Any:
        """What ``_backward_impl`` does; ``args`` are taken away while compiled code runs."""
        if self.failed:
            return self._run_eagerly(args)
        if self.fresh:
            return self._run_first(ctx, args)
        count = len(args)
        before = self._copied_before(args)
        try:
            return self.compiled(ctx, args)
        except Exception as error:
            failure = error
        # Compiled code takes its arguments away when it begins: if all are there, it has not.
        remaining = args if len(args) == count else None
        return self._run_instead(remaining, failure, before)

    def _run_first(self, ctx: Any, args: list[Any]) -> Any:
        """The first run compiles, and is the one that is most likely to fail."""
        # Held once, for one step; in every step that would keep activations alive longer.
        held = list(args)
        if not self._is_harmless():
            self.effects = None
            if self._module is not None:
                self.effects = effects_of(self._module, args)
        before = self._copied_before(args)
        began = time.perf_counter()
        try:
            result = self.compiled(ctx, args)
        except Exception as error:
            failure = error
        else:
            self._note_seconds(time.perf_counter() - began)
            self.fresh = False
            return result
        return self._run_instead(held, failure, before)

    def _copied_before(self, args: list[Any]) -> Before | None:
        """What a run is about to change. Nearly always nothing."""
        if self.effects is not None and self.effects.harmless:
            return _NOTHING
        if self.fresh:
            return copied_before(self.effects, args)
        return copied_before(self.effects, args, SMALL)

    def _note_seconds(self, seconds: float) -> None:
        """The first run compiles first, which is nearly all of it."""
        guard = self.guard()
        if guard is not None:
            guard.seconds += seconds

    def _run_instead(self, args: list[Any] | None, error: Exception, before: Before | None) -> Any:
        guard = self.guard()
        if guard is None:
            raise error
        # Asked first: where it is raised nothing need be run again.
        if guard.under_test or guard.attempt.config.fail_policy == "raise":
            guard.failed_backward(error)
        if args is None or self._module is None or before is None:
            guard.refuse(error, "its compiled backward pass raised while it ran. The gradients of this step are "
                                "incomplete: drop them, and give maybe_compile a sample batch", "backward")
        else:
            before.restore()
        try:
            result = self._run_eagerly(args)
        except Exception:
            raise error from None
        self.failed = True
        guard.failed_backward(error)
        return result

    @property
    def _module(self) -> Any:
        return getattr(self.info, "bw_module", None)

    def _is_harmless(self) -> bool:
        """Whether it can run again after it has begun: it draws nothing and writes to nothing."""
        if self._module is None:
            return True
        for node in self._module.graph.nodes:
            operator = node.target
            if node.op != "call_function" or not isinstance(operator, torch._ops.OpOverload):
                continue
            if operator._schema.is_mutable or node_draws(node):
                return False
        return True

    def _run_eagerly(self, args: Any) -> Any:
        """Autocast is part of the graph already; AOTAutograd turns it off as well."""
        with torch._C._DisableAutocast():
            return self._module(*args)
