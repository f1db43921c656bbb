"""The command `shapes`: sizes are read, each way runs in a process of its own, and the playbook has the figures."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from sample_report import SMALL, sample_report, written

from pytest_torchcompile.adoption.shapes_command import read_traffic
from pytest_torchcompile.cli import main

MODELS = """
import torch
class Net(torch.nn.Linear):
    def forward(self, x):
        return torch.relu(super().forward(x))
def net():
    return Net(4, 4)
def batch(B, C):
    return torch.randn(B, C)
"""
MATRIX = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: {choices: [3, 5]}, C: 4}}
  other: {factory: "models:net", inputs: "models:batch", dims: {B: 3, C: 4}}
axes: {backend: [eager], phase: [inference]}
"""
BLOCKS = """
import torch
class Block(torch.nn.Linear):
    def forward(self, x):
        return torch.relu(super().forward(x))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(4, 4)])
    def forward(self, x):
        return self.blocks[0](x)
def net():
    return Net()
def batch(B, C):
    return torch.randn(B, C)
"""
CELL = "net-eager-default-auto-none-inference"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "m.yaml").write_text(MATRIX)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_sizes_and_their_calls():
    assert read_traffic("8, 12*50,40", 10) == {8: 10, 12: 50, 40: 10}


@pytest.mark.parametrize(("arguments", "message"), [
    (["--sizes", "8,x"], "--sizes: 'x' is no size; expected sizes from 1 on, each with its number of calls"),
    (["--sizes", "8,0"], "--sizes: '0' is no size"),
    (["--sizes", "8,8*3"], "--sizes: 8 is listed twice; write 8*CALLS once"),
    (["--sizes", "8"], "--sizes: '8' is one size, which does not vary; name two or more, for example 8,12,40"),
    (["--sizes", "8,12", "--buckets", "8,y"], "--buckets: 'y' is no size; expected sizes, for example 16,64"),
    (["--sizes", "8,12", "--buckets", "4,8"], "--buckets: size 12 fits into none of 4,8; add a larger one"),
    (["--sizes", "8,12", "--timeout", "0"], "--timeout: 0 is not a number of seconds above 0, for example 1800"),
    (["--sizes", "8,12", "--timeout", "nan"], "--timeout: nan is not a number of seconds above 0"),
    (["--sizes", "8,12", "--dim", "D"], "--dim: model 'net' has no dim 'D' that may vary; Known: B, C"),
])
def test_what_cannot_be_tried(folder, capsys, arguments, message):
    assert main(["shapes", CELL, "--matrix", "m.yaml", *arguments]) == 4
    assert message in capsys.readouterr().err


def test_a_digit_that_is_no_number(folder, capsys):
    assert main(["shapes", CELL, "--matrix", "m.yaml", "--sizes", "8,12", "--buckets", "²"]) == 4
    assert "--buckets: '²' is no size" in capsys.readouterr().err


def test_a_model_whose_dim_is_not_clear(folder, capsys):
    other = CELL.replace("net", "other", 1)
    assert main(["shapes", other, "--matrix", "m.yaml", "--sizes", "8,12"]) == 4
    assert "--dim: model 'other' has the dims B, C; say which of them varies" in capsys.readouterr().err


def test_a_way_that_fails_is_told(folder, capsys, monkeypatch):
    def fail(*given):
        return {"error": f"raised ValueError: {given[4]}"}

    monkeypatch.setattr("pytest_torchcompile.adoption.shapes_command._try_apart", fail)
    assert main(["shapes", CELL, "--matrix", "m.yaml", "--sizes", "8,12", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ways"][0]["error"] == "raised ValueError: static"


def test_a_way_that_hangs_is_stopped(folder, capsys, monkeypatch):
    (folder / "hangs.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr("pytest_torchcompile.adoption.shapes_command._MODULE", "hangs")
    assert main(["shapes", CELL, "--matrix", "m.yaml", "--sizes", "8,12", "--timeout", "0.5", "--json"]) == 1
    errors = [way["error"] for way in json.loads(capsys.readouterr().out)["ways"]]
    assert errors == ["it did not end within 0.5 s, and was stopped; name fewer sizes, or give it more time by "
                      "--timeout"] * 4


@pytest.mark.slow
@pytest.mark.needs_torch
def test_each_way_is_tried_and_the_playbook_tells(folder, capsys):
    """With the backend eager, which compiles nothing but captures: as many compiles as a way needs."""
    assert main(["shapes", CELL, "--matrix", "m.yaml", "--sizes", "8,12,20", "--buckets", "16,32"]) == 0
    text = capsys.readouterr().out
    assert "net: B varies, backend eager, inference, torch 2." in text
    path = Path(".compile-matrix/shapes/net.json")
    found = json.loads(path.read_text())
    ways = {way["name"]: way for way in found["ways"]}
    compiles = {name: way["compiles"] for name, way in ways.items()}
    assert compiles == {"static": 3, "auto": 2, "dynamic": 1, "buckets": 2}
    assert not any(way["late_compiles"] for way in ways.values())
    assert found["buckets"] == [16, 32]
    assert all(way["cold_seconds"] > 0 for way in ways.values())

    report = written(sample_report(SMALL), folder / "r.json")
    assert main(["playbook", str(report), "-o", "-", "--shapes", str(path)]) == 0
    text = capsys.readouterr().out
    assert "### Sizes of `net`" in text
    assert "| way | compiles | cold | a step of B = 8 / 12 / 20 | total | pays after |" in text
    assert "- Buckets 16, 32: 38% of the padded B is padding." in text


@pytest.mark.needs_torch
@pytest.mark.parametrize(("way", "compiles", "eager_sizes"), [
    ("static", 8, [10, 11]), ("auto", 2, []), ("dynamic", 1, []),
])
def test_a_backward_is_no_compile_of_its_own(folder, monkeypatch, way, compiles, eager_sizes):
    """As many as torch's counters say: Dynamo's limit is eight."""
    import torch

    from pytest_torchcompile.adoption import shape_trial
    from pytest_torchcompile.layer.benchmark_result import Ratio
    from pytest_torchcompile.plan.matrix import load_matrix

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    matrix = load_matrix(folder / "m.yaml")
    planned = next(each for each in matrix.cells if each.cell.model == "net")
    cell = replace(planned.cell, backend="aot_eager", phase="training", dynamic=way)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "models", raising=False)
    monkeypatch.setattr(shape_trial, "_timed", lambda *sides: (1.0, Ratio(1.0, 1.0, 1.0, 9)))
    # It would be counted by torch as well.
    monkeypatch.setattr(shape_trial, "warm_toolchain", lambda settings, device: None)
    sizes = list(range(2, 12))
    asked = {"cell": cell.to_dict(), "entry": matrix.models["net"].to_dict(), "root": str(folder), "dim": "B",
             "sizes": sizes, "padded": {str(size): size for size in sizes}}
    found = shape_trial.try_way(asked)
    assert (found["compiles"], found["eager_sizes"], found["late_compiles"]) == (compiles, eager_sizes, 0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiles


@pytest.mark.needs_torch
def test_eager_stays_eager_where_blocks_are_compiled_in_place(folder, monkeypatch):
    """A wrapper may compile the very modules that it is given, so that each side has a model of its own."""
    from pytest_torchcompile.adoption import shape_trial
    from pytest_torchcompile.layer.benchmark_result import Ratio
    from pytest_torchcompile.plan.matrix import load_matrix

    (folder / "models.py").write_text(BLOCKS)
    (folder / "m.yaml").write_text(MATRIX.replace("axes: {", "axes: {wrapper: [regional], "))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "models", raising=False)
    matrix = load_matrix(folder / "m.yaml")
    planned = next(each for each in matrix.cells if each.cell.model == "net")
    sides = []

    def timed(eager, compiled, own, padded):
        sides.append((eager, compiled))
        return 1.0, Ratio(1.0, 1.0, 1.0, 9)

    monkeypatch.setattr(shape_trial, "_timed", timed)
    asked = {"cell": planned.cell.to_dict(), "entry": matrix.models["net"].to_dict(), "root": str(folder), "dim": "B",
             "sizes": [2, 3], "padded": {"2": 2, "3": 3}}
    assert shape_trial.try_way(asked)["eager_sizes"] == []
    eager, compiled = sides[0]
    assert [block._compiled_call_impl for block in eager.module.blocks] == [None]
    assert compiled.module.blocks[0]._compiled_call_impl is not None


@pytest.mark.parametrize(("content", "message"), [
    (None, "No such file"), ("{}", "it is not what `pytest-torchcompile shapes` writes"), ("[1]", "it is not what"),
    ("no", "it is not what"),
])
def test_what_is_no_experiment(folder, capsys, content, message):
    report = written(sample_report(SMALL), folder / "r.json")
    if content is not None:
        (folder / "s.json").write_text(content)
    assert main(["playbook", str(report), "-o", "-", "--shapes", "s.json"]) == 2
    assert message in capsys.readouterr().err


LOOP = MODELS.replace("return torch.relu(super().forward(x))", """for _ in range(x.shape[0] // 4):
            x = torch.relu(super().forward(x))
        return x""")


@pytest.mark.needs_torch
@pytest.mark.parametrize(("models", "way", "told"), [
    (LOOP, "auto", "a guard failed 3 times, the last being (x.size()[0] // 4) == 6 ("),
    (LOOP, "dynamic", "a guard failed 3 times, the last being (x.size()[0] // 4) == 6 ("),
    (LOOP, "static", ""), (MODELS, "auto", ""), (MODELS, "dynamic", ""),
])
def test_why_each_size_is_compiled_is_told(folder, monkeypatch, models, way, told):
    """A loop over a size fixes it, whatever `dynamic` says; its guard and line are named. A clean twin has none."""
    import torch

    from pytest_torchcompile.adoption import shape_trial
    from pytest_torchcompile.layer.benchmark_result import Ratio
    from pytest_torchcompile.plan.matrix import load_matrix

    torch.compiler.reset()
    (folder / "models.py").write_text(models)
    matrix = load_matrix(folder / "m.yaml")
    planned = next(each for each in matrix.cells if each.cell.model == "net")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "models", raising=False)
    monkeypatch.setattr(shape_trial, "_timed", lambda *sides: (1.0, Ratio(1.0, 1.0, 1.0, 9)))
    sizes = [8, 16, 24, 40]
    asked = {"cell": replace(planned.cell, dynamic=way).to_dict(), "entry": matrix.models["net"].to_dict(),
             "root": str(folder), "dim": "B", "sizes": sizes, "padded": {str(size): size for size in sizes}}
    recompiled = shape_trial.try_way(asked)["recompiled"]
    assert recompiled.startswith(told)
    assert bool(recompiled) == bool(told)
    if told:
        assert "models.py:5): a loop of the code (for _ in range(x.shape[0] // 4):" in recompiled


def test_progress_is_told_while_a_way_runs(folder, capsys, monkeypatch):
    """Each way takes a while, and the table comes at the end; standard output is the table's, or JSON's, alone."""
    monkeypatch.setattr("subprocess.run", lambda *given, **named: SimpleNamespace(stdout="", stderr="boom",
                                                                                returncode=3))
    main(["shapes", CELL, "--matrix", "m.yaml", "--sizes", "3,5", "--json"])
    printed = capsys.readouterr()
    assert "shapes: way 2 of 4, auto: compiling and timing 2 sizes" in printed.err
    assert "shapes: way" not in printed.out
