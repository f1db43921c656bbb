"""Torch's own planted faults, in the real Inductor: what our planted ones stand for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

from pytest_torchcompile.gates import Place
from pytest_torchcompile.gates.breaks import Break

__all__ = ["injected"]

PHASES = {"compile_error": ("forward",), "runtime_error": ("forward",), "accuracy": ("comparison",)}


def injected(place: Place) -> Iterator[tuple[Break, AbstractContextManager[object]]]:
    """Each break, and what to open around it; nothing where the gates do not run on Inductor.

    ``torch._inductor.config.cpp.inject_relu_bug_TESTING_ONLY`` and its twin in ``triton`` (torch 2.8 to 2.15). A Triton
    kernel that fails when it runs ends the use of the GPU in its process, so that one is left out there.
    """
    if place.backend != "inductor":
        return
    from torch._inductor import config

    language = "cpp" if place.device == "cpu" else "triton"
    for kind, phases in PHASES.items():
        if language == "cpp" or kind != "runtime_error":
            broken = Break(f"Inductor's {kind}", lambda: "inductor", raises=kind != "accuracy", phases=phases)
            yield broken, config.patch({f"{language}.inject_relu_bug_TESTING_ONLY": kind})
