"""From what a history shows to the operator to blame: planted, torch's own, and nobody where nothing is wrong."""

from __future__ import annotations

import pytest
from contract_programs import shrunk

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.contract.contract_search import ContractFinding
from pytest_torchcompile.contract.finding_text import finding_record, finding_text
from pytest_torchcompile.contract.history_culprit import history_culprit
from pytest_torchcompile.contract.history_run import Program, run_history
from pytest_torchcompile.contract.worker import ProgramSource, Told, Worker
from pytest_torchcompile.culprit.culprit_record import Culprit
from pytest_torchcompile.faults import FAULTS
from pytest_torchcompile.faults.wrong_compiler import WRONG_COMPILERS
from pytest_torchcompile.fuzz.drawn_call import call
from pytest_torchcompile.fuzz.search import FailingSequence, SequenceProblem
from pytest_torchcompile.run.subject import cxx_compiler
from pytest_torchcompile.state.torch_state import isolated, same_random_draws

pytestmark = [pytest.mark.needs_torch, pytest.mark.usefixtures("warm_spawn")]
needs_cxx = pytest.mark.skipif(cxx_compiler() is None, reason="no C++ compiler found; install g++ or clang")
SECONDS = 3000.0


@pytest.fixture(autouse=True)
def _isolated():
    with isolated([]), same_random_draws():
        yield


def told_of(program, history):
    """What a history shows, as a worker tells it."""
    problem = run_history(program, history, lambda index, side: None).problem
    return None if problem is None else {"kind": problem.kind, "message": problem.message}


@pytest.mark.parametrize(("name", "subsystem", "operator"), [
    ("decomposition of silu", "decomposition", "silu"),
    pytest.param("lowering of relu", "lowerings", "relu", marks=[pytest.mark.slow, needs_cxx]),
])
def test_a_wrong_compiler_is_named(name, subsystem, operator):
    """Planted: the line of the model, a script that needs torch alone."""
    fault = next(each for each in WRONG_COMPILERS if each.name == name)
    program = Program(fault.build_model, {"backend": fault.backend}, lambda sizes, seed: Batch.of(fault.make_batch()))
    history = (call(B=2, training=False),)
    with fault.plant():
        told = told_of(program, history)
        assert told is not None
        found = Culprit.from_dict(history_culprit(program, history, (), fault.backend, told, SECONDS))
    assert (found.subsystem, found.operator, found.left) == (subsystem, f"aten.{operator}.default", (operator,))
    assert found.place.rpartition(":")[0].endswith("wrong_compiler.py")
    assert "pytest_torchcompile" not in found.script


def test_torchs_own_group_norm_is_named():
    """By every operator, where no compiler takes part: docs/found has the page."""
    case = next(case for case in FAULTS if case.upstream == "native_group_norm_backward")
    program = Program(case.program.build_model, {"backend": "aot_eager"},
                      lambda sizes, seed: Batch.of(case.program.inputs(**case.program.sizes[0])))
    history = (call(B=2),)
    told = told_of(program, history)
    if told is None:
        pytest.skip("this torch has mended native_group_norm_backward")
    found = Culprit.from_dict(history_culprit(program, history, (), "aot_eager", told, SECONDS))
    assert found.operator == "aten.native_group_norm_backward.default"
    assert "programs.py:" in found.place
    assert len(found.operator_script.splitlines()) <= 20


@pytest.mark.parametrize("surrounded", [False, True])
def test_a_right_compiler_is_accused_of_nothing(surrounded):
    """The twin; with an autocast around it too, which is no part of a graph."""
    program = shrunk({"backend": "aot_eager"})
    mutations = {"autocast": "bfloat16"} if surrounded else {}
    told = {"kind": "value", "message": "output: wrong"}
    found = Culprit.from_dict(history_culprit(program, (call(B=2, **mutations),), (), "aot_eager", told, 100))
    assert (found.operator, found.left, found.script) == ("", (), "")
    assert found.why_not.startswith("none of 1 graph(s) shows it by itself")


@pytest.mark.slow
@needs_cxx
def test_a_worker_tells_torchs_own_softshrink_with_the_inputs_of_the_last_call():
    """The whole way of a search, after its history is small: of two calls only the second one's input has a NaN."""
    source = ProgramSource("contract_programs:shrunk", {"backend": "inductor"}, ("special_values",), {"B": 2})
    history = (call(B=2), call(B=2, special_values="nan 0"))
    with Worker(source) as worker:
        told = worker.run(history)
        if not told.kind:
            pytest.skip("this torch has mended softshrink")
        culprit = worker.culprit(history, (), "inductor", told, SECONDS)
        again = worker.run(history)
    assert again == Told(told.kind, told.where, told.message, told.at, told.moved, again.counts)
    found = Culprit.from_dict(culprit)
    assert "softshrink" in found.operator + " ".join(found.left), found
    assert "contract_programs.py:" in (found.place or found.places[0])
    assert "nan" in found.script
    failing = FailingSequence(SequenceProblem(told.kind, told.message, told.at), history, history)
    record = finding_record(ContractFinding(told, failing, (), "inductor", culprit), (), "import torch\n")
    text = finding_text(record).evidence
    assert "softshrink" in text
    assert "contract_programs.py:" in text
    assert "# What is left of it, by itself:" in text
