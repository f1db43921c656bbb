"""What tests of several rooms share: the choice of those that need no torch, and a project folder for matrices.

``pytest -m "not needs_torch"`` runs the tests that need no torch, also where it is not installed. The others say at
their head ``pytestmark = pytest.mark.needs_torch``, and are not even imported then.
"""

from __future__ import annotations

import gc
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import warm_python
from hypothesis import HealthCheck, settings
from warm_python import WarmPython

from pytest_torchcompile.errors import MatrixError
from pytest_torchcompile.plan.matrix import Matrix, load_matrix
from pytest_torchcompile.ranks.serving import COLLECT_AFTER
from pytest_torchcompile.system import can_fork

# Hypothesis judges no test by its time: machines are busy.
settings.register_profile("tests", deadline=None,
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
settings.load_profile("tests")

ADDRESS = re.compile(r" at 0x[0-9a-f]{8}")
MARKED = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.needs_torch\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files that are marked, as importing them would import torch."""
    if config.option.markexpr != "not needs_torch" or collection_path.suffix != ".py":
        return None
    if MARKED.search(collection_path.read_text(encoding="utf-8")):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse ids that hold an address: each worker of xdist would collect other tests, and none would run."""
    addressed = [item.nodeid for item in items if ADDRESS.search(item.nodeid)]
    if addressed:
        raise pytest.UsageError(f"ids differ from process to process, name them: {', '.join(addressed)}")


def guards_untimed(*_: object) -> float:
    """Microseconds of a frame's guards. Torch empties the processor's caches to time them, 17 ms for every frame that
    is compiled: a tenth of what small models take. Ranks and inner runs have torch's own.
    """
    return 1.0


def pytest_collection_finish() -> None:
    """Take out of the tests' time what torch and Python do beside them."""
    search_less_for_garbage()
    if "torch" in sys.modules:
        from torch._dynamo import guards

        guards.profile_guard_manager = guards_untimed


def search_less_for_garbage() -> None:
    """Search as seldom as a rank does, and not through what has been imported by now: it stays until the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def pytest_unconfigure() -> None:
    """Else libraries that look for leaks at the very end find what is frozen."""
    gc.unfreeze()


ZOO = """
def gpt(width=64, depth=2): ...
def anything(**axes): ...
def batch(**dims): ...
"""
HEAD = "version: 1\nmodels: {gpt: {factory: zoo:gpt, inputs: zoo:batch}}\n"


class Project:
    """A folder with ``zoo.py`` and ``matrix/m.yaml``; texts name the matrix ``m.yaml``."""

    head = HEAD

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = root / "matrix" / "m.yaml"
        self.file.parent.mkdir()
        (root / "zoo.py").write_text(ZOO)

    def load(self, text: str | bytes, **options) -> Matrix:
        """Write the matrix file and load it."""
        self.file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_matrix(self.file, self.root, shown="m.yaml", **options)

    def mistakes(self, text: str | bytes, **options) -> list[str]:
        """The lines of the error that loading raises."""
        with pytest.raises(MatrixError) as caught:
            self.load(text, **options)
        assert caught.value.exit_code == 4
        assert caught.value.__cause__ is None
        return str(caught.value).splitlines()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """An empty project."""
    return Project(tmp_path)


@pytest.fixture(scope="session")
def warm_torch() -> Iterator[WarmPython | None]:
    """The interpreter that has imported torch; None where nothing forks, or without torch."""
    if not can_fork() or importlib.util.find_spec("torch") is None:
        yield None
        return
    python = WarmPython(warm_python.TORCH)
    yield python
    python.close()


@pytest.fixture(scope="session")
def warm(warm_torch: WarmPython | None) -> Iterator[dict[str, str]]:
    """Addresses of the interpreters from which inner runs are forked; none where nothing forks, or without torch."""
    if warm_torch is None:
        yield {}
        return
    both = WarmPython(warm_python.PYTEST, warm_torch)
    alone = WarmPython(warm_python.PYTEST)
    yield {"torch": warm_torch.address, "both": both.address, "pytest": alone.address}
    for python in (alone, both):
        python.close()


@pytest.fixture
def warm_spawn(warm_torch: WarmPython | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that ``multiprocessing`` spawns have imported torch already."""
    if warm_torch is not None:
        # Only systems that fork have what it starts them with.
        from warm_spawn import warm_popen

        monkeypatch.setattr("multiprocessing.popen_spawn_posix.Popen", warm_popen(warm_torch.address))


@pytest.fixture(scope="session")
def run_python(warm_torch: WarmPython | None) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command line of Python in a process that has imported torch, as ``subprocess.run``."""

    def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
        return warm_python.run_python(warm_torch and warm_torch.address, [sys.executable, *arguments], **options)

    return run
