"""A user-defined Triton kernel as a custom op: what ``zoo.triton_op`` builds. Importing it needs Triton.

The op is opaque to the compiler, which knows it by three things only: its schema, the shape function
(``register_fake``) and its gradient (``register_autograd``); all three can be wrong on their own. A GPU runs the
kernel compiled; on a CPU Triton's own interpreter runs it, slowly, and the compiler sees the same op.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor, nn

__all__ = ["GatedUnit", "gate"]

BLOCK = 256


def _gate_kernel(x, y, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    left = tl.load(x + place, mask=inside).to(tl.float32)
    right = tl.load(y + place, mask=inside).to(tl.float32)
    # Not tl.sigmoid: Triton's own kernels were decorated when it was imported, so the interpreter can't call them.
    tl.store(out + place, left / (1 + tl.exp(-left)) * right, mask=inside)


def _interpreted_kernel(kernel: Callable[..., None]) -> Any:
    """The kernel as Triton's interpreter runs it; the variable counts while a kernel is decorated, for that one."""
    # Triton reads it in the decorator, not when the kernel runs.
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        return triton.jit(kernel)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


_ON_GPU = triton.jit(_gate_kernel)
_ON_CPU = _interpreted_kernel(_gate_kernel)


@torch.library.custom_op("pytest_torchcompile::gate", mutates_args=(), device_types=("cuda", "cpu"))
def gate(x: Tensor, y: Tensor) -> Tensor:
    """``silu(x) * y`` of two tensors of the same shape, as one Triton kernel."""
    # The kernel reads memory in one row: other strides would mix elements up.
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    count = x.numel()
    kernel = _ON_GPU if x.is_cuda else _ON_CPU
    kernel[(triton.cdiv(count, BLOCK),)](x, y, out, count, BLOCK=BLOCK)
    return out


@gate.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gate_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, y = ctx.saved_tensors
    s = torch.sigmoid(x)
    return grad * y * s * (1 + x * (1 - s)), grad * x * s


gate.register_autograd(_gate_gradient, setup_context=_save_inputs)


class GatedUnit(nn.Module):
    """Two linear layers, one gating the other through :func:`gate`. (B, hidden) -> (B, hidden)."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return silu(left(x)) * right(x)."""
        gated: Tensor = gate(self.left(x), self.right(x))
        return gated
