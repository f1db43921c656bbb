"""`pytest --compile-model` needs no file: an ordinary matrix in memory, with the same plan, run and report."""

from __future__ import annotations

import shutil

import pytest

pytestmark = pytest.mark.needs_torch
MODEL = "--compile-model=models:Net"
OWN_REPORT = ".compile-matrix/model/report.json"
EAGER = "compile_cell(backend='eager')"


@pytest.fixture
def bare(repo):
    """A repository without a matrix."""
    shutil.rmtree(repo.path / "matrix")
    return repo


def test_first_verdicts(bare):
    """Three backends and three sizes, inputs guessed; nothing is written but the report."""
    result = bare.run(MODEL, option="")
    assert result.ret == 0
    result.stdout.fnmatch_lines([
        "compile matrix: model:models:Net: 3 cells planned, 0 excluded, 0 to skip, 0 expected to fail",
        "  note: net: inputs guessed, x: float32[[]B, 6]; B = 4, 5, 10",
        "model:models:Net *",
        "3 cells: 3 pass; 3 ran compiled code",
    ])
    verdicts = bare.verdicts(OWN_REPORT)
    assert {name.split("-")[1] for name in verdicts} == {"eager", "aot_eager", "inductor"}
    assert "net-inductor-default-auto-none::gradients" in verdicts
    block = bare.block(OWN_REPORT)
    assert block["matrix"]["path"] == "model:models:Net"
    sizes = block["cells"][0]["observation"]["sections"]["recompiles"]["sizes"]
    assert sizes == 3
    assert not (bare.path / "matrix").exists()
    again = "model:models:Net::net-eager-default-auto-none::compiles"
    assert bare.run(again, option="--compile-matrix=model:models:Net").parseoutcomes() == {"passed": 1}


def test_inputs_that_are_named(bare):
    """The function's own parameters are the dims; the name says which function."""
    result = bare.run(MODEL, "--compile-inputs=models:batch", "-m", EAGER, option="")
    result.stdout.fnmatch_lines([
        "compile matrix: model:models:Net,models:batch: 3 cells planned*",
        "  note: net: inputs by models:batch; B = 4, 5, 10",
        "next: `pytest-torchcompile init models:Net --inputs models:batch` writes a matrix to keep and to change",
    ])
    assert result.ret == 0


def test_the_ini_file_names_it(bare):
    """An ini key for each option, as all have."""
    bare.file("pyproject.toml", "[tool.pytest.ini_options]\ncompile_model = 'models:net'\n"
                                "compile_inputs = 'models:batch'\n")
    result = bare.run("--co", "-q", option="--compile-model")
    assert "model:models:net,models:batch::net-eager-default-auto-none::compiles" in result.stdout.str()


def test_a_failure_says_how_to_run_it_again(bare):
    """A fault in the model is found, as with a file."""
    bare.models("""
    class Broken(Net):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)
    """)
    result = bare.run("--compile-model=models:Broken", "-m", EAGER, option="")
    assert result.ret == 1
    result.stdout.fnmatch_lines([
        "graph_breaks: graph break (1 place(s), 0 allowed)*",
        "  logs   --compile-logs=graph_breaks shows more",
        "  again  pytest --compile-matrix=model:models:Broken "
        "'model:models:Broken::broken-eager-default-auto-none::graph_breaks'",
    ])


def test_workers_of_xdist_get_the_controllers_matrix(bare, monkeypatch):
    """The model is looked at once, whatever the number of workers."""
    bare.models("""
    class Counted(Net):
        pass
    open(os.path.join(os.path.dirname(__file__), "looked"), "a").write(str(os.getpid()) + "\\n")
    """)
    result = bare.run("--compile-model=models:Counted", "-n", "2", "-m", EAGER, "--compile-checks=compiles", option="")
    assert result.parseoutcomes() == {"passed": 1}
    # The one examination, and the rank process that ran the cell.
    assert len(set((bare.path / "looked").read_text().split())) == 2


@pytest.mark.parametrize(("arguments", "expected"), [
    ([MODEL, "--compile-matrix"], "--compile-model runs a model without a matrix file, and --compile-matrix one from a "
                                  "file; take one of them off"),
    (["--compile-model"], "--compile-model names no model, nor does the ini key compile_model; expected "
                          "--compile-model=module:Class"),
    (["--compile-inputs=models:batch"], "--compile-inputs is for --compile-model, which is not given; a matrix file "
                                        "names the inputs of each model itself"),
    (["--compile-model=models:Nett"], "--compile-model: 'models:Nett' cannot be imported: models has no attribute "
                                      "'Nett'; did you mean 'Net'? Known: Net, batch, net, os, signal, time, torch"),
    ([MODEL, "--compile-inputs=modells:batch"], "--compile-inputs: 'modells:batch' cannot be imported: no module "
                                                "'modells'; did you mean 'models'? Known: models"),
    (["--compile-model=tests"], "--compile-model: 'tests' names no code; expected module:attribute, for example "
                                "my_models.gpt:build"),
])
def test_mistakes(bare, arguments, expected):
    """One sentence, exit code 4."""
    result = bare.run(*arguments, option="")
    assert result.ret == 4
    assert f"ERROR: {expected}" in result.stderr.str()


def test_what_cannot_be_guessed(bare):
    """One sentence that names the option; and the process that tries the model may die."""
    bare.models("""
    class Graphs(Net):
        def forward(self, graph, edges):
            return graph.nodes[edges]

    class Dies(Net):
        def __init__(self):
            print("going", flush=True)
            os.abort()

    class Needs(Net):
        def __init__(self, width):
            super().__init__()
    """)
    for model, expected in (
        ("Graphs", "--compile-model: no inputs could be guessed for models:Graphs, whose forward is (graph, edges); "
                   "write a function that returns a batch, and name it by --compile-inputs module:function ("),
        ("Dies", "--compile-model: the process that tried models:Dies ended with -6: going"),
        ("Needs", "--compile-model: models:Needs takes width, without a default; write a function without arguments "
                  "that makes one, and name it by --compile-model"),
    ):
        result = bare.run(f"--compile-model=models:{model}", option="")
        assert result.ret == 4
        assert f"ERROR: {expected}" in result.stderr.str()


def test_pytest_itself_does_not_load_torch(bare):
    """The model is made in a process of its own."""
    bare.file("conftest.py", "import sys\n\ndef pytest_unconfigure():\n"
                             "    print('torch loaded:', 'torch' in sys.modules)\n")
    result = bare.run_anew(MODEL, "-m", EAGER, "--compile-checks=compiles", "-s")
    assert "torch loaded: False" in result.stdout.str()
    assert result.ret == 0


def test_the_report_of_the_matrix_stays_as_it_is(repo):
    """A run of one model has files of its own, says where to go next, and is no run that a baseline finds."""
    folder = repo.path / ".compile-matrix"
    folder.mkdir()
    kept = {name: folder / name for name in ("report.json", "journal.jsonl", "part/report.json")}
    for name, path in kept.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'{{"compile_matrix": "{name}"}}')
    result = repo.run(MODEL, "-m", EAGER, "--compile-checks=compiles", option="")
    assert result.ret == 0
    for name, path in kept.items():
        assert path.read_text() == f'{{"compile_matrix": "{name}"}}'
    assert (folder / "model/report.json").is_file()
    assert not (folder / "runs").exists()
    result.stdout.fnmatch_lines(["next: `pytest-torchcompile init models:Net` writes a matrix to keep and to change"])
