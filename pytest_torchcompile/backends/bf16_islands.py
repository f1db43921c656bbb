"""The pass ``bf16_islands``: matrix products in bfloat16, all around them as it was."""

from __future__ import annotations

from typing import Final

import torch
from torch import fx

__all__ = ["bf16_islands"]

_aten: Final = torch.ops.aten
_PRODUCTS: Final = frozenset({
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default,
})
# What a value's description stands under, of which none is true of the product any more.
_DESCRIPTIONS: Final = ("val", "tensor_meta", "example_value")


def bf16_islands(module: fx.GraphModule) -> None:
    """Cast what products take to bfloat16, and what they give back to float32; a value is cast once.

    Forward and backward, where all that a product takes is float32. It changes numbers, as autocast does: its attribute
    ``brings_in`` has them judged by the rounding noise of bfloat16.
    """
    narrow: dict[fx.Node, fx.Node] = {}
    for node in list(module.graph.nodes):
        tensors = [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor)]
        if node.target not in _PRODUCTS or any(each.meta["val"].dtype != torch.float32 for each in tensors):
            continue
        for each in tensors:
            if each not in narrow:
                # Before the first product that takes it: those behind have it too.
                with module.graph.inserting_before(node):
                    narrow[each] = _cast(each, torch.bfloat16)
            node.replace_input_with(each, narrow[each])
        with module.graph.inserting_after(node):
            back = _cast(node, torch.float32)
        node.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)
        for key in _DESCRIPTIONS:
            node.meta.pop(key, None)


def _cast(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    # As Inductor's own table writes a cast: it knows no other, with or without a table.
    cast = node.graph.call_function(torch.ops.prims.convert_element_type.default, (node, dtype))
    cast.meta["val"] = node.meta["val"].to(dtype)
    return cast


bf16_islands.brings_in = torch.bfloat16  # type: ignore[attr-defined]
