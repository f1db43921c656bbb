"""The tables of backends, wrappers, checks and limits."""

from __future__ import annotations

from importlib import metadata
from importlib.metadata import EntryPoint

from pytest_torchcompile import backends
from pytest_torchcompile.backends import BACKENDS, NOT_ALONE
from pytest_torchcompile.checks import CHECKS, LIMITS
from pytest_torchcompile.plan.targets import Targets
from pytest_torchcompile.wrappers import WRAPPERS


def test_backends():
    """Each is known under its own name; only Inductor listens to modes."""
    assert all(name == backend.name for name, backend in BACKENDS.items())
    assert [name for name, backend in BACKENDS.items() if backend.modes] == ["inductor"]
    assert {"inductor", "aot_eager", "aot_eager_decomp_partition", "eager", "cudagraphs"} <= BACKENDS.keys()
    assert not BACKENDS.keys() & set(NOT_ALONE)


def test_installed(monkeypatch):
    """Backends that other packages register are read from their metadata."""
    asked = []

    def entry_points(group):
        asked.append(group)
        return [EntryPoint("hidet", "not_there:at_all", group)]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    assert backends.installed.__wrapped__() == {"hidet"}
    assert asked == ["torch_dynamo_backends"]


def test_targets_are_there(request):
    """What the tables name is in the source."""
    targets = Targets(request.config.rootpath)
    named = [entry.target for entry in (*WRAPPERS.values(), *CHECKS.values())]
    assert [mistake for target in named if (mistake := targets.mistake(target))] == []


def test_checks():
    """The order of the report, and the limits that a matrix may set."""
    assert list(CHECKS) == ["graph_breaks", "compiles", "equivalence", "gradients", "training_steps", "aliasing",
                            "layout", "recompiles", "shape_stability", "cudagraphs", "smoketest", "safe_fallback",
                            "rank_divergence", "randomness", "kernels", "memory", "determinism", "worth", "contract",
                            "artifacts", "fuzz", "passes"]
    assert {name: (limit.kind, limit.default) for name, limit in LIMITS.items()} == {
        "coverage": ("min", 1.0), "guard_us": ("max", None),
        "steps": ("min", 3), "graph_breaks": ("max", 0), "recompiles": ("max", None),
        "late_recompiles": ("max", None), "uncaptured": ("max", None), "kernels": ("max", None),
        "launches": ("max", None), "speedup": ("min", None), "leaked_bytes": ("max", None), "memory_mib": ("max", None),
        "kernels_share": ("max", None),
        "fuzz_recompiles": ("max", None), "zero_gradients": ("max", None), "zero_signs": ("max", None),
        "rms": ("max", None), "bias": ("max", None),
        "peak": ("max", None), "strides": ("max", None), "unexplained": ("max", None),
        "decided": ("min", None), "cache_misses": ("max", 0), "routes": ("min", 1)}
