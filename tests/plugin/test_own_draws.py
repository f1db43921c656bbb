"""Own draws: cells compile with random numbers that Inductor draws itself, as production does."""

from __future__ import annotations

import random

import pytest

pytestmark = pytest.mark.needs_torch
# Torch's pass that replaces eager's operators by Inductor's own random numbers; with `fallback_random` it does nothing.
MODELS = """
class Drops(Net):
    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), 0.25, True)

class Evaluates(Net):
    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), 0.25, self.training)

class Shakes(Net):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x) / 8)

def fail_beyond(rows):
    from torch._inductor.fx_passes import joint_graph

    # A factory is called several times.
    if getattr(joint_graph.replace_random_passes, "planted", False):
        return
    torchs_own = joint_graph.replace_random_passes

    def planted(graph):
        sizes = {node.meta["val"].shape[0] for node in graph.graph.nodes if node.op == "placeholder"}
        replaced = torchs_own(graph)
        if replaced and max(sizes) > rows:
            raise ValueError("planted: no code for so many random numbers")
        return replaced

    planted.planted = True
    joint_graph.replace_random_passes = planted

class OfOneTest(Drops):
    def forward(self, x):
        return super().forward(x) * NUMBER

def broken():
    fail_beyond(16)
    return OfOneTest()
"""
MATRIX = """
version: 1
models:
  MODEL: {factory: "models:MODEL", inputs: "models:batch", dims: {B: {choices: [16, 32]}}}
axes:
  backend: [BACKEND]
  dynamic: [static]
checks: [compiles, equivalence, gradients]
"""
SAYS = "with Inductor's own random numbers, as in production, the compiled run raised"


def models_of_this_test():
    """A number of its own: what another test has compiled would be taken from the cache, without the planted pass."""
    return MODELS.replace("NUMBER", f"{1 + random.random()}")


def compiled_section(repo, model, backend="inductor"):
    repo.models(models_of_this_test())
    repo.matrix(MATRIX.replace("MODEL", model).replace("BACKEND", backend))
    result = repo.run()
    (cell,) = repo.block()["cells"]
    return result, cell, cell["observation"]["sections"]["compiles"]


@pytest.mark.slow
def test_code_that_only_production_compiles_is_tried(repo):
    """All numbers are right under `fallback_random`, and `torch.compile` alone raises: at any size."""
    result, cell, _ = compiled_section(repo, "broken")
    result.assert_outcomes(passed=2, failed=1)
    (problem,) = cell["checks"]["compiles"]["problems"]
    assert problem["message"].startswith(SAYS)
    assert "in forward of call 2 (B=32): " in problem["message"]
    assert problem["message"].endswith("ValueError: planted: no code for so many random numbers")
    assert "fallback_random" in problem["hint"]
    assert not cell["checks"]["equivalence"]["problems"] + cell["checks"]["gradients"]["problems"]


@pytest.mark.parametrize(("model", "judged"), [("Drops", True), ("Shakes", None)])
def test_a_right_model_runs_and_the_cell_says_how(repo, model, judged):
    """What eager can be given the numbers of is compiled once, and judged; else it is compiled once more, and run."""
    result, cell, section = compiled_section(repo, model)
    result.assert_outcomes(passed=3)
    assert (section["own_draws"]["tried"], section["own_draws"]["calls"]) == (True, 2)
    assert section["own_draws"]["graphs"]
    assert section["own_draws"].get("judged") is judged
    assert ("own draws" in cell["observation"]["seconds"]) == (judged is None)
    assert "with Inductor's own random numbers" not in cell["observation"]["seconds"]


@pytest.mark.parametrize(("model", "backend"), [("Net", "inductor"), ("Drops", "aot_eager")])
def test_where_inductor_draws_nothing_nothing_is_tried(repo, model, backend):
    result, cell, section = compiled_section(repo, model, backend)
    result.assert_outcomes(passed=3)
    assert "own_draws" not in section
    assert "own draws" not in cell["observation"]["seconds"]


def test_production_code_is_what_is_timed(repo):
    """Under `fallback_random` dropout is a call of eager's generator; production has it in its own kernel."""
    repo.models(models_of_this_test())
    repo.matrix(MATRIX.replace("MODEL", "Drops").replace("BACKEND", "inductor, aot_eager")
                .replace("gradients", "gradients, worth"))
    repo.run()
    worth = {cell["axes"]["backend"]: cell["observation"]["sections"]["worth"] for cell in repo.block()["cells"]}
    assert worth["inductor"]["own_draws"]
    assert "own_draws" not in worth["aot_eager"]
    drawn_by_a_call = [name for name in worth["inductor"]["profile"]["library_calls"] if "bernoulli" in name]
    assert drawn_by_a_call == []
    # The cell's other checks go on with what was judged.
    assert all(cell["checks"]["gradients"]["verdict"] == "pass" for cell in repo.block()["cells"])


def test_what_raises_in_production_alone_is_not_timed(repo):
    repo.models(models_of_this_test())
    repo.matrix(MATRIX.replace("MODEL", "broken").replace("BACKEND", "inductor").replace("gradients", "worth"))
    repo.run()
    (cell,) = repo.block()["cells"]
    (problem,) = cell["checks"]["worth"]["problems"]
    assert "with random numbers that Inductor draws itself" in problem["message"]
    assert cell["checks"]["compiles"]["problems"]
