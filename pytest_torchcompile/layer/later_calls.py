"""What later calls of a compiled model may bring: hooks that are new, and forwards that are run once more.

Hooks: a new one is noticed at the next call, by one number. Dynamo traces the hooks that a module has, and by default
puts no guard on a module that has none (``torch._dynamo.config.skip_nnmodule_hook_guards``): a hook that is registered
later is silently left out. A guard on each module costs 0.3 to 0.5 microseconds at every call. So there is none at
first: torch numbers all hooks of the process in one row, and as long as that number stands still, no hook is new. Where
a new one belongs to the model, its code is compiled again, and from then on with those guards; then Dynamo itself
notices every hook that comes or goes.

Activation checkpointing: forward and recompute must be the same code. A recompute that runs eagerly where the forward
ran compiled saves other tensors and draws other random numbers, and may give wrong gradients without an error. So it is
counted which compiled calls may yet be recomputed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

__all__ = ["HookGuards", "Hooks", "Outstanding", "guards_on_hooks", "in_backward", "need_gradient", "saving"]

_TABLES: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Where a module keeps its hooks, by the number of their handle (torch/nn/modules/module.py, torch 2.8 to 2.15)."""
_GLOBAL_TABLES: Final = tuple("_global" + name for name in _TABLES)
"""Where hooks for every module of the process are kept. Dynamo puts no guard on them, whatever it is told."""


@dataclass(frozen=True)
class HookGuards:
    """What compiled code checks or takes for granted about hooks; code is shared only where this is equal."""

    each_module: bool = False
    """Every module without hooks is guarded to have none."""
    latest_global: int = -1
    """The number of the latest hook for all modules that was there when the code was traced."""


class Hooks:
    """The hooks of the modules that are traced into one compiled model."""

    def __init__(self, modules: Callable[[], Sequence[tuple[str, nn.Module]]]) -> None:
        """``modules`` lists the traced modules by name, whenever it is asked."""
        self._modules = modules
        self._known: Sequence[tuple[str, nn.Module]] | None = None
        self._renewals: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self.seen = RemovableHandle.next_id
        """The number that the next hook of the process had when this was last asked."""
        # A code object's compiled entries are shared by equal models. One that has hooks must not use an entry that
        # was made for one without, so it begins with the guards.
        has_hooks = any(table for _, table in self._hook_tables())
        self.guards = HookGuards(has_hooks, _latest_global())

    def look_again(self) -> None:
        """Code was compiled, perhaps for modules that were not there before."""
        self._known = None

    def on_change(self, renew: Callable[[], object]) -> None:
        """Call ``renew`` when code has to be compiled again, with other :attr:`guards`."""
        self._renewals.append(renew)

    def notice_new(self) -> str:
        """Called when hooks were registered somewhere: the new one that traced modules run, in words, or ''."""
        with self._lock:
            # First, so that a hook registered meanwhile is noticed at the next call.
            before, self.seen = self.seen, RemovableHandle.next_id
            new_hook = self._new_hook(before)
            if not new_hook:
                return ""
            guards = HookGuards(True, max(self.guards.latest_global, _latest_global()))
            # Else Dynamo's own guards notice it.
            if guards == self.guards:
                return ""
            self.guards = guards
            for renew in self._renewals:
                renew()
            return new_hook

    def _new_hook(self, before: int) -> str:
        for where, table in self._hook_tables():
            for number, hook in table.items():
                if isinstance(number, int) and number >= before:
                    name = getattr(hook, "__qualname__", type(hook).__name__)
                    return f"the hook {name} is new on {where}"
        return ""

    def _hook_tables(self) -> Iterator[tuple[str, Mapping[Any, Any]]]:
        if self._known is None:
            self._known = self._modules()
        for name, module in self._known:
            own = vars(module)
            for kind in _TABLES:
                table = own.get(kind)
                if table:
                    yield f"{name or 'the model'} ({type(module).__name__})", table
        for kind in _GLOBAL_TABLES:
            yield "every module of the process", getattr(nn.modules.module, kind, {})


def _latest_global() -> int:
    latest = -1
    for kind in _GLOBAL_TABLES:
        latest = max(latest, *getattr(nn.modules.module, kind, {}), -1)
    return latest


@contextlib.contextmanager
def guards_on_hooks() -> Iterator[None]:
    """Inside of it Dynamo compiles guards on modules without hooks too.

    ``torch._dynamo.config.skip_nnmodule_hook_guards`` and ``convert_frame.compile_lock``, without which two threads
    could leave each other's setting behind (torch 2.8 to 2.15).
    """
    from torch._dynamo import convert_frame

    with convert_frame.compile_lock, torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        yield


# -------------------------------------------------------------------------------------------------------- checkpointing
saving = torch._C._autograd._top_saved_tensors_default_hooks
"""``saving(True)``: the hooks for saved tensors in force, or None. ``torch.utils.checkpoint`` puts some around the
forward and the recompute of its non-reentrant variant (torch 2.8 to 2.15)."""


def in_backward() -> bool:
    """Is this thread inside a backward pass? (``torch._C._current_graph_task_id``, torch 2.8 to 2.15)."""
    return torch._C._current_graph_task_id() != -1


class _OwnCall(threading.local):
    recomputable = False
    ran_before = 0


class Outstanding:
    """Compiled calls of one model that may yet be recomputed."""

    def __init__(self) -> None:
        self.count = 0
        self.mine = _OwnCall()
        """About the call that this thread is in."""
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], ran: int) -> Iterator[None]:
        """Around a call; ``ran``: how many compiled graphs have run in this process."""
        recompute, mine = in_backward(), self.mine
        recomputable = not recompute and _will_be_recomputed(args, kwargs)
        with self._lock:
            if recomputable:
                self.count += 1
            elif recompute and self.count:
                # It is the recompute of one of them.
                self.count -= 1
        # Calls of one model may nest.
        outer = mine.recomputable, mine.ran_before
        mine.recomputable, mine.ran_before = recomputable, ran
        try:
            yield
        finally:
            mine.recomputable, mine.ran_before = outer

    def why_not_eager(self, ran: int) -> str:
        """Why this thread's call must not go on eagerly, or ''; ``ran`` as for :meth:`call`."""
        if in_backward():
            return ("it was called in a backward pass, where activation checkpointing recomputes a forward pass that "
                    "ran compiled")
        others = self.count - self.mine.recomputable
        if others:
            return (f"{others} earlier call(s) ran compiled under activation checkpointing (or other hooks for saved "
                    "tensors) and may yet be recomputed")
        if self.mine.recomputable and ran > self.mine.ran_before:
            return "part of this call has run compiled already, and activation checkpointing will recompute all of it"
        return ""


def _will_be_recomputed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Hooks for saved tensors are in force, or gradients are off for tensors that need them (the reentrant variant)."""
    return saving(True) is not None or (not torch.is_grad_enabled() and need_gradient(args, kwargs))


def need_gradient(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor among the arguments requires a gradient. Asked at every call without gradients: kept plain."""
    for value in args:
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return any(isinstance(value, Tensor) and value.requires_grad for value in kwargs.values()) if kwargs else False
