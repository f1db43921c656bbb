"""Diagnosis: the same trial again with other settings. Which stage of the compiler brings a difference in?

Torch is needed only where something is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.oracle.discrepancies import find_discrepancies

if TYPE_CHECKING:
    from pytest_torchcompile.backends.toolkit import Toolkit
    from pytest_torchcompile.oracle.trial import Trial

__all__ = ["STAGES", "blamed_backend", "first_stage", "locate_stage", "remedy_of", "stage_summary", "stages_before"]

STAGES: Final = {
    "eager": "Dynamo's capture of the program",
    "aot_eager": "AOTAutograd's graphs of forward and backward",
    "aot_eager_decomp_partition": "the decompositions or the partitioner that Inductor uses",
    "inductor": "Inductor's lowering, fusion or generated code",
}
"""Backend to what it adds to the one before it."""
# What a stage did where it computes what eager computes; reports hold the word.
_AGREES: Final = "agrees"
_UNTRIED: Final = "could not be tried"


@dataclass(frozen=True)
class _Stage:
    """A backend that does part of what the one under test does."""

    told: str
    backend: Any
    """For ``torch.compile``."""
    blamed: str = ""
    """What the search for a culprit asks if this stage is the first that differs; empty: nobody knows how to ask."""


def stages_before(backend: str) -> list[str]:
    """The backends that do part of what ``backend`` does, in order; of an unknown one the two that most build on."""
    names = list(STAGES)
    if backend not in STAGES:
        return names[:2]
    return names[:names.index(backend)]


def stage_summary(located: Mapping[str, Any]) -> str:
    """One line: what each stage did, and which is the first that differs.

    ``located`` has ``backend``, the one under test, and ``stages``: pairs of a backend and ``agrees`` or what it did
    instead; ``adds``, what stages of the toolkit add, by their name; and ``beyond``, as ``stages``, of backends that do
    more. An older report has neither of the last two.
    """
    adds = {**STAGES, **located.get("adds", {})}
    text = _first_that_differs(located["backend"], located["stages"], adds)
    for name, did in located.get("beyond", ()):
        if did == _AGREES:
            text += f"; {name} works where {located['backend']} raises"
    return text


def remedy_of(located: Mapping[str, Any]) -> str:
    """What was tried and mends it, as a sentence that says what else it does; empty where nothing is known."""
    # Older reports do not have it.
    return str(located.get("remedy") or "")


def first_stage(located: Mapping[str, Any]) -> str:
    """The first backend that shows it: one of those before the one under test, or that one."""
    for name, did in located["stages"]:
        if did != _AGREES and not did.startswith(_UNTRIED):
            return str(name)
    return str(located["backend"])


def blamed_backend(located: Mapping[str, Any]) -> str:
    """The backend of :data:`STAGES` that has the part to blame; empty where a part of the toolkit has no such name."""
    first = first_stage(located)
    return str(located.get("blamed", {}).get(first, first))


def _first_that_differs(backend: str, tried: Sequence[tuple[str, str]], adds: Mapping[str, str]) -> str:
    if not tried:
        return f"stages: backend {backend} does nothing but run {adds[backend]}: look there"
    # The first of them is called eager, as is the model that is not compiled.
    words = "backend " + ", ".join(f"{name} {did}" for name, did in tried)
    last, did = tried[-1]
    if did != _AGREES:
        return f"stages: {words}: look at {adds[last]}"
    suspect = adds.get(backend, "the backend itself")
    return f"stages: {words}; {backend} is the first that does not: look at {suspect}"


def locate_stage(trial: Trial) -> dict[str, Any] | None:
    """Try the backends that do part of what the trial's backend does, until one differs or raises as it does.

    Returns what :func:`stage_summary` and :func:`remedy_of` take; None where nothing is wrong that a stage could bring
    in. Everything compiled is forgotten.
    """
    # Torch is imported only where something is run.
    from pytest_torchcompile.oracle.fast_path import try_without_fast_path

    error, wrong_places = trial.compiled.error, _wrong_places(trial)
    if error is None and not wrong_places:
        return None
    backend = trial.settings.get("backend", "inductor")
    stages, adds = [], dict[str, str]()
    if isinstance(backend, str):
        name = backend
        stages = [_Stage(stage, stage, stage) for stage in stages_before(backend)]
    else:
        name = getattr(backend, "__name__", type(backend).__name__)
        stages = [_Stage(stage, stage, stage) for stage in stages_before("")]
    blamed: dict[str, str] = {}
    if getattr(backend, "is_whole", False):
        parts, adds = _parts_of_toolkit(backend)
        name = parts[-1].told
        blamed = {part.told: part.blamed for part in parts}
        stages += parts[:-1]
    tried: list[tuple[str, str]] = []
    beyond: list[tuple[str, str]] = []
    with trial.phase("stages"):
        for stage in stages:
            tried.append((stage.told, _try_backend(trial, stage.backend, wrong_places)))
            if tried[-1][1] != _AGREES:
                break
        if error is not None and name == "aot_eager":
            # What most users go on to: Inductor may do well what AOTAutograd's graphs raise when they run as they are.
            beyond.append(("inductor", _try_backend(trial, "inductor", wrong_places)))
        remedy = try_without_fast_path(trial)
    return {"backend": name, "stages": tried, "beyond": beyond, "remedy": remedy, "adds": adds, "blamed": blamed}


def _parts_of_toolkit(toolkit: Toolkit) -> tuple[list[_Stage], dict[str, str]]:
    """A toolkit of whole graphs in its parts, from the capture to itself; and what each adds to the one before.

    Its graphs run in torch's operators until the last of them, so that its compiler has no part in what is found.
    """
    table = toolkit.decompositions if isinstance(toolkit.decompositions, str) else "of your own"
    first = {"compiler": "eager", "dump": None}
    parts = [(_Stage("toolkit", toolkit.with_passes(0, decompositions="none", **first)),
              "the toolkit's capture of the joint graph")]
    if toolkit.decompositions and table != "none":
        # Torch's bisector knows Inductor's own table.
        blamed = "aot_eager_decomp_partition" if table == "inductor" else ""
        parts.append((_Stage(f"with decompositions {table}", toolkit.with_passes(0, **first), blamed),
                      f"decompositions {table}"))
    count = len(toolkit.graph_passes)
    compiler = toolkit.compiler or "eager"
    if count:
        parts.append((_Stage("with passes", toolkit.with_passes(count, **first)),
                      "the graph passes: the check `passes`, or judge_passes(), tells which"))
    if compiler in ("inductor", "regional_inductor"):
        blamed = "inductor" if compiler == "inductor" else ""
        parts.append((_Stage(f"with compiler {compiler}", toolkit, blamed), STAGES["inductor"]))
    elif compiler == "none":
        parts[-1:] = [(_Stage("with passes", toolkit), "the graph passes, of which the last one runs the graphs")]
    return [part for part, _ in parts], {part.told: adds for part, adds in parts}


def _try_backend(trial: Trial, backend: Any, wrong_places: set[tuple[str, str]]) -> str:
    """What the trial does with another backend, in one or two words."""
    from pytest_torchcompile.state.torch_state import forget_compiled

    # Modes and options belong to the backend under test.
    settings = _settings_among(trial, ("dynamic", "fullgraph"))
    forget_compiled()
    other = trial.again({**settings, "backend": backend})
    try:
        other.run()
    except Exception as why:
        return f"{_UNTRIED} ({type(why).__name__})"
    if other.compiled.error:
        return f"raises {other.compiled.error.type}"
    return "differs" if wrong_places & _wrong_places(other) else _AGREES


def _settings_among(trial: Trial, keys: Sequence[str]) -> dict[str, Any]:
    return {key: trial.settings[key] for key in keys if key in trial.settings}


def _wrong_places(trial: Trial) -> set[tuple[str, str]]:
    discrepancies = find_discrepancies([*trial.leaves, *trial.trained])
    return {(discrepancy.kind, discrepancy.where) for discrepancy in discrepancies}
