"""StateSnapshot: a module's parameters, buffers and training flags, to be put back in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pytest_torchcompile.state.attributes import Holdings

__all__ = ["StateSnapshot"]


class StateSnapshot:
    """Remember a module's tensors and training flags; :meth:`restore` puts them back in place.

    The tensor objects stay the ones that compiled code has guarded on: values are copied into them, and
    where a call has replaced, added or deleted a parameter or buffer, the object of the snapshot returns.
    Tensors in attributes, and in lists, dicts and objects there, are remembered too; counters and flags are not.
    """

    def __init__(self, module: torch.nn.Module | None) -> None:
        self._modules = [] if module is None else list(module.modules())
        self._training = [part.training for part in self._modules]
        self._parameters = [dict(part._parameters) for part in self._modules]
        self._buffers = [dict(part._buffers) for part in self._modules]
        tables: list[Mapping[str, torch.Tensor | None]] = [*self._parameters, *self._buffers]
        held = {id(t): t for table in tables for t in table.values() if t is not None}
        self._holdings = Holdings(module)
        self._saved = [(t, t.detach().clone(), t.requires_grad) for t in held.values()]

    def restore(self) -> None:
        """Copy the remembered values back, drop all gradients, set the training flags again."""
        for part, training, parameters, buffers in zip(
            self._modules, self._training, self._parameters, self._buffers, strict=True
        ):
            if part.training != training:
                part.training = training
            _refill(part._parameters, parameters)
            _refill(part._buffers, buffers)
        self._holdings.restore()
        with torch.no_grad():
            for tensor, value, requires_grad in self._saved:
                if tensor.requires_grad != requires_grad:
                    # a buffer that a call has tied to a graph (`self.cache = cache + x` written in place)
                    tensor.detach_() if not tensor.is_leaf else tensor.requires_grad_(requires_grad)
                tensor.copy_(value)
                if tensor.is_leaf:
                    tensor.grad = None


def _refill(table: dict[str, Any], kept: Mapping[str, torch.Tensor | None]) -> None:
    if list(table) == list(kept) and all(table[name] is kept[name] for name in kept):
        return
    table.clear()
    table.update(kept)
