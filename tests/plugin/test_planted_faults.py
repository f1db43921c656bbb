"""Planted faults: wrong compilers and models that lie, each caught by the check that is there for it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs_torch
BACKENDS = """
import functorch.compile
from torch._dynamo.backends.common import aot_autograd

def honest(graph, inputs):
    return graph.forward

def _changed(change):
    def backend(graph, inputs):
        def run(*args):
            return tuple(change(out) if isinstance(out, torch.Tensor) and out.is_floating_point() else out
                         for out in graph.forward(*args))
        return run
    return backend

scaled = _changed(lambda out: out * 1.001)
one_element = _changed(lambda out: out.index_put((torch.tensor(0), torch.tensor(0)), out.detach()[0, 0] * 1.01))
half = _changed(lambda out: out.to(torch.float16).to(torch.float32))
zeros = _changed(lambda out: out * 0)
dtype = _changed(lambda out: out.double())
strides = _changed(lambda out: out.t().contiguous().t())
detached = _changed(lambda out: out.detach())

def stale(graph, inputs):
    kept = []
    def run(*args):
        kept.append(graph.forward(*args))
        return kept[0] if kept[0][0].shape == kept[-1][0].shape else kept[-1]
    return run

def larger_only(graph, inputs):
    def run(*args):
        outs = graph.forward(*args)
        return tuple(out * 1.001 if isinstance(out, torch.Tensor) and out.shape[0] > 4 else out for out in outs)
    return run

def _backward(change):
    def compile_backward(graph, inputs):
        def run(args):
            outs = graph.forward(*args)
            return [change(i, out) if isinstance(out, torch.Tensor) else out for i, out in enumerate(outs)]
        run._boxed_call = True
        return run
    boxed = lambda graph, inputs: functorch.compile.make_boxed_func(graph.forward)
    return aot_autograd(fw_compiler=boxed, bw_compiler=compile_backward)

gradient_scaled = _backward(lambda i, out: out * 1.001)
gradient_negated = _backward(lambda i, out: -out)
one_gradient_zero = _backward(lambda i, out: out * 0 if i == 0 else out)
honest_backward = _backward(lambda i, out: out)

def raises_in_backward(graph, inputs):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()
        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("no backward here")
    return lambda *args: tuple(Fails.apply(out) for out in graph.forward(*args))
"""
CAUGHT = {
    "scaled": "equivalence", "one_element": "equivalence", "half": "equivalence", "dtype": "equivalence",
    "strides": "layout", "detached": "gradients", "stale": "equivalence", "larger_only": "equivalence",
    "zeros": "equivalence", "gradient_scaled": "gradients", "gradient_negated": "gradients",
    "one_gradient_zero": "gradients", "raises_in_backward": "compiles",
}


def test_wrong_backends(repo):
    """Every wrong backend fails the check that is there for it, and the honest ones pass all checks."""
    repo.models(BACKENDS)
    names = ["honest", "honest_backward", *CAUGHT]
    repo.matrix(f"""
    version: 1
    models:
      net: {{factory: "models:net", inputs: "models:batch", dims: {{B: {{buckets: [4, 8]}}}}}}
    axes:
      backend: [{', '.join(f'"models:{name}"' for name in names)}]
    """)
    result = repo.run()
    found = repo.verdicts()
    missed = [name for name, check in CAUGHT.items()
              if found[f"net-models_{name}-default-auto-none::{check}"] != "fail"]
    assert not missed, result.stdout.str()
    alarms = {key: verdict for key, verdict in found.items() if "honest" in key and verdict != "pass"}
    assert not alarms, result.stdout.str()
    result.stdout.fnmatch_lines(["*output*eager*compiled*expected*", "*gradient of *"])


MODELS = """
class Disabled(Net):
    def __init__(self):
        super().__init__()
        self.inner.forward = torch.compiler.disable(self.inner.forward)

class Breaks(Net):
    def forward(self, x):
        x = self.inner(x)
        print(end="")
        return self.outer(x)

class GivesUp(Net):
    def forward(self, x):
        try:
            print(end="")
        finally:
            x = self.inner(x)
        return self.outer(x)

class Counts(Net):
    calls = 0
    def forward(self, x):
        self.calls += 1
        return self.outer(self.inner(x) * self.calls ** 0)

class Zero(Net):
    def forward(self, x):
        return super().forward(x) * 0

class Forced(Net):
    def __init__(self):
        super().__init__()
        torch.compiler.set_stance("force_eager")

class NoTensor(Net):
    def forward(self, x):
        return x
"""
LYING = {
    "Disabled": ("compiles", "graph_breaks"), "Breaks": ("graph_breaks",), "GivesUp": ("compiles", "graph_breaks"),
    "Counts": ("recompiles",), "Zero": ("compiles", "gradients"), "Forced": ("compiles", "graph_breaks", "recompiles"),
    "NoTensor": ("compiles",),
}


def test_models_that_only_seem_compiled(repo):
    """A model that runs eagerly, in part or in whole, or proves nothing, never gets a green `compiles`."""
    repo.models(MODELS)
    entries = "\n".join(f'      {name}: {{factory: "models:{name}", inputs: "models:batch", dims: {{B: 4}}}}'
                        for name in ["Net", *LYING])
    repo.matrix(f"""
    version: 1
    models:
{entries}
    axes:
      backend: [eager]
    """)
    result = repo.run()
    found = repo.verdicts()
    missed = [(name, check) for name, checks in LYING.items() for check in checks
              if found[f"{name}-eager-default-auto-none::{check}"] not in ("fail", "error")]
    assert not missed, result.stdout.str()
    assert {v for k, v in found.items() if k.startswith("Net-")} == {"pass"}, result.stdout.str()


LAYER = """
def wrong_after_a_step(graph, inputs):
    kept = []
    def run(*args):
        weights = [arg.detach() for arg in args if isinstance(arg, torch.nn.Parameter)]
        kept[:] = kept or [weight.clone() for weight in weights]
        moved = max((weight - before).abs().max() for weight, before in zip(weights, kept))
        return tuple(out * (1.01 if 0 < moved < 0.0101 else 1) for out in graph.forward(*args))
    return run

GLOBAL = [0]

class Leaks(Net):
    def forward(self, x):
        return super().forward(x) + self.counted()
    @torch._dynamo.disable
    def counted(self):
        GLOBAL[0] += 1
        return GLOBAL[0]

class Counter:
    steps = 0

class Keeps(Net):
    def __init__(self):
        super().__init__()
        self.counter, self.meters, self.gen = Counter(), {"loss": []}, torch.Generator()
    def forward(self, x):
        return super().forward(x) * self.counted() + torch.rand(3, generator=self.gen)
    @torch._dynamo.disable
    def counted(self):
        self.counter.steps += 1
        self.meters["loss"].append(self.counter.steps)
        return self.counter.steps

class Text(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(9, 4)
    def forward(self, input_ids):
        return self.table(input_ids).sum(-1)

class CountsPads(Text):
    def forward(self, input_ids):
        return super().forward(input_ids) * (1 + int((input_ids == 0).sum()))

def text(B, S):
    return {"input_ids": torch.randint(1, 9, (B, S))}
"""


def test_the_checks_of_the_layer(repo):
    """Each fails for the fault that it is there for, and passes beside it, also where a model keeps state in Python."""
    repo.models(BACKENDS + LAYER)
    dims = {"text": "{B: 2, S: {buckets: [4, 8]}}", "batch": "{B: 4}"}
    of = {"Net": "batch", "Leaks": "batch", "Keeps": "batch", "Text": "text", "CountsPads": "text"}
    others = '"models:raises_in_backward", "models:wrong_after_a_step"'
    entries = "\n".join(f'      {name}: {{factory: "models:{name}", inputs: "models:{inputs}", dims: {dims[inputs]}}}'
                        for name, inputs in of.items())
    repo.matrix(f"""
    version: 1
    models:
{entries}
    axes:
      backend: ["models:honest", {others}]
    checks: [equivalence, smoketest, safe_fallback, shape_stability]
    rules:
      - exclude: {{model: [Leaks, Keeps, Text, CountsPads], backend: [{others}]}}
        reason: one model is enough
    """)
    result = repo.run()
    failed = {key.replace("-default-auto-none", "") for key, verdict in repo.verdicts().items() if verdict != "pass"}
    assert failed == {
        *(f"Net-models_raises_in_backward::{name}" for name in ("equivalence", "smoketest", "shape_stability")),
        "Net-models_wrong_after_a_step::smoketest",
        # Its eager runs differ among themselves, so what it computes after a fallback is undecided: a note.
        *(f"Leaks-models_honest::{name}" for name in ("equivalence", "shape_stability")),
        "Keeps-models_honest::shape_stability",
        "CountsPads-models_honest::shape_stability",
    }, result.stdout.str()
    result.stdout.fnmatch_lines_random([
        "smoketest: the smoketest says False: output: error is * (step 2, comparison)",
        "shape_stability: CountsPads.forward is compiled for S=2, padded to 4, after the bucket itself was met",
    ])
