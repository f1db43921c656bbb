"""What a failing cell leaves for the user: a file that fails in the same way, the stage, one line for each cause."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.needs_torch
MODELS = """
class Blocks(Net):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Net(), Net()])

    def forward(self, x):
        return super().forward(x) + sum(block(x) for block in self.blocks)

def blocks():
    return Blocks()

def scaled(graph, inputs):
    return lambda *args: tuple(out * 1.01 if isinstance(out, torch.Tensor) else out for out in graph(*args))

def refuses(graph, inputs):
    raise RuntimeError("cannot lower this")

def dies(graph, inputs):
    os._exit(3)

def own(model, settings, cell):
    call = model if settings is None else torch.compile(model, **settings)
    return lambda x: call(x * 2)
"""
MATRIX = """
version: 1
models:
  blocks: {factory: "models:blocks", inputs: "models:batch", dims: {B: 4}}
axes:
  backend: ["models:scaled"]
  wrapper: [none, checkpoint, regional, "models:own"]
checks: [compiles, equivalence]
"""


def alone(repo, *names):
    """Run some of the files that a matrix run has left."""
    return repo.run("-p", "no:cacheprovider", *(f".compile-matrix/repro/{name}" for name in names), option="")


@pytest.mark.slow
def test_a_file_that_fails_for_the_same_reason(repo):
    """For each wrapper: the text names the command, and the file finds what the cell found."""
    repo.models(MODELS)
    repo.matrix(MATRIX)
    wrappers = ("none", "checkpoint", "regional", "models_own")
    files = [f"test_blocks_models_scaled_default_auto_{wrapper}.py" for wrapper in wrappers]
    result = repo.run()
    result.stdout.fnmatch_lines([f"  alone  pytest .compile-matrix/repro/{files[0]}"])
    agree, remedy = "stages: backend eager agrees, aot_eager agrees; ", "look at the backend itself"
    # The matrix calls the backend by its module too.
    stages = f"{agree}models:scaled is the first that does not: {remedy}"
    for wrapper in wrappers:
        (problem, *_) = repo.problems(f"blocks-models_scaled-default-auto-{wrapper}", "equivalence")
        assert problem["message"].startswith("output: error is ")
        assert problem["evidence"].endswith(stages)
    again = alone(repo, *files)
    # The file without a wrapper has a test that needs torch alone, and fails too.
    again.assert_outcomes(failed=5)
    again.stdout.fnmatch_lines(["E *AssertionError: Tensor-likes are not close!"])
    again.stdout.fnmatch_lines(["FAILED *::test_blocks_with_torch_alone*"])
    told_alone = f"E *{agree}scaled is the first that does not: {remedy}"
    again.stdout.fnmatch_lines(["E *value: output: error is *", told_alone] * 4)
    repo.models(MODELS.replace("out * 1.01", "out * 1"))
    alone(repo, files[1]).assert_outcomes(passed=1)


def test_errors_and_crashes(repo):
    """A backend that raises raises in the file too; one that ends the process ends it there too."""
    repo.models(MODELS)
    repo.matrix(MATRIX.replace('["models:scaled"]', '["models:refuses", "models:dies", "models:scaled"]')
                      .replace('[none, checkpoint, regional, "models:own"]', "[none, checkpoint]")
                + "rules: [{xfail: {backend: 'models:scaled'}, checks: [equivalence], reason: known}]\n")
    result = repo.run()
    result.stdout.fnmatch_lines([
        "2 cells  compiles: the compiled run raised torch._dynamo.exc.BackendCompilerFailed in forward; eager did not: "
        "backend='refuses' raised: RuntimeError: cannot lower this",
        "    in blocks-models_refuses-default-auto-none, blocks-models_refuses-default-auto-checkpoint",
        "2 cells  crash, so no check has a result: the process ended itself with exit code 3",
    ])
    raised = alone(repo, "test_blocks_models_refuses_default_auto_none.py")
    raised.assert_outcomes(failed=2)
    raised.stdout.fnmatch_lines(["E *error: the compiled run raised * RuntimeError: cannot lower this"])
    raised.stdout.fnmatch_lines(["E *BackendCompilerFailed: backend='refuses' raised:"])
    assert alone(repo, "test_blocks_models_dies_default_auto_none.py").ret == 3
    # an expected failure needs neither
    assert not list((repo.path / ".compile-matrix/repro").glob("*scaled*"))
    (known,) = (c for c in repo.block()["cells"] if c["id"] == "blocks-models_scaled-default-auto-none")
    assert "located" not in json.dumps(known)


def test_the_command_has_what_this_run_alone_was_given(repo):
    """Without them the item would not be there, or would draw other sequences."""
    repo.models(MODELS)
    repo.matrix(MATRIX.replace("models:scaled", "models:refuses").replace('[none, checkpoint, regional, "models:own"]',
                                                                         "[none]"))
    given = ["--compile-checks=graph_breaks,compiles", "--compile-fuzz-seed=3",
             "--compile-fuzz-settings=torch._dynamo.config.recompile_limit=9"]
    result = repo.run(*given)
    result.stdout.fnmatch_lines([f"  again  pytest --compile-matrix=* {' '.join(given)} '*::compiles'"])


def test_files_of_an_earlier_run_do_not_stay(repo):
    """What passes now has no file."""
    repo.models(MODELS)
    repo.matrix(MATRIX.replace('[none, checkpoint, regional, "models:own"]', "[none]"))
    repo.run()
    assert list((repo.path / ".compile-matrix/repro").iterdir())
    repo.models(MODELS.replace("out * 1.01", "out * 1"))
    repo.run().assert_outcomes(passed=2)
    assert not list((repo.path / ".compile-matrix/repro").iterdir())


def test_bad_inputs_in_one_line(repo):
    """Where eager raises, the message has the place in the user's code, and no stack of torch's."""
    repo.models("""
    class Deep(Net):
        def forward(self, x):
            return self.part(x)

        def part(self, x):
            return x @ torch.ones(5, 5)

    def net(hidden=8):
        return Deep()
    """)
    repo.run()
    (problem,) = repo.problems("net-eager-default-auto-none", "compiles")
    assert problem["message"].startswith(
        "the model raises without torch.compile too, at call 1 (B=4): RuntimeError: mat1 and mat2 shapes cannot be "
        "multiplied (4x6 and 5x5) (models.py:")
    assert problem["message"].endswith(" in part)")
    assert problem["evidence"].splitlines()[-1].endswith(" in forward")
    assert "site-packages" not in problem["evidence"]


def test_a_zero_head_is_no_failure(repo):
    """A last layer that begins at zero is compared with other values as well, so it proves something."""
    repo.models("""
    def net(hidden=8):
        net = Net(hidden)
        torch.nn.init.zeros_(net.outer.weight)
        torch.nn.init.zeros_(net.outer.bias)
        return net
    """)
    repo.matrix("""
    version: 1
    models:
      net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
    axes:
      backend: [eager]
      phase: [training, inference]
    checks: [compiles, equivalence, gradients]
    """)
    repo.run().assert_outcomes(passed=5)
