"""Runnable files: Dynamo's graph as a program that runs it on the inputs that it had, and compares what comes of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import torch

from pytest_torchcompile.errors import InstrumentError
from pytest_torchcompile.explain.explanation import Explanation
from pytest_torchcompile.ledger.torch_internals import private_name

__all__ = ["write_runnables"]

_OPERATOR: Final = re.compile(r"torch\.ops\.(\w+)\.(\w+)")
_PROGRAM: Final = '''\
# Dynamo's graph of {name}, compile {compile_id}, as it was captured with torch {version}.
# It runs eagerly on the inputs that it had, and compares with what the compiled graph returned;
# `python {file} --compile` compiles it again. An output that two seeds make differ is random, and is not compared.
# On a GPU convolutions are in TF32 by torch's default; what that changes by itself is allowed four times.
import sys
from math import inf, nan
import re
from pathlib import Path

import torch
from torch import device
{imports}
{code}

graph = GraphModule()
run = torch.compile(graph) if "--compile" in sys.argv else graph


def run_with(seed):
    # Loaded anew: the graph may write to its inputs.
    inputs, expected = torch.load(Path(__file__).with_suffix(".pt"))
    torch.manual_seed(seed)
    return run(*inputs), expected


outputs, expected = run_with(1)
others, _ = run_with(2)
without_tf32 = outputs
if any(isinstance(one, torch.Tensor) and one.is_cuda for one in outputs):
    torch.backends.cudnn.allow_tf32 = False
    without_tf32, _ = run_with(1)
random = 0
for number, (one, two, exact, other) in enumerate(zip(outputs, others, without_tf32, expected)):
    if isinstance(one, torch.Tensor):
        if not torch.allclose(one, two, rtol=1e-3, atol=1e-5, equal_nan=True):
            random += 1
            continue
        allowed = {{}}
        if one.is_cuda and one.dtype == torch.float32:
            allowed = {{"rtol": 1.3e-6, "atol": 1e-5 + 4 * (one - exact).abs().nan_to_num(0.0, 0.0).max().item()}}
        torch.testing.assert_close(one, other, equal_nan=True, **allowed,
                                   msg=lambda text: f"output {{number}}: {{text}}")
print(f"{{len(expected) - random}} outputs are those of the compiled graph")
if random:
    print(f"{{random}} outputs are random, and were not compared")
'''


def write_runnables(explained: Explanation, folder: Path) -> dict[str, str]:
    """Write each graph that ran as a program and its tensors; returns the files, and what each is.

    A graph that calls a graph of its own, such as a checkpointed block, has none: its text alone does not run.
    """
    written: dict[str, str] = {}
    graphs = [stage for stage in explained.stages if stage.stage == "dynamo"]
    for number, (stage, run) in enumerate(zip(graphs, explained.graph_runs, strict=False)):
        if not run.ran or run.compile_id != stage.compile_id or _calls_another(stage.text):
            continue
        name = "fx_graph_runnable" if number == 0 else f"fx_graph_runnable_{number}"
        program = _PROGRAM.format(name=explained.name, compile_id=stage.compile_id, version=explained.torch_version,
                                  file=f"{name}.py", code=stage.text, imports=_imports_of(stage.text))
        (folder / f"{name}.py").write_text(program, encoding="utf-8")
        torch.save((run.inputs, run.outputs), folder / f"{name}.pt")
        written[f"{name}.py"] = "Dynamo's graph as a program that compares with what the compiled graph returned"
        written[f"{name}.pt"] = "the tensors of that program"
    return written


def _imports_of(text: str) -> str:
    """Lines that import the modules which define the operators of the graph that are not torch's own.

    ``torch._library.custom_ops.OPDEFS`` (torch 2.13) has those of ``torch.library.custom_op``, by name.
    """
    try:
        defined = private_name("torch._library.custom_ops", "OPDEFS", "lists custom operators",
                               "modules that define operators can't be told")
    except InstrumentError as missing:
        return f"# {missing}\n"
    lines: dict[str, None] = {}
    for namespace, name in _OPERATOR.findall(text):
        definition = defined.get(f"{namespace}::{name}")
        # Its body is the user's own function.
        module = getattr(getattr(definition, "_init_fn", None), "__module__", "")
        if module and not module.startswith("torch."):
            lines[f"import {module}"] = None
    return "".join(f"{line}\n" for line in lines)


def _calls_another(text: str) -> bool:
    # The user's own lines stand behind the hash.
    return any("self." in line.partition("#")[0] for line in text.splitlines())
