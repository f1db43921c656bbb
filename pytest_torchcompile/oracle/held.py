"""Held: outputs that somebody keeps while the model is called again. Do they stay what they were?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytest_torchcompile.oracle.leaf import Leaf
from pytest_torchcompile.oracle.ownership import run_theirs
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.oracle.shared_memory import alias_pairs
from pytest_torchcompile.state.bits import same_bits
from pytest_torchcompile.state.paths import leaves_of

__all__ = ["Held", "later"]


class Held:
    """Keeps the outputs of the last call, and asks after each further call what became of them."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, torch.Tensor]] = []
        self._values: dict[str, Any] = {}
        self._new: list[tuple[str, torch.Tensor]] = []

    def holding(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` itself, with its output kept."""

        def holding(*args: Any, **kwargs: Any) -> Any:
            self._new = []
            output = run_theirs(call, *args, **kwargs)
            self._new = [(f"output{path}", leaf.detach()) for path, leaf in leaves_of(output)[0]
                         if isinstance(leaf, torch.Tensor)]
            return output

        return holding

    def after(self, recording: Recording) -> dict[str, str]:
        """What the call that ``recording`` is of did to the outputs of the one before: name to a key of ``_TEXTS``."""
        others = [(f"{name} before", tensor) for name, tensor in self._kept]
        found = {other.removesuffix(" before"): "shared" for _, other in alias_pairs(self._new, others)
                 if other.endswith(" before")}
        found |= {name: "changed" for name, tensor in self._kept if not _still(tensor, self._values[name])}
        self._kept, self._new = self._new, []
        self._values = {name: item.value for name, item in recording.outputs.items()}
        return found


def _still(tensor: torch.Tensor, value: Any) -> bool:
    try:
        return not isinstance(value, torch.Tensor) or same_bits(tensor, value)
    except RuntimeError:  # an output of a CUDA graph that has run again: torch refuses to read it, nobody is misled
        return True


_TEXTS = {
    "changed": "is overwritten by the call after it ({}), {} only: who has kept it reads other values then",
    "shared": "shares its memory with an output of the call after it ({}), {} only",
}


def later(eager: dict[str, str], compiled: dict[str, str], after: str) -> Iterator[Leaf]:
    """Leaves about the held outputs of a call, once the call ``after`` has run."""
    if eager == compiled:
        yield Leaf("held outputs", "alias", bitwise=True)
        return
    for name in sorted({*eager, *compiled}):
        for where, mine, other in (("compiled", compiled, eager), ("in eager", eager, compiled)):
            if name in mine and other.get(name) != mine[name]:
                yield Leaf(name, "alias", message=_TEXTS[mine[name]].format(after, where))
