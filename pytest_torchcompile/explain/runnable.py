"""Runnable files: Dynamo's graph as a program that runs it on the inputs that it had, and compares what comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from pytest_torchcompile.explain.explanation import Explanation

__all__ = ["write_runnables"]

_PROGRAM: Final = '''\
# Dynamo's graph of {name}, compile {compile_id}, as it was captured with torch {version}.
# It runs eagerly on the inputs that it had, and compares with what the compiled graph returned;
# `python {file} --compile` compiles it again. A graph that draws random numbers draws others here.
import sys
from math import inf, nan
from pathlib import Path

import torch
from torch import device

{code}

inputs, expected = torch.load(Path(__file__).with_suffix(".pt"))
graph = GraphModule()
run = torch.compile(graph) if "--compile" in sys.argv else graph
for number, (one, other) in enumerate(zip(run(*inputs), expected)):
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, msg=lambda text: f"output {{number}}: {{text}}")
print(f"{{len(expected)}} outputs are those of the compiled graph")
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
                                  file=f"{name}.py", code=stage.text)
        (folder / f"{name}.py").write_text(program, encoding="utf-8")
        torch.save((run.inputs, run.outputs), folder / f"{name}.pt")
        written[f"{name}.py"] = "Dynamo's graph as a program that compares with what the compiled graph returned"
        written[f"{name}.pt"] = "the tensors of that program"
    return written


def _calls_another(text: str) -> bool:
    # The user's own lines stand behind the hash.
    return any("self." in line.partition("#")[0] for line in text.splitlines())
