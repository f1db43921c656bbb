"""CUDA graphs, with fakes where there is no GPU, and with planted skips where there is one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pytest_torchcompile import CompileConfig, compare
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.checks import CHECKS, load
from pytest_torchcompile.gauges import memory
from pytest_torchcompile.gauges.replays import compiled_backwards, count_replays
from pytest_torchcompile.ledger import observe
from pytest_torchcompile.ledger.cudagraph_skips import outside_of_partitions, partition_skips
from pytest_torchcompile.observation import Job
from pytest_torchcompile.oracle.training import Training, steps_of
from pytest_torchcompile.run.runner import run_cell

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
pytestmark = [pytest.mark.needs_torch,
              pytest.mark.filterwarnings("ignore")]  # torch's own, when Inductor and CUDA are first used


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_replays_are_counted_by_graph(monkeypatch):
    """Those inside of a compiled graph are that graph's, others a backward's; afterwards torch's method is back."""
    calls = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", calls.append)
    before = torch.cuda.CUDAGraph.replay

    def backend(module, inputs):
        def run(*args):
            torch.cuda.CUDAGraph.replay("graph")
            torch.cuda.CUDAGraph.replay("graph")
            return module(*args)

        return run

    replaying = torch.compile(lambda x: x.sin(), backend=backend)
    plain = torch.compile(lambda x: x.cos(), backend="eager")
    x = torch.ones(3)
    replaying(x), plain(x)
    with count_replays() as seen:
        replaying(x), plain(x)
        torch.cuda.CUDAGraph.replay("backward")
    assert [graph["replays"] for graph in seen.graphs] == [2, 0]
    assert (seen.elsewhere, len(seen.without)) == (1, 1)
    assert calls == ["graph"] * 4 + ["backward"]
    assert torch.cuda.CUDAGraph.replay is before


def test_compiled_backwards_are_found_behind_the_loss():
    """Two compiled functions and one eager: two backward passes are compiled."""
    one, two = (torch.compile(f, backend="aot_eager") for f in (lambda x: x.sin() * 2, lambda x: x.exp()))
    x = torch.ones(3, requires_grad=True)
    assert compiled_backwards((two(one(x)).square()).sum()) == 2
    assert compiled_backwards(x.sin().sum()) == 0


CODE = """
triton_poi_fused_add_0 = async_compile.triton('k', '''...''')
def partition_0(args):
    triton_poi_fused_add_0.run(arg0_1, buf0, 4)
class Runner:
    def call(self, args):
        buf1.copy_(arg1_1, False)
        (buf0,) = self.partitions[0](partition0_args)
        buf2 = torch.ops.aten.nonzero.default(buf0)
"""


def test_what_stays_outside_of_partitions():
    """Copies, kernels and fallbacks in the function that calls the partitions."""
    assert outside_of_partitions(CODE) == ["buf1.copy_", "torch.ops.aten.nonzero.default"]
    assert outside_of_partitions(CODE.replace("buf1.copy_(arg1_1, False)", "triton_poi_fused_add_0.run(arg1_1)")) == [
        "triton_poi_fused_add_0.run", "torch.ops.aten.nonzero.default"]
    assert outside_of_partitions("def call(args):\n    extern_kernels.mm(a, b)\n") == []


def test_a_partitioned_graph_says_what_it_does_without():
    """Torch is silent about each of these."""
    info = SimpleNamespace(cudagraph_fail_reasons=["skipping cudagraphs due to cpu device (arg0_1)"])
    graph = SimpleNamespace(cudagraph_info=info, partition_maps=[], source_code=CODE)
    assert [(s.reason, s.part) for s in partition_skips(graph)] == [("cpu device (arg0_1)", False)]
    graph.cudagraph_info = None
    assert [(s.reason, s.part) for s in partition_skips(graph)] == [("no operator of the graph can be captured", False)]
    graph.partition_maps = [1]
    assert [(s.reason, s.part) for s in partition_skips(graph)] == [
        ("outside of 1 captured part(s): buf1.copy_, torch.ops.aten.nonzero.default", True)]


@pytest.mark.parametrize("copied", [True, False])
def test_gradients_of_a_step_are_copied_before_the_next(copied):
    """Inputs' gradients that all come in the same memory, as CUDA graphs do: as they are, the next overwrites them."""
    memory = torch.zeros(2, 3)

    def reuse(x):
        memory.copy_(x.grad)
        x.grad = memory

    def square(x):
        x.register_post_accumulate_grad_hook(reuse)
        return x.square()

    training = Training(nn.Linear(3, 1), square, lambda out, value: out.sum(), 0.0, copied=copied)
    one, five = (torch.full((2, 3), value, requires_grad=True) for value in (1.0, 5.0))
    steps = steps_of([Batch.of(one), Batch.of(five)]).kwargs
    training(**steps)
    assert steps["step 2"].grad.tolist() == [[10.0] * 3] * 2
    assert steps["step 1"].grad.tolist() == [[2.0 if copied else 10.0] * 3] * 2


def test_a_gpu_that_fails_is_told_in_its_words(monkeypatch):
    """Whatever the call at which CUDA repeats itself; out of memory is no such error."""
    assert memory.sticky_error() == ""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def fail(error):
        def synchronize():
            raise error

        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    fail(RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."))
    assert memory.sticky_error() == "CUDA error: an illegal memory access was encountered"
    fail(torch.OutOfMemoryError("CUDA out of memory"))
    assert memory.sticky_error() == ""


@pytest.mark.parametrize("error", ["", "CUDA error: an illegal memory access was encountered"])
def test_a_gpu_whose_collective_may_never_end_is_not_waited_for(monkeypatch, error):
    """What another rank never joins would hold the process that has a failure to tell."""
    def query():
        if error:
            raise RuntimeError(error)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("it waits"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=query))
    assert memory.sticky_error(wait=False) == error


# with a GPU


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.b(self.a(x).relu())


class OnTheHost(Plain):
    """Something is computed on the CPU, in the middle."""

    def forward(self, x):
        return self.b((self.a(x).cpu() * 2).cuda().relu())


class Writes(Plain):
    """Changes its input in place."""

    def forward(self, x):
        y = self.b(self.a(x).relu())
        x.add_(1)
        return y


class Syncs(Plain):
    """A size that only the data know, in the middle of a graph."""

    def forward(self, x):
        y = self.a(x).relu()
        return self.b(y[(y.detach().sum(1) > 0).nonzero().squeeze(-1)])


def rows(B):
    return torch.randn(B, 16)


def cell_of(model, **axes):
    """What a cell of the model came to: the observation, and what the check said."""
    cell = {"model": "m", "backend": "inductor", "mode": "reduce-overhead", "dynamic": "auto", "wrapper": "none",
            "dtype": "float32", "device": "cuda", "phase": "training", "user": {}} | axes
    from pytest_torchcompile.dims import Dim
    from pytest_torchcompile.plan.models import ModelEntry

    made = ModelEntry("m", f"test_cudagraphs:{model}", "test_cudagraphs:rows", dims={"B": Dim(choices=(4, 6))})
    names = [name for name in ("compiles", "equivalence", "gradients", "training_steps", "aliasing", "cudagraphs")
             if CHECKS[name].applies(cell)]
    seen, poisoned = run_cell(Job(cell, made.to_dict(), str(Path(__file__).parent), tuple(names)))
    assert seen["failure"] is None, seen["failure"]
    assert not poisoned
    problems = {name: [p.message for p in load(name).judge(seen["sections"][name], {})] for name in names}
    return seen["sections"], {name: found for name, found in problems.items() if found}


@needs_gpu
@pytest.mark.parametrize("axes", [
    {}, {"mode": "max-autotune"}, {"dynamic": "dynamic"}, {"dynamic": "static"}, {"phase": "inference"},
    {"backend": "cudagraphs", "mode": "default", "dynamic": "static"}], ids=str)
def test_a_healthy_model_replays_everything(axes):
    """No false alarm of any check, and each graph of each size, forward and backward, replays."""
    sections, problems = cell_of("Plain", **axes)
    assert problems == {}
    steps = sections["cudagraphs"]["steps"]
    assert [len(step["graphs"]) for step in steps] == [1, 1]
    assert all(graph["replays"] for step in steps for graph in step["graphs"])
    assert {step["backwards"] for step in steps} == ({0} if axes.get("phase") == "inference" else {1})
    assert sections["cudagraphs"]["skips"] == []


@needs_gpu
@pytest.mark.parametrize(("model", "axes"), [
    ("OnTheHost", {}), ("OnTheHost", {"backend": "cudagraphs", "mode": "default", "dynamic": "static"}),
    ("Writes", {"phase": "inference"}),  # the backend cudagraphs records such writes
])
def test_a_planted_skip_is_caught(model, axes):
    """The mode promises CUDA graphs, and torch does without for a part of the model or all of it."""
    _, problems = cell_of(model, **axes)
    assert "CUDA graph" in problems["cudagraphs"][0]


@needs_gpu
def test_switched_off_by_torch_itself():
    """Torch's own fault injector."""
    if not hasattr(torch._inductor.config, "force_disable_cudagraph_TESTING_ONLY"):
        pytest.skip(f"torch {torch.__version__} has no such fault injector")
    with torch._inductor.config.patch(force_disable_cudagraph_TESTING_ONLY=True):
        _, problems = cell_of("Plain")
    assert "2 of 2 compiled graphs ran without a CUDA graph" in problems["cudagraphs"][0]


@needs_gpu
def test_compare_takes_cuda_graphs():
    """Held outputs are overwritten by design, which a note says; what is wrong is still found."""
    torch.manual_seed(0)
    model = Plain().cuda()
    calls = [torch.randn(4, 16, device="cuda"), torch.randn(6, 16, device="cuda")]
    found = compare(model, calls, CompileConfig(enabled=True, mode="reduce-overhead"), steps=3)
    assert found.ok, str(found)
    assert any("CUDA graphs write to the same memory" in note for note in found.notes)


@needs_gpu
def test_partitions_of_a_real_graph():
    """A size that the data decide splits the graph, of which torch says nothing."""
    model = Syncs().cuda()
    with observe() as seen, torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(model, mode="reduce-overhead", fullgraph=True)(torch.randn(8, 16, device="cuda"))
    assert seen.cudagraph_skips, "torch captured a size that only the data know"
