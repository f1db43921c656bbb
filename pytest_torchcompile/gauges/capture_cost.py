"""What it costs to capture a program: operators that AOTAutograd traces, with a limit at which tracing is given up.

Inductor's time grows with these operators, and each of its compiles takes much longer than such a count. A setting that
unrolls a loop, as ``allow_rnn`` does, is known by it before anybody has waited.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CaptureCost", "TracedBackend"]


@dataclass(frozen=True)
class CaptureCost:
    """What tracing the graphs of a program took."""

    operators: int
    """ATen operators that were traced, of the forward and of the backward pass; 0 where no graph was made."""
    seconds: float
    """Wall seconds in AOTAutograd."""
    given_up: bool
    """Whether the limit was met, so that there are more operators than that."""


class _TooMany(Exception):
    """Ends a trace that has more operators than the limit."""


class TracedBackend:
    """A backend for ``torch.compile``: torch's own ``aot_eager``, whose traced operators are counted.

    Uses ``torch.utils._python_dispatch.TorchDispatchMode`` below the tracer's own modes (torch 2.8 to 2.15).
    """

    def __init__(self, most: int | None = None) -> None:
        """``most``: operators after which a trace raises, so that torch takes the compile for failed."""
        self.most = most
        self._counting = _Counting(most)
        self._seconds = 0.0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph."""
        backend = torch._dynamo.lookup_backend("aot_eager")
        start = time.perf_counter()
        try:
            with self._counting:
                return backend(graph, inputs)  # type: ignore[arg-type]  # torch's type wants a list of tensors
        finally:
            self._seconds += time.perf_counter() - start

    @property
    def cost(self) -> CaptureCost:
        """Of all graphs so far."""
        return CaptureCost(self._counting.operators, self._seconds, self._counting.given_up)


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run below it."""

    supports_higher_order_operators = True

    def __init__(self, most: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most, self.operators, self.given_up = most, 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.most is not None and self.operators >= self.most:
            self.given_up = True
            raise _TooMany(f"more than {self.most} operators")
        self.operators += 1
        return func(*args, **(kwargs or {}))
