"""A report made up for tests and benchmarks: of any size, like those of real runs, with planted failures."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from pytest_torchcompile.observation import worst
from pytest_torchcompile.report.provenance import cell_fingerprint, head_fingerprint
from pytest_torchcompile.report.schema import SCHEMA_VERSION

AXES: dict[str, list[Any]] = {
    "model": ["scorer", "mini_gpt", "encoder", "conv_net", "moe_lite"],
    "backend": ["inductor", "aot_eager", "eager"],
    "mode": ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
    "dynamic": ["auto", "static", "dynamic"],
    "wrapper": ["none", "autocast", "regional"],
    "phase": ["training", "inference"],
}
"""1,080 cells."""
SMALL: dict[str, list[Any]] = {"model": ["scorer", "moe_lite"], "backend": ["inductor", "aot_eager"],
                               "dynamic": ["auto", "static", "dynamic"]}  # fmt: skip
"""12 cells."""
CHECKS = ("compiles", "equivalence", "gradients", "graph_breaks", "recompiles")


def sample_report(axes: dict[str, list[Any]] | None = None, kernels: bool = True) -> dict[str, Any]:
    """A whole report of the cells of some axes. What fails in them:

    - model ``moe_lite``: a graph break at ``models.py:41``, and so coverage, where the backend is not ``eager``
    - backend ``inductor`` with mode ``reduce-overhead`` and dynamic ``dynamic``: recompiles at ``models.py:12``
    - wrapper ``regional`` with model ``encoder``: expected to fail; ``autocast`` with ``conv_net``: skipped
    - model ``mini_gpt``, mode ``max-autotune``, backend ``eager``, phase ``inference``: one crash for each wrapper
    """
    axes = axes or AXES
    product = enumerate(itertools.product(*axes.values()))
    return report([cell(dict(zip(axes, values, strict=True)), i, kernels) for i, values in product])


def report(cells: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A report of these cells."""
    block = {
        "schema_version": SCHEMA_VERSION,
        "run": {"plugin": "0.1.0", "git": {"commit": "4f2c9d", "changed": False, "prefix": ""}, "ci": {},
                "started": "2026-11-20T10:00:00+00:00", "finished": "2026-11-20T10:20:00+00:00", "exit_status": 1},
        "environment": {"torch": "2.13.0+cpu", "python": "3.11.7", "platform": "Linux", "cores": 2, "devices": ["cpu"]},
        "matrix": {"path": "matrix/default.yaml", "sha256": "6c" * 32, "cells_planned": [c["id"] for c in cells],
                   "checks": list(CHECKS), "excluded": {"a mode changes only what Inductor does": 7}},
        "shard": {"index": 1, "of": 1}, "finished": True, "gates": {}, "cells": cells,
        "tests_planned": [], "tests": [],
    }  # fmt: skip
    block |= more
    return {"compile_matrix": {**block, "head_sha256": head_fingerprint(block)}}


def written(content: dict[str, Any], path: Path) -> Path:
    """Write a report and return its path."""
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def cell(axes: dict[str, Any], number: int = 0, kernels: bool = True) -> dict[str, Any]:
    """One cell, judged by what its axes are."""
    name = "-".join(str(value) for value in axes.values())
    if axes.items() >= {"wrapper": "autocast", "model": "conv_net"}.items():
        return entry(name, axes, dict.fromkeys(CHECKS, check("skip", note="no autocast for this device")), None)
    if axes.items() >= {"model": "mini_gpt", "mode": "max-autotune", "backend": "eager", "phase": "inference"}.items():
        crashed = check("crash", problem("the process of this cell ended by SIGSEGV",
                                         "Fatal Python error: Segmentation fault\n" * 8,
                                         "run the cell under a debugger: --compile-inprocess"))
        return entry(name, axes, dict.fromkeys(CHECKS, crashed), observation(name, []))
    breaks = [graph_break()] if axes.get("model") == "moe_lite" and axes.get("backend") != "eager" else []
    again = axes.items() >= {"backend": "inductor", "mode": "reduce-overhead", "dynamic": "dynamic"}.items()
    compiles = [compiled("0/0", number), compiled("0/0", number, kind="backward")]
    compiles += [recompiled(i + 1, number) for i in range(6 if again else number % 2)]
    checks = {each: check("pass") for each in CHECKS}
    if breaks:
        checks["compiles"] = check("fail", problem(
            f"only {80 + number % 7}% of the model's operator calls ran inside compiled graphs at call 1 (B=4), "
            "100% wanted (1 of 5 ran eagerly)", "aten::item x1"))
        checks["graph_breaks"] = check("fail", problem(
            "graph break (1 place(s), 0 allowed): Unsupported Tensor.item() call", "models.py:41 (mine)  gb0124",
            breaks[0]["hint"], "models.py", 41))
    if again:
        checks["recompiles"] = check("fail", problem(
            "6 recompile(s) that no size explains", "call 1: Router.forward models.py:12",
            "register self.calls as a buffer (a tensor)", "models.py", 12))
    if axes.items() >= {"wrapper": "regional", "model": "encoder"}.items():
        checks["equivalence"] = check("xfail", problem("output: error is 31.2 times the rounding noise (limit 4.5)"),
                                      note="known: us/models#12")
    return entry(name, axes, checks, observation(name, compiles, breaks, kernels=kernels, number=number))


def entry(name: str, axes: dict[str, Any], checks: dict[str, Any], seen: dict[str, Any] | None) -> dict[str, Any]:
    """A cell as the report has it."""
    told = {
        "id": name, "axes": axes, "planned": None, "status": worst([c["verdict"] for c in checks.values()]),
        "selected": True, "checks": checks, "seconds": None if seen is None else 4.5, "observation": seen,
    }  # fmt: skip
    return {**told, "evidence_sha256": cell_fingerprint(told)}


def check(verdict: str, *problems: dict[str, Any], note: str = "") -> dict[str, Any]:
    """What a check says."""
    return {"verdict": verdict, "problems": list(problems)} | ({"note": note} if note else {})


def problem(message: str, evidence: str = "", hint: str = "", file: str = "", line: int = 0) -> dict[str, Any]:
    """A problem of a check."""
    return {"message": message, "evidence": evidence, "hint": hint, "file": file, "line": line}


def observation(name: str, compiles: list[dict[str, Any]], breaks: list[dict[str, Any]] | None = None, *,
                number: int = 0, kernels: bool = False) -> dict[str, Any]:  # fmt: skip
    """What a run recorded."""
    graphs = [{"compile_id": c["compile_id"], "ops": c["ops"], "runs": 4, "function": c["function"]} for c in compiles]
    recompiles = [c for c in compiles if c["kind"] == "recompile"]
    leaf = {"call": "call 3 (B=12)", "name": "gradient of down.bias", "kind": "gradient", "dtype": "float32",
            "rms": 0.1 + number % 9, "bias": 0.1, "peak": 0.2, "index": [0], "eager": -0.0517758,
            "compiled": -0.0517759, "expected": -0.05177585, "draws": 5}
    sections: dict[str, Any] = {
        "compiles": {"compiles": compiles, "graphs": graphs, "eager_frames": [], "lost": [], "error": None,
                     "all_zero": [False], "eager_all_zero": [False], "seconds": 3.0,
                     "coverage": [{"call": "call 1 (B=4)", "total": 5, "outside": len(breaks or ()), "sites": [],
                                   "share": 1 - len(breaks or ()) / 5}]},
        "equivalence": {"raised": None, "compared": 45, "bitwise": 45, "inexact": 0, "leaves": []},
        "gradients": {"raised": None, "compared": 36, "bitwise": 35, "inexact": 1, "leaves": [leaf], "nonzero": 12},
        "graph_breaks": {"raised": None, "graphs": len(graphs), "graph_breaks": breaks or []},
        "recompiles": {"raised": None, "graphs": len(graphs), "recompiles": recompiles, "sizes": 3, "special": 0,
                       "dynamic": "auto"},
    }  # fmt: skip
    if kernels:
        names = [f"cpp_fused_relu_{i}" for i in range(3)]
        sections["kernels"] = {"graphs": [
            {"compile_id": "0/0", "stage": stage, "library": {"addmm": 2}, "fallbacks": {},
             "generated": [{"name": each, "language": "cpp", "ops": ["addmm", "relu"], "lines": ["models.py:11"],
                            "calls": 1} for each in names]} for stage in ("forward", "backward")]}  # fmt: skip
    return {"cell": name, "sections": sections, "failure": None, "leaks": [],
            "seconds": {"build": 0.02, "eager": 0.1, "compiled": 3.0, "steady": 0.04}}


def compiled(compile_id: str, number: int = 0, **more: Any) -> dict[str, Any]:
    """A compile."""
    seconds = 0.4 + (number * 37 % 100) / 50
    return {
        "function": "Scorer.forward", "file": "models.py", "line": 9, "compile_id": compile_id, "kind": "first",
        "reason": "", "cause": "", "all_reasons": [], "what": "", "expected": "", "actual": "", "source": "",
        "at": "", "advice": "", "during": "call 1 (B=4)",
        "graphs": 1, "ops": 3, "guards": 33, "seconds": seconds, "resumed_at": 0,
        "seconds_in": {"dynamo": 0.1, "aot": 0.1, "inductor": seconds / 2, "kernels": seconds / 4},
        "caches": ["aot miss", "fx miss"],
    } | more  # fmt: skip


def recompiled(index: int, number: int = 0, **more: Any) -> dict[str, Any]:
    """A recompile for another size."""
    reason = f"tensor 'x' size mismatch at index 0. expected {2 + 2 * index}, actual {4 + 2 * index}"
    given = {"kind": "recompile", "reason": reason, "cause": "shape", "all_reasons": [reason], "what": "x.size(0)",
             "expected": str(2 + 2 * index), "actual": str(4 + 2 * index),
             "during": f"call {index + 1} (B={4 + 2 * index})"}
    return compiled(f"0/{index}", number, **(given | more))


def graph_break(**more: Any) -> dict[str, Any]:
    """A graph break in the user's code."""
    return {
        "reason": "Unsupported Tensor.item() call with capture_scalar_outputs=False", "gb_id": "gb0124",
        "file": "models.py", "line": 41, "hint": "Set `torch._dynamo.config.capture_scalar_outputs = True`",
        "owner": "mine", "function": "MoE.forward", "whole_frame": False, "during": "call 1 (B=4)",
        "explanation": "Dynamo does not support tracing `Tensor.item()`.", "compile_id": "0/0", "stack": [],
        "link": "https://meta-pytorch.github.io/compile-graph-break-site/gb/gb0124.html",
    } | more  # fmt: skip
