"""A marker that says what we do not know is a usage error with the test's place, and no test runs."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs_torch
USED = "def test_it(compiled_model): pass"
UNKNOWN_MARKERS = ("-W", "ignore::pytest.PytestUnknownMarkWarning")
CASES = {
    "unknown argument": (f"@pytest.mark.compile_modes(dynamc='auto')\n{USED}",
                         "test_it.py:2: compile_modes: unknown argument 'dynamc'; did you mean 'dynamic'? Known: *"),
    "unknown value": (f"@pytest.mark.compile_modes('max-autotun')\n{USED}",
                      "test_it.py:2: compile_modes: unknown mode 'max-autotun'; did you mean 'max-autotune'? *"),
    "no combination": (f"@pytest.mark.compile_modes('max-autotune', backend='eager')\n{USED}",
                       "test_it.py:2: compile_modes: mode 'max-autotune' is for backends that take modes *"),
    "a marker's own name": (f"@pytest.mark.compile_mode('max-autotune')\n{USED}",
                            "test_it.py:2: compile_mode: unknown marker; did you mean 'compile_modes'?"),
    "limit": ("@pytest.mark.compile_limits(recompile=0)\ndef test_it(): pass",
              "test_it.py:2: compile_limits: unknown argument 'recompile'; did you mean 'recompiles'? Known: *"),
    "buckets": ("@pytest.mark.shape_buckets(256, 128)\ndef test_it(shape_buckets): pass",
                "test_it.py:2: shape_buckets: buckets=(256, 128): 128 comes after 256; *"),
    "modes without the fixture": ("@pytest.mark.compile_modes()\ndef test_it(): pass",
                                  "test_it.py:2: compile_modes: test_it does not use the fixture compiled_model"),
    "buckets without the fixture": ("@pytest.mark.shape_buckets(4)\ndef test_it(): pass",
                                    "test_it.py:2: shape_buckets: test_it does not use the fixture shape_buckets"),
    "modes of one parameter": (
        "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.compile_modes())])\n"
        "def test_it(x, compiled_model): pass",
        "test_it.py:2: compile_modes: the marker of one parameter cannot make several tests of test_it*; put it on *"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_in_a_marker(repo, case):
    """Each kind of mistake is one line with file and line of the test, exit code 4, no traceback."""
    test, expected = CASES[case]
    repo.file("test_it.py", f"import pytest\n{test}\ndef test_other(): pass\n")
    # Where warnings are errors pytest's own word of the marker comes first, and has no nearest name.
    result = repo.pytester.runpytest_inprocess("-p", "no:cacheprovider", *UNKNOWN_MARKERS)
    assert result.ret == 4
    result.stderr.fnmatch_lines([f"ERROR: {expected}"])
    everything = result.stdout.str() + result.stderr.str()
    assert "Traceback" not in everything
    assert "INTERNALERROR" not in everything
    result.assert_outcomes()


@pytest.mark.parametrize(("marker", "test", "ini"), [
    ("compile_mode", "def test_it(): pass", ""),
    ("compile_mode", "def test_it(compile_config): pass", "markers = compile_mode: mine"),
    ("slow", "def test_it(compile_config): pass", ""),
], ids=["without a fixture of ours", "somebody's own", "nothing like it"])
def test_a_marker_of_others_is_no_mistake(repo, marker, test, ini):
    """Only what is used with our fixtures, is registered by nobody and looks like a marker of ours."""
    repo.file("pytest.ini", f"[pytest]\n{ini}\n")
    repo.file("test_it.py", f"import pytest\n@pytest.mark.{marker}\n{test}\n")
    result = repo.pytester.runpytest_inprocess("-p", "no:cacheprovider", *UNKNOWN_MARKERS)
    assert result.ret == 0


TWO = """
import pytest

@pytest.mark.compile_limits(recompile=0)
class TestMany:
    def test_a(self): pass
    def test_b(self): pass

@pytest.mark.compile_limits(2)
def test_c(): pass
"""


@pytest.mark.parametrize("args", [(), ("-n", "2"), ("--co",)], ids=["alone", "xdist", "collect-only"])
def test_all_mistakes_are_told_at_once(repo, args):
    """Each once, at the first test that it stands on, also under xdist; nothing runs."""
    repo.file("test_it.py", TWO)
    result = repo.run("-p", "no:cacheprovider", *args, option="")
    assert result.ret == 4
    told = [line for line in result.stderr.str().splitlines() if "compile_limits" in line]
    assert told == [
        "ERROR: test_it.py:6: compile_limits: unknown argument 'recompile'; did you mean 'recompiles'? "
        "Known: eager_frames, graph_breaks, recompiles",
        "test_it.py:9: compile_limits: 2 has no name; expected recompiles=2 or another of recompiles, "
        "graph_breaks, eager_frames",
    ]
    everything = result.stdout.str() + result.stderr.str()
    assert "Traceback" not in everything
    assert "INTERNALERROR" not in everything


def test_a_marker_for_a_module_needs_no_test_to_use_it(repo):
    """compile_modes and shape_buckets on a class or module leave tests alone that do not use the fixtures."""
    repo.file("test_it.py", """
    import pytest
    pytestmark = [pytest.mark.compile_modes("default", backend="eager"), pytest.mark.shape_buckets(4)]

    def test_it(): pass
    def test_two(compile_config): assert compile_config.backend == "eager"
    """)
    repo.run("-p", "no:cacheprovider", option="").assert_outcomes(passed=2)


def test_a_matrix_item_takes_no_such_marker(repo):
    """Markers on what is no test function are refused too."""
    repo.file("conftest.py", """
    import pytest

    def pytest_itemcollected(item):
        item.add_marker(pytest.mark.compile_limits(recompiles=0))
    """)
    result = repo.run("-k", "compiles")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: *compile_limits: graph_breaks takes no fixtures; the marker is for test *"])


def test_what_pytest_tells(repo):
    """--fixtures describes every public fixture, --markers every marker."""
    told = repo.run("--fixtures", option="").stdout.str()
    for name in ("compiled_model", "compile_config", "recompile_counter", "graph_breaks", "shape_buckets"):
        assert f"\n{name} -- " in told
    assert "_compile_watch" not in told
    assert "no docstring available" not in told.partition("compile_config -- ")[2].partition("\n--")[0]
    told = repo.run("--markers", option="").stdout.str()
    for name in ("compile_modes(*modes, ", "compile_limits(recompiles=None, ", "shape_buckets(*sizes)"):
        assert f"@pytest.mark.{name}" in told
