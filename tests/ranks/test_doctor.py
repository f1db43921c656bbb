"""doctor: the machine in words, from plain data."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from pytest_torchcompile import run, wrappers
from pytest_torchcompile.errors import Unavailable
from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.ranks import doctor

ABOUT = {"torch": "2.13.0", "triton": None, "python": "3.11", "cores": 2, "cpu": "x86_64 AVX2", "compiler": "g++ 13",
         "cuda": None, "driver": None, "devices": ["cpu"]}


@pytest.mark.parametrize(("about", "files", "last"), [
    ({}, [], "no GPU: this build of torch has no CUDA"),
    ({}, ["/dev/nvidia0"], "no GPU: this build of torch has no CUDA, and the machine has /dev/nvidia0"),
    ({"cuda": "13.0"}, [], "no GPU: torch is built for CUDA 13.0, and the machine shows none"),
    ({"cuda": "13.0"}, ["/dev/nvidia0"], "no GPU: torch is built for CUDA 13.0, and can't use /dev/nvidia0"),
    ({"cuda": "13.0", "driver": "580.1", "devices": ["cpu", "NVIDIA H200"]}, ["/dev/nvidia0"],
     "CUDA 13.0, driver 580.1: NVIDIA H200 (leased: 0)"),
])
def test_gpus(monkeypatch, about, files, last):
    """What is missing is said: the GPU, the driver's device, or torch's build."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor, "gpu_device_files", lambda: files)
    lines = list(doctor.machine_lines(ABOUT | about))
    assert lines[0] == "torch 2.13.0, triton none, Python 3.11, 2 cores (x86_64 AVX2)"
    assert lines[1:] == ["C++ compiler: g++ 13", last]


def machine_of(monkeypatch, refuse=lambda *given: None):
    """Stands in for what needs torch: every model can be made, and ``refuse`` says what ranks lack."""
    built = SimpleNamespace(compile_settings=lambda *given: {}, build_model=lambda *given: None)
    for package, name, module in ((run, "subject", built),
                                  (wrappers, "process_group", SimpleNamespace(refuse_unavailable=refuse)),
                                  (wrappers, "protocol", SimpleNamespace(load=lambda *given: None))):
        monkeypatch.setitem(sys.modules, f"{package.__name__}.{name}", module)
        monkeypatch.setattr(package, name, module, raising=False)


def test_a_wrapper_that_this_machine_cannot_have(monkeypatch, tmp_path):
    """Each is asked about once, and its cells are counted with the reason."""
    asked = []

    def refuse(cell, wrapper, where):
        asked.append(cell.wrapper)
        if cell.wrapper == "pp":
            raise Unavailable("wrapper pp needs NumPy")

    machine_of(monkeypatch, refuse)
    path = tmp_path / "m.yaml"
    path.write_text("""
version: 1
models: {net: {factory: "pytest_torchcompile.zoo:tiny_head", inputs: "pytest_torchcompile.zoo:vector_batch",
               dims: {B: 4}}}
axes: {backend: [eager, aot_eager], wrapper: [ddp, pp]}
""")
    survey = doctor.survey_cells(load_matrix(path))
    assert [planned.cell.wrapper for planned in survey.runnable] == ["ddp", "ddp"]
    assert survey.why_not == {"wrapper pp needs NumPy": 2}
    assert sorted(asked) == ["ddp", "pp"]


def test_a_cell_of_several_ranks_needs_a_gpu_for_each(monkeypatch, tmp_path):
    """The machine has GPUs, and too few for some cells; the fake lane needs one."""
    monkeypatch.setattr(doctor, "visible_gpus", lambda files: ("0", "1"))
    machine_of(monkeypatch)
    path = tmp_path / "m.yaml"
    path.write_text("""
version: 1
models: {net: {factory: "pytest_torchcompile.zoo:tiny_head", inputs: "pytest_torchcompile.zoo:vector_batch",
               dims: {B: 4}}}
axes: {backend: [eager], device: [cuda], wrapper: [none, ddp, ddp*4, fsdp2+tp, tp*fake8]}
""")
    survey = doctor.survey_cells(load_matrix(path))
    assert len(survey.runnable) == 3
    assert survey.why_not == {"it needs 4 GPUs, and this machine has 2 to use": 2}


@pytest.mark.parametrize(("problems", "code"), [((), 0), (("a cell of ours raised",), 1)])
def test_json_for_programs(monkeypatch, tmp_path, capsys, problems, code):
    """What can run, what cannot and why, and what came of the cell that was tried."""
    machine_of(monkeypatch)
    monkeypatch.setitem(sys.modules, f"{run.__name__}.environment", SimpleNamespace(environment=lambda: ABOUT))
    monkeypatch.setattr(doctor, "set_environment", lambda: None)
    monkeypatch.setattr(doctor, "try_training", lambda *given: doctor.TriedCell("net-eager", 1.5, problems))
    path = tmp_path / "m.yaml"
    path.write_text("""
version: 1
models: {net: {factory: "pytest_torchcompile.zoo:tiny_head", inputs: "pytest_torchcompile.zoo:vector_batch",
               dims: {B: 4}}}
axes: {backend: [eager, aot_eager]}
rules: [{skip: {backend: aot_eager}, reason: not here}]
""")
    assert doctor.examine_machine(path, as_json=True) == code
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "exit_code": code, "environment": ABOUT, "matrix": str(path), "cells": 2,
        "runnable": ["net-eager-default-auto-none"], "cannot": {"a rule skips it: not here": 1},
        "tried": {"cell": "net-eager", "seconds": 1.5, "problems": list(problems)}}


def test_no_compiler():
    """What to do about it."""
    assert list(doctor.machine_lines(ABOUT | {"compiler": None}))[1] == (
        "no C++ compiler, which Inductor needs on a CPU: install g++ or clang")
