"""What of the machine, Python and the packages is in a key: what may change a verdict, and nothing else."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
from unit.rooms import ROOMS

from pytest_torchcompile.reuse import machine_facts as module
from pytest_torchcompile.reuse.machine_facts import NOT_IN_RANKS, machine_digests, machine_facts, tools_of_path


@pytest.fixture
def fresh_machine():
    """What was read of the machine is forgotten, before and after."""
    machine_facts.cache_clear()
    yield
    machine_facts.cache_clear()


@pytest.mark.usefixtures("fresh_machine")
def test_what_is_read_of_the_machine(monkeypatch, tmp_path):
    """A package more, another compiler, another driver: the part that holds it differs, and no other."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr(module, "_own_code", lambda: iter([("wrap.py", "1")]))
    files = {"/proc/cpuinfo": "model name\t: A\ncpu MHz\t\t: 1\n\nmodel name\t: B\n"}
    monkeypatch.setattr(module, "_read", lambda path: files.get(path, ""))
    compiler = {"place": "g++", "version": "g++ 12"}
    monkeypatch.setattr(module, "_compiler", lambda: compiler)

    def read():
        machine_facts.cache_clear()
        return machine_digests()

    first = read()

    def changed():
        now = read()
        return [name for name in now if now[name] != first[name]]

    # The clock rate, and what comes behind the first processor, are no difference.
    files["/proc/cpuinfo"] = "model name\t: A\ncpu MHz\t\t: 2\n\nmodel name\t: C\n"
    assert changed() == []
    files["/proc/cpuinfo"] = "model name\t: B\n"
    assert changed() == ["the machine"]
    files["/proc/cpuinfo"] = "model name\t: A\ncpu MHz\t\t: 1\n\n"
    files["/proc/driver/nvidia/version"] = "580"
    assert changed() == ["the machine"]
    del files["/proc/driver/nvidia/version"]
    compiler["version"] = "g++ 13"
    assert changed() == ["the C++ compiler"]
    compiler["version"] = "g++ 12"
    (tmp_path / "numpy-2.dist-info").mkdir()
    (tmp_path / "numpy-2.dist-info" / "RECORD").write_text("numpy/core.py,sha256=1,5\n")
    assert changed() == ["the installed packages"]
    (tmp_path / "numpy-2.dist-info" / "RECORD").write_text("numpy/core.py,sha256=2,5\n")
    assert machine_facts()["the installed packages"].keys() == {"numpy-2.dist-info"}


@pytest.mark.usefixtures("fresh_machine")
def test_two_of_one_name_in_the_path(monkeypatch, tmp_path):
    """The first is found, so their order counts; where a folder stands among others does not."""
    for name, text in (("a", "1"), ("b", "2"), ("empty", "")):
        (tmp_path / name / "tiny-1.dist-info").mkdir(parents=True)
        (tmp_path / name / "tiny-1.dist-info" / "RECORD").write_text(text)
    (tmp_path / "empty" / "tiny-1.dist-info" / "RECORD").unlink()
    (tmp_path / "empty" / "tiny-1.dist-info").rmdir()

    def packages(*names):
        monkeypatch.setattr("sys.path", [str(tmp_path / name) for name in names])
        machine_facts.cache_clear()
        return machine_digests()["the installed packages"]

    assert packages("a", "b") == packages("empty", "a", "b")
    assert packages("a", "b") != packages("b", "a")
    assert packages("a") != packages("a", "b")


def test_flags_of_the_interpreter_are_no_part():
    """Rank processes are started without them: a result of ``python -B -m pytest`` is one of ``pytest`` too."""
    code = "from pytest_torchcompile.reuse.machine_facts import machine_digests; print(machine_digests()['Python'])"
    told = set()
    for flags in ([], ["-B"], ["-O"], ["-v"], ["-X", "dev"]):
        done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True)
        told.add(done.stdout)
    assert len(told) == 1


@pytest.mark.usefixtures("fresh_machine")
@pytest.mark.parametrize(("system", "changes"), [("Linux", False), ("Darwin", True)])
def test_the_kernels_release(monkeypatch, system, changes):
    """On Linux it computes nothing, and is another one on each machine of CI; elsewhere it names the libraries."""
    monkeypatch.setattr(platform, "system", lambda: system)
    told = set()
    for release in ("6.1", "6.2"):
        monkeypatch.setattr(platform, "platform", lambda release=release: f"{system}-{release}")
        machine_facts.cache_clear()
        told.add(machine_digests()["Python"])
    assert (len(told) == 2) is changes


def test_the_c_library_counts(monkeypatch):
    """It has the mathematical functions."""
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    first = module._system()
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.39"))
    assert module._system() != first


def test_rooms_that_no_cell_loads():
    """Those above the rooms that run and judge a cell; imports go down only, so none of these is loaded there."""
    above = ROOMS[ROOMS.index("ranks") + 1 :]
    names = {name.removesuffix(".py") for name in NOT_IN_RANKS} - {"__main__", "zoo"}
    assert names == set(above)
    counted = dict(module._own_code())
    assert {"reuse/cell_key.py", "oracle/trial.py", "cell.py", "ranks/serving.py"} <= counted.keys()
    assert not [name for name in counted if name.startswith(("plugin/", "zoo/", "page/"))]


def test_programs_that_are_found_in_a_path(tmp_path):
    """Each with its file, through links, and its bytes; a folder without any changes nothing."""
    for folder in ("a", "b", "empty"):
        (tmp_path / folder).mkdir()
    gcc = tmp_path / "a" / "gcc"
    gcc.write_text("1")
    gcc.chmod(0o755)
    (tmp_path / "b" / "gcc").symlink_to(gcc)
    one, linked, both = (tools_of_path({"PATH": path}) for path in (
        f"{tmp_path}/a", f"{tmp_path}/b", f"{tmp_path}/empty:{tmp_path}/b"))
    assert one == linked == both
    assert one["gcc"].startswith(f"{gcc} ")
    assert tools_of_path({"PATH": f"{tmp_path}/empty"}) == tools_of_path({}) or not tools_of_path({"PATH": "/nowhere"})


@pytest.mark.parametrize("size", [0, 1 << 20], ids=["a script", "a program"])
def test_a_script_around_a_compiler(tmp_path, monkeypatch, size):
    """It hands on another option, tells the same version, and is as long as it was: of a large program that is one."""
    script = tmp_path / "g++"
    told = []
    for option in ("-O2", "-O3"):
        told_version = "[ $1 = --version ] && echo g++ 12"
        script.write_text(f"#!/bin/sh\n{told_version} || exec /usr/bin/g++ {option} $*\n{' ' * size}")
        script.chmod(0o755)
        module._tools_of.cache_clear()
        monkeypatch.setenv("CXX", str(script))
        told.append((tools_of_path({"PATH": str(tmp_path)}), module._compiler()))
    assert (told[0][0] == told[1][0]) is (told[0][1] == told[1][1]) is bool(size)
    assert told[0][1]["version"] == "g++ 12\n"
