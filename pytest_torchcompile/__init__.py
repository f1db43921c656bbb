"""Is torch.compile correct, stable, worth it and safe for your models?

Public names are loaded on first use (PEP 562), so that importing the package costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_torchcompile.cell import Cell
    from pytest_torchcompile.errors import CannotFallBack, CompileFailed
    from pytest_torchcompile.fuzz.drawn_call import call, shape_sequences
    from pytest_torchcompile.layer.benchmark import benchmark
    from pytest_torchcompile.layer.benchmark_result import Benchmark
    from pytest_torchcompile.layer.config import BucketConfig, CompileConfig
    from pytest_torchcompile.layer.equivalence import Comparison, assert_equivalent, compare
    from pytest_torchcompile.layer.pass_judgement import JudgedPasses, judge_passes
    from pytest_torchcompile.layer.shape_stabilizer import ShapeStabilizer
    from pytest_torchcompile.layer.smoketest import CompileSmoketest, SmoketestResult
    from pytest_torchcompile.layer.wrap import maybe_compile
    from pytest_torchcompile.ledger import Ledger, observe
    from pytest_torchcompile.plan.matrix import Matrix, load_matrix
    from pytest_torchcompile.plugin.compile_contract import compile_contract
    from pytest_torchcompile.plugin.compile_shapes import compile_shapes, dim
    from pytest_torchcompile.plugin.fixtures import (
        FuzzCutShortWarning,
        RanEagerlyWarning,
        StateLeakWarning,
        WarmUpLostWarning,
    )
    from pytest_torchcompile.run.fuzz_test import assert_calls, cell_sequences

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
    "JudgedPasses",
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
    "compile_contract",
    "compile_shapes",
    "dim",
    "judge_passes",
    "load_matrix",
    "maybe_compile",
    "observe",
    "shape_sequences",
]
__version__ = "0.1.0"

_EXPORTS = {
    "Benchmark": "layer.benchmark_result",
    "BucketConfig": "layer.config",
    "CannotFallBack": "errors",
    "Cell": "cell",
    "Comparison": "layer.equivalence",
    "CompileConfig": "layer.config",
    "CompileFailed": "errors",
    "CompileSmoketest": "layer.smoketest",
    "FuzzCutShortWarning": "plugin.fixtures",
    "JudgedPasses": "layer.pass_judgement",
    "Ledger": "ledger",
    "Matrix": "plan.matrix",
    "RanEagerlyWarning": "plugin.fixtures",
    "ShapeStabilizer": "layer.shape_stabilizer",
    "SmoketestResult": "layer.smoketest",
    "StateLeakWarning": "plugin.fixtures",
    "WarmUpLostWarning": "plugin.fixtures",
    "assert_calls": "run.fuzz_test",
    "assert_equivalent": "layer.equivalence",
    "benchmark": "layer.benchmark",
    "call": "fuzz.drawn_call",
    "cell_sequences": "run.fuzz_test",
    "compare": "layer.equivalence",
    "compile_contract": "plugin.compile_contract",
    "compile_shapes": "plugin.compile_shapes",
    "dim": "plugin.compile_shapes",
    "judge_passes": "layer.pass_judgement",
    "load_matrix": "plan.matrix",
    "maybe_compile": "layer.wrap",
    "observe": "ledger",
    "shape_sequences": "fuzz.drawn_call",
}


def on_first_use(
    package: str, namespace: dict[str, Any], exports: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package, which ``namespace`` is the globals of.

    :param exports: public name to the module below the package that holds it.
    """

    def load(name: str) -> Any:
        try:
            module = exports[name]
        except KeyError:
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        value = namespace[name] = getattr(import_module(f"{package}.{module}"), name)
        return value

    return load, lambda: sorted({*namespace, *exports})


__getattr__, __dir__ = on_first_use(__name__, globals(), _EXPORTS)
