"""The fake lane: what does not compile over ranks is found in one process, for any number of them. Numbers are not."""

from __future__ import annotations

import jsonschema
import pytest
import torch

from pytest_torchcompile.report.schema import report_schema

pytestmark = [
    pytest.mark.needs_torch,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed"),
]

MODELS = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.widen, self.narrow = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, x):
        return x + self.narrow(torch.relu(self.widen(x)))

class Deep(torch.nn.Module):
    tp_plan = {"blocks.*.widen": "colwise", "blocks.*.narrow": "rowwise"}

    def __init__(self, breaks):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.breaks = breaks

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x

def deep():
    return Deep(False)

def broken():
    return Deep(True)

def wide_batch(B):
    return torch.randn(B, 16)

def wrong(graph, inputs):
    '''A backend whose numbers are wrong: it is right about everything else.'''
    return lambda *args: [out * 3 if isinstance(out, torch.Tensor) else out for out in graph(*args)]

def refuses(graph, inputs):
    raise RuntimeError("planted: this backend compiles nothing")
"""
MATRIX = """
version: 1
models:
  deep: {factory: "models:deep", inputs: "models:wide_batch", dims: {B: {buckets: [4, 8]}}}
  broken: {factory: "models:broken", inputs: "models:wide_batch", dims: {B: 4}}
axes:
  backend: [aot_eager, "models:wrong", "models:refuses"]
  dynamic: [static]
  wrapper: ["tp*fake8", "tp*fake64", "fsdp2*fake64"]
rules:
  - exclude: {model: broken, backend: ["models:wrong", "models:refuses"]}
    reason: one fault at a time
  - exclude: {model: broken, wrapper: ["tp*fake64", "fsdp2*fake64"]}
    reason: one is enough
  - exclude: {backend: ["models:wrong", "models:refuses"], wrapper: ["tp*fake64", "fsdp2*fake64"]}
    reason: one is enough
  - limits: {coverage: 0, recompiles: 3}  # FSDP's own operators run eagerly; the first block's input needs no gradient
    when: {wrapper: "fsdp2*fake64"}
checks: [compiles, equivalence, gradients, graph_breaks, recompiles, rank_divergence]
"""
BOTH = """
version: 1
models:
  deep: {factory: "models:deep", inputs: "models:wide_batch", dims: {B: {buckets: [4, 8]}}}
axes:
  backend: [aot_eager]
  dynamic: [auto]
  wrapper: ["tp", "tp*fake2"]
checks: [compiles, graph_breaks, recompiles]
"""


def test_what_it_finds_and_what_it_does_not_judge(repo):
    """Graph breaks and failing compiles are found; wrong numbers are not, and no check claims that they would be."""
    repo.models(MODELS)
    repo.matrix(MATRIX)
    result = repo.run()
    assert result.ret == 1
    block = repo.block()
    jsonschema.validate({"compile_matrix": block}, report_schema())
    assert {cell["lane"] for cell in block["cells"]} == {"fake"}
    assert {tuple(cell["checks"]) for cell in block["cells"]} == {("graph_breaks", "compiles", "recompiles")}
    assert {cell["id"]: cell["status"] for cell in block["cells"]} == {
        "deep-aot_eager-default-static-tp_fake8": "pass",
        "deep-aot_eager-default-static-tp_fake64": "pass",
        "deep-aot_eager-default-static-fsdp2_fake64": "pass",
        "deep-models_wrong-default-static-tp_fake8": "pass",
        "deep-models_refuses-default-static-tp_fake8": "fail",
        "broken-aot_eager-default-static-tp_fake8": "fail",
    }
    verdicts = repo.verdicts()
    assert verdicts["broken-aot_eager-default-static-tp_fake8::graph_breaks"] == "fail"
    assert verdicts["broken-aot_eager-default-static-tp_fake8::compiles"] == "pass"
    assert "planted" in repo.problems("deep-models_refuses-default-static-tp_fake8", "compiles")[0]["message"]
    for cell in block["cells"]:
        if cell["status"] == "pass":  # the second size was compiled anew, for each rank's share of it
            assert cell["observation"]["sections"]["recompiles"]["recompiles"]
    result.stdout.fnmatch_lines(["6 cells: 4 pass, 2 fail; 5 ran compiled code; 6 in the fake lane, where no number *"])


def test_it_compiles_what_ranks_compile(repo):
    """With as many ranks both lanes compile the same graphs, and recompile them for the same reasons."""
    repo.models(MODELS)
    repo.matrix(BOTH)
    assert repo.run().ret == 0
    sections = {cell["id"]: cell["observation"]["sections"] for cell in repo.block()["cells"]}
    fake, real = (sections[f"deep-aot_eager-default-auto-{wrapper}"] for wrapper in ("tp_fake2", "tp"))
    assert len(fake["compiles"]["graphs"]) == len(real["compiles"]["graphs"]) > 0
    told = [[(r["function"], r["cause"], r["during"]) for r in each["recompiles"]["recompiles"]]
            for each in (fake, real)]
    assert told[0] == told[1] != []
