"""Two processes, one artifact between them: what was planted in it is found, and the clean one is silent."""

from __future__ import annotations

import re
import shutil
import subprocess
import zipfile
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from pytest_torchcompile.artifacts.route import version_of
from pytest_torchcompile.artifacts.shipping import Shipment, ship
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.checks import load
from pytest_torchcompile.contract.worker import OwnFailure
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.fuzz.drawn_call import call
from pytest_torchcompile.observation import Job
from pytest_torchcompile.plan.models import ModelEntry

pytestmark = [pytest.mark.needs_torch, pytest.mark.usefixtures("warm_spawn")]

HERE = Path(__file__).parent
MAKER = "pytest_torchcompile.run.artifact_cell:make_artifact"
LOADER = "pytest_torchcompile.run.artifact_cell:program_of"
TORCH = metadata.version("torch") if find_spec("torch") else "0.0"
PRECOMPILES = pytest.mark.skipif(version_of(TORCH) < (2, 14), reason="torch.compiler.precompile came with torch 2.14")
ENDED_AT_ONCE = b"\x0f\x0b"
"""``ud2``: what a processor of x86 does with an instruction that it does not know."""


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Ships a model by a route; returns the section."""
    monkeypatch.setenv("ARTIFACT_MODELS_SEEN", str(tmp_path / "seen"))
    # Makers and loaders are named, and processes that are spawned look where this one does.
    monkeypatch.syspath_prepend(str(HERE))

    def by(route, factory="heads", phase="inference", tamper=lambda folder: None, inputs="vectors", maker=MAKER,
           loader=LOADER):
        entry = ModelEntry("net", f"artifact_models:{factory}", f"artifact_models:{inputs}", where=f"{HERE}/a.yaml:1:1")
        job = Job(Cell(model="net", phase=phase).to_dict(), entry.to_dict(), str(HERE), ("artifacts",), threads=1,
                  modules=("artifact_models",))
        return ship(Shipment(maker, loader, asdict(job), route, (call(B=4), call(B=6)), tamper))

    return by


def problems_of(section):
    """What the check says of one route."""
    return list(load("artifacts").judge({"raised": None, "unfit": "", "routes": [section]}, {}))


def test_a_warm_folder_compiles_nothing(shipped):
    """The second process counts no compile, and computes the same, backward too."""
    section = shipped("warm_folder", phase="training")
    assert problems_of(section) == []
    assert section["misses"] == 0
    assert section["hits"] > 0
    assert section["calls"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("route", "built"), [("warm_folder", 0), ("cache_artifacts", 1)])
def test_libraries_of_kernels(shipped, route, built):
    """A folder has them; torch's cache artifacts do not, so that the C++ compiler is called again for a hit."""
    section = shipped(route, "kernel")
    assert problems_of(section) == []
    assert section["misses"] == 0
    assert min(section["built"], 1) == built


@pytest.mark.parametrize("factory", ["heads", "hooked_heads"])
def test_a_clean_artifact(shipped, factory):
    """Loaded, it does what eager does, or refuses; a hook that both processes have is inside."""
    section = shipped("aot_compile", factory)
    assert problems_of(section) == []
    assert section["calls"] > 2
    assert "[call(B=6)]" in section["refusals"]


def test_a_factory_that_raises(shipped):
    """That is no refusal of torch's."""
    with pytest.raises(UsageError, match="raised ValueError: no such weights"):
        shipped("aot_compile", "raises")


@pytest.mark.parametrize(("route", "text"), [
    ("aot_compile", "UserError: "), ("aot_inductor", "GuardOnDataDependentSymNode: "),
])
def test_torch_refuses(shipped, route, text):
    """In its own words; nothing got out, so nothing fails but the number of routes."""
    section = shipped(route, "branching")
    assert section["refused"].startswith(text)
    assert "Could not guard on data-dependent expression" in section["refused"]
    # No line of ours, as if it were the model's.
    assert f"({route}.py:" not in section["refused"]
    (problem,) = problems_of(section)
    assert problem.message == "vacuous: 0 routes shipped the model, and 1 must"
    assert problem.evidence.startswith(f"{route} refused: {text}")


def test_our_own_mistake_in_the_first_process(shipped):
    """It is no refusal of torch's: the check has not judged."""
    with pytest.raises(OwnFailure, match=r"(?s)pytest-torchcompile itself failed, not the model:.*IndexError"):
        shipped("aot_compile", maker="artifact_models:maker_with_a_mistake")


def test_our_own_mistake_in_the_second_process(shipped):
    """It is no artifact that cannot be loaded."""
    with pytest.raises(OwnFailure, match=r"(?s)pytest-torchcompile itself failed, not the model:.*FileNotFoundError"):
        shipped("aot_compile", loader="artifact_models:loader_with_a_mistake")


def test_what_cannot_be_sent_is_told(shipped):
    """The user's mistake, in its own words, though the exception does not survive the way between processes."""
    with pytest.raises(UsageError, match=r"^a\.yaml:1:2: no such model$"):
        shipped("aot_compile", maker="artifact_models:maker_of_a_matrix")


def test_a_process_that_ends_while_it_makes(shipped):
    """A crash of the compiler is one, and no refusal."""
    (problem,) = problems_of(shipped("aot_compile", maker="artifact_models:maker_that_is_killed"))
    assert problem.message == ("crash: route aot_compile: making the artifact ended its process by signal SIGKILL")


def test_a_process_that_ends_while_it_loads(shipped):
    (problem,) = problems_of(shipped("aot_compile", loader="artifact_models:loader_that_is_killed"))
    assert problem.message == "load: route aot_compile: another process could not load what was shipped"
    assert problem.evidence == "the process for histories ended its process by signal SIGKILL while it made the program"


def test_a_damaged_artifact(shipped):
    """Torch does not take it, and says so."""
    section = shipped("aot_compile", tamper=lambda folder: (folder / "aot_compiled.bin").write_bytes(b"nothing"))
    (problem,) = problems_of(section)
    assert problem.message == "load: route aot_compile: another process could not load what was shipped"
    assert problem.evidence.startswith("UnpicklingError: ")


@PRECOMPILES
@pytest.mark.parametrize("factory", ["heads", "hooked_heads"])
def test_a_clean_precompiled_file(shipped, factory):
    """It takes the parameters of the module that it is called for, and refuses another size."""
    section = shipped("precompile", factory)
    assert problems_of(section) == []
    assert section["calls"] > 0
    assert "[call(B=6)]" in section["refusals"]


@PRECOMPILES
def test_a_hook_that_a_precompiled_file_drops(shipped):
    (problem,) = problems_of(shipped("precompile", "hooked_where_loaded"))
    assert problem.message.startswith("value: route precompile, [call(B=4)]: output: error is")
    assert "asks nothing of flags, globals, hooks" in problem.hint


@PRECOMPILES
def test_a_value_of_python_in_a_precompiled_file(shipped):
    """Whatever becomes of another one: eager's answer or a refusal, or it is told."""
    section = shipped("precompile", "powered", inputs="with_power")
    for problem in problems_of(section):
        assert "power" in problem.message
    assert any("power" in code for code in section["refusals"]) or problems_of(section)


def test_a_stale_key(shipped):
    """The cache gives what an older pass made: its key is the same."""
    (problem,) = problems_of(shipped("warm_folder", "passed_heads"))
    assert problem.message.startswith("value: route warm_folder, [call(B=4), call(B=6)]: output: error is")
    assert "custom passes and their uuid" in problem.hint


def test_the_same_pass_in_both(shipped):
    """The clean twin: the caches are asked with the pass in the key, and have it."""
    section = shipped("warm_folder", "harmlessly_passed_heads")
    assert problems_of(section) == []
    assert section["hits"] > 0


def test_a_dropped_hook(shipped):
    """The process that loads registers a hook, and the artifact does not call it."""
    (problem,) = problems_of(shipped("aot_compile", "hooked_where_loaded"))
    assert problem.message.startswith("value: route aot_compile, [call(B=4)]: output: error is")
    assert "hooks that are registered later" in problem.hint


def test_a_dropped_guard(shipped):
    """Guards on globals are dropped, and the other process has another value there."""
    (problem,) = problems_of(shipped("aot_compile", "scaled_heads"))
    assert problem.message == ("shape: route aot_compile, [call(B=4)]: output: shape is (4, 8) in eager, "
                               "(4, 4) compiled")
    assert "guards on globals" in problem.hint


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nm") is None, reason="nm, which finds a function in a library, is not installed")
def test_another_instruction_set(shipped, monkeypatch):
    """The library has an instruction that the processor does not know."""
    monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "1")

    def tamper(folder):
        package, other = folder / "model.pt2", folder / "other.pt2"
        with zipfile.ZipFile(package) as old, zipfile.ZipFile(other, "w") as new:
            for member in old.infolist():
                data = old.read(member)
                if member.filename.endswith(".so"):
                    data = with_unknown_instruction(data, folder / "library.so")
                new.writestr(member.filename, data)
        other.replace(package)

    (problem,) = problems_of(shipped("aot_inductor", tamper=tamper))
    assert problem.message.startswith("crash: route aot_inductor, [call(B=4)]: the compiled side ended its process by "
                                      "signal SIGILL")


def test_a_clean_package(shipped, monkeypatch):
    """Told to check its inputs, it refuses another size."""
    monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "1")
    section = shipped("aot_inductor")
    assert problems_of(section) == []
    assert "[call(B=6)]" in section["refusals"]


def with_unknown_instruction(data, file):
    """A library whose function that runs the model begins with one."""
    file.write_bytes(data)
    symbols = subprocess.run(["nm", "-D", str(file)], capture_output=True, text=True, check=True).stdout
    place = int(re.search(r"^(\w+) T AOTInductorModelContainerRun$", symbols, re.MULTILINE)[1], 16)
    return data[:place] + ENDED_AT_ONCE + data[place + len(ENDED_AT_ONCE):]
