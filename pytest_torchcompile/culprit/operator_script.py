"""Operator scripts: a graph with its inputs, or one operator, as a few lines that need torch alone. Each is run."""

from __future__ import annotations

import contextlib
import copy
import io
import re
import runpy
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import fx

from pytest_torchcompile.culprit.captured_graph import CapturedGraph
from pytest_torchcompile.culprit.operator_notes import OperatorNote
from pytest_torchcompile.errors import TorchcompileError
from pytest_torchcompile.state.torch_state import forget_compiled

__all__ = ["NoScript", "graph_script", "operator_script"]

_WIDTH: Final = 110
_INLINED: Final = 64
"""Elements of tensors whose values are written down."""
_CLEARED: Final = re.compile(r";  [\w =]+= None$")
_FROM: Final = {"device": "torch", "inf": "math", "nan": "math"}


class NoScript(TorchcompileError):
    """There is no script; the text says why."""


def graph_script(captured: CapturedGraph, title: str, settings: Mapping[str, Any], sign: str) -> str:
    """The script of a graph: it raises where eager and compiled differ, or where the compiled one raises.

    Args:
        captured: The graph; its inputs are drawn anew where they are floating and large.
        title: Its first line.
        settings: Of ``torch.compile``; the backend has a name.
        sign: As :func:`~.graph_trial.signs_of` has it.

    Raises NoScript where the graph can't be written, or the script does not show it.
    """
    for tolerance in ("", ", rtol=1e-3, atol=1e-6", ", rtol=0, atol=0"):
        text = _written(captured, title, settings, sign, tolerance)
        wanted = sign.removeprefix("raises ") if sign.startswith("raises ") else "AssertionError"
        if _raised_by(text) == wanted:
            calm = _written(captured, title, {"backend": "eager"}, "", tolerance)
            if _raised_by(calm):
                raise NoScript("the script differs from itself without a compiler too")
            return text
        if sign.startswith("raises "):
            break
    raise NoScript("with inputs that a few lines can make, the graph alone does not show it")


def _written(captured: CapturedGraph, title: str, settings: Mapping[str, Any], sign: str, tolerance: str) -> str:
    body, names, imports = _function_lines(captured)
    keywords = ", ".join(f"{name}={value!r}" for name, value in settings.items() if value is not None)
    inputs = [_input_code(value) for value in captured.inputs]
    imports = sorted({*imports, *_number_imports(inputs)})
    lines = [f'"""{title}"""', *imports, "", f"def f({', '.join(names)}):", *body, "",
             "torch.manual_seed(0)", *_list_lines("given", inputs)]
    compiled = f"torch.compile(f, {keywords})"
    grad = captured.grad and any(_wants_gradient(value) for value in captured.inputs)
    if sign.startswith("raises "):
        lines += [f"output = {compiled}(*given)"]
        if grad:
            lines += ["sum((y * y + y).mean() for y in output if y.requires_grad).backward()"]
        return "\n".join(lines) + "\n"
    lines += ["results = []", f"for call in (f, {compiled}):"]
    if grad:
        lines += ["    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in given]",
                  "    output = [y for y in call(*inputs) if isinstance(y, torch.Tensor)]",
                  "    sum((y * y + y).mean() for y in output if y.requires_grad).backward()",
                  "    results.append([*output, *(x.grad for x in inputs if x.grad is not None)])"]
    else:
        lines += ["    with torch.no_grad():",
                  "        results.append([y for y in call(*map(torch.clone, given)) if isinstance(y, torch.Tensor)])"]
    lines += ["for eager, compiled in zip(*results):",
              f"    torch.testing.assert_close(compiled, eager, equal_nan=True{tolerance})"]
    return "\n".join(lines) + "\n"


def _function_lines(captured: CapturedGraph) -> tuple[list[str], list[str], list[str]]:
    """The body of the graph as a function, the names of its inputs, and the imports that it needs."""
    module = fx.GraphModule(captured.module, copy.deepcopy(captured.module.graph))
    names = _short_names(module.graph)
    code = module.graph.python_code("self")
    lines = []
    for line in code.src.splitlines():
        bare = _CLEARED.sub("", line.rstrip())
        if bare.strip() and not bare.lstrip().startswith(("#", "def ", "import ", "from ")):
            lines.append(bare)
    if any("self." in line for line in lines):
        raise NoScript("the graph calls a graph of its own, as a checkpointed block does")
    imports = ["import torch"]
    for name, value in code.globals.items():
        used = any(re.search(rf"\b{re.escape(name)}\b", line) for line in lines)
        if not used or name == "torch":
            continue
        if name in _FROM:
            imports.append(f"from {_FROM[name]} import {name}")
        elif isinstance(value, ModuleType):
            imports.append(f"import {name}")
        else:
            raise NoScript(f"the graph calls {name}, which is not torch's")
    return lines, names, sorted(imports)


def _short_names(graph: fx.Graph) -> list[str]:
    """Give inputs names of one word, as the model has them; Dynamo's have the whole path."""
    names: list[str] = []
    taken = {node.name for node in graph.nodes}
    for node in [node for node in graph.nodes if node.op == "placeholder"]:
        word = str(node.target).strip("_").lower()
        short = re.split(r"_parameters_|_buffers_|_modules_|^l_", word)[-1].strip("_") or "x"
        name, number = short, 1
        while name in taken or not name.isidentifier() or name in ("f", "torch"):
            name, number = f"{short if short.isidentifier() else 'x'}_{number}", number + 1
        taken.add(name)
        # Else the code has a line that hands one name on to the other.
        node.name = node.target = name
        node.type = None
        names.append(name)
    return names


def _is_drawn(value: torch.Tensor) -> bool:
    return hasattr(value, "_torchcompile_seed")


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _list_lines(name: str, parts: list[str]) -> list[str]:
    line = f"{name} = [{', '.join(parts)}]"
    if len(line) <= _WIDTH:
        return [line]
    filled = textwrap.wrap(", ".join(parts) + "]", _WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    return [f"{name} = [", *(f"    {part}" for part in filled)]


def _number_imports(inputs: list[str]) -> list[str]:
    """Imports of the names that numbers have which are none, as ``tolist`` writes them."""
    words = set(re.findall(r"\b(?:inf|nan)\b", " ".join(inputs)))
    return [f"from math import {word}" for word in sorted(words)]


def _input_code(value: Any, drawn: bool = False) -> str:
    """An expression that makes an input; ``drawn``: of floating ones with other numbers."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    size = ", ".join(map(str, value.shape)) or "()"
    where = "" if value.device.type == "cpu" else f", device={value.device.type!r}"
    dtype = "" if value.dtype == torch.float32 else f", dtype={value.dtype}"
    if value.is_floating_point() and (drawn or value.numel() > _INLINED or _is_drawn(value)):
        if value.is_contiguous():
            text = f"torch.randn({size}{dtype}{where})"
        else:
            strided = f"{tuple(value.shape)}, {tuple(value.stride())}"
            text = f"torch.empty_strided({strided}{dtype}{where}).normal_()"
    elif value.dtype == torch.bool and value.numel() > _INLINED:
        text = f"torch.ones({size}{dtype}{where})"
    elif value.numel() > _INLINED and not value.is_complex():
        text = f"torch.randint({int(value.min())}, {int(value.max()) + 1}, ({size},){dtype}{where})"
    else:
        text = f"torch.tensor({value.detach().tolist()}{dtype}{where})"
        if not value.is_contiguous():
            text = f"torch.empty_strided({tuple(value.shape)}, {tuple(value.stride())}{dtype}{where}).copy_({text})"
    return f"{text}.requires_grad_()" if value.requires_grad else text


def operator_script(note: OperatorNote, title: str) -> str:
    """The script of an operator that is wrong by itself: on its inputs, and on contiguous copies of them.

    Raises NoScript where it can't be written or does not show it.
    """
    # Numbers that a line draws first; its very own where they alone show it.
    for drawn in (True, False):
        text = _written_operator(note, title, drawn)
        if _raised_by(text) == "AssertionError":
            return text
    raise NoScript("with inputs that a few lines can make, the operator by itself is right")


def _written_operator(note: OperatorNote, title: str, drawn: bool) -> str:
    inputs = [_input_code(value, drawn) for value in note.args]
    keywords = "".join(f", {name}={value!r}" for name, value in note.kwargs.items())
    imports = [*_number_imports(inputs), "import torch"]
    lines = [f'"""{title}"""', *imports, "", f"operator = torch.ops.{note.name}", "torch.manual_seed(0)",
             *_list_lines("given", inputs),
             "plain = [x.clone(memory_format=torch.contiguous_format) if isinstance(x, torch.Tensor) else x",
             "         for x in given]",
             f"results = operator(*given{keywords}), operator(*plain{keywords})",
             "results = [[x] if isinstance(x, torch.Tensor) else x for x in results]",
             "for strided, contiguous in zip(*results):",
             "    if contiguous is not None:",
             "        torch.testing.assert_close(strided, contiguous, equal_nan=True)"]
    return "\n".join(lines) + "\n"


def _raised_by(text: str) -> str:
    """Run a script from a file, as Dynamo wants its source; the name of what it raises, empty for nothing."""
    forget_compiled()
    with tempfile.TemporaryDirectory(prefix="pytest-torchcompile-script-") as folder:
        file = Path(folder, "shows_it.py")
        file.write_text(text, encoding="utf-8")
        silent = io.StringIO()
        try:
            with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
                runpy.run_path(str(file))
        except Exception as raised:  # whatever the compiler raises is what is asked
            return type(raised).__name__
    return ""
