"""Tape: what random operators drew in the eager run, to be replayed in the float64 one."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_torchcompile.oracle.units import unit_of

__all__ = ["Replay", "Tape"]


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the eager run: ``record(model, model, batch, mode=tape)``.

    ``rand_like`` and ``bernoulli(tensor)`` consume the generator differently in float64, so that equal seeds
    don't draw equal numbers across dtypes; replaying does. The tape also notes the largest unit roundoff of
    any operator's result, which shows an autocast inside the model.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[tuple[str, torch.Tensor]] = []
        self.unit: float | None = None
        self._dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator; keep what it drew."""
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if isinstance(first, torch.Tensor) and first.dtype not in self._dtypes:
            self._dtypes.add(first.dtype)
            if first.is_floating_point() or first.is_complex():
                self.unit = max(self.unit or 0.0, unit_of(first.dtype))
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            drawn = out[1] if func._schema.name == "aten::native_dropout" else out
            if isinstance(drawn, torch.Tensor):
                self.draws.append((func._schema.name, drawn.detach().clone()))
        return out


class Replay:
    """Hands the draws of a tape out again, operator by operator, in their order."""

    def __init__(self, tape: Tape | None) -> None:
        self._left: dict[str, deque[torch.Tensor]] = defaultdict(deque)
        for name, drawn in tape.draws if tape is not None else ():
            self._left[name].append(drawn)

    def draw(self, func: Callable[..., Any], args: tuple[Any, ...], wide: torch.dtype) -> Any:
        """What the random operator ``func`` drew then, or ``None`` if the tape has nothing that fits."""
        schema = func._schema  # type: ignore[attr-defined]
        left = self._left.get(schema.name)
        if not left:
            return None
        like = args[0] if args and isinstance(args[0], torch.Tensor) else None
        writes = bool(schema.arguments) and schema.arguments[0].alias_info is not None
        if like is not None and schema.name != "aten::multinomial" and like.shape != left[0].shape:
            return None
        drawn = left.popleft()
        if schema.name == "aten::native_dropout" and like is not None:
            p = args[1]
            return like * drawn * (1.0 / (1.0 - p) if p < 1 else 0.0), drawn.clone()
        drawn = drawn.to(wide) if drawn.is_floating_point() else drawn
        if writes and like is not None:
            return like.copy_(drawn)
        return drawn.clone()
