"""The fixture `graph_pass`: a unit test of graph passes, judged by the oracle. No torch until a test uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_torchcompile.layer.pass_judgement import JudgedPasses
    from pytest_torchcompile.plan.markers import PassChoice

__all__ = ["PassJudge"]


@dataclass(frozen=True)
class PassJudge:
    """What the fixture gives: call it with a model, and a batch for each call."""

    choice: PassChoice

    def judge(self, model: Callable[..., Any], *batches: Any, **options: Any) -> JudgedPasses:
        """What :func:`~pytest_torchcompile.judge_passes` finds; ``options`` as there."""
        from pytest_torchcompile.layer.pass_judgement import judge_passes

        settings = {each.name: getattr(self.choice, each.name) for each in fields(self.choice)}
        return judge_passes(model, list(batches), **{**settings, **options})

    def __call__(self, model: Callable[..., Any], *batches: Any, **options: Any) -> JudgedPasses:
        """The same; fails the test if a pass changes what the model computes, or if one finds nothing to change."""
        # pytest then shows the test, not this line.
        __tracebackhide__ = True
        judged = self.judge(model, *batches, **options)
        if not judged.ok:
            raise AssertionError(str(judged))
        if judged.unused:
            raise AssertionError(f"{', '.join(judged.unused)} changed no graph of this model, so nothing is proved; "
                                 "give a model with something to change, or look at graph_pass.judge(...)"
                                 + "".join(f"\nnote: {remark}" for remark in judged.remarks))
        return judged


@pytest.fixture
def graph_pass(request: pytest.FixtureRequest) -> PassJudge:
    """Judges the passes of the marker `graph_passes`: `graph_pass(model, batch)` fails with what a pass has changed.

    `graph_pass.judge(model, batch)` returns what was found instead. Passes may be given to both as `passes=[...]`.
    """
    from pytest_torchcompile.plan.markers import PassChoice, read_pass_choice

    mark = request.node.get_closest_marker("graph_passes")
    if mark is None:
        return PassJudge(PassChoice())
    return PassJudge(read_pass_choice(mark.args, mark.kwargs))
