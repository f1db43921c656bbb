"""Machine peaks: how many bytes and FLOPs a second this machine does at its best. Measured once, and kept in a file.

The best of many short runs counts, so that a machine which is busy now and then has its true peaks all the same. On one
that is busy all the time they are too low, and shares of them too high: remove the file to have them measured again.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from pytest_torchcompile.gauges.peaks_file import peaks_path

__all__ = ["TF32", "MachinePeaks", "machine_peaks"]

TF32: Final = "tf32"
"""No dtype of torch's: how a GPU may multiply float32."""

_RUNS: Final = 30
_CALLS: Final = 100
"""Of a small operator in a row: fewer than a GPU's queue holds."""
_RUNS_OF_CALLS: Final = 300
"""A run of calls takes a millisecond, and on a busy machine few of them go undisturbed."""
_COPIED: Final = {"cpu": 1 << 26, "cuda": 1 << 30}
"""Bytes that are copied: more than caches hold."""
_IN_CACHES: Final = 1 << 17
"""Elements: enough that calling takes little of it, and that several threads take part."""
_WIDTH: Final = {"cpu": 512, "cuda": 8192}
"""Of the square matrices that are multiplied."""


@dataclass
class MachinePeaks:
    """What one device does at its best, with as many threads as now."""

    device: str
    """``cpu`` or the name of a GPU."""
    bandwidth: float
    """Bytes a second, read and written."""
    call_seconds: float = 0.0
    """What calling an operator takes, however little it computes."""
    products: dict[str, float] = field(default_factory=dict)
    """FLOPs a second of a matrix product, by dtype."""
    functions: float = 0.0
    """Elements a second of exp, the cheapest of the functions that take many instructions; 0 on a GPU, where nothing
    but memory bounds one call of it: there such functions are not counted."""
    takes_tf32: bool = False
    """Whether convolutions of float32 are computed in TF32, as cuDNN does unless it is told not to."""
    measure: Callable[[str], float] | None = field(default=None, repr=False, compare=False)
    """Measures a dtype that is asked for first; None: there is nothing more to measure."""

    def products_per_second(self, dtype: str) -> float:
        """FLOPs a second of matrix products in a dtype; where none can be multiplied, as in float32.

        ``tf32`` is half as fast as bfloat16, by NVIDIA's papers on the architectures of A100 and H100.
        """
        if dtype == TF32:
            return max(self.products_per_second("float32"), self.products_per_second("bfloat16") / 2)
        if dtype not in self.products and self.measure is not None:
            self.products[dtype] = self.measure(dtype)
        return self.products.get(dtype) or self.products.get("float32") or 1e12

    def multiplied_in(self, dtype: str, convolves: bool) -> str:
        """The dtype by whose peak a product is measured: ``tf32`` for a convolution of float32 that takes it."""
        return TF32 if convolves and dtype == "float32" and self.takes_tf32 else dtype

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"device": self.device, "bandwidth": self.bandwidth, "call_seconds": self.call_seconds,
                "products": dict(self.products), "functions": self.functions}


def machine_peaks(device: str = "cpu") -> MachinePeaks:
    """The peaks of a device, from the file or measured now; what is asked of them later is measured and kept then."""
    kind = torch.device(device).type
    key = _key_of(device)
    known = _read_file().get(key, {})
    peaks = MachinePeaks(_name_of(device), float(known.get("bandwidth", 0.0)),
                         float(known.get("call_seconds", 0.0)), dict(known.get("products", {})),
                         float(known.get("functions", 0.0)), kind == "cuda" and _takes_tf32(device))
    if not peaks.bandwidth or not peaks.call_seconds:
        peaks.bandwidth = _measure_bandwidth(device, kind)
        peaks.call_seconds = _measure_call(device, kind)
        _keep(key, peaks)
    if not peaks.functions and kind == "cpu":
        # A file of an earlier version has none.
        peaks.functions = _measure_functions()
        _keep(key, peaks)

    def measure_and_keep(dtype: str) -> float:
        peaks.products[dtype] = _measure_product(device, kind, dtype)
        _keep(key, peaks)
        return peaks.products[dtype]

    peaks.measure = measure_and_keep
    return peaks


def _takes_tf32(device: str) -> bool:
    # From the architecture Ampere on.
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        # From torch 2.9 on it raises where a project has set `fp32_precision` instead; by default that is TF32.
        return True


def _name_of(device: str) -> str:
    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return "cpu"


def _key_of(device: str) -> str:
    """What a peak depends on: the device, its threads, and how torch multiplies float32."""
    machine = platform.node() if torch.device(device).type == "cpu" else ""
    words = [_name_of(device), machine, f"{torch.get_num_threads()} threads", torch.get_float32_matmul_precision(),
             torch.__version__]
    return ", ".join(filter(None, words))


def _read_file() -> dict[str, Any]:
    try:
        content = json.loads(peaks_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # There is none yet, or somebody has written something else there.
        return {}
    return content if isinstance(content, dict) else {}


def _keep(key: str, peaks: MachinePeaks) -> None:
    """Write them beside what the file has of other machines; without a place to write they are measured each time."""
    content = _read_file()
    content[key] = peaks.to_dict()
    path = peaks_path()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process reads either the old file or the new one.
        scratch = path.with_name(f"{path.name}.{os.getpid()}")
        scratch.write_text(json.dumps(content, indent=1), encoding="utf-8")
        scratch.replace(path)


def _best_seconds(call: Callable[[], object], kind: str) -> float:
    """Of several calls the shortest, after one to warm up."""
    best = float("inf")
    for number in range(_RUNS + 1):
        if kind == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if kind == "cuda":
            torch.cuda.synchronize()
        if number:
            best = min(best, time.perf_counter() - start)
    return best


def _measure_bandwidth(device: str, kind: str) -> float:
    """Bytes a second of a copy, each read once and written once."""
    source = torch.ones(_COPIED[kind] // 4, device=device)
    target = torch.empty_like(source)
    seconds = _best_seconds(lambda: target.copy_(source), kind)
    return 2 * _COPIED[kind] / seconds


def _measure_call(device: str, kind: str) -> float:
    """Seconds of the host for one operator on a few numbers, of which a GPU is not waited for."""
    one = torch.ones(8, device=device)
    best = float("inf")
    for _ in range(_RUNS_OF_CALLS):
        if kind == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            for _ in range(_CALLS):
                torch.add(one, one)
        best = min(best, time.perf_counter() - start)
    return best / _CALLS


def _measure_functions() -> float:
    """Elements a second of exp on a CPU, of what lies in its caches."""
    given = torch.zeros(_IN_CACHES)
    target = torch.empty_like(given)
    seconds = _best_seconds(lambda: torch.exp(given, out=target), "cpu")
    return _IN_CACHES / seconds


def _measure_product(device: str, kind: str, dtype: str) -> float:
    """FLOPs a second of a product of two square matrices; 0 where the dtype has no product on this device."""
    width = _WIDTH[kind]
    # A processor without units for half precision takes a hundred times as long.
    if kind == "cpu" and dtype not in ("float32", "float64"):
        width //= 4
    try:
        one = torch.ones(width, width, device=device, dtype=getattr(torch, dtype))
        seconds = _best_seconds(lambda: torch.mm(one, one), kind)
    except (RuntimeError, AttributeError):
        return 0.0
    return 2 * width**3 / seconds
