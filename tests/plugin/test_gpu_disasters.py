"""What breaks on a GPU costs its own cell only: an illegal access, a failed assertion, no memory left."""

from __future__ import annotations

import importlib.util
import os

import pytest

from pytest_torchcompile.ranks.gpus import gpu_device_files

pytestmark = pytest.mark.needs_torch
MODELS = """
try:
    import triton
    import triton.language as tl

    @triton.jit
    def _wild(x):
        tl.store(x + (1 << 42), 1.0)
except ImportError:
    _wild = None

def _strike(what):
    def backend(graph, inputs):
        def run(*args):
            if what == "illegal":
                _wild[(1,)](torch.ones(4, device="cuda"))
                torch.cuda.synchronize()
            if what == "assertion":
                torch.ones(4, device="cuda")[torch.full((4,), 99, device="cuda")]
                torch.cuda.synchronize()
            if what == "memory":
                torch.empty(1 << 44, device="cuda")
            return graph(*args)
        return run
    return backend

def told():
    with open("seen.txt", "a") as file:
        print(os.environ["CUDA_VISIBLE_DEVICES"], file=file)
    return Net()

illegal, assertion, memory = map(_strike, ["illegal", "assertion", "memory"])
"""
MATRIX = """
version: 1
models:
  net: {factory: "models:told", inputs: "models:batch", dims: {B: 4}}
axes:
  device: [cuda]
  backend: [eager, "models:illegal", aot_eager, "models:assertion", toolkit, "models:memory",
            aot_eager_decomp_partition]
checks: [compiles, equivalence, gradients]
"""


@pytest.mark.skipif(not gpu_device_files() or importlib.util.find_spec("triton") is None,
                    reason="needs a CUDA GPU and Triton")
def test_each_disaster_is_one_cells_verdict(repo):
    """The process that saw it is replaced; the cells around it, on the same GPU, pass."""
    repo.models(MODELS)
    repo.matrix(MATRIX)
    result = repo.run("--compile-timeout=120")
    assert result.ret == 1
    cells = {cell["axes"]["backend"].removeprefix("models:"): cell for cell in repo.block()["cells"]}
    assert {name: cell["status"] for name, cell in cells.items()} == {
        "eager": "pass", "illegal": "crash", "aot_eager": "pass", "assertion": "crash", "toolkit": "pass",
        "memory": "fail", "aot_eager_decomp_partition": "pass",
    }
    failures = {name: (cell["observation"]["failure"] or {}).get("message", "") for name, cell in cells.items()}
    assert "can't be used any more" in failures["illegal"]
    assert "illegal memory access" in failures["illegal"]
    assert "device-side assert" in failures["assertion"]
    error = cells["memory"]["observation"]["sections"]["compiles"]["error"]
    assert error["type"].endswith("OutOfMemoryError")
    assert set((repo.path / "seen.txt").read_text().split()) == {_first_gpu()}


def _first_gpu():
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]


POISONED = """
from pytest_torchcompile.gauges import memory

def _poison(graph, inputs):
    def run(*args):
        memory.sticky_error = lambda *, wait=True: "CUDA error: an illegal memory access was encountered"
        return graph(*args)
    return run
"""


def test_a_process_with_a_spoilt_gpu_is_replaced(repo):
    """As above with a fake: after the cell the GPU answers with an error, and the next cell has a fresh process."""
    repo.models(POISONED)
    repo.matrix("""
        version: 1
        models:
          net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
        axes:
          backend: ["models:_poison", eager]
        checks: [compiles]
    """)
    repo.run()
    first, second = repo.block()["cells"]
    assert (first["status"], second["status"]) == ("crash", "pass")
    assert first["observation"]["failure"]["message"] == (
        "the GPU can't be used any more by the process that ran the cell: CUDA error: an illegal memory access was "
        "encountered")


TWO = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
axes:
  device: [cpu, "cuda:7"]
  backend: [eager]
checks: [compiles]
"""


def test_more_gpus_than_the_machine_has(repo, monkeypatch):
    """A skip with its reason: of two GPUs none is the eighth. Needs no GPU: nobody gets so far as to use one."""
    repo.file("conftest.py", """
        from pytest_torchcompile.ranks import gpus
        gpus.gpu_device_files = lambda: ["/dev/nvidia0", "/dev/nvidia1"]
    """)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    repo.matrix(TWO)
    repo.run()
    status = {cell["axes"]["device"]: cell for cell in repo.block()["cells"]}
    assert status["cpu"]["status"] == "pass"
    assert status["cuda:7"]["status"] == "skip"
    assert status["cuda:7"]["observation"]["failure"]["message"] == "it needs 8 GPUs, and this machine has 2 to use"
