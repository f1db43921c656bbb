"""judge_passes(): does each graph pass leave what a model computes? Without pytest, for any module or function."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pytest_torchcompile.backends.toolkit import Toolkit
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.layer.config import CompileConfig
from pytest_torchcompile.layer.equivalence import ObjectTrial, Wrap
from pytest_torchcompile.oracle.pass_records import PassStep
from pytest_torchcompile.oracle.pass_steps import judge_steps
from pytest_torchcompile.oracle.training import no_loss
from pytest_torchcompile.oracle.whole_step import WholeStep, compile_step
from pytest_torchcompile.state.torch_state import isolated, same_random_draws

__all__ = ["JudgedPasses", "judge_passes"]


@dataclass(frozen=True)
class JudgedPasses:
    """What :func:`judge_passes` found."""

    steps: tuple[PassStep, ...]
    """The capture, the decompositions if there are any, then each pass."""
    remarks: tuple[str, ...] = ()
    """What the calls cannot show: that the model takes no other size, say."""

    @property
    def ok(self) -> bool:
        """Whether every step leaves what the one before it computes."""
        return bool(self.steps) and not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """``pass 2 of 3 (fold) changed gradient of up.weight (310 times the rounding noise)``, one for each step."""
        return tuple(step.problem for step in self.steps if step.problem)

    @property
    def unused(self) -> tuple[str, ...]:
        """The passes that changed no graph: that nothing is wrong with them says little."""
        return tuple(step.told for step in self.steps if not step.changed)

    def __str__(self) -> str:
        lines = []
        for step in self.steps:
            text = step.problem or step.remark or f"{step.told}: {step.compared} values and properties as before"
            lines.append(text)
            lines += [f"    {wrong.text} in {wrong.call}" for wrong in step.wrong[:6]]
        lines += [f"note: {remark}" for remark in self.remarks]
        return "\n".join(lines)


def judge_passes(
    model: Callable[..., Any],
    calls: list[Any],
    passes: str | Sequence[Any],
    *,
    capture: str = "joint",
    decompositions: Any = None,
    dynamic: bool | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    train: bool = True,
    seed: int = 0,
) -> JudgedPasses:
    """Run a model with the first k passes for each k, and hold it against the model with the first k - 1.

    The calls are made once more with other values for parameters, buffers, tensors in attributes and inputs.
    Values that are not bitwise equal are measured from a float64 run, in units of this program's own rounding noise.
    Nothing is left changed, but code that was compiled before is dropped.

    Args:
        model: A module in the state and training mode to be judged in, or a function; one graph, without breaks.
        calls: A list of batches, as for :func:`~pytest_torchcompile.compare`.
        passes: As for :class:`~pytest_torchcompile.backends.toolkit.Toolkit`.
        capture: ``joint``, ``forward_backward``, or ``step``: forward, loss and backward in one graph.
        decompositions: ``inductor``, ``core_aten``, ``none``, ``module:table`` or a mapping; a step of its own.
        dynamic: As of ``torch.compile``. Unless it is False one further size is tried where calls have one alone.
        loss: ``loss(output, batch)``; None: a weighted mean over all float outputs.
        train: Whether there is a backward pass; False for passes of the graph of inference.
        seed: Of every random number.

    Raises:
        UsageError: for a model, calls or passes that are of no use.
    """
    toolkit = Toolkit(passes=passes, capture=capture, compiler="eager", decompositions=decompositions)
    if not toolkit.graph_passes and decompositions in (None, "none"):
        raise UsageError("there is no pass to judge; give passes=[my_pass], or the marker "
                         "@pytest.mark.graph_passes([my_pass]) beside the fixture graph_pass")
    config = CompileConfig(backend=toolkit, fullgraph=True, dynamic=dynamic)
    wrap: Wrap | None = None
    if capture == "step":
        if not isinstance(model, torch.nn.Module) or not train:
            raise UsageError("capture 'step' is a training step of a module: give judge_passes a module, and leave "
                             "train as it is")
        model, loss, train, wrap = WholeStep(model, loss), no_loss, False, compile_step
    trial = ObjectTrial(model, calls, config, wrap=wrap, loss=loss, train=train, steps=1, seed=seed)
    with isolated([]), same_random_draws(), trial.untouched(), warnings.catch_warnings():
        # A filter that makes errors of warnings would have torch's own end a compile.
        warnings.simplefilter("ignore")
        judged = judge_steps(trial)
    remarks = judged.remarks
    doubtful = [step.told for step in judged.steps if step.raised or not step.changed]
    if train and doubtful and doubtful != [judged.steps[0].told]:
        remarks += (f"{', '.join(doubtful)}: judged on the graph of forward and backward; a pass that is for inference "
                    "alone needs train=False",)
    return JudgedPasses(judged.steps, remarks)
