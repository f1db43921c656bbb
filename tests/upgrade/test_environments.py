"""Environments: what is installed, what is told before, what is kept. Programs are faked; nothing is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.upgrade import environments as module
from pytest_torchcompile.upgrade.environments import Environments, PackageVersion, partners_of

WANTED = PackageVersion.parse("lego", "2.12.1")


class Programs:
    """Stands for venv, uv and pip: notes each command, and makes what each would make."""

    def __init__(self, found: str = "2.12.1", fails: str = "") -> None:
        self.commands: list[list[str]] = []
        self.found, self.fails = found, fails

    def __call__(self, command, seconds):
        self.commands.append(list(command))
        text = " ".join(command)
        if self.fails and self.fails in text:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found for lego\n")
        if " venv " in text:
            folder = Path(command[-1])
            (folder / "bin").mkdir(parents=True)
            (folder / "site").mkdir()
            (folder / "pyvenv.cfg").touch()
            for python in ("bin/python",):
                (folder / python).touch()
        out = ""
        if "sysconfig" in text:
            out = str(Path(command[0]).parents[1] / "site") + "\n"
        elif "installed_packages" in text:
            out = json.dumps({"lego": self.found, "numpy": "2.4.6"})
        return subprocess.CompletedProcess(command, 0, out, "")


@pytest.fixture(autouse=True)
def no_uv(monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda name: None)


@pytest.mark.skipif(sys.platform == "win32", reason="the faked venv has the layout of POSIX")
def test_it_is_made_once_and_kept(tmp_path):
    """On top of the present packages; the second time no program is run."""
    programs = Programs()
    environments = Environments(tmp_path / "kept", programs)
    assert f"lego==2.12.1: to be made in {tmp_path / 'kept' / 'lego-2.12.1'}: up to 1 GiB of disk (" in \
        environments.outlook(WANTED)
    made = environments.get(WANTED)
    assert (made.was_made, made.versions["lego"]) == (True, "2.12.1")
    assert programs.commands[0] == [sys.executable, "-m", "venv", str(tmp_path / "kept" / "lego-2.12.1")]
    assert [made.python, "-m", "pip", "install", "lego==2.12.1"] in programs.commands
    (layer,) = (tmp_path / "kept" / "lego-2.12.1" / "site").glob("*.pth")
    assert "site.addsitedir(" in layer.read_text()
    number = len(programs.commands)
    again = environments.get(WANTED)
    assert (again.was_made, again.python, len(programs.commands)) == (False, made.python, number)
    assert environments.outlook(WANTED) == f"lego==2.12.1: kept in {tmp_path / 'kept' / 'lego-2.12.1'}"
    assert environments.has(WANTED)


@pytest.mark.skipif(sys.platform == "win32", reason="the faked venv has the layout of POSIX")
def test_uv_is_taken_where_it_is(tmp_path, monkeypatch):
    """For the environment and for what goes into it."""
    monkeypatch.setattr(module.shutil, "which", lambda name: "/bin/uv" if name == "uv" else None)
    programs = Programs()
    made = Environments(tmp_path, programs).get(WANTED)
    assert programs.commands[0] == ["/bin/uv", "venv", "--python", sys.executable, str(tmp_path / "lego-2.12.1")]
    assert ["/bin/uv", "pip", "install", "--python", made.python, "lego==2.12.1"] in programs.commands


def test_the_present_environment_serves(tmp_path):
    """A version that is installed here needs nothing made, whatever its local part is."""
    here = PackageVersion.parse("pytest", pytest.__version__)
    environments = Environments(tmp_path, Programs())
    assert environments.get(here).python == sys.executable
    assert environments.outlook(here) == f"{here.requirement}: is in the present environment, {sys.prefix}"
    assert PackageVersion.parse("torch", "2.13.0").is_met_by("2.13.0+cpu")
    assert not PackageVersion.parse("torch", "2.13.0").is_met_by("2.13.1+cpu")


@pytest.mark.skipif(sys.platform == "win32", reason="the faked venv has the layout of POSIX")
@pytest.mark.parametrize(("programs", "text"), [
    (Programs(fails="pip install"), "lego==2.12.1 cannot be installed: `.*` ended with 1:\nERROR: No matching"),
    (Programs(found="2.13.0"), "has lego 2.13.0 after lego==2.12.1 was installed into it; is there another one in "
                               "PYTHONPATH"),
])
def test_a_half_made_environment_does_not_stay(tmp_path, programs, text):
    """The error has what pip said, and the gigabytes are gone."""
    with pytest.raises(UsageError, match=text):
        Environments(tmp_path, programs).get(WANTED)
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_the_way_is_told(tmp_path, monkeypatch):
    """A folder of the user's is left alone; too little disk is told before anything is made."""
    (tmp_path / "lego-2.12.1").mkdir()
    with pytest.raises(UsageError, match="is there and is no environment; expected nothing there"):
        Environments(tmp_path, Programs()).get(WANTED)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda place: type("", (), {"free": 1 << 29})())
    torch = PackageVersion.parse("torch", "1.0.0")
    with pytest.raises(UsageError, match=r"torch==1.0.0 takes up to 6 GiB and 0.5 GiB are free in"):
        Environments(tmp_path / "other", Programs()).get(torch)


def test_partners_are_found(monkeypatch):
    """Packages that are built for one version, and no others."""
    def distribution(name, *requires):
        return type("", (), {"requires": list(requires), "metadata": {"Name": name}})()

    monkeypatch.setattr(module.metadata, "distributions", lambda: [
        distribution("TorchVision", "torch==2.12.1", "numpy"), distribution("lightning", "torch>=2.8"),
        distribution("odd", "not a requirement !"), distribution("none")])
    assert partners_of("torch") == ["torchvision"]


@pytest.mark.parametrize("version", ["next", "", ">=2"])
def test_what_is_no_version_is_told(version):
    """Before anything is asked of an index."""
    with pytest.raises(UsageError, match=r"is no version; expected one as pip has it, such as 2\.13\.0"):
        PackageVersion.parse("torch", version)
