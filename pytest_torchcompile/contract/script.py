"""The script that shows a finding: it needs torch alone, where the model's own file does.

Functions and classes are copied as their files have them, each with what it uses of its file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pytest_torchcompile.contract.copied_source import Source, copied_source
from pytest_torchcompile.contract.mutation import in_order, mutation
from pytest_torchcompile.contract.short_script import Shown, short_script
from pytest_torchcompile.contract.stand_in import code_of, path_of
from pytest_torchcompile.fuzz.drawn_call import DrawnCall, Sequence

__all__ = ["Shown", "copied_source", "written_script"]

def written_script(shown: Shown) -> str:
    """A script that runs a history eagerly, then compiled, and prints how far both are apart.

    Where batches are tensors it is the short form, of about twenty lines. Raises OSError or TypeError where the source
    of the model can't be had.
    """
    short = short_script(shown, Source())
    if short is not None:
        return short
    source = Source()
    make, batch, loss = source.add(shown.factory), source.add(shown.inputs), "None"
    if shown.loss is not None:
        loss = source.add(shown.loss)
    for name in _mutations_of(shown.history):
        source.add(mutation(name).act)
    where, moves = "", ""
    if shown.is_moved:
        where, moves = f"{shown.device!r}, ", _MOVES.format(device=shown.device)
    settings = _keywords({name: value for name, value in shown.settings.items() if value is not None})
    lines = [f'"""{shown.title}"""', *source.lines(), "", "", "def history(model, compile):", "    values = []"]
    for index, each in enumerate(shown.history):
        lines += [f"    {line}" for line in _call_lines(shown, index, each, batch)]
    lines += ["    return values", "", "",
              "def new_model():",
              f"    torch.manual_seed({shown.seed})",
              f"    model = {make}({_keywords(shown.keywords.get('factory', {}))})",
              f"    model = model.to({where}dtype=torch.{shown.dtype})"]
    if shown.training is not None:
        lines.append(f"    model.train({shown.training})")
    lines += [f"    model.set_submodule({path_of(each)!r}, {code_of(each)})" for each in shown.without]
    common = _COMMON.format(loss=loss, compile=settings, moves=moves)
    lines += ["    return model", "", "", *common.splitlines()]
    return "\n".join(lines) + "\n"


def _mutations_of(history: Sequence) -> list[str]:
    names: dict[str, None] = {}
    for each in history:
        names |= dict.fromkeys(name for name, _ in each.mutations)
    return list(names)


def _keywords(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _call_lines(shown: Shown, index: int, drawn: DrawnCall, batch: str) -> Iterator[str]:
    """One call: the module changed, the batch made and changed, the forward, loss and backward."""
    mutations = in_order(dict(drawn.mutations))
    for each, choice in mutations:
        if each.kind == "module":
            yield f"{each.name}(model, {choice!r})"
    if drawn.training is not None:
        yield f"model.train({drawn.training})"
    keywords = _keywords(dict(drawn.sizes) | dict(shown.keywords.get("inputs", {})))
    yield f"torch.manual_seed({shown.seed + index})"
    yield f"args, kwargs = arguments({batch}({keywords}), torch.{shown.dtype})"
    inputs = [f"{each.name}(tensors, {choice!r})" for each, choice in mutations if each.kind == "inputs"]
    if inputs:
        yield "leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))"
        yield "places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]"
        yield "tensors = [leaves[place] for place in places]"
        yield from inputs
        yield "for place, tensor in zip(places, tensors):"
        yield "    leaves[place] = tensor"
        yield "args, kwargs = torch.utils._pytree.tree_unflatten(leaves, spec)"
    for each, choice in mutations:
        if each.kind == "arguments":
            yield f"args, kwargs = {each.name}(args, kwargs, {choice!r})"
    yield "part, call = model, model if compile is None else compile(model)"
    for each, choice in mutations:
        if each.kind == "call":
            yield f"part, call = {each.name}(part, compile, {choice!r})"
    around = [f"{each.name}({choice!r}, {shown.device_type!r})" for each, choice in mutations if each.kind == "around"]
    trains = shown.train if drawn.training is None else drawn.training
    around.insert(0, f"torch.set_grad_enabled({trains})")
    yield f"torch.manual_seed({shown.seed + index})"
    yield f"with {', '.join(around)}:"
    yield "    output = call(*args, **kwargs)"
    yield f"values += results({index + 1}, part, output, (args, kwargs), {trains})"


_MOVES: Final = '''\
    # The same tensor twice stays so, and an input that wants a gradient is a leaf there too.
    moved = {{id(leaf): leaf.detach().to({device!r}).requires_grad_(leaf.requires_grad)
             for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)}}
    value = torch.utils._pytree.tree_map_only(torch.Tensor, lambda leaf: moved[id(leaf)], value)
'''
_COMMON: Final = '''\
def arguments(value, dtype):
    """What is called: positional and keyword arguments, in the model's dtype."""
    value = torch.utils._pytree.tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, value)
{moves}    if isinstance(value, dict):
        return (), value
    if isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[0], (tuple, list)):
        return tuple(value[0]), value[1]
    return (tuple(value) if isinstance(value, (tuple, list)) else (value,)), {{}}


def results(number, model, output, given, trains):
    """Everything that a call gave: outputs, gradients, buffers."""
    tensors = torch.utils._pytree.tree_leaves(output)
    tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    named = [(f"call {{number}}: output {{place}}", tensor.detach().clone()) for place, tensor in enumerate(tensors)]
    loss_function = {loss}
    if loss_function is None:
        floats = [tensor.float() for tensor in tensors if tensor.is_floating_point()]
        weighted = [(y.square() + y) * torch.linspace(0.5, 1.5, y.numel(), device=y.device).view(y.shape)
                    for y in floats]
        total = sum(y.nan_to_num(0, 0, 0).mean() for y in weighted)
    else:
        total = loss_function(output, given[1] if not given[0] else given[0] if len(given[0]) > 1 else given[0][0])
    if trains and isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    for name, tensor in [*model.named_parameters(), *((f"input {{n}}", leaf) for n, leaf in enumerate(leaves))]:
        if tensor.is_leaf and tensor.grad is not None:
            named.append((f"call {{number}}: gradient of {{name}}", tensor.grad))
            tensor.grad = None
    return named + [(f"call {{number}}: {{name}}", buffer.clone()) for name, buffer in model.named_buffers()]


eager = history(new_model(), None)
compiled = history(new_model(), functools.cache(functools.partial(torch.compile, {compile})))
for (name, one), (other_name, other) in zip(eager, compiled, strict=True):
    assert name == other_name, (name, other_name)
    apart = (one.double() - other.double()).abs().max().item() if one.numel() else 0.0
    if apart or one.dtype != other.dtype or one.stride() != other.stride():
        print(f"{{name}}: apart by {{apart:.3g}}, largest {{one.double().abs().max().item():.3g}};",
              one.dtype, other.dtype, one.stride(), other.stride())'''
