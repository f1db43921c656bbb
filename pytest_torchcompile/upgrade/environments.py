"""Environments: one folder for each version, with that version on top of the environment that pytest runs in.

Only what is asked for, and what it depends on, is installed. Everything else is taken from the present environment, by
a ``.pth`` file: so nothing differs but the version, the user's own project is found, and little disk is needed.
An environment that was made to its end has a file ``environment.json``; with it, it is used again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.report.safe_output import make_folder, replace_file

__all__ = ["Environment", "Environments", "PackageVersion", "partners_of", "present_version"]

RECORD: Final = "environment.json"
_GIB: Final = 1 << 30
_TORCH_GIB: Final = 6
"""Room for torch with its CUDA libraries: 2.12.1 takes 4.8 GiB, and pip unpacks a part of it beside."""
_OTHER_GIB: Final = 1
_SECONDS: Final = 3600
"""For one installation: several gigabytes over a slow line."""
_LAYER: Final = "zz_pytest_torchcompile_present.pth"
# pip tells the reason last, below what it has tried.
_LAST_LINES: Final = 12

Execute = Callable[[Sequence[str], float], "subprocess.CompletedProcess[str]"]
"""Runs a program to its end, with a time-out in seconds; tests put their own in its place."""


@dataclass(frozen=True)
class PackageVersion:
    """One version of one package."""

    package: str
    version: str

    @property
    def name(self) -> str:
        """As folders are called: ``torch-2.12.1``."""
        return f"{self.package}-{self.version}"

    @property
    def requirement(self) -> str:
        """As pip takes it."""
        return f"{self.package}=={self.version}"

    @classmethod
    def parse(cls, package: str, version: str) -> PackageVersion:
        """Raises :class:`~pytest_torchcompile.errors.UsageError` for what is no version."""
        try:
            # Both are asked: a requirement may also end in `.*`, which is no version.
            Requirement(f"{package}=={version}")
            Version(version)
        except (InvalidRequirement, InvalidVersion):
            raise UsageError(f"upgrade: {package}=={version}: {version!r} is no version; expected one as pip has it, "
                             "such as 2.13.0") from None
        return cls(canonicalize_name(package), version)

    def is_met_by(self, version: str | None) -> bool:
        """Is it this version, whatever its local part (``+cpu``) is?"""
        if version is None:
            return False
        # A nightly is asked for by its own name, so prereleases count.
        return Requirement(self.requirement).specifier.contains(version, prereleases=True)


@dataclass(frozen=True)
class Environment:
    """An environment that cells can be run in."""

    python: str
    versions: Mapping[str, str]
    """Every package in it, and its version."""
    was_made: bool = False
    """Was it made now? Else it is the present one, or one that was kept."""


def execute(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a program; what it prints is returned."""
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)


def present_version(package: str) -> str | None:
    """The version of a package in the present environment; None where it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def partners_of(package: str) -> list[str]:
    """Packages here that are built for one version of this one, such as torchvision: they need theirs beside it."""
    found = []
    for distribution in metadata.distributions():
        for text in distribution.requires or ():
            try:
                requirement = Requirement(text)
            # Older packages have requirements that nobody can read any more.
            except InvalidRequirement:
                continue
            # Only an exact pin: what takes a range of versions works with the new one too.
            pinned = any(specifier.operator in ("==", "===") for specifier in requirement.specifier)
            if canonicalize_name(requirement.name) == package and pinned and requirement.marker is None:
                found.append(canonicalize_name(distribution.metadata["Name"]))
    return sorted(set(found))


class Environments:
    """A folder of environments."""

    def __init__(self, folder: Path, run: Execute = execute) -> None:
        self.folder = folder
        self.run = run

    def outlook(self, wanted: PackageVersion) -> str:
        """What it takes to have the version, in one sentence; told before anything is done."""
        if wanted.is_met_by(present_version(wanted.package)):
            return f"{wanted.requirement}: is in the present environment, {sys.prefix}"
        folder = self.folder / wanted.name
        if self._kept(wanted) is not None:
            return f"{wanted.requirement}: kept in {folder}"
        # Of the nearest folder that is there: this one may not be made yet.
        free = shutil.disk_usage(_existing(self.folder)).free / _GIB
        return (f"{wanted.requirement}: to be made in {folder}: up to {_gib_needed(wanted)} GiB of disk "
                f"({free:.0f} GiB are free), and minutes to download")

    def has(self, wanted: PackageVersion) -> bool:
        """Is it there without being made?"""
        return wanted.is_met_by(present_version(wanted.package)) or self._kept(wanted) is not None

    def get(self, wanted: PackageVersion) -> Environment:
        """The present environment, a kept one, or a new one.

        Raises :class:`~pytest_torchcompile.errors.UsageError` where it cannot be made; then nothing of it is left.
        """
        if wanted.is_met_by(present_version(wanted.package)):
            return Environment(sys.executable, self._versions_in(sys.executable))
        kept = self._kept(wanted)
        if kept is not None:
            return kept
        self._require_room(wanted)
        folder = self.folder / wanted.name
        self._remove_unfinished(folder)
        make_folder(self.folder)
        try:
            return self._make(folder, wanted)
        except BaseException:
            # Half of an environment would take gigabytes, and nobody would know of it.
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _kept(self, wanted: PackageVersion) -> Environment | None:
        folder = self.folder / wanted.name
        try:
            record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        # On top of another environment, or of another Python, it is another one.
        if record["present"] != self._present() or not Path(record["python"]).exists():
            return None
        return Environment(record["python"], record["versions"])

    def _present(self) -> dict[str, Any]:
        return {"python": sys.version.partition(" ")[0], "packages": sysconfig.get_path("purelib")}

    def _require_room(self, wanted: PackageVersion) -> None:
        place = _existing(self.folder)
        free, needed = shutil.disk_usage(place).free, _gib_needed(wanted)
        if free < needed * _GIB:
            raise UsageError(f"upgrade: {wanted.requirement} takes up to {needed} GiB and {free / _GIB:.1f} GiB are "
                             f"free in {place}; name another folder by --environments, or remove old ones there")

    def _remove_unfinished(self, folder: Path) -> None:
        if not folder.exists():
            return
        # Somebody's own folder stays.
        if not (folder / "pyvenv.cfg").is_file():
            raise UsageError(f"upgrade: {folder} is there and is no environment; expected nothing there; move it, or "
                             "name another folder by --environments")
        shutil.rmtree(folder)

    def _make(self, folder: Path, wanted: PackageVersion) -> Environment:
        uv = shutil.which("uv")
        if uv is not None:
            self._run_or_refuse([uv, "venv", "--python", sys.executable, str(folder)], wanted)
        else:
            self._run_or_refuse([sys.executable, "-m", "venv", str(folder)], wanted)
        python = str(_python_of(folder))
        if uv is None:
            # Before Python 3.12 a new environment has a setuptools of its own, which would hide the present one.
            self._run_or_refuse([python, "-m", "pip", "uninstall", "-y", "setuptools"], wanted)
        self._layer_on_present(python, wanted)
        requirements = [wanted.requirement, *partners_of(wanted.package)]
        if uv is not None:
            self._run_or_refuse([uv, "pip", "install", "--python", python, *requirements], wanted)
        else:
            # The user's own pip.conf and PIP_ variables say which index, which constraints and which proxy.
            self._run_or_refuse([python, "-m", "pip", "install", *requirements], wanted)
        versions = self._versions_in(python)
        found = versions.get(wanted.package)
        if not wanted.is_met_by(found):
            raise UsageError(f"upgrade: {folder} has {wanted.package} {found or 'not'} after {wanted.requirement} was "
                             "installed into it; is there another one in PYTHONPATH?")
        record = {"present": self._present(), "python": python, "versions": versions}
        # Last, because it says that all is there.
        replace_file(folder / RECORD, json.dumps(record, indent=1))
        return Environment(python, versions, was_made=True)

    def _layer_on_present(self, python: str, wanted: PackageVersion) -> None:
        """Have it see the packages of the present environment, behind its own."""
        done = self._run_or_refuse([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], wanted)
        present = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        # Not a plain path: `.pth` files of the present environment lead to editable installs.
        lines = [f"import site; site.addsitedir({path!r})" for path in present]
        Path(done.stdout.strip(), _LAYER).write_text("\n".join([*lines, ""]), encoding="utf-8")

    def _run_or_refuse(self, command: Sequence[str], wanted: PackageVersion) -> subprocess.CompletedProcess[str]:
        try:
            done = self.run(command, _SECONDS)
        except subprocess.TimeoutExpired:
            raise UsageError(f"upgrade: {wanted.requirement}: `{' '.join(command)}` took more than an hour") from None
        except OSError as error:
            raise UsageError(f"upgrade: {wanted.requirement}: `{command[0]}` cannot be run: "
                             f"{error.strerror or error}") from None
        if done.returncode:
            said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_LAST_LINES:])
            raise UsageError(f"upgrade: {wanted.requirement} cannot be installed: `{' '.join(command)}` ended with "
                             f"{done.returncode}:\n{said}")
        return done

    def _versions_in(self, python: str) -> dict[str, str]:
        """Every package that this Python sees; of one that is there twice the one that is imported."""
        try:
            done = self.run([python, "-c", _LIST], _SECONDS)
            versions: dict[str, str] = json.loads(done.stdout)
        # The list of packages is told for information; what counts is the run itself.
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return {}
        return versions


_LIST: Final = """
import json
from pytest_torchcompile.report.provenance import installed_packages
print(json.dumps(installed_packages()))
"""


def _gib_needed(wanted: PackageVersion) -> int:
    return _TORCH_GIB if wanted.package == "torch" else _OTHER_GIB


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _python_of(folder: Path) -> Path:
    if sys.platform == "win32":
        return folder / "Scripts" / "python.exe"
    return folder / "bin" / "python"
