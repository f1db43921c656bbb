"""The script that shows a finding: it needs torch alone, where the model's own file does.

Functions and classes are copied as their files have them, each with what it uses of its file.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.contract.mutation import in_order, mutation
from pytest_torchcompile.fuzz.drawn_call import DrawnCall, Sequence

__all__ = ["Shown", "copied_source", "written_script"]

_OURS: Final = "pytest_torchcompile"


class _Source:
    """Pieces of files, each once, in an order in which Python can run them."""

    def __init__(self) -> None:
        self.imports: dict[str, None] = {}
        self.pieces: dict[tuple[str, str], str] = {}

    def add(self, function: Any) -> str:
        """Add a function or class with what it uses of its file; returns its name there."""
        path = Path(inspect.getsourcefile(inspect.unwrap(function)) or "")
        name: str = inspect.unwrap(function).__qualname__.partition(".")[0]
        text = path.read_text(encoding="utf-8")
        self._add_named(str(path), text, _definitions(ast.parse(text)), name)
        return name

    def _add_named(self, path: str, text: str, defined: Mapping[str, ast.stmt], name: str) -> None:
        node = defined.get(name)
        if node is None or (path, name) in self.pieces:
            return
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._add_import(node, name)
            return
        # Its place is taken before what it uses, which may use it in turn; it is filled after that.
        self.pieces[path, name] = ""
        for used in _names_in(node):
            if used != name:
                self._add_named(path, text, defined, used)
        del self.pieces[path, name]
        self.pieces[path, name] = _source_of(text, node)

    def _add_import(self, node: ast.Import | ast.ImportFrom, name: str) -> None:
        if isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] == _OURS:
                return
            chosen = next(alias for alias in node.names if name in (alias.asname, alias.name))
            self.imports[ast.unparse(ast.ImportFrom(node.module, [chosen], node.level))] = None
        else:
            chosen = next(alias for alias in node.names if name in (alias.asname, alias.name.partition(".")[0]))
            self.imports[ast.unparse(ast.Import([chosen]))] = None

    def lines(self) -> Iterator[str]:
        """The imports, then everything else."""
        # Annotations may name what is imported for types only.
        yield "from __future__ import annotations"
        yield from sorted({*self.imports, "import functools", "import torch"})
        for piece in self.pieces.values():
            yield f"\n\n{piece}"


def _definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    defined: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                defined[alias.asname or alias.name.partition(".")[0]] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        defined[part.id] = node
    return defined


def _names_in(node: ast.stmt) -> list[str]:
    """The names that a piece uses when it runs: not those in annotations, nor in a decorator of ours."""
    names: dict[str, None] = {}
    waiting: list[ast.AST] = [node]
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, ast.Name):
            names[each.id] = None
        for role, value in ast.iter_fields(each):
            if role in ("annotation", "returns"):
                continue
            if each is node and role == "decorator_list" and isinstance(node, ast.FunctionDef):
                continue
            values = value if isinstance(value, list) else [value]
            waiting += [part for part in values if isinstance(part, ast.AST)]
    return list(names)


def _source_of(text: str, node: ast.stmt) -> str:
    """As written, without decorators of a function: those of a test are ours."""
    lines = text.splitlines()
    first = node.lineno
    if isinstance(node, ast.ClassDef) and node.decorator_list:
        first = node.decorator_list[0].lineno
    return "\n".join(lines[first - 1:node.end_lineno])


def copied_source(function: Any) -> str:
    """A function or class as a script has it, with its imports."""
    source = _Source()
    source.add(function)
    return "\n".join(source.lines())


@dataclass(frozen=True)
class Shown:
    """What a script shows."""

    title: str
    factory: Any
    inputs: Any
    loss: Any
    history: Sequence
    settings: Mapping[str, Any]
    """Of ``torch.compile``."""
    train: bool = True
    """Whether there is a backward pass, where a call does not say."""
    training: bool | None = None
    """The mode that the model is put into at first; None: its own."""
    without: tuple[str, ...] = ()
    """Submodules that an Identity stands in for."""
    seed: int = 0
    dtype: str = "float32"
    keywords: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Those of ``factory`` and ``inputs`` beside the sizes."""
    device: str = "cpu"


def written_script(shown: Shown) -> str:
    """A script that runs a history eagerly, then compiled, and prints how far both are apart.

    Raises OSError or TypeError where the source of the model can't be had.
    """
    source = _Source()
    make, batch, loss = source.add(shown.factory), source.add(shown.inputs), "None"
    if shown.loss is not None:
        loss = source.add(shown.loss)
    for name in _mutations_of(shown.history):
        source.add(mutation(name).act)
    settings = _keywords({name: value for name, value in shown.settings.items() if value is not None})
    lines = [f'"""{shown.title}"""', *source.lines(), "", "", "def history(model, compile):", "    values = []"]
    for index, each in enumerate(shown.history):
        lines += [f"    {line}" for line in _call_lines(shown, index, each, batch)]
    lines += ["    return values", "", "",
              "def new_model():",
              f"    torch.manual_seed({shown.seed})",
              f"    model = {make}({_keywords(shown.keywords.get('factory', {}))}).to(dtype=torch.{shown.dtype})"]
    if shown.training is not None:
        lines.append(f"    model.train({shown.training})")
    lines += [f"    model.set_submodule({path!r}, torch.nn.Identity())" for path in shown.without]
    lines += ["    return model", "", "", *_COMMON.format(loss=loss, compile=settings).splitlines()]
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
    around = [f"{each.name}({choice!r}, {shown.device!r})" for each, choice in mutations if each.kind == "around"]
    trains = shown.train if drawn.training is None else drawn.training
    around.insert(0, f"torch.set_grad_enabled({trains})")
    yield f"torch.manual_seed({shown.seed + index})"
    yield f"with {', '.join(around)}:"
    yield "    output = call(*args, **kwargs)"
    yield f"values += results({index + 1}, part, output, (args, kwargs), {trains})"


_COMMON: Final = '''\
def arguments(value, dtype):
    """What is called: positional and keyword arguments, in the model's dtype."""
    value = torch.utils._pytree.tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, value)
    if isinstance(value, dict):
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
        weighted = [(y.square() + y) * torch.linspace(0.5, 1.5, y.numel()).view(y.shape) for y in floats]
        loss = sum(y.nan_to_num(0, 0, 0).mean() for y in weighted)
    else:
        loss = loss_function(output, given[1] if not given[0] else given[0] if len(given[0]) > 1 else given[0][0])
    if trains and isinstance(loss, torch.Tensor) and loss.requires_grad:
        loss.backward()
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
