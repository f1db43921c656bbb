"""A user's mistake gets one line with file:line:column and exit code 4, never a traceback."""

from __future__ import annotations

import pytest

from pytest_torchcompile.checks import CHECKS

pytestmark = pytest.mark.needs_torch
HEAD = """version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
"""
CASES = {
    "malformed": ("version: 1\nmodels: [", "matrix/default.yaml:3:1: malformed YAML: *"),
    "unknown key": (HEAD + "axis:\n  backend: [eager]\n", "matrix/default.yaml:4:1: *'axis'*did you mean 'axes'"),
    "unknown value": (HEAD + "axes:\n  backend: [inducter]\n", "matrix/default.yaml:5:13: *'inducter'*'inductor'"),
    "unknown mode": (HEAD + "axes:\n  mode: [max-autotun]\n", "matrix/default.yaml:5:10: *'max-autotune'"),
    "unknown check": (HEAD + "checks: [equivalance]\n", "matrix/default.yaml:4:10: *'equivalance'*'equivalence'"),
    "unknown model": (HEAD + "rules:\n  - exclude: {model: nett}\n    reason: no\n",
                      "matrix/default.yaml:5:*'nett'*'net'"),
    "a rule that matches nothing": (
        HEAD + "axes:\n  backend: [eager]\nrules:\n  - exclude: {backend: inductor}\n    reason: slow\n",
        "matrix/default.yaml:7:*"),
    "duplicate key": (HEAD + "axes: {}\naxes: {}\n", "matrix/default.yaml:5:1: *'axes'*twice*"),
    "wrong type": (HEAD + "axes: [backend]\n", "matrix/default.yaml:4:7: *"),
    "empty axis": (HEAD + "axes:\n  backend: []\n", "matrix/default.yaml:5:12: *"),
    "zero cells": (HEAD + "rules:\n  - exclude: {model: net}\n    reason: none\n", "matrix/default.yaml:*"),
    "no such module": (HEAD.replace("models:net", "modles:net"), "matrix/default.yaml:3:*'modles'*'models'*"),
    "no such attribute": (HEAD.replace("models:net", "models:nett"), "matrix/default.yaml:3:*'nett'*'net'*"),
    "not callable": (HEAD.replace("models:net", "models:NUMBER"), "matrix/default.yaml:3:*not callable*"),
    "a tag that builds objects": (HEAD + "axes: !!python/object/apply:os.system ['true']\n", "matrix/default.yaml:4:*"),
    "a bomb": ("a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"{c}: &{c} [{', '.join(['*' + p] * 10)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)),
        "matrix/default.yaml:*"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_in_the_matrix(repo, case):
    """Each kind of mistake is told with its place, and the run ends with pytest's code for usage errors."""
    text, expected = CASES[case]
    repo.models("NUMBER = 3\n")
    (repo.path / "matrix").mkdir(exist_ok=True)
    (repo.path / "matrix/default.yaml").write_text(text)
    result = repo.pytester.runpytest_inprocess("--compile-matrix")
    assert result.ret == 4
    result.stderr.fnmatch_lines([f"*{expected}*"])
    everything = result.stdout.str() + result.stderr.str()
    assert "Traceback" not in everything
    assert "INTERNALERROR" not in everything


@pytest.mark.parametrize(("args", "expected"), [
    (["--compile-matrix=nowhere.yaml"], "*nowhere.yaml*"),
    (["--compile-matrix=matrix.yaml"], "*matrix.yaml*"),
    (["--compile-matrix", "--compile-shard=9/8"], "*'9/8'*"),
    (["--compile-matrix", "--compile-checks=equivalance"], "*'equivalance' is not a check; did you mean 'equivalence'*"
     ),
    (["--compile-matrix", "--compile-checks=compiles,rank_divergence"], "*rank_divergence has nothing to judge*"),
    (["--compile-matrix", "-o", "compile_checks=rank_divergence"],
     "*ERROR: compile_checks: rank_divergence has nothing to judge*"),
    (["--compile-matrix", "-m", "not compile_cell(baxkend='eager')"], "*-m: *'baxkend'; did you mean 'backend'*"),
    (["--compile-matrix", "--compile-timeout=never"], "*--compile-timeout: 'never'*"),
])  # fmt: skip
def test_a_mistake_on_the_command_line(repo, args, expected):
    """A missing file, a folder, a part that is not there, unknown names: told in a line, exit code 4."""
    (repo.path / "matrix.yaml").mkdir()
    result = repo.pytester.runpytest_inprocess(*args)
    assert result.ret == 4
    result.stderr.fnmatch_lines([expected])
    assert "Traceback" not in result.stdout.str() + result.stderr.str()


def test_checks_of_the_ini_file_are_those_of_every_matrix(repo):
    """One of them that this matrix has nothing for is told in a note; it may be there for another matrix."""
    result = repo.pytester.runpytest_inprocess("--compile-matrix", "--collect-only", "-o",
                                               "compile_checks=compiles,rank_divergence")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*note: rank_divergence has nothing to judge in 1 of 1 cell: *",
                                 "*<CheckItem compiles>*"])


def test_not_utf8(repo):
    """A file in another encoding is named as such."""
    (repo.path / "matrix/default.yaml").write_bytes(b"version: 1\n# caf\xe9\n")
    result = repo.pytester.runpytest_inprocess("--compile-matrix")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*matrix/default.yaml:2:*UTF-8*"])


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_factory_that_fails_only_when_it_is_called(repo, workers):
    """What only a rank process can find is told with the place in the matrix, and the exit code is 4 too."""
    repo.models("""
    def net(hidden=8):
        raise ValueError("no weights here")
    """)
    result = repo.run(*workers)
    assert result.ret == 4
    result.stdout.fnmatch_lines(["*matrix/default.yaml:4:3: factory 'models:net' raised ValueError: no weights here*"])
    assert "Traceback" not in result.stdout.str()


def test_a_model_that_fails_eagerly_is_no_compile_failure(repo):
    """The model's own mistake is an error of the cell, told as the user's, with the user's stack."""
    repo.models("""
    class Broken(Net):
        def forward(self, x):
            raise KeyError("weights")

    def net(hidden=8):
        return Broken()
    """)
    result = repo.run()
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*the model raises without torch.compile too, at call 1 (B=4): KeyError: 'weights'*"])
    assert set(repo.verdicts().values()) == {"error"}


def test_no_compiler(repo, monkeypatch):
    """Without a C++ compiler Inductor's cells skip with what to install; a run of only such cells is no green one."""
    monkeypatch.setenv("CXX", "a-compiler-that-is-not-here")
    repo.matrix("""
    version: 1
    models:
      net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
    axes:
      backend: [inductor]
    """)
    result = repo.run("-rs")
    plain = {"phase": "training", "wrapper": "none"}
    applying = [check for check in CHECKS.values() if check.applies(plain) and not check.on_request]
    result.assert_outcomes(skipped=len(applying))
    result.stdout.fnmatch_lines(["SKIPPED*no C++ compiler found; install g++ or clang", "no cell ran compiled code: *"])
    assert {c["status"] for c in repo.block()["cells"]} == {"skip"}


@pytest.mark.parametrize("option", ["--compile-shard=1/2", "--compile-checks=compiles", "--compile-baseline=last.json"])
def test_an_option_of_cells_without_a_matrix(repo, option):
    """A shard of nothing would be all tests of the repository, on every machine."""
    repo.file("test_it.py", "def test_it(): pass\n")
    result = repo.run(option, option="")
    assert result.ret == 4
    result.stderr.fnmatch_lines([f"ERROR: {option.partition('=')[0]} is about the cells of a matrix, and none is asked "
                                 "for; add --compile-matrix, or take it off"])


@pytest.mark.parametrize(("words", "expected"), [
    ("hidden == 32", "-k 'hidden == 32': pytest takes no `=` there; expected -m \"compile_cell(hidden=32)\", for "
                     "exactly those cells, or -k hidden-32, for an axis of your own"),
    ("net and backend == 'eager'", "expected -m \"compile_cell(backend='eager')\""),
])
def test_an_equals_sign_among_words(words, expected, repo):
    """No id has it so, and pytest's -k does not take it: what to type is told before anything is collected."""
    result = repo.run("-k", words)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert expected in result.stderr.str()
    assert "Traceback" not in result.stderr.str()


@pytest.mark.parametrize("options", [
    ("-k", "hidden=32"), ("-k", "net-eager-default-auto-none-hidden=32"), ("-k", "hidden=32 and not hidden=8"),
    ("-k", "net-eager-default-auto-none-hidden=32::compiles"),
    ("-k", "hidden=32", "-n", "1"), ("-k", "hidden-32"), ("-m", "compile_cell(hidden=32)"),
], ids=" ".join)
def test_an_id_is_taken(options, repo):
    """As it stands in the report, whole or a part of it, and by the ways that the text above tells."""
    repo.matrix(HEAD + "axes:\n  backend: [eager]\n  hidden: [8, 32]\n")
    result = repo.run("--compile-checks=compiles", *options)
    assert {name: verdict for name, verdict in repo.verdicts().items() if verdict != "not_run"} == {
        "net-eager-default-auto-none-hidden=32::compiles": "pass"}
    assert result.ret == 0


MISTAKEN_INPUTS = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:mistaken", dims: {B: 4}}
axes:
  backend: [aot_eager, eager]
  dynamic: [auto, static]
"""


def test_inputs_that_raise_are_one_failure(repo):
    """One letter, one text, and the inputs function is called in one cell of four, twice; all stay failed for --lf."""
    repo.matrix(MISTAKEN_INPUTS)
    repo.models("""
    from pathlib import Path

    def mistaken(B):
        with Path("calls.txt").open("a") as calls:
            calls.write("called ")
        raise IndexError("no such file in the data set")
    """)
    result = repo.run("-q")
    lines = result.outlines
    assert lines[0].split()[0] == "F"
    assert "inputs 'models:mistaken' raised IndexError: no such file in the data set" in result.stdout.str()
    assert (repo.path / "calls.txt").read_text().split() == ["called", "called"]
    verdicts = repo.verdicts()
    assert set(verdicts.values()) == {"error"}
    assert len({name.partition("::")[0] for name in verdicts}) == 4


@pytest.mark.parametrize("error", ["ConnectionError('the server is busy')", "IndexError('unlucky')"])
def test_inputs_that_may_work_the_next_time(repo, error):
    """What a network has to do with, and what returns when it is called again alike, is tried in each cell."""
    repo.matrix(MISTAKEN_INPUTS)
    repo.models(f"""
    from pathlib import Path

    def mistaken(B):
        first = not Path("called").exists()
        Path("called").touch()
        if first:
            raise {error}
        return torch.ones(B, 6)
    """)
    repo.run()
    verdicts = repo.verdicts()
    assert verdicts["net-aot_eager-default-auto-none::compiles"] == "error"
    assert verdicts["net-aot_eager-default-static-none::compiles"] == "pass"


def test_a_loss_that_raises_is_not_the_model(repo):
    """The loss is blamed, and what it was given is told."""
    repo.matrix("""
    version: 1
    models:
      net: {factory: "models:net", inputs: "models:batch", loss: "models:entropy", dims: {B: 4}}
    axes: {backend: [aot_eager]}
    """)
    repo.models("""
    def entropy(output, target):
        return torch.nn.functional.cross_entropy(output, target["label"])
    """)
    result = repo.run()
    text = result.stdout.str()
    assert "the loss function raises without torch.compile too, at call 1 (B=4): " in text
    assert "it is called with the output and the batch as it was given, an object of type Tensor" in text
    assert "try    mend the loss function first: eager must work" in text
    assert set(repo.verdicts().values()) == {"error"}


def test_a_dict_that_is_no_keywords(repo):
    """The model takes the dict itself: what the error says is what to write."""
    repo.matrix("""
    version: 1
    models:
      net: {factory: "models:takes_dict", inputs: "models:dict_batch", dims: {B: 4}}
    axes: {backend: [aot_eager]}
    """)
    repo.models("""
    class TakesDict(torch.nn.Linear):
        def forward(self, batch):
            return super().forward(batch["image"])

    def takes_dict():
        return TakesDict(4, 2)

    def dict_batch(B):
        return {"image": torch.ones(B, 4)}
    """)
    result = repo.run()
    assert ("the batch is a dict with image, and a dict is keyword arguments; for a model that takes the dict itself "
            "make it a tuple of one, `(batch,)`") in result.stdout.str()
    repo.models("""
    class TakesDict(torch.nn.Linear):
        def forward(self, batch):
            return super().forward(batch["image"])

    def takes_dict():
        return TakesDict(4, 2)

    def dict_batch(B):
        return ({"image": torch.ones(B, 4)},)
    """)
    repo.run()
    assert set(repo.verdicts().values()) == {"pass"}


@pytest.mark.slow
def test_the_loss_of_a_model_of_dicts(repo):
    """It gets the dict that the model returned, and the dict that the model was given: in every check."""
    repo.matrix("""
    version: 1
    models:
      net: {factory: "models:TakesDict", inputs: "models:batch", loss: "models:loss", dims: {B: {choices: [4, 6]}}}
    axes: {backend: [aot_eager]}
    checks: [compiles, equivalence, gradients, training_steps, smoketest, safe_fallback, worth, contract]
    """)
    repo.models("""
    class TakesDict(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(4, 3)

        def forward(self, batch):
            return {"logits": self.head(batch["image"])}

    def batch(B):
        return ({"image": torch.randn(B, 4), "label": torch.randint(0, 3, (B,))},)

    def loss(output, batch):
        return torch.nn.functional.cross_entropy(output["logits"], batch["label"])
    """)
    repo.run()
    verdicts = repo.verdicts()
    # Whether it is worth it depends on the machine.
    assert verdicts.pop("net-aot_eager-default-auto-none::worth") in ("pass", "fail")
    assert set(verdicts.values()) == {"pass"}


DRAWN_SIZES = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:limited", dims: {B: {buckets: [4, 8]}}}
axes:
  backend: [aot_eager, eager]
checks: [compiles]
rules:
  - also: [shape_stability]
    when: {backend: aot_eager}
"""


def test_inputs_that_raise_for_a_size_that_a_check_drew(repo):
    """Only cells with that check ask for the size, so that the others are run."""
    repo.matrix(DRAWN_SIZES)
    repo.models("""
    def limited(B):
        if B not in (4, 8):
            raise IndexError(f"no batch of {B}")
        return torch.ones(B, 6)
    """)
    result = repo.run()
    assert "inputs 'models:limited' raised IndexError: no batch of " in result.stdout.str()
    verdicts = repo.verdicts()
    assert verdicts["net-aot_eager-default-auto-none::shape_stability"] == "error"
    assert verdicts["net-eager-default-auto-none::compiles"] == "pass"
