"""The search in a process of its own: what ends it, what is wrong there, what is right, and the scripts."""

from __future__ import annotations

import signal

import contract_programs
import pytest

from pytest_torchcompile.contract.contract_search import search_contract
from pytest_torchcompile.contract.finding_text import finding_record, finding_text
from pytest_torchcompile.contract.script import Shown, written_script
from pytest_torchcompile.contract.worker import ProgramSource
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.fuzz.drawn_call import as_code, call
from pytest_torchcompile.fuzz.search import Budget

pytestmark = [pytest.mark.needs_torch, pytest.mark.usefixtures("warm_spawn")]

DIMS = {"B": Dim(min=2, max=4)}
BUDGET = Budget(examples=2, seconds=300)


def search(program, *names):
    """Search one of the programs with some mutations on."""
    return search_contract(ProgramSource(f"contract_programs:{program}", {}, names, {"B": 2}), DIMS, BUDGET)


def test_eager_that_ends_its_process(run_python):
    """Its side is named; the history and the module are made small, and the script ends in the same way."""
    came = search("ending", "thread", "memory_format")
    (finding,) = came.findings
    assert as_code(finding.failing.sequence) == "[call(B=2, memory_format='channels_last 0')]"
    assert finding.told.message == "the eager side ended its process by signal SIGSEGV"
    assert finding.without == ("stem", "rest")
    assert finding.stage == ""
    script = written_script(Shown("crash", contract_programs.ends, contract_programs.images, None,
                                  finding.failing.sequence, {"backend": "eager"}, without=finding.without))
    assert "pytest_torchcompile" not in script
    ended = run_python("-c", script)
    assert ended.returncode == -signal.SIGSEGV, ended.stderr
    text = finding_text(finding_record(finding, [("rest.0", "Tanh"), ("norm", "GroupNorm")], script))
    assert text.message == ("crash: after [call(B=2, memory_format='channels_last 0')]: the eager side ended its "
                            "process by signal SIGSEGV")
    assert "to look for it in torch's tracker: segfault eager" in text.evidence


def test_a_wrong_backend():
    came = search("wrong", "strides")
    (finding,) = came.findings
    assert finding.told.kind == "value"
    assert as_code(finding.failing.sequence) == "[call(B=2, strides='transposed 0')]"
    # None of torch's own backends shows it.
    assert finding.stage == ""
    assert came.processes == 1


def test_a_program_without_a_fault():
    came = search("right", "strides", "grad_mode", "dtypes")
    assert came.findings == []
    assert came.counts["histories"] >= 13
    assert came.counts["calls"] > came.counts["histories"]
    assert came.counts["graphs"]
    # Its convolution refuses any other dtype.
    assert came.uncompared == ["dtypes"]
    assert not came.compared_none


def test_a_program_that_cannot_be_made():
    with pytest.raises(UsageError, match="RuntimeError: no weights here"):
        search("refusing", "thread")


def test_a_script_without_a_fault_prints_nothing(run_python):
    history = (call(B=2), call(B=3, strides="sliced 0", grad_mode="no_grad", thread="other"),
               call(B=2, training=False, frozen="first", second_copy="copy", autocast="bfloat16"))
    script = written_script(Shown("nothing", contract_programs.layers, contract_programs.images, None, history,
                                  {"backend": "eager"}))
    ended = run_python("-c", script)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
