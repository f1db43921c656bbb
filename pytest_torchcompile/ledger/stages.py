"""What each stage of a compile made, how long it took, and what the caches answered. Reads a ledger; no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pytest_torchcompile.ledger.records import Compile, Text

__all__ = ["STAGES", "cache_answers", "seconds_by_stage", "seconds_in", "texts_by_stage"]

STAGES: Final = {
    "dynamo_output_graph": "dynamo",
    "aot_joint_graph": "joint",
    "aot_forward_graph": "forward",
    "aot_inference_graph": "forward",
    "aot_backward_graph": "backward",
    "inductor_post_grad_graph": "post_grad",
    # Torch 2.8 writes this one on a cache miss.
    "after_post_grad_graph": "post_grad",
    "inductor_output_code": "code",
    # Since torch 2.9, and only where kernels are compiled with the lines of the user's code.
    "inductor_provenance_tracking_kernel_stack_traces": "kernel_lines",
}
"""Events and artifacts of the structured trace (names: torch 2.8 to 2.15), and our names of the stages."""

_CUMULATIVE: Final = {
    "dynamo": "dynamo_cumulative_compile_time_us",
    "aot": "aot_autograd_cumulative_compile_time_us",
    "inductor": "inductor_cumulative_compile_time_us",
    # Named for Triton, but on a CPU the wait for g++ (AsyncCompile.wait) goes here as well.
    "kernels": "triton_compile_time_us",
}
"""Fields of ``CompilationMetrics`` (torch/_dynamo/utils.py, torch 2.8 to 2.15), outermost first."""


def texts_by_stage(texts: Iterable[Text], compile_id: str) -> dict[str, list[str]]:
    """Texts of one compile by stage, in the order in which they were made.

    A graph that is compiled again for its backward has several `post_grad` and `code`; `eager` has only
    `dynamo`, `aot_eager` no code.
    """
    by_stage: dict[str, list[str]] = {}
    for text in texts:
        if text.compile_id == compile_id:
            by_stage.setdefault(text.stage, []).append(text.text)
    return by_stage


def seconds_in(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Wall seconds of each stage without those inside it, from one compile's metrics record.

    Torch measures cumulatively: Dynamo calls AOTAutograd, which calls Inductor, which waits for its kernels.

    >>> seconds_in({"dynamo_cumulative_compile_time_us": 5_000_000, "aot_autograd_cumulative_compile_time_us":
    ...     4_000_000, "inductor_cumulative_compile_time_us": 3_000_000, "triton_compile_time_us": 1_000_000})
    {'dynamo': 1.0, 'aot': 1.0, 'inductor': 2.0, 'kernels': 1.0}
    """
    times = {name: metrics.get(key) or 0 for name, key in _CUMULATIVE.items()}
    # Dynamo has no part in a backward, and its time is in no cumulative field.
    if not times["dynamo"]:
        total = metrics.get("duration_us") or 0
        times["aot"] = max(total, times["aot"], times["inductor"])
    # From the innermost stage outwards. A stage that did not run has 0, and the next inner one counts instead.
    own: dict[str, float] = {}
    inside = 0
    for name in reversed(times):
        if times[name]:
            own[name] = max(0, times[name] - inside) / 1e6
        inside = max(inside, times[name])
    return {name: own[name] for name in times if name in own}


def seconds_by_stage(compiles: Iterable[Compile]) -> dict[str, float]:
    """Wall seconds of some compiles together, by stage."""
    total: Counter[str] = Counter()
    for compile_ in compiles:
        total.update(compile_.seconds_in)
    return dict(total)


def cache_answers(compiles: Iterable[Compile]) -> dict[str, int]:
    """How often each cache answered what: ``{"aot hit": 2, "fx miss": 1}``.

    With dynamic=True one compile may both miss and hit: Dynamo starts over when it meets a float attribute.
    """
    answers: Counter[str] = Counter()
    for compile_ in compiles:
        answers.update(compile_.caches)
    return dict(answers)
