"""The inner blocks of a model: what is compiled, checkpointed or sharded one by one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

__all__ = ["inner_blocks"]


def inner_blocks(model: nn.Module) -> dict[nn.Module, str]:
    """The direct children of the model's outermost ``nn.ModuleList``\\ s, each once, with their names."""
    found: dict[nn.Module, str] = {}
    for name, block in _outermost(model, ""):
        found.setdefault(block, name)
    return found


def _outermost(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for inner, child in module.named_children():
        path = f"{name}.{inner}" if name else inner
        if isinstance(module, nn.ModuleList):
            yield path, child
        else:
            yield from _outermost(child, path)
