"""The short form of a script: for batches of tensors, with the lines of each mutation where they act.

What is compared is what the finding is about, of the last call.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_torchcompile.contract.copied_source import Source
from pytest_torchcompile.contract.mutation import Mutation, in_order
from pytest_torchcompile.contract.specialised import specialised_lines, without_gradients
from pytest_torchcompile.contract.stand_in import code_of, path_of
from pytest_torchcompile.fuzz.drawn_call import DrawnCall, Sequence

__all__ = ["Shown", "short_script"]

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
    """What stands in for submodules, as in ``stand_in.py``."""
    seed: int = 0
    dtype: str = "float32"
    keywords: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Those of ``factory`` and ``inputs`` beside the sizes."""
    device: str = "cpu"
    """Where the model and its batches are: made on the CPU, and moved."""
    kind: str = ""
    """Of the finding; empty: not known."""
    where: str = ""
    """What is wrong, as the finding names it."""

    @property
    def is_moved(self) -> bool:
        """Whether the script moves the model and its batches to another device."""
        return self.device != "cpu"

    @property
    def device_type(self) -> str:
        """The device without its number, as autocast wants it."""
        return self.device.partition(":")[0]


_LOCALS = frozenset(("history", "module", "tensors", "call", "compile", "output", "outputs", "losses"))
_WIDTH = 120
_OUTPUTS = "torch.utils._pytree.tree_leaves(output)"


class _Unfit(Exception):
    """The short form has no room for it."""


def short_script(shown: Shown, source: Source) -> str | None:
    """A script as :func:`~pytest_torchcompile.contract.script.written_script` has it; None where only a long one does.

    ``source`` gets the pieces of files that it needs. Raises OSError or TypeError where a source can't be had.
    """
    if shown.loss is not None or shown.dtype != "float32":
        return None
    try:
        lines = list(_history(shown, source))
    except _Unfit:
        return None
    if _LOCALS & {name for _, name in source.pieces}:
        return None
    settings = ", ".join(f"{name}={value!r}" for name, value in shown.settings.items() if value is not None)
    eager, compiled = "lambda module: module", f"lambda module: torch.compile(module, {settings})"
    imported = ["import torch"]
    if len(shown.history) > 1 or "part, call" in "\n".join(lines):
        # A module is compiled once, however often it is called.
        eager, compiled = f"functools.cache({eager})", f"functools.cache({compiled})"
        imported.append("import functools")
    compared = "compiled, eager, rtol=0, atol=0, equal_nan=True, check_stride=True"
    pieces = list(source.pieces.values())
    imports = sorted({*source.imports, *imported})
    if any(map(_has_annotations, pieces)):
        # They may name what is imported for types only.
        imports.insert(0, "from __future__ import annotations")
    title = f'"""{shown.title}"""'
    sides = f"eager, compiled = history({eager}), history({compiled})"
    if len(sides) > _WIDTH:
        sides = f"eager = history({eager})\ncompiled = history({compiled})"
    blocks = ["\n".join([title, *imports]), *pieces, "\n".join(lines),
              f"{sides}\ntorch.testing.assert_close({compared})"]
    return "\n\n".join(blocks) + "\n"


def _has_annotations(piece: str) -> bool:
    for node in ast.walk(ast.parse(piece)):
        if isinstance(node, ast.AnnAssign) or getattr(node, "annotation", None) or getattr(node, "returns", None):
            return True
    return False


def _made(source: Source, function: Any, keywords: Mapping[str, Any]) -> str:
    """What makes a module or a batch: what a function of one line returns, or else a call of it."""
    own = None
    if inspect.isfunction(function):
        known = _plain_defaults(function) | dict(keywords)
        # A parameter without a value would be a name that the script does not have.
        if set(inspect.signature(function).parameters) <= set(known):
            own = specialised_lines(function, known, {})
    if own is not None and len(own) == 1 and own[0].startswith("return ") and len(own[0]) < _WIDTH:
        source.add_used(function, own)
        return own[0].removeprefix("return ")
    return f"{source.add(function)}({', '.join(f'{name}={value!r}' for name, value in keywords.items())})"


def _plain_defaults(function: Any) -> dict[str, Any]:
    """The parameters of a function that it has a plain value for itself: a script names none of them."""
    defaults: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        # No subclass: an enum is written otherwise than its value.
        if type(parameter.default) in (bool, int, float, str, type(None)):
            defaults[name] = parameter.default
    return defaults


def _history(shown: Shown, source: Source) -> Iterator[str]:
    yield "def history(compile):"
    yield f"    torch.manual_seed({shown.seed})"
    made = _made(source, shown.factory, shown.keywords.get("factory", {}))
    if shown.is_moved:
        if not isinstance(ast.parse(made, mode="eval").body, ast.Call):
            made = f"({made})"
        made += f".to({shown.device!r})"
    yield f"    module = {made}"
    if shown.training is not None:
        yield f"    module.train({shown.training})"
    for each in shown.without:
        yield f"    module.set_submodule({path_of(each)!r}, {code_of(each)})"
    for index, drawn in enumerate(shown.history):
        for line in _call(shown, source, index, drawn):
            yield f"    {line}"
    yield f"    return {_compared(shown)}"


def _call(shown: Shown, source: Source, index: int, drawn: DrawnCall) -> Iterator[str]:
    mutations = in_order(dict(drawn.mutations))
    yield from _lines_of("module", mutations, source)
    if drawn.training is not None:
        yield f"module.train({drawn.training})"
    yield f"torch.manual_seed({shown.seed + index})"
    made, wants_gradients = _tensors(shown, source, drawn)
    yield f"tensors = {_moved_tensors(made, wants_gradients, shown)}"
    changes = _lines_of("inputs", mutations, source)
    if not wants_gradients and not any(each.name == "requires_grad" for each, _ in mutations):
        changes = without_gradients(changes)
    yield from changes
    called = "compile(module)"
    for each, choice in mutations:
        if each.kind == "arguments":
            raise _Unfit
        if each.kind == "call":
            source.add(each.act)
            called = "call"
            yield f"part, call = {each.name}(module, compile, {choice!r})"
    trains = shown.train if drawn.training is None else drawn.training
    around = [] if trains else ["torch.no_grad()"]
    for line in _lines_of("around", mutations, source, shown.device_type):
        if line.startswith("return "):
            around.append(line.removeprefix("return "))
        else:
            yield line
    indent = ""
    if around:
        yield f"with {', '.join(around)}:"
        indent = "    "
    yield f"{indent}output = {called}(*tensors)"
    # What a call gives is there before the backward; so the last one needs none where that is what is wrong.
    if trains and (index < len(shown.history) - 1 or not _is_output(shown)):
        yield f"outputs = [y.float() for y in {_OUTPUTS} if y.is_floating_point() and y.requires_grad]"
        weights = "torch.linspace(0.5, 1.5, y.numel())"
        if shown.is_moved:
            weights = "torch.linspace(0.5, 1.5, y.numel(), device=y.device)"
        yield f"losses = [(y * (y + 1) * {weights}.view(y.shape)).mean() for y in outputs]"
        yield "sum(losses, torch.zeros((), requires_grad=True)).backward()"


def _tensors(shown: Shown, source: Source, drawn: DrawnCall) -> tuple[str, bool]:
    """The list of the inputs, and whether any of them wants a gradient.

    Raises _Unfit where they are anything but tensors.
    """
    import torch

    keywords = dict(drawn.sizes) | dict(shown.keywords.get("inputs", {}))
    torch.manual_seed(shown.seed)
    try:
        made = shown.inputs(**keywords)
    except Exception:
        raise _Unfit from None
    call = _made(source, shown.inputs, keywords)
    if isinstance(made, torch.Tensor):
        return f"[{call}]", made.requires_grad
    if not isinstance(made, (tuple, list)) or not all(isinstance(each, torch.Tensor) for each in made):
        raise _Unfit
    # Each is moved by itself.
    if shown.is_moved and len(set(map(id, made))) < len(made):
        raise _Unfit
    wants_gradients = any(each.requires_grad for each in made)
    expression = ast.parse(call, mode="eval").body
    if isinstance(expression, (ast.Tuple, ast.List)):
        return ast.unparse(ast.List(expression.elts, ast.Load())), wants_gradients
    return f"list({call})", wants_gradients


def _moved_tensors(made: str, wants_gradients: bool, shown: Shown) -> str:
    """The list of the inputs on the script's device; an input that wants a gradient is a leaf there too."""
    if not shown.is_moved:
        return made
    moved = f"each.to({shown.device!r})"
    if wants_gradients:
        moved = f"each.detach().to({shown.device!r}).requires_grad_(each.requires_grad)"
    return f"[{moved} for each in {made}]"


def _lines_of(kind: str, mutations: list[tuple[Mutation, str]], source: Source, device: str = "cpu") -> list[str]:
    """The lines of the mutations of a kind; of those around a call, on ``device``, the last one returns what is
    entered."""
    lines: list[str] = []
    for each, choice in mutations:
        if each.kind != kind:
            continue
        known: dict[str, Any] = {"choice": choice}
        if kind == "around":
            known["device"] = device
        own = specialised_lines(each.act, known, {"model": "module"})
        if own is None:
            raise _Unfit
        # What it uses of its file: an import, a table.
        source.add_used(each.act, own)
        lines += [line for line in own if line]
    return lines


def _is_output(shown: Shown) -> bool:
    """Whether the forward of the last call shows it."""
    if shown.kind == "error":
        return " in forward" in shown.title
    return shown.kind in ("dtype", "shape", "stride", "alias", "structure", "value") and not _gradient_of(shown)


def _gradient_of(shown: Shown) -> str:
    """The parameter or input whose gradient is wrong."""
    return shown.where.removeprefix("gradient of ") if shown.where.startswith("gradient of ") else ""


def _compared(shown: Shown) -> str:
    """What the finding is about."""
    name = _gradient_of(shown)
    if place := re.fullmatch(r"input\[(\d+)\](?:\[(\d+)\])?", name):
        return f"tensors[{place[2] or place[1]}].grad"
    if name.replace(".", "").replace("_", "").isalnum():
        return f"module.get_parameter({name!r}).grad"
    if shown.where.startswith("buffer "):
        return f"module.get_buffer({shown.where.removeprefix('buffer ')!r})"
    if "after the call" in shown.where:
        return "[*tensors, *module.parameters()]"
    if shown.kind == "alias":
        return f"[y.data_ptr() == x.data_ptr() for y in {_OUTPUTS} for x in tensors]"
    return _OUTPUTS
