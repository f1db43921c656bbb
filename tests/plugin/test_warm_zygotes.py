"""The tests' own warm process: inner runs have their zygotes from it, unless torch would be another one."""

from __future__ import annotations

import pytest
import warm_zygotes

pytestmark = pytest.mark.needs_torch
TELLING = """
def telling():
    zygote = os.getppid()
    with open(f"/proc/{zygote}/status") as status:
        (parent,) = [line.split()[1] for line in status if line.startswith("PPid:")]
    with open("told", "w") as told:
        print(parent, os.environ.get("OMP_NUM_THREADS"), os.environ.get("TORCHINDUCTOR_CACHE_DIR"), file=told)
    return net()
"""


@pytest.fixture
def parent_of_zygote(repo, monkeypatch):
    """Runs a cell: its zygote's parent, and what the cell finds of two variables."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(repo.path / "cache"))
    repo.models(TELLING)
    repo.matrix("""
    version: 1
    models: {net: {factory: "models:telling", inputs: "models:batch", dims: {B: 4}}}
    axes: {backend: [eager]}
    checks: [compiles]
    """)

    def run():
        assert repo.run().ret == 0
        parent, *found = (repo.path / "told").read_text().split()
        return int(parent), found

    return run


def test_a_zygote_is_forked_from_the_warm_process(repo, warm_process, parent_of_zygote):
    """With the environment of its own run."""
    if warm_process is None:
        pytest.skip("this system has no zygotes")
    assert parent_of_zygote() == (warm_process.pid, ["None", str(repo.path / "cache")])


def test_a_variable_that_torch_may_read_has_it_start_as_for_users(repo, warm_process, parent_of_zygote, monkeypatch):
    """torch has read it once and for all in the warm process; and so it is for who takes the address away."""
    if warm_process is None:
        pytest.skip("this system has no zygotes")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    parent, found = parent_of_zygote()
    assert parent != warm_process.pid
    assert found[0] == "1"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv(warm_zygotes.ADDRESS)
    parent, found = parent_of_zygote()
    assert parent != warm_process.pid
