"""Autotuning: what it costs a cell, and a limit to what it tries.

A mode ``max-autotune`` compiles and times dozens of candidates for each matrix product, and then every neighbour of
each Triton kernel's block sizes: minutes for a model of a few layers. Which candidate wins changes speed, and rounding,
but not what has to hold. Torch keeps the results in its cache folder (``autotune_local_cache``), where other cells,
processes and runs find them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Autotuning", "autotunes_kernels", "first_choices", "limit_autotuning", "pads_by_timing"]


@dataclass
class Autotuning:
    """What autotuning took while it was watched."""

    seconds: float = 0.0
    """Wall seconds, those of all threads added up."""
    _depth: threading.local = field(default_factory=threading.local, repr=False)

    def timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """``work``, with its seconds added to ours unless it runs within another that is."""

        @functools.wraps(work)
        def run(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._depth, "inside", False):
                return work(*args, **kwargs)
            self._depth.inside, start = True, time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self._depth.inside = False
                self.seconds += time.perf_counter() - start

        return run


@contextlib.contextmanager
def limit_autotuning(most: int = 0) -> Iterator[Autotuning]:
    """Watch autotuning while the block runs, and let each choice try ``most`` candidates; 0: as many as torch wants.

    ``AlgorithmSelectorCache.__call__`` (torch/_inductor/select_algorithm.py), ``CachingAutotuner`` and
    ``CoordescTuner`` (torch/_inductor/runtime/triton_heuristics.py, coordinate_descent_tuner.py): torch 2.8 to 2.15. A
    torch that lacks one of them autotunes as it likes, and what that takes is not counted.
    """
    from torch._inductor import select_algorithm
    from torch._inductor.runtime import coordinate_descent_tuner, triton_heuristics

    found = Autotuning()
    with contextlib.ExitStack() as stack:
        def wrap(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
            if (original := getattr(owner, name, None)) is not None:
                setattr(owner, name, change(original))
                stack.callback(setattr, owner, name, original)

        selector = getattr(select_algorithm, "AlgorithmSelectorCache", None)
        tuner = getattr(triton_heuristics, "CachingAutotuner", None)
        descent = getattr(coordinate_descent_tuner, "CoordescTuner", None)
        wrap(selector, "__call__", lambda work: found.timed(_choosing(work, most)))
        for name in ("autotune_to_one_config", "coordinate_descent_tuning"):
            wrap(tuner, name, found.timed)
        wrap(descent, "call_func", lambda work: _descending(work, most))
        yield found


def first_choices(choices: list[Any], most: int) -> list[Any]:
    """At most so many of the choices: library calls first, then the templates' configurations in torch's order.

    0 takes all. Library calls (``ExternKernelCaller``) need no compiling, and one of them is what runs without tuning.
    """
    if not most or len(choices) <= most:
        return choices
    return sorted(choices, key=lambda choice: "Extern" not in type(choice).__name__)[:most]


def _choosing(work: Callable[..., Any], most: int) -> Callable[..., Any]:
    @functools.wraps(work)
    def choose(self: Any, name: Any, choices: list[Any], *args: Any, **kwargs: Any) -> Any:
        return work(self, name, first_choices(choices, most), *args, **kwargs)

    return choose


def _descending(work: Callable[..., Any], most: int) -> Callable[..., Any]:
    @functools.wraps(work)
    def call(self: Any, func: Any, config: Any) -> Any:
        tried = vars(self).setdefault("_pytest_torchcompile_tried", [])
        if most and len(tried) >= most and self.lookup_in_cache(config) is None:
            return float("inf")  # as slow as a configuration that does not compile: the descent ends here
        tried.append(config)
        return work(self, func, config)

    return call


def autotunes_kernels(settings: Mapping[str, Any]) -> bool:
    """Whether kernels are chosen by timing: by the mode, or by a setting of Inductor's (torch 2.8 to 2.15)."""
    if settings.get("backend", "inductor") != "inductor":
        return False
    from torch._inductor import config

    options = settings.get("options") or {}
    names = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")
    return "max-autotune" in str(settings.get("mode")) or any(options.get(n, getattr(config, n, False)) for n in names)


def pads_by_timing(settings: Mapping[str, Any], devices: Collection[str]) -> bool:
    """Whether Inductor times if a matrix product is faster when it is padded.

    Only on GPUs, by ``should_pad_bench`` in torch/_inductor/fx_passes/pad_mm.py (torch 2.8 to 2.15), with the setting
    ``shape_padding``, which is on by default; ``force_shape_pad`` pads without asking. A kept graph from a compile
    cache holds what was timed when it was made.
    """
    if settings.get("backend", "inductor") != "inductor" or set(devices) <= {"cpu", "meta"}:
        return False
    from torch._inductor import config

    options = settings.get("options") or {}
    pads = options.get("shape_padding", getattr(config, "shape_padding", False))
    return bool(pads) and not options.get("force_shape_pad", getattr(config, "force_shape_pad", False))
