"""What CI is told, by itself: commands of GitHub's workflows escaped and bounded, and JUnit that any reader takes."""

from __future__ import annotations

from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from runs import Run

from pytest_torchcompile.checks.severity import Severity
from pytest_torchcompile.gate.ci_formats import (
    ANNOTATION_LENGTH,
    LAST_LENGTH,
    MOST_ANNOTATIONS,
    annotate_findings,
    junit,
    junit_of_refusal,
    workflow_command,
)
from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.report.finding import Finding


def outcome(*findings, policy="", git=None):
    """As much of an outcome as annotations look at."""
    return SimpleNamespace(findings=list(findings), code=1, causes=[], policy=SimpleNamespace(path=policy),
                           merged=SimpleNamespace(git=git))


def parts(line):
    """The properties and the text of a command, as GitHub's runner reads them."""
    head, _, text = line.removeprefix("::error ").partition("::")
    properties = dict(each.split("=", 1) for each in head.split(","))
    for escaped, meant in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
        properties = {name: value.replace(escaped, meant) for name, value in properties.items()}
        text = text.replace(escaped, meant)
    return properties, text


@pytest.mark.parametrize("text", [
    "plain", "two\nlines", "100 % of %0A", "a::b", "x,y=z", "", "%25", "tab\there", "é 😀",
])
@pytest.mark.parametrize("file", ["a.py", "odd,name:with%signs.py", "C:\\net.py"])
def test_a_command_is_read_as_it_was_meant(text, file):
    line = workflow_command(text, file, 7)
    assert "\n" not in line
    assert parts(line) == ({"file": file, "line": "7", "title": "torch.compile gate"}, text)


@pytest.mark.parametrize(("file", "line", "named"), [
    ("", 0, []), ("", 7, []), ("a.py", 0, ["file"]), ("a.py", 7, ["file", "line"]),
])
def test_a_line_needs_a_file(file, line, named):
    properties, _ = parts(workflow_command("text", file, line))
    assert list(properties) == [*named, "title"]


def test_a_command_in_a_text_is_no_command():
    """Of whatever a model wrote."""
    line = workflow_command("first\n::set-output name=a::b\r::error::c")
    assert line.count("::") == 2 + line.partition("::error ")[2].count(": :")
    assert len(line.splitlines()) == 1


def test_the_longest_text():
    """GitHub takes 64 KiB of an annotation."""
    assert len(parts(workflow_command("x" * (LAST_LENGTH + 1)))[1]) == LAST_LENGTH


@pytest.mark.parametrize(("file", "policy", "git", "shown"), [
    ("models.py", "", None, "models.py"),
    ("models.py", "", {"prefix": "sub/project/"}, "sub/project/models.py"),
    ("models.py", "", {"prefix": ""}, "models.py"),
    ("gate.yaml", "gate.yaml", {"prefix": "sub/"}, "gate.yaml"),
    ("/venv/site-packages/net.py", "", {"prefix": "sub/"}, None),
    ("<string>", "", None, None),
    ("", "", {"prefix": "sub/"}, None),
])
def test_files_are_named_from_the_root_of_the_repository(file, policy, git, shown):
    """But for the policy's, which is named as it was typed; what is no file of the repository has no place."""
    (line,) = annotate_findings(outcome(Finding("k", "fail", "text", file=file, line=3), policy=policy, git=git))
    properties, _ = parts(line)
    assert properties.get("file") == shown
    assert properties.get("line") == ("3" if shown else None)


def test_an_annotation_names_its_first_cell_and_is_bounded():
    told = outcome(Finding("k", "fail", "text", cells=("a", "b", "c")), Finding("k", "unusable", "y" * 2000),
                   Finding("k", "note", "never shown"))
    first, second = annotate_findings(told)
    assert parts(first)[1] == "text [a and 2 more]"
    assert parts(second)[1] == "y" * ANNOTATION_LENGTH


@pytest.mark.parametrize(("count", "lines"), [(0, 0), (1, 1), (MOST_ANNOTATIONS, MOST_ANNOTATIONS),
                                              (MOST_ANNOTATIONS + 1, MOST_ANNOTATIONS), (500, MOST_ANNOTATIONS)])
def test_github_shows_ten(count, lines):
    """The last one stands for all that are left, and names what is wrong in numbers."""
    findings = [Finding("k", "fail", f"finding {number}.", cells=(f"cell{number}",),
                        severity=Severity.WRONG_NUMBERS if number % 2 else 0) for number in range(count)]
    told = [parts(line)[1] for line in annotate_findings(outcome(*findings))]
    assert len(told) == lines
    if count > lines:
        left = count - lines + 1
        assert told[-1].startswith(f"{left} more findings: see the summary. ")
        wrong = [number for number in range(lines - 1, count) if number % 2]
        lines_left = [f"also wrong numbers in cell{number}: finding {number}." for number in wrong]
        assert told[-1].split("\n")[1:] == lines_left


# ------------------------------------------------------------------------------------------------------------- JUnit
def suites(text):
    return {suite.get("name"): suite for suite in ElementTree.fromstring(text.encode())}


@pytest.mark.parametrize("odd", ["\x00", "\x1b[31mred", "\x08", "\ufffe", "\ud800", "]]>", "<a>&amp;", "\u2028"])
def test_any_text_is_xml(odd):
    """What XML 1.0 has no character for is shown as one that it has."""
    release = suites(junit_of_refusal(f"r.json: a{odd}b", 2))
    (case,) = next(iter(release.values()))
    told = case[0].get("message")
    assert told.startswith("UNUSABLE: r.json: a")
    assert told.endswith("b")


def test_the_numbers_of_a_suite_are_those_of_its_cases():
    """A reader of JUnit shows them, and does not count."""
    run = Run()
    run.skips(run.ids[0], reason="no GPU")
    run.breaks(run.ids[1], {"reason": "print", "file": "a.py", "line": 3})
    for suite in suites(junit(gate(run.reports()))).values():
        children = [child.tag for case in suite for child in case]
        assert suite.get("tests") == str(len(suite))
        for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert suite.get(name) == str(children.count(tag))
    cells = suites(junit(gate(run.reports())))["torch.compile cells"]
    assert len(cells) == len(run.ids)
    assert cells.get("skipped") == "1"
    assert cells.get("failures") == "1"
