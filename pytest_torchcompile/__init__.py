"""Is torch.compile correct, stable, worth it and safe for your models?

Public names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_torchcompile.exports import on_first_use

if TYPE_CHECKING:
    from pytest_torchcompile.cell import Cell
    from pytest_torchcompile.errors import CannotFallBack, CompileFailed
    from pytest_torchcompile.fixtures import FuzzCutShortWarning, RanEagerlyWarning, StateLeakWarning, WarmUpLostWarning
    from pytest_torchcompile.fuzz.calls import call
    from pytest_torchcompile.fuzz.drawing import shape_sequences
    from pytest_torchcompile.fuzz.emitted import assert_calls, cell_sequences
    from pytest_torchcompile.fuzz.shapes import compile_shapes, dim
    from pytest_torchcompile.instruments import Ledger, observe
    from pytest_torchcompile.layer.benchmark import Benchmark, benchmark
    from pytest_torchcompile.layer.config import BucketConfig, CompileConfig
    from pytest_torchcompile.layer.equivalence import Comparison, assert_equivalent, compare
    from pytest_torchcompile.layer.shapes import ShapeStabilizer
    from pytest_torchcompile.layer.smoketest import CompileSmoketest, SmoketestResult
    from pytest_torchcompile.layer.wrap import maybe_compile
    from pytest_torchcompile.matrix import Matrix, load_matrix

__all__ = [
    "Benchmark",
    "BucketConfig",
    "CannotFallBack",
    "Cell",
    "Comparison",
    "CompileConfig",
    "CompileFailed",
    "CompileSmoketest",
    "FuzzCutShortWarning",
    "Ledger",
    "Matrix",
    "RanEagerlyWarning",
    "ShapeStabilizer",
    "SmoketestResult",
    "StateLeakWarning",
    "WarmUpLostWarning",
    "assert_calls",
    "assert_equivalent",
    "benchmark",
    "call",
    "cell_sequences",
    "compare",
    "compile_shapes",
    "dim",
    "load_matrix",
    "maybe_compile",
    "observe",
    "shape_sequences",
]
__version__ = "0.1.0"

_EXPORTS = {
    "Benchmark": "layer.benchmark",
    "BucketConfig": "layer.config",
    "CannotFallBack": "errors",
    "Cell": "cell",
    "Comparison": "layer.equivalence",
    "CompileConfig": "layer.config",
    "CompileFailed": "errors",
    "CompileSmoketest": "layer.smoketest",
    "FuzzCutShortWarning": "fixtures",
    "Ledger": "instruments",
    "Matrix": "matrix",
    "RanEagerlyWarning": "fixtures",
    "ShapeStabilizer": "layer.shapes",
    "SmoketestResult": "layer.smoketest",
    "StateLeakWarning": "fixtures",
    "WarmUpLostWarning": "fixtures",
    "assert_calls": "fuzz.emitted",
    "assert_equivalent": "layer.equivalence",
    "benchmark": "layer.benchmark",
    "call": "fuzz.calls",
    "cell_sequences": "fuzz.emitted",
    "compare": "layer.equivalence",
    "compile_shapes": "fuzz.shapes",
    "dim": "fuzz.shapes",
    "load_matrix": "matrix",
    "maybe_compile": "layer.wrap",
    "observe": "instruments",
    "shape_sequences": "fuzz.drawing",
}
__getattr__, __dir__ = on_first_use(__name__, globals(), _EXPORTS)
