"""Stages, kernels, launches and memory of real runs."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config
from torch import nn

from pytest_torchcompile.errors import InstrumentError, Unavailable
from pytest_torchcompile.gauges import kernels, memory
from pytest_torchcompile.ledger import observe

pytestmark = [pytest.mark.needs_torch,
              pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
              pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]  # fmt: skip
HAS_LINES = "trace.provenance_tracking_level" in torch._inductor.config.get_config_copy()
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class Net(nn.Module):
    """One library call, one fused kernel, one fallback."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        """Forward."""
        y = self.linear(x)
        y = self.norm(y).relu()
        return torch.sort(y + 1).values


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def trained(backend="inductor"):
    """Ledger of one training step."""
    torch.manual_seed(0)
    torch.compiler.reset()
    with observe(keep_texts=True) as seen:
        torch.compile(Net(), backend=backend, dynamic=False)(torch.ones(4, 8)).sum().backward()
    return seen


def test_kernels_of_a_training_step_cold_and_on_a_cache_hit():
    """The same kernels with the same operators, from generated and from cached code."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        cold, warm = trained(), trained()
    assert [answer for compiled in cold.compiles for answer in compiled.caches].count("aot miss") == 1
    assert [answer for compiled in warm.compiles for answer in compiled.caches].count("aot hit") == 1
    for seen in (cold, warm):
        forward, backward = kernels.read_kernels(seen.texts, kernels.aten_operators())
        assert (forward.stage, backward.stage) == ("forward", "backward")
        assert forward.library == {"addmm": 1}
        assert list(forward.fallbacks) == ["aten.sort.stable"]
        assert [(k.language, set(k.ops), k.calls) for k in forward.generated] == [
            ("cpp", {"add", "native_layer_norm", "relu"}, 1)]  # fmt: skip
        assert backward.library == {"mm": 1}  # the gradient of the weight; the input needs none


@pytest.mark.skipif(not HAS_LINES, reason="torch 2.8 does not note the lines of kernels")
def test_lines_of_the_users_code():
    """Under note_source_lines() each kernel has the lines that are fused in it."""
    from torch._inductor.utils import fresh_cache

    start = Net.forward.__code__.co_firstlineno
    with fresh_cache(), kernels.note_source_lines():
        forward, _ = kernels.read_kernels(trained().texts, kernels.aten_operators())
    assert forward.generated[0].lines == (f"{__file__}:{start + 3}", f"{__file__}:{start + 4}")


def test_a_torch_that_cannot_note_lines_is_named(monkeypatch):
    """One sentence with the name and the version."""
    monkeypatch.setattr(kernels, "_LEVEL", "trace.no_such_level")
    said = r"has no torch\._inductor\.config\.trace\.no_such_level"
    with pytest.raises(InstrumentError, match=said), kernels.note_source_lines():
        pass


@pytest.mark.parametrize(("backend", "wanted"), [
    ("eager", {"dynamo"}), ("aot_eager", {"dynamo", "joint", "forward", "backward"}),
    ("inductor", {"dynamo", "joint", "forward", "backward", "post_grad", "code"}),
])  # fmt: skip
def test_texts_of_each_stage(backend, wanted):
    """As far as the backend goes; kept only where they were asked for."""
    texts = [text for text in trained(backend).texts if text.compile_id == "0/0"]
    assert {text.stage for text in texts} - {"kernel_lines"} == wanted
    assert "relu" in next(text.text for text in texts if text.stage == "dynamo")
    with observe() as seen:
        torch.compile(Net(), backend=backend)(torch.ones(3, 8))
    assert seen.texts == []


def test_seconds_are_split_and_add_up():
    """Dynamo, AOTAutograd, Inductor and kernels together are the whole compile."""
    (first, *_) = trained().compiles
    assert set(first.seconds_in) >= {"dynamo", "aot"}
    assert sum(first.seconds_in.values()) == pytest.approx(first.seconds, rel=0.02)
    stages = {stage for compiled in trained("eager").compiles for stage in compiled.seconds_in}
    assert stages == {"dynamo", "aot"}  # the backend's part, tiny


def test_memory_of_a_call_on_the_cpu():
    """400 MB kept: delta and extra. 400 MB dropped: extra only."""
    kept = []
    keeps = memory.measure_memory(lambda: kept.append(torch.ones(100_000_000)))
    drops = memory.measure_memory(lambda: torch.ones(100_000_000).sum())
    assert keeps.source in ("rss", "maxrss")
    assert keeps.delta == pytest.approx(400e6, rel=0.1)
    assert keeps.peak >= keeps.after
    if drops.source == "rss":
        assert drops.extra == pytest.approx(400e6, rel=0.1)
    assert drops.delta < 40e6
    assert memory.Memory(**keeps.to_dict()) == keeps


def test_a_system_that_cannot_reset_the_peak_says_so(monkeypatch, tmp_path):
    """The peak is then the process', and the record tells."""
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "absent" / "clear_refs")
    found = memory.measure_memory(lambda: None)
    assert found.source == "maxrss"
    assert found.peak >= found.before > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
def test_launches_are_unavailable_without_a_gpu():
    """A skip, never a zero that looks like a measurement."""
    with pytest.raises(Unavailable, match="CUDA GPU"):
        kernels.count_launches(lambda: None)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own
@needs_gpu
def test_launches_and_memory_on_a_gpu():
    """Fewer kernels compiled than eager; one CUDA graph replay in reduce-overhead; torch's own count of bytes."""
    x = torch.ones(64, 64, device="cuda")

    def chain(x):
        return ((x + 1) * 2).relu() - 3

    compiled, graphed = torch.compile(chain), torch.compile(chain, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            compiled(x), graphed(x)
        eager, fused, replayed = (kernels.count_launches(lambda f=f: f(x)) for f in (chain, compiled, graphed))
    assert (eager.kernels, eager.graphs, eager.host_launches) == (4, 0, 4)
    assert (fused.kernels, fused.graphs, fused.host_launches) == (1, 0, 1)
    assert (replayed.graphs, replayed.host_launches) == (1, 1)  # one copies the input to where the graph reads it
    kept = []
    found = memory.measure_memory(lambda: kept.append(torch.ones(1_000_000, device="cuda")), "cuda")
    assert (found.source, found.delta) == ("cuda", pytest.approx(4e6, rel=0.01))


def test_a_skipped_cuda_graph_has_its_reason():
    """Each reason once, with the user's line where torch names it; nothing after the block."""
    from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

    because = "skipping cudagraphs due to mutated inputs (1 instances). Found from : \n   File \"n.py\", line 5, in f\n"
    with observe() as seen, seen.during("call 1"):
        for message in (because, because, "skipping cudagraphs due to skipping cudagraphs due to cpu device (y)"):
            log_cudagraph_skip_and_bump_counter(message)
    log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to something else")
    assert [(s.reason, s.file, s.line, s.during) for s in seen.cudagraph_skips] == [
        ("mutated inputs (1 instances)", "n.py", 5, "call 1"), ("cpu device (y)", "", 0, "call 1")]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own
@needs_gpu
def test_a_real_skipped_cuda_graph_has_its_reason():
    """An input that the graph writes to: torch finds out at the first run."""

    def mutates(x):
        x.add_(1)
        return x * 2

    with observe() as seen, torch.no_grad(), torch._inductor.config.patch(graph_partition=False):
        torch.compile(mutates, mode="reduce-overhead")(torch.ones(64, device="cuda"))
    assert [s.reason for s in seen.cudagraph_skips] == ["mutated inputs (1 instances)"]
    assert seen.cudagraph_skips[0].line == mutates.__code__.co_firstlineno + 1


@needs_gpu
def test_triton_kernels_name_their_operators():
    """From the comment above each kernel."""
    with observe(keep_texts=True) as seen, torch.no_grad():
        torch.compile(lambda x: (x + 1).relu())(torch.ones(64, 64, device="cuda"))
    (found,) = kernels.read_kernels(seen.texts)
    assert [(k.language, set(k.ops), k.calls) for k in found.generated] == [("triton", {"add", "relu"}, 1)]


def test_seconds_of_products_are_told_by_the_operator_that_launched_them():
    """Those that a library computes on both sides; a gamma function is none of them, nor what becomes a sum."""
    seconds = {"addmm": 1.0, "bmm": 2.0, "_grouped_mm": 4.0, "cudnn_convolution": 8.0, "convolution_backward": 16.0,
               "_efficient_attention_forward": 32.0, "_cudnn_rnn": 64.0, "mine::op": 128.0, "addmv": 1000.0,
               "lgamma": 1000.0, "native_layer_norm": 1000.0}  # fmt: skip
    assert kernels.Launches(11, 0, 11, by_operator=seconds).product_seconds == 255.0
