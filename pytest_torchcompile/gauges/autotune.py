"""Autotuning: what it costs a cell, a limit to what it tries, and where a stopwatch decides what Inductor generates.

A mode ``max-autotune`` compiles and times dozens of candidates for each matrix product, and then every neighbour of
each Triton kernel's block sizes: minutes for a model of a few layers. Which candidate wins changes speed, and rounding,
but not what has to hold. Torch keeps the results in its cache folder (``autotune_local_cache``), where other cells,
processes and runs find them.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["Autotuning", "autotunes_kernels", "first_choices", "inductor_setting", "limit_autotuning",
           "pads_by_timing", "timing_behind_stride"]


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
            self._depth.inside = True
            start = time.perf_counter()
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

    tuning = Autotuning()
    with contextlib.ExitStack() as stack:
        def wrap(module: Any, class_name: str, method: str, change: Callable[[Any], Any]) -> None:
            owner = getattr(module, class_name, None)
            original = getattr(owner, method, None)
            if original is not None:
                setattr(owner, method, change(original))
                stack.callback(setattr, owner, method, original)

        def limited(work: Callable[..., Any]) -> Callable[..., Any]:
            return tuning.timed(_with_fewer_choices(work, most))

        wrap(select_algorithm, "AlgorithmSelectorCache", "__call__", limited)
        wrap(triton_heuristics, "CachingAutotuner", "autotune_to_one_config", tuning.timed)
        wrap(triton_heuristics, "CachingAutotuner", "coordinate_descent_tuning", tuning.timed)
        # Its time is that of coordinate_descent_tuning, which calls it.
        shorter = functools.partial(_with_shorter_descent, most=most)
        wrap(coordinate_descent_tuner, "CoordescTuner", "call_func", shorter)
        yield tuning


def first_choices(choices: list[Any], most: int) -> list[Any]:
    """At most so many of the choices: library calls first, then the templates' configurations in torch's order.

    0 takes all. Library calls (``ExternKernelCaller``) need no compiling, and one of them is what runs without tuning.
    """
    if not most or len(choices) <= most:
        return choices
    return sorted(choices, key=_is_template)[:most]


def _is_template(choice: Any) -> bool:
    return "Extern" not in type(choice).__name__


def _with_fewer_choices(work: Callable[..., Any], most: int) -> Callable[..., Any]:
    @functools.wraps(work)
    def choose(self: Any, name: Any, choices: list[Any], *args: Any, **kwargs: Any) -> Any:
        return work(self, name, first_choices(choices, most), *args, **kwargs)

    return choose


def _with_shorter_descent(work: Callable[..., Any], most: int) -> Callable[..., Any]:
    @functools.wraps(work)
    def call(self: Any, func: Any, config: Any) -> Any:
        tried = vars(self).setdefault("_pytest_torchcompile_tried", [])
        # What torch has timed already costs nothing.
        if most and len(tried) >= most and self.lookup_in_cache(config) is None:
            return float("inf")  # as slow as a configuration that does not compile: the descent ends here
        tried.append(config)
        return work(self, func, config)

    return call


_TUNING_SETTINGS: Final = (
    "max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning",
)  # fmt: skip


def autotunes_kernels(settings: Mapping[str, Any]) -> bool:
    """Whether kernels are chosen by timing: by the mode, or by a setting of Inductor's (torch 2.8 to 2.15)."""
    if settings.get("backend", "inductor") != "inductor":
        return False
    if "max-autotune" in str(settings.get("mode")):
        return True
    return any(inductor_setting(settings, name) for name in _TUNING_SETTINGS)


def pads_by_timing(settings: Mapping[str, Any], devices: Collection[str]) -> bool:
    """Whether Inductor times if a matrix product is faster when it is padded.

    Only on GPUs, by ``should_pad_bench`` in torch/_inductor/fx_passes/pad_mm.py (torch 2.8 to 2.15), with the setting
    ``shape_padding``, which is on by default; ``force_shape_pad`` pads without asking. A kept graph from a compile
    cache holds what was timed when it was made.
    """
    if settings.get("backend", "inductor") != "inductor" or set(devices) <= {"cpu", "meta"}:
        return False
    pads = inductor_setting(settings, "shape_padding")
    return pads and not inductor_setting(settings, "force_shape_pad")


def timing_behind_stride(settings: Mapping[str, Any], devices: Collection[str], eager: str, compiled: str) -> str:
    """What timing may have decided that a stride is another one, as texts have it; empty: none did.

    ``eager`` and ``compiled`` are the strides as Python writes them: ``(5, 1)``.
    """
    if autotunes_kernels(settings):
        return "autotuning"
    if pads_by_timing(settings, devices) and _is_padding(eager, compiled):
        return "the padding of matrix products (pad_mm)"
    return ""


def _is_padding(eager: str, compiled: str) -> bool:
    """Whether the same axes come in the same order, with gaps between them."""
    before, after = ast.literal_eval(eager), ast.literal_eval(compiled)
    if not isinstance(before, tuple) or not isinstance(after, tuple) or len(before) != len(after):
        return False
    # Only gaps between rows grow: neighbours in a row stay neighbours, and what was repeated stays so.
    wider = all(new == old or new > old > 1 for old, new in zip(before, after, strict=True))
    # An axis that moves is another memory format.
    axes = range(len(before))
    return wider and sorted(axes, key=before.__getitem__) == sorted(axes, key=after.__getitem__)


def inductor_setting(settings: Mapping[str, Any], name: str) -> bool:
    """A switch of ``torch._inductor.config``, which options of this compile may override."""
    from torch._inductor import config

    options = settings.get("options") or {}
    return bool(options.get(name, getattr(config, name, False)))
