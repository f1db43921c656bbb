"""Slow causes: why a model is not faster compiled, as one sentence with place and remedy, from the section of `worth`.

Seven kinds of causes have evidence there:

- nothing or little was compiled, or something compiles again in the timed steps (:mod:`.eager_causes`);
- nothing was fused, the work is in custom operators, or in others than eager calls (:mod:`.kernel_causes`);
- the kernels are so short that calling them is the work;
- memory or processor are at their peak, so that no compiler helps;
- the host is busy with guards, with Python, or with waiting for numbers.

Of several the one that takes most of the step is told, and a cause before what follows from it: where most operators
run eagerly, single launches and kernels that nothing fused are what breaks leave. What the machine needs of the step at
its peak is taken off the others, for no remedy wins that back; what explains less than a tenth is not told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from pytest_torchcompile.checks.eager_causes import late_compiles, little_compiled, nothing_compiled, over_limit
from pytest_torchcompile.checks.kernel_causes import (
    IDLE_GPU,
    at_the_roof,
    custom_operators,
    other_operators,
    same_kernels,
    short_kernels,
)
from pytest_torchcompile.checks.step_evidence import (
    MUCH_CALLING,
    MUCH_GUARDING,
    SlowCause,
    first_break,
    gpu_share,
    mostly_outside,
    part_of_step,
)
from pytest_torchcompile.quantity import count, readable_seconds

__all__ = ["idle_causes", "idle_remark", "slow_cause", "slow_causes"]

LEAST_TOLD: Final = 0.1
"""A cause that explains less of the step is not told: its remedy would win nothing that one sees."""
MUCH_PYTHON: Final = 0.5
LEAVES_IDLE: Final = ("coverage", "host", "launches")
FASTER: Final = "faster"
NOT_FASTER: Final = ("slower", "no difference")


def slow_cause(section: Mapping[str, Any]) -> str:
    """The first cause of a section of `worth` that is slower or no different; empty where none is known."""
    causes = slow_causes(section)
    return causes[0].text if causes else ""


def slow_causes(section: Mapping[str, Any]) -> list[SlowCause]:
    """All of them, that which explains most of the step first."""
    # Something that compiles is no steady state, whatever the times say.
    late = list(late_compiles(section))
    if section["verdict"] == FASTER:
        return late
    given_up = [*nothing_compiled(section), *_told(over_limit(section))]
    if late or section["verdict"] not in NOT_FASTER or not section.get("profile"):
        # What runs eagerly by now was compiled until its limit: those compiles are the smaller trouble.
        return [*given_up, *late] if mostly_outside(section) else [*late, *given_up]
    return _ranked_causes(section, given_up)


def idle_remark(section: Mapping[str, Any]) -> str:
    """What a model that is faster already leaves unused: a part that was given up, a GPU that waits; mostly empty."""
    causes = idle_causes(section)
    return f"more to win: {causes[0].text}" if causes else ""


def idle_causes(section: Mapping[str, Any]) -> list[SlowCause]:
    """The causes of :func:`idle_remark`; what a GPU computes is none of them."""
    if section["verdict"] != FASTER or section.get("late"):
        return []
    given_up = list(over_limit(section))
    busy = gpu_share(section) if section.get("profile") else None
    if busy is None or busy >= IDLE_GPU:
        return given_up
    ranked = [cause for cause in _ranked_causes(section, ()) if cause.kind in LEAVES_IDLE]
    return [*given_up, *ranked]


def _ranked_causes(section: Mapping[str, Any], given_up: Sequence[SlowCause]) -> list[SlowCause]:
    outside = [*given_up, *little_compiled(section)]
    of_host = [*_guards(section), *_python(section), *_calling(section), *_waits(section)]
    of_kernels = [*at_the_roof(section), *custom_operators(section), *other_operators(section)]
    causes = [*outside, *of_host, *of_kernels]
    # Of kernels that are mostly their calls it says little that they are as many as before.
    following = list(short_kernels(section)) or list(same_kernels(section))
    if outside and mostly_outside(section):
        return [*_told(causes), *_told(following)]
    return _told([*causes, *following])


def _told(causes: Iterable[SlowCause]) -> list[SlowCause]:
    """Those that explain enough, the largest first."""
    return sorted((cause for cause in causes if cause.share >= LEAST_TOLD), key=_share_of, reverse=True)


def _share_of(cause: SlowCause) -> float:
    return cause.share


def _guards(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    share = part_of_step(section, "guards")
    if share >= MUCH_GUARDING:
        seconds = section["profile"]["guards"]
        yield SlowCause(
            "host", share, f"Dynamo's guards take {share:.0%} of a compiled step ({seconds * 1e6:.0f} µs): the step is "
            "too short for them, so compile a larger part at once, or give it larger batches",
        )  # fmt: skip


def _users_python(section: Mapping[str, Any]) -> float:
    """The share of a step that passes in Python of the user's own: by both of the profiles that see it.

    That of operators has torch's own Python in it, and what it costs itself. That of functions has operators in it.
    """
    own = section["profile"].get("user_python") or {}
    return min(part_of_step(section, "python"), float(own.get("share", 0.0)))


def _python(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    share = _users_python(section)
    if share < MUCH_PYTHON:
        return
    own = section["profile"]["user_python"]
    place = f"{own['function']} ({own['file']}:{own['line']})"
    if at := first_break(section):
        place += f", the first graph break being at {at}"
    yield SlowCause(
        "host", share, f"{share:.0%} of a compiled step passes in Python of the model's own, most of it in {place}: "
        "take prints, `.item()` and loading out of the step",
    )  # fmt: skip


def _calling(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    """What a call of compiled code costs beside its kernels: torch's own Python, and guards."""
    guards = part_of_step(section, "guards")
    # Where guards are much of it, that is a cause of its own.
    share = part_of_step(section, "python") - _users_python(section) + (0 if guards >= MUCH_GUARDING else guards)
    if share < MUCH_CALLING:
        return
    kernels, busy, skipped = section["sides"]["compiled"]["kernels"], gpu_share(section), section.get("skips")
    remedy = "give it larger batches, or compile a larger part at once"
    if busy is not None and kernels and kernels > 1 and not section["launches"]["compiled"]["graphs"]:
        remedy = "give it larger batches, or have its kernels replayed as one CUDA graph, by mode reduce-overhead"
        if skipped:
            remedy = f"give it larger batches; CUDA graphs were skipped: {skipped[0]}"
    around = f" around {count(kernels, 'kernel call')}" if kernels else ""
    step = readable_seconds(section["sides"]["compiled"]["low"])
    yield SlowCause(
        "launches", share, f"{share:.0%} of a compiled step of {step} is what calling compiled code "
        f"costs (torch's own Python and guards{around}): {remedy}",
    )  # fmt: skip


def _waits(section: Mapping[str, Any]) -> Iterator[SlowCause]:
    """Numbers that are taken out of tensors: each breaks the graph, and a GPU is waited for."""
    waits = section["profile"].get("waits", 0)
    busy = gpu_share(section)
    if not waits or (busy is not None and busy >= 1 - MUCH_GUARDING):
        return
    at = first_break(section)
    place = f"; the first graph break is at {at}" if at else ""
    # On a CPU nobody is waited for: what the break leaves outside of graphs is what it costs.
    outside = part_of_step(section, "operators") + part_of_step(section, "python")
    share = outside if busy is None else 1 - busy
    if share >= MUCH_GUARDING:
        yield SlowCause(
            "host", share, f"a step takes {count(waits, 'number')} out of tensors (`.item()`, a branch on a "
            f"value){place}, and the rest waits for each: keep them tensors, or read them once every many steps",
        )  # fmt: skip
