"""Halves of a joint graph: what of it waits for a gradient, and what does not."""

from __future__ import annotations

from torch import fx

__all__ = ["forward_nodes", "nodes_from_gradients", "put_backward_behind", "tag_halves"]


def nodes_from_gradients(module: fx.GraphModule) -> set[fx.Node]:
    """The inputs that are gradients of results, and all that depends on one; empty in a graph without a backward."""
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        is_gradient = node.op == "placeholder" and str(node.target).startswith("tangents")
        if is_gradient or found.intersection(node.all_input_nodes):
            found.add(node)
    return found


def forward_nodes(module: fx.GraphModule) -> list[fx.Node]:
    """The operators that depend on no gradient, in order."""
    backward = nodes_from_gradients(module)
    return [node for node in module.graph.nodes if node.op == "call_function" and node not in backward]


def put_backward_behind(module: fx.GraphModule) -> None:
    """Move what depends on a gradient behind all that the forward was made of.

    A pass may have put it before, behind the input that the gradient is. Torch's ``default_partition`` takes all that
    stands before the last operator with its mark of the forward (``partitioner_tag``) for a part of it (torch 2.13).
    """
    marked = [node for node in module.graph.nodes if node.meta.get("partitioner_tag") == "is_forward"]
    if not marked:
        return
    last = marked[-1]
    backward = nodes_from_gradients(module)
    early = []
    for node in module.graph.nodes:
        if node is last:
            break
        if node in backward and node.op == "call_function":
            early.append(node)
    # The first of them comes to stand first behind it.
    for node in reversed(early):
        last.append(node)
    if early:
        module.recompile()


def tag_halves(module: fx.GraphModule) -> None:
    """Mark the operators of a joint graph that was made anew as torch does: of the forward, or of the backward.

    By ``partitioner_tag`` ``default_partition`` knows what of the forward the backward may read (torch 2.13). Without
    it, it hands over results that are written to behind the forward, as the new values of a batch norm's buffers.
    """
    backward = nodes_from_gradients(module)
    operators = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    if not backward or any("partitioner_tag" in node.meta for node in operators):
        return
    for node in operators:
        node.meta["partitioner_tag"] = "is_backward" if node in backward else "is_forward"
