"""The backend of a guarded model: what a compiled graph does when it raises.

Beside what the backend made, the captured graph itself is kept. A compiled graph that raises is run eagerly instead, on
the same inputs, if they are as they were: if it writes to nothing, or if what it writes to was copied before. It is
copied before the first run, and before each where it is little: random states and statistics, not caches. Where eager
raises as well, that is the user's exception, and goes through.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pytest_torchcompile.layer.backward import guard_backward
from pytest_torchcompile.layer.double_backward import Differentiable
from pytest_torchcompile.layer.graph_effects import SMALL, Before, Effects, Rewinding, copied_before, effects_of
from pytest_torchcompile.layer.guarded_model import RAN, Guard, guard_of_this_call
from pytest_torchcompile.layer.later_calls import in_backward

__all__ = ["GuardedBackend"]


class GuardedBackend:
    """``inner`` with a guard.

    Two of them are one to Dynamo, so that they share compiled code, if their backends are one and what their code
    takes for granted about hooks is the same.
    """

    def __init__(self, inner: Callable[..., Any], guard: Guard) -> None:
        self.inner = inner
        self.hook_guards = guard.hooks.guards
        # Dynamo's caches live longer than a model.
        self.guard = weakref.ref(guard)
        # Copied, for the frame evaluator asks backends for attributes in places where no Python code may run.
        for name in _ASKED:
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        """Compile a captured graph."""
        # Before the backend, which may change what it is given.
        original, fixed = _copy_of(graph), _fixed_places(graph)
        try:
            compiled = self.inner(graph, example_inputs, **options)
        except Exception as error:
            guard = self.guard()
            if guard is not None:
                guard.backend_error = error
            raise
        return _runner_of(_GuardedGraph(_written_out(compiled), original, self.guard, fixed))

    def __eq__(self, other: object) -> bool:
        return (isinstance(other, GuardedBackend) and bool(self.inner == other.inner)
                and self.hook_guards == other.hook_guards)

    def __hash__(self) -> int:
        # Torch's own backends have no hash.
        return hash(GuardedBackend)


def _fixed_places(graph: torch.fx.GraphModule) -> frozenset[int]:
    """The inputs without dynamic sizes: where Dynamo traced with a symbol, another call may have another size.

    The example inputs do not tell, for they are the real tensors of the first call. ``meta["example_value"]`` of a
    captured graph's placeholders does (``wrap_fx_proxy`` in torch/_dynamo/variables/builder.py, torch 2.8 to 2.15).
    """
    fixed: set[int] = set()
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for place, node in enumerate(placeholders):
        traced = node.meta.get("example_value")
        # Of a dynamic size the type is SymInt.
        if isinstance(traced, Tensor) and set(map(type, traced.shape)) <= {int}:
            fixed.add(place)
    return frozenset(fixed)


def _written_out(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The code of a graph module whose code is written at its first call, as Dynamo does for what it can see.

    ``_LazyGraphModule`` (torch/fx/_lazy_graph_module.py; ``call_user_compiler`` in torch/_dynamo/output_graph.py, torch
    2.8 to 2.15); it saves two calls in each run, and nothing depends on it.
    """
    owner: Any = getattr(compiled, "__self__", None)
    if getattr(compiled, "__name__", "") != "_lazy_forward" or not hasattr(owner, "real_recompile"):
        return compiled
    owner.real_recompile()
    return owner.forward  # type: ignore[no-any-return]


def _copy_of(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
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


class _FailedBefore(Exception):
    """Stands for a compiled graph that has failed before."""


class _GuardedGraph:
    """One compiled graph, and the same graph uncompiled."""

    def __init__(
        self,
        compiled: Callable[..., Any],
        graph: torch.fx.GraphModule,
        guard: weakref.ref[Guard],
        fixed: frozenset[int],
    ) -> None:
        """``fixed``: the places of inputs that have the same shape in every run."""
        self.compiled, self.graph, self.guard = compiled, graph, guard
        self.fresh = True
        self.plain = False
        """A run is the compiled code alone."""
        self.effects: Effects | None = None
        self.fixed = fixed
        self.rewinding: Rewinding | None = None
        """Copies what a run changes, if that is little."""
        self.differentiable: Differentiable | None = None
        """Remembers what a run was given, for the derivative of its gradients."""
        self.error: Exception | None = None
        """Why it is not run compiled any more."""

    def run_first(self, args: tuple[Any, ...]) -> Any:
        """The first run, the one that is most likely to fail."""
        # However large: it is one run, and what fails mostly fails in it.
        self.effects = effects_of(self.graph, args)
        before = copied_before(self.effects, args)
        try:
            result = self.compiled(*args)
        except Exception as error:
            failure = error
        else:
            self.fresh = False
            # Only a run shows which autograd nodes lead to the compiled function.
            guard_backward((*pytree.tree_leaves(result), *args), self.guard)
            self._prepare_further_runs(args, result)
            self.plain = self.rewinding is None and self.differentiable is None
            return result
        return self.run_instead(args, failure, before)

    def _prepare_further_runs(self, args: tuple[Any, ...], result: Any) -> None:
        """Decide what further runs need besides the compiled code, now that one of them has gone well."""
        effects = self.effects
        if effects is None:
            return
        if effects.harmless:
            self.differentiable = Differentiable.of(self.graph, result, args)
            self._note(args, result)
        elif effects.written_bytes(args) <= SMALL:
            self.rewinding = Rewinding(effects, args, self.fixed)

    def run_again(self, args: tuple[Any, ...]) -> Any:
        """A further run: taken back if it fails, and its inputs remembered."""
        copied = self.rewinding.begin(args) if self.rewinding is not None else None
        try:
            result = self.compiled(*args)
        except Exception as error:
            failure = error
        else:
            if self.rewinding is not None:
                self.rewinding.end(copied)
            self._note(args, result)
            return result
        before = copied.before() if copied is not None else None
        return self.run_instead(args, failure, before)

    def _note(self, args: tuple[Any, ...], result: Any) -> None:
        if self.differentiable is not None:
            self.differentiable.note(result, args)

    def run_instead(self, args: tuple[Any, ...], error: Exception, before: Before | None = None) -> Any:
        """Run it eagerly in the place of a compiled run that raised; raise where that would be a guess.

        ``before``: copies of what the compiled run may have changed, if there are any.
        """
        # Equal models share compiled code: the call's own guard has to know, not that of whom the code was made for.
        guard = guard_of_this_call() or self.guard()
        if guard is None or type(error).__name__ == _STOP:
            raise error
        began = self.error is None
        # A graph that has failed before is not begun again: then the first error is the cause.
        error = self.error or error
        if guard.under_test:
            guard.note(error)
        if began:
            self._take_back(args, error, before, guard)
        # There a recompute may be under way, for which the guard refuses; but the user's own error comes first.
        if in_backward():
            self._try_on_copies(args)
            guard.failed(error)
        # What this raises is the user's.
        result = self.graph(*args)
        guard.failed(error, running=1)
        self.error, self.compiled, self.plain = error, _always_failing, True
        return result

    def _take_back(self, args: tuple[Any, ...], error: Exception, before: Before | None, guard: Guard) -> None:
        """Make good what a run that ended with ``error`` has written; raises where nobody knows how."""
        if before is not None:
            before.restore()
        elif not self._is_harmless(args):
            # The user's own error comes first here too.
            self._try_on_copies(args)
            guard.refuse(error, self._why_not_again(args))

    def _is_harmless(self, args: tuple[Any, ...]) -> bool:
        if self.effects is None:
            self.effects = effects_of(self.graph, args)
        return self.effects is not None and self.effects.harmless

    def _why_not_again(self, args: tuple[Any, ...]) -> str:
        if self.effects is None:
            what = "writes to what cannot be told"
        else:
            size = self.effects.written_bytes(args) / 2**20
            what = f"writes to {size:.1f} MiB of its inputs, of which no copy is made before each run"
        return (f"a compiled graph raised while it ran; it {what}, and part of that may have happened. "
                "Give maybe_compile a sample batch, or run it uncompiled")

    def _try_on_copies(self, args: tuple[Any, ...]) -> None:
        """Raise what eager raises, which is the user's, without touching anything."""
        copies = list(args)
        devices: set[torch.device] = set()
        for place, arg in enumerate(args):
            if isinstance(arg, Tensor):
                copies[place] = arg.detach().clone()
                if arg.device.type == "cuda":
                    devices.add(arg.device)
        with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
            self.graph(*copies)


def _always_failing(*args: Any) -> NoReturn:
    raise _FailedBefore


def _runner_of(state: _GuardedGraph) -> Callable[..., Any]:
    """What Dynamo calls: as little as possible around the compiled graph."""

    ran = RAN

    def run(*args: Any) -> Any:
        ran[0] += 1
        try:
            if state.plain:
                return state.compiled(*args)
        except Exception as error:
            failure = error
        else:
            return state.run_first(args) if state.fresh else state.run_again(args)
        # Outside of the handler: an exception of the user's has no other before it.
        return state.run_instead(args, failure)

    return run
