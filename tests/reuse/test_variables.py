"""Which environment variables are in a key: all that may change a verdict, and none that cannot."""

from __future__ import annotations

import pytest

from pytest_torchcompile.reuse import variables
from pytest_torchcompile.reuse.definitions import SourceUse
from pytest_torchcompile.reuse.variables import (
    environment_digest,
    is_passing,
    named_variables,
    names_in_data,
    variable_marks,
)


@pytest.fixture(autouse=True)
def one_compiler(monkeypatch):
    """In each path the same."""
    monkeypatch.setattr(variables, "tools_of_path", lambda given: {"gcc": "/usr/bin/gcc 7"})


@pytest.mark.parametrize("name", [
    "_", "SHELL", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV",
    "PIP_NO_INPUT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "GITHUB_RUN_ID", "TERM", "CI_JOB_ID",
    "XDG_RUNTIME_DIR", "CCACHE_DIR",
])
def test_a_variable_that_changes_no_verdict(name):
    """Set, unset or another: the key is the same, unless the project's code names it."""
    assert is_passing(name)
    without = environment_digest({"A": "1"}, ())
    assert environment_digest({"A": "1", name: "1"}, ()) == environment_digest({"A": "1", name: "2"}, ()) == without
    named = {name, "environ"}
    assert environment_digest({"A": "1", name: "1"}, named) != environment_digest({"A": "1", name: "2"}, named)


@pytest.mark.parametrize("name", [
    "OMP_NUM_THREADS", "TORCHINDUCTOR_FREEZING", "TORCH_COMPILE_DEBUG", "PYTHONOPTIMIZE", "PYTHONHASHSEED",
    "PYTHONPATH", "CXX", "MKL_CBWR", "MY_FLAG", "LD_LIBRARY_PATH", "CONDA_PREFIX", "TORCHINDUCTOR_CACHE_DIR_2",
    # Torch has other settings in CI; torch.hub keeps weights in a user's cache; ccache may call another compiler.
    "CI", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "CCACHE_COMPILER", "CCACHE_PREFIX", "CCACHE_PATH",
])
def test_a_variable_that_may_change_a_verdict(name):
    """Whether anything names it or not."""
    assert environment_digest({name: "1"}, ()) != environment_digest({name: "2"}, ())
    assert environment_digest({name: ""}, ()) != environment_digest({}, ())


@pytest.mark.parametrize(("identifiers", "texts", "counts"), [
    ({"_", "range"}, set(), False),
    ({"_", "environ"}, {"MY_FLAG"}, False),
    ({"_", "replace"}, {"_"}, False),
    ({"getenv"}, {"_"}, True),
], ids=["a loop", "a loop and another variable", "a text", "the variable"])
def test_the_name_of_what_a_loop_does_not_need(identifiers, texts, counts):
    """``for _ in range(3)`` does not name the variable ``_``, which is the program that a shell has started."""
    named = named_variables(SourceUse("", frozenset(identifiers), frozenset(texts)))
    assert named >= (identifiers | texts) - {"_"}
    one, other = ({"_": program} for program in ("/bin/pytest", "/bin/time"))
    assert (environment_digest(one, named) != environment_digest(other, named)) is counts


@pytest.mark.parametrize(("named", "name", "counts"), [
    ({"JOB_"}, "JOB_SIZE", True),
    ({"job_"}, "JOB_SIZE", True),
    ({"_TOKEN"}, "HF_TOKEN", True),
    ({"JOB_"}, "BUILD_SIZE", False),
    ({"JOB"}, "JOB_SIZE", False),
    ({"_", "__"}, "_", False),
    ({"_", "__"}, "JOB_SIZE", False),
])
def test_a_name_that_is_put_together(named, name, counts):
    """``os.environ[f"JOB_{key}"]``, or all variables that begin so, as pydantic's ``env_prefix`` means them."""
    named = named_variables(SourceUse("", frozenset({"environ"}), frozenset(named)))
    if name == "_":
        named -= {"_"}
    assert (environment_digest({name: "1"}, named) != environment_digest({name: "2"}, named)) is counts


def test_names_in_data(tmp_path):
    """A file of settings may name a variable; a large one is none, and one that is gone is told elsewhere."""
    settings, large = tmp_path / "settings.yaml", tmp_path / "weights.pt"
    settings.write_text("size: ${oc.env:JOB_SIZE}\n")
    large.write_bytes(b"JOB_NAME" + bytes(1 << 20))
    assert names_in_data([settings, large, tmp_path / "gone"]) == {"JOB_SIZE"}


def test_a_path_counts_by_what_is_found_in_it(monkeypatch):
    """An environment that is activated, or a folder of scripts more, changes nothing; another compiler does."""
    first = environment_digest({"PATH": "/usr/bin"}, ())
    assert environment_digest({"PATH": "/home/me/.venv/bin:/usr/bin"}, ()) == first
    assert environment_digest({"PATH": "/x:/usr/bin"}, {"PATH"}) != environment_digest({"PATH": "/usr/bin"}, {"PATH"})
    monkeypatch.setattr(variables, "tools_of_path", lambda given: {"gcc": "/opt/gcc 9"})
    assert environment_digest({"PATH": "/usr/bin"}, ()) != first


def test_marks_give_no_value_away():
    """Four digits for each variable that counts: they tell a change, and 65536 values have one of them."""
    marks = variable_marks({"A": "secret", "TERM": "xterm"}, ())
    assert marks.keys() == {"A"}
    assert len(marks["A"]) == 4
    assert variable_marks({"A": "other"}, ()) != marks
