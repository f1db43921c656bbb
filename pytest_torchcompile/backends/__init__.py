"""BACKENDS: what is known about each name that ``torch.compile(backend=...)`` takes.

To add one: a record here. A backend that torch does not register by itself needs no record: an entry point of
the group ``torch_dynamo_backends`` or ``module:attribute`` serves as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

__all__ = ["BACKENDS", "ENTRY_POINTS", "NOT_ALONE", "PASS_NAMES", "TABLES", "Backend", "installed", "promised"]

ENTRY_POINTS: Final = "torch_dynamo_backends"
"""The entry-point group that torch looks backends up in (torch/_dynamo/backends/registry.py, torch 2.13)."""


@dataclass(frozen=True, slots=True)
class Backend:
    """What a matrix must know of a backend without importing torch."""

    name: str
    help: str
    modes: bool = False
    """Does ``torch.compile(mode=...)`` change what it does?"""
    kernels: bool = False
    """Does it generate kernels, so that there is something to count and to time?"""
    graphs: tuple[str, ...] = ()
    """The modes in which it promises to run CUDA graphs on a GPU."""

    @property
    def is_stage(self) -> bool:
        """Does it only show how far the compiler comes? It optimises nothing, and nobody deploys it."""
        return not self.kernels and self.name != "cudagraphs"


# From torch/_dynamo/backends/*.py, torch 2.13; tests/backends/test_backends_table.py compares with the torch
# that is installed.
_RECORDS: Final = (
    Backend("inductor", "Inductor: Triton kernels on GPUs, C++ kernels on CPUs", modes=True, kernels=True,
            graphs=("reduce-overhead", "max-autotune")),
    Backend("aot_eager", "Dynamo and AOTAutograd, then torch's own operators"),
    Backend("aot_eager_decomp_partition", "aot_eager with Inductor's decompositions and partitioner"),
    Backend("eager", "Dynamo alone: the captured graph is run as it is"),
    Backend("toolkit", "the whole model as one graph, graph passes of yours over it, and Inductor or another last",
            kernels=True),
    Backend("cudagraphs", "AOTAutograd, then CUDA graphs of torch's own operators",
            graphs=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")),
    Backend("aot_eager_default_partitioner", "aot_eager with the default partitioner"),
    Backend("aot_eager_decomp_partition_crossref", "... with fake tensors checked against real ones"),
    Backend("aot_ts", "AOTAutograd, then TorchScript"),
    Backend("ts", "TorchScript"),
    Backend("eager_noexcept", "eager, with errors of the captured graph reported as Dynamo's"),
    Backend("eager_debug", "eager, with the schema of every operator checked"),
    Backend("pre_dispatch_eager", "eager, after tracing the graph above autograd"),
    Backend("onnxrt", "ONNX Runtime", kernels=True),
    Backend("openxla", "XLA with AOTAutograd", kernels=True),
    Backend("openxla_eval", "XLA, inference only", kernels=True),
    Backend("tvm", "Apache TVM, inference only", kernels=True),
    Backend("relu_accuracy_error_TESTING_ONLY", "planted fault: relu adds 1"),
    Backend("relu_compile_error_TESTING_ONLY", "planted fault: relu does not compile"),
    Backend("relu_runtime_error_TESTING_ONLY", "planted fault: relu raises when run"),
    Backend("non_leaf_compile_error_TESTING_ONLY", "planted fault: a non-leaf input does not compile"),
)
BACKENDS: Final[dict[str, Backend]] = {record.name: record for record in _RECORDS}

PASS_NAMES: Final = ("dead_code", "common_subexpressions", "no_op_views", "recompute_pointwise",
                     "save_products", "constant_folding", "bucket_collectives", "bf16_islands", "cuda_graphs")
"""The graph passes that the backend ``toolkit`` knows by a name (``graph_passes.py``)."""
TABLES: Final = ("inductor", "core_aten", "none")
"""The tables of decompositions that it knows by a name (``decomposition_tables.py``)."""

NOT_ALONE: Final = (
    "aot_eager_decomp_partition_with_mode",
    "dynamo_accuracy_minifier_backend",
    "dynamo_minifier_backend",
    "invoke_subgraph",
)
"""Names that torch registers for its own use: they need arguments or graphs that no cell can give them."""


def promised(settings: Mapping[str, Any]) -> bool:
    """Do the keyword arguments of ``torch.compile`` promise CUDA graphs on a GPU?"""
    backend, mode = settings.get("backend") or "inductor", settings.get("mode") or "default"
    # A backend may also be a function; of that nothing is known.
    if not isinstance(backend, str) or backend not in BACKENDS:
        return False
    record = BACKENDS[backend]
    asked = (settings.get("options") or {}).get("triton.cudagraphs")
    return mode in record.graphs or (record.modes and bool(asked))


@cache
def installed() -> frozenset[str]:
    """Names of the backends that other packages on this machine register; loads none of them."""
    # Slow to import, and seldom needed.
    from importlib.metadata import entry_points

    return frozenset(point.name for point in entry_points(group=ENTRY_POINTS))
