"""The backend of a guarded model: what a compiled graph does when it raises.

Beside what the backend made, the captured graph itself is kept. A compiled graph that raises is run eagerly instead, on
the same inputs, if they are as they were: if it writes to nothing, or if it is its first run, before which what it
writes to was copied. Where eager raises as well, that is the user's exception, and goes through.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pytest_torchcompile.layer.backward import guard_backward
from pytest_torchcompile.layer.checkpointing import in_backward
from pytest_torchcompile.layer.effects import Before, Effects, effects_of
from pytest_torchcompile.layer.fallback import RAN, Guard, of_this_call

__all__ = ["Backend"]


class Backend:
    """``inner`` with a guard.

    Two of them are one to Dynamo, so that they share compiled code, if their backends are one and what their code
    takes for granted about hooks is the same.
    """

    def __init__(self, inner: Callable[..., Any], guard: Guard) -> None:
        self.inner = inner
        self.hook_guards = guard.hooks.guards
        self.guard = weakref.ref(guard)  # Dynamo's caches live longer than a model
        # Copied, for the frame evaluator asks backends for attributes in places where no Python code may run.
        for name in _ASKED:
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        """Compile a captured graph."""
        kept = _copy(graph)  # a backend may change what it is given
        try:
            compiled = self.inner(graph, example_inputs, **options)
        except Exception as error:
            if (guard := self.guard()) is not None:
                guard.refused = error
            raise
        return _run_of(_Graph(_written(compiled), kept, self.guard))

    def __eq__(self, other: object) -> bool:
        return (isinstance(other, Backend) and bool(self.inner == other.inner)
                and self.hook_guards == other.hook_guards)

    def __hash__(self) -> int:
        return hash(Backend)  # torch's own backends have no hash


def _written(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The code of a graph module whose code is written at its first call, as Dynamo does for what it can see.

    ``_LazyGraphModule`` (torch/fx/_lazy_graph_module.py; ``call_user_compiler`` in torch/_dynamo/output_graph.py, torch
    2.8 to 2.15); it saves two calls in each run, and nothing depends on it.
    """
    owner: Any = getattr(compiled, "__self__", None)
    if getattr(compiled, "__name__", "") != "_lazy_forward" or not hasattr(owner, "real_recompile"):
        return compiled
    owner.real_recompile()
    return owner.forward  # type: ignore[no-any-return]


def _copy(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same graph without what it remembers of tracing, which would hold memory."""
    nodes = torch.fx.Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    for node in nodes.nodes:
        node.meta.clear()
    return torch.fx.GraphModule(graph, nodes)


_ASKED: Final = ("__name__", "compiler_name", "get_compiler_config", "reset", "backend_ctx_ctor",
                 "_dynamo_backend_init")  # fmt: skip
"""What torch asks a backend for besides calling it (torch/_dynamo/eval_frame.py, repro/after_dynamo.py, torch 2.8 to
2.15)."""
_STOP: Final = "_StopRecomputationError"
"""How activation checkpointing ends a recompute that has computed enough (torch/utils/checkpoint.py)."""


class _Failed(Exception):
    """Stands for a compiled graph that has failed before."""


class _Graph:
    """One compiled graph, and the same graph uncompiled."""

    def __init__(self, compiled: Callable[..., Any], graph: torch.fx.GraphModule, guard: weakref.ref[Guard]) -> None:
        self.compiled, self.graph, self.guard = compiled, graph, guard
        self.fresh = True
        self.effects: Effects | None = None
        self.error: Exception | None = None
        """Why it is not run compiled any more."""

    def first(self, args: tuple[Any, ...]) -> Any:
        """The first run, the one that is most likely to fail."""
        before = self._before(args)
        try:
            result = self.compiled(*args)
        except Exception as error:
            failure = error
        else:
            self.fresh = False
            guard_backward((*pytree.tree_leaves(result), *args), self.guard)
            return result
        return self.mend(args, failure, before)

    def _before(self, args: tuple[Any, ...]) -> Before | None:
        self.effects = effects_of(self.graph, args)
        try:
            return None if self.effects is None else Before(self.effects, args)
        except Exception:  # no memory for copies
            return None

    def mend(self, args: tuple[Any, ...], error: Exception, before: Before | None = None) -> Any:
        """Run it eagerly in the place of a compiled run that raised; raise where that would be a guess."""
        guard = of_this_call() or self.guard()
        if guard is None or type(error).__name__ == _STOP:
            raise error
        began = self.error is None
        error = self.error or error
        if guard.trial:
            guard.note(error)
        if began and before is not None:
            before.restore()
        elif began and not self._harmless(args):
            self._try_on_copies(args)
            guard.refuse(error, self._why())
        if in_backward():
            self._try_on_copies(args)
            guard.failed(error)
        result = self.graph(*args)  # what this raises is the user's
        guard.failed(error, running=1)
        self.error, self.compiled, self.fresh = error, _always_failing, False
        return result

    def _harmless(self, args: tuple[Any, ...]) -> bool:
        if self.effects is None:
            self.effects = effects_of(self.graph, args)
        return self.effects is not None and self.effects.none

    def _why(self) -> str:
        effects = self.effects
        what = "writes to what cannot be told" if effects is None else " and ".join(
            text for text, holds in (("writes to its inputs", effects.mutated), ("draws random numbers", effects.draws))
            if holds)
        return ("a compiled graph raised while it ran, and not in its first run, before which copies are made; it "
                f"{what}, part of which may have happened. Give maybe_compile a sample batch, or run it uncompiled")

    def _try_on_copies(self, args: tuple[Any, ...]) -> None:
        """Raise what eager raises, which is the user's, without touching anything."""
        copies = [arg.detach().clone() if isinstance(arg, Tensor) else arg for arg in args]
        devices = {arg.device for arg in args if isinstance(arg, Tensor) and arg.device.type == "cuda"}
        with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
            self.graph(*copies)


def _always_failing(*args: Any) -> NoReturn:
    raise _Failed


def _run_of(state: _Graph) -> Callable[..., Any]:
    """What Dynamo calls: as little as possible around the compiled graph."""

    ran = RAN

    def run(*args: Any) -> Any:
        ran[0] += 1
        try:
            if not state.fresh:
                return state.compiled(*args)
        except Exception as error:
            failure = error
        else:
            return state.first(args)
        return state.mend(args, failure)  # outside of the handler: an exception of the user's has no other before it

    return run
