"""Torch's log and trace of a while: written to a file, and afterwards torch logs as before."""

from __future__ import annotations

import logging
import shutil
import subprocess

import pytest
import torch

from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.ledger import observe
from pytest_torchcompile.ledger.torch_logs import _read_channels, logged_channels, traced_to_file

pytestmark = pytest.mark.needs_torch


def compile_something():
    torch.compiler.reset()
    compiled = torch.compile(torch.nn.Linear(3, 2), backend="aot_eager", dynamic=False)
    for rows in (2, 4):
        compiled(torch.randn(rows, 3))


def test_channels_go_to_the_file_and_end(tmp_path, monkeypatch, capfd):
    """Recompiles of the block alone, and nothing on stderr; TORCH_LOGS of the environment is no obstacle."""
    monkeypatch.setenv("TORCH_LOGS", "graph_breaks")
    levels = {name: logging.getLogger(name).level for name in ("torch", "torch._dynamo", "torch._inductor")}
    with logged_channels(("recompiles",), tmp_path / "log"):
        compile_something()
    text = (tmp_path / "log").read_text()
    assert text.count("Recompiling function") == 1
    assert "size mismatch" in text
    compile_something()
    assert (tmp_path / "log").read_text() == text
    assert "Recompiling" not in capfd.readouterr().err
    assert {name: logging.getLogger(name).level for name in levels} == levels


def test_parts_have_headings(tmp_path):
    """What is logged for a purpose of ours stands below it; a part in which torch said nothing has no heading."""
    with logged_channels(("recompiles",), tmp_path / "log") as begin:
        compile_something()
        begin("silent")
        begin("again")
        compile_something()
        begin("the end")
    text = (tmp_path / "log").read_text()
    cells, ours = text.split("--- again\n")
    assert cells.count("Recompiling function") == ours.count("Recompiling function") == 1
    assert "---" not in cells + ours


@pytest.mark.parametrize("name", CHECKS)
def test_channels_that_checks_name(name):
    """Each is one of torch's."""
    channels = tuple(filter(None, CHECKS[name].logs.split(",")))
    assert set(_read_channels(channels)) == set(channels)


def test_levels():
    """A component has a level, by a sign in front; what is switched on or off has none."""
    assert _read_channels(("+dynamo", "inductor", "-aot", "graph_breaks")) == {
        "dynamo": logging.DEBUG, "inductor": logging.INFO, "aot": logging.ERROR, "graph_breaks": True}
    with pytest.raises(UsageError, match="'graph_brakes' is no channel of torch's log; did you mean 'graph_breaks'"):
        _read_channels(("graph_brakes",))


def test_a_trace_beside_a_ledger(tmp_path):
    """Each record is one line with its payload below, also while a ledger reads the same."""
    with traced_to_file(tmp_path / "cell.trace.log"), observe() as seen:
        compile_something()
    text = (tmp_path / "cell.trace.log").read_text()
    assert len(seen.compiles) == 2
    assert text.count('"dynamo_output_graph"') == 2
    compile_something()
    assert (tmp_path / "cell.trace.log").read_text() == text


@pytest.mark.skipif(shutil.which("tlparse") is None, reason="tlparse is not installed")
def test_tlparse_opens_it(tmp_path):
    """Its page lists both compiles."""
    with traced_to_file(tmp_path / "cell.trace.log"):
        compile_something()
    done = subprocess.run(["tlparse", tmp_path / "cell.trace.log", "-o", tmp_path / "out", "--no-browser"],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out" / "index.html").read_text()
    assert "dynamo_output_graph" in page
    assert "[0/1]" in page
