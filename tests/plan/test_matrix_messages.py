"""Every text that a mistake in a matrix file leads to, word for word."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest
import yaml

from pytest_torchcompile.cell import AXES
from pytest_torchcompile.checks import CHECKS, LIMITS
from pytest_torchcompile.errors import MatrixError, nearest
from pytest_torchcompile.plan import nodes as yamlnodes
from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.wrappers import WRAPPERS

HEAD = "version: 1\nmodels: {gpt: {factory: zoo:gpt, inputs: zoo:batch}}\n"


def _cases() -> dict[str, tuple[str, str]]:
    cases = {}
    for block in Path(__file__).with_name("mistakes.txt").read_text().split("\n## ")[1:]:
        name, _, rest = block.partition("\n")
        text, _, expected = rest.partition("\n=> ")
        assert name not in cases
        cases[name] = text.replace("@head\n", HEAD), _with_names(expected.strip())
    return cases


def _shown(known):
    """What `nearest` lists of the names that are known."""
    _, _, listed = nearest("", known).partition("Known: ")
    return listed.split(", ")


def _with_names(expected):
    """A new wrapper, check, limit or axis is known without a line in the file of mistakes."""
    lists = {"@wrappers": sorted(WRAPPERS), "@checks": sorted(CHECKS), "@limits in order": LIMITS,
             "@limits": _shown(LIMITS)}
    for word, names in lists.items():
        expected = expected.replace(word, ", ".join(names))
    # In brackets what is known beside the axes; without them the axes in their own order.
    if more := re.search(r"@axes\((.*)\)", expected):
        others = filter(None, more[1].split(", "))
        return expected.replace(more[0], ", ".join(sorted([*AXES, *others])))
    return expected.replace("@axes", ", ".join(AXES))


CASES = _cases()


@pytest.mark.parametrize("case", CASES)
def test_mistake(project, case):
    """One mistake is one line: file, line, column, what was found, what was expected, the nearest name."""
    text, expected = CASES[case]
    assert project.mistakes(text) == [f"m.yaml:{expected}"]


NOT_YAML = {
    "empty": ("", "1:1: the file is empty; expected at least the keys version and models"),
    "comments only": ("# nothing\n", "1:1: the file is empty; expected at least the keys version and models"),
    "malformed": ("version: 1\nmodels: [", "3:1: malformed YAML: did not find expected node content"),
    "tab": ("version: 1\nmodels:\n\tgpt: 1", "3:1: malformed YAML: found character that cannot start"),
    "control": ("version: 1\nmodels: \x07", "2:9: malformed YAML: control characters are not allowed"),
    "unknown alias": ("version: *x", "1:10: malformed YAML: found undefined alias"),
    "two documents": ("version: 1\n---\na: 1\n", "2:1: malformed YAML: but found another document"),
    "not UTF-8": (b"version: 1\n# caf\xe9\n", "2:6: byte 0xe9 is not UTF-8; save the file as UTF-8"),
    "UTF-16": (HEAD.encode("utf-16"), "1:1: byte 0xff is not UTF-8; save the file as UTF-8"),
    "deep": ("[" * 100_000, "1:33: nested deeper than 32 levels"),
    "deep and closed": ("version: " + "[" * 33 + "]" * 33, "1:41: nested deeper than 32 levels"),
    "deep blocks": ("\n".join(" " * k + "a:" for k in range(40)), "33:33: nested deeper than 32 levels"),
    "long": ("#" * (1 << 20) + "\n" + HEAD, "1:1: is longer than 1,048,576 bytes, too long for a matrix"),
}


@pytest.mark.parametrize("case", NOT_YAML)
def test_no_yaml(project, case):
    """What cannot be read as YAML is one line as well, never a traceback."""
    text, expected = NOT_YAML[case]
    (line,) = project.mistakes(text)
    assert line.startswith(f"m.yaml:{expected}")


@pytest.mark.parametrize("case", ["malformed", "tab", "control", "deep"])
def test_no_yaml_without_libyaml(project, case, monkeypatch):
    """PyYAML's own parser words it differently, but what we say of it is in the same place."""
    monkeypatch.setattr(yamlnodes, "_LOADER", yaml.SafeLoader)
    text, expected = NOT_YAML[case]
    (line,) = project.mistakes(text)
    wrong = "malformed YAML: " if "malformed" in expected else "nested deeper"
    assert line.partition(": ")[2].startswith(wrong)


def test_unknown_backend(project):
    """The list of backends goes on with whatever this machine has."""
    (line,) = project.mistakes(HEAD + "axes: {backend: [inducter]}")
    assert line.startswith("m.yaml:3:18: 'inducter' is not a backend, nor module:attribute; "
                           "did you mean 'inductor'? Known: aot_eager, ")


@pytest.mark.parametrize(("axes", "expected"), [
    ("passes: [dead_cod]", "m.yaml:3:17: passes: 'dead_cod' is neither a name nor module:attribute; did "),
    ("passes: ['backward=dead_code, nowhere.to_be:found']", "m.yaml:3:17: passes: 'nowhere.to_be:found' cannot be "),
    ("decompositions: [indctor]", "m.yaml:3:25: decompositions: 'indctor' is neither a name nor module:attribute; "),
    ("compiler: [eagre]", "m.yaml:3:19: 'eagre' is not a value of axis 'compiler'; did you mean 'eager'?"),
])
def test_axes_of_the_toolkit(project, axes, expected):
    """Each pass of a list is looked up."""
    (line,) = project.mistakes(HEAD + f"axes: {{{axes}}}")
    assert line.startswith(expected)


def test_too_many_cells(project):
    """A product beyond all bounds is refused before it is multiplied out."""
    values = ", ".join(map(str, range(999)))
    assert project.mistakes(f"{HEAD}axes: {{width: [{values}], depth: [{values}]}}") == [
        "m.yaml:1:1: the axes multiply to 998,001 cells, more than 250,000; take values out"
    ]


def test_bomb(project):
    """Aliases that stand for 10**9 nodes are refused at once."""
    levels = [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]" for k in range(1, 10)]
    (line,) = project.mistakes("\n".join(["version: 1", "a0: &a0 [1, 2]", *levels]))
    assert line == "m.yaml:7:5: aliases expand to more than 50,000 nodes"


def test_missing_file(project):
    """A file that is not there: the nearest that is."""
    project.load(HEAD)
    project.file = project.file.with_name("n.yaml")
    with pytest.raises(MatrixError) as caught:
        load_matrix(project.file, shown="matrix/n.yaml")
    assert str(caught.value) == ("matrix/n.yaml:1:1: no such file; did you mean 'matrix/m.yaml'? "
                                 "Known: matrix/m.yaml")
    with pytest.raises(MatrixError) as caught:
        load_matrix(project.root / "elsewhere" / "m.yaml", shown="m.yaml")
    assert str(caught.value) == "m.yaml:1:1: no such file"


def test_folder(project):
    """A folder: the files in it."""
    project.load(HEAD)
    with pytest.raises(MatrixError) as caught:
        load_matrix(project.file.parent, shown="matrix")
    assert str(caught.value) == "matrix:1:1: is a folder; expected a matrix file; it holds m.yaml"


def test_device_file():
    """A device file would never end."""
    with pytest.raises(MatrixError, match=r"^/dev/zero:1:1: is no regular file; expected a matrix file$"):
        load_matrix("/dev/zero")


def test_all_mistakes_in_order(project):
    """Every mistake has its line, in the order of the file, and none is blamed for another."""
    found = project.mistakes(
        "version: 1\nmodels: {gpt: {factory: zoo:gtp, inputs: zoo:batch}}\n"
        "rules: [{skip: {model: gpt, mode: fast}, reason: x}]\nchecks: [nothing]\naxes: {mode: [fast]}"
    )
    assert [line.split(": ")[0] for line in found] == ["m.yaml:2:25", "m.yaml:4:10", "m.yaml:5:15"]


def test_long_names_are_cut(project):
    """A name of a million letters does not flood the terminal either."""
    (line,) = project.mistakes(HEAD + "axes: {backend: [" + "x" * 1_000_000 + "]}")
    assert line.startswith("m.yaml:3:18: 'xxx")
    assert len(line) < 1000


def test_at_most_twenty_lines(project):
    """A file that is no matrix at all does not flood the terminal."""
    found = project.mistakes("version: 1\nmodels: {}\n" + "\n".join(f"key{k}: 1" for k in range(40)))
    assert len(found) == 21
    numbers = [int(line.split(":")[1]) for line in found[:20]]
    assert numbers == sorted(numbers)
    assert found[-1] == "... and 21 more"


def test_expired_xfail_that_matches_nothing_is_still_wrong(project):
    """Expiry does not excuse a rule that names what is not there."""
    text = HEAD + "rules: [{xfail: {mode: max-autotune}, reason: x, until: 2020-01-01}]"
    (line,) = project.mistakes(text, today=datetime.date(2026, 1, 1))
    assert line.startswith("m.yaml:3:24: 'max-autotune' is not a value of axis 'mode'")
