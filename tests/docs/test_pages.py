"""README and docs say what is so: links, commands, YAML, names, and the reference made from the code. No torch."""

from __future__ import annotations

import configparser
import re
import shlex

import pytest
import yaml
from docs.pages import DOCS, PAGES, README, ROOT, blocks, command_lines, files_of, links_of, scripts_of, text_of
from docs.reference_pages import FOLDER, WRITER
from docs.reference_pages import PAGES as REFERENCE

import pytest_torchcompile
from pytest_torchcompile.backends import BACKENDS
from pytest_torchcompile.checks import CHECKS, LIMITS
from pytest_torchcompile.cli import _make_parser
from pytest_torchcompile.gate.policyfile import KEYS as POLICY_KEYS
from pytest_torchcompile.gate.policyfile import parse_policy
from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.run.options import OPTIONS
from pytest_torchcompile.wrappers import WRAPPERS

MOST_LINES, MOST_WORDS, SENTENCE = 250, 2200, 25


def name_of(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_is_of_this_code(name):
    """Every option, key, check, limit, command and exit code, with the code's own words."""
    assert (FOLDER / name).read_text(encoding="utf-8") == REFERENCE[name](), f"run: {WRITER}"


def test_the_reference_has_no_other_page():
    """A page that nothing makes would grow old."""
    assert {path.name for path in FOLDER.iterdir()} == set(REFERENCE)


def test_every_option_is_in_the_reference():
    """The twin, by another way than the one that makes the page."""
    text = (FOLDER / "options.md").read_text(encoding="utf-8")
    for option in OPTIONS:
        assert option.flag in text
        assert f"`{option.ini}`" in text
        assert option.help in text


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_is_explained(name):
    """In README by name, and in full on the page of the checks."""
    assert f"`{name}`" in text_of(README)
    assert f"**`{name}`**" in text_of(DOCS / "explanation/checks.md")


@pytest.mark.parametrize("name", LIMITS)
def test_every_limit_is_explained(name):
    """Where the check is that judges by it."""
    told = text_of(DOCS / "explanation/checks.md") + text_of(DOCS / "how-to/fuzz.md")
    assert f"`{name}`" in told


@pytest.mark.parametrize("name", WRAPPERS)
def test_every_wrapper_is_explained(name):
    """On the page of the matrix, or on that of several ranks."""
    told = text_of(DOCS / "how-to/matrix.md") + text_of(DOCS / "how-to/several-ranks.md")
    assert f"`{name}`" in told


def test_public_names():
    """What the package exports is what it lists."""
    assert sorted(pytest_torchcompile.__all__) == sorted(pytest_torchcompile._EXPORTS)
    assert "inductor" in BACKENDS


def test_readme_is_short():
    """Everything else has its page."""
    text = text_of(README)
    assert len(text.splitlines()) <= MOST_LINES
    assert len(text.split()) <= MOST_WORDS


def test_what_ci_runs_is_told():
    """A fresh clone needs one command, and it is CI's: README's `tox` runs the environments of `.ci/run`."""
    run = ",".join(re.findall(r"tox\" run\S* .*-e (\S+)", (ROOT / ".ci/run").read_text(encoding="utf-8")))
    assert tox_file()["tox"]["env_list"].replace(" ", "") == run
    assert f"tox run -e {run} " in text_of(ROOT / "CONTRIBUTING.md")
    assert "pip install tox && tox run -e tests" in text_of(README)
    assert "`tox` alone runs what CI runs" in text_of(README)


def words_of_sentences(text):
    """The length of each sentence of a page's prose, in words; tables and code count as none."""
    prose = re.sub(r"^(```.*?^```|\|.*?|#.*?|<!--.*?-->)$", "", text, flags=re.MULTILINE | re.DOTALL)
    paragraphs = re.split(r"\n\s*\n|\n(?=[-\d] ?\.? )", prose)
    sentences = [each for paragraph in paragraphs for each in re.split(r"(?<=[.?!])\s+", paragraph.strip())]
    return [len(each.split()) for each in sentences if each]


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_sentences_are_short(path):
    """On average, on every page."""
    lengths = words_of_sentences(text_of(path))
    assert sum(lengths) / len(lengths) <= SENTENCE


def test_a_long_sentence_is_seen():
    """The twin, which shows that the count counts."""
    assert words_of_sentences("# Head\n\nOne two three. " + "word " * 30 + "\n\n| a | table |\n") == [3, 30]


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_to_files(path):
    """Also to pictures and workflow files, which the site's builder does not look for."""
    for link in links_of(path):
        target = link.partition("#")[0]
        if "://" in link or not target:
            continue
        found = (path.parent / target).resolve()
        assert found.exists(), f"{name_of(path)} links to {link}"
        # The site has what is in docs, and nothing else.
        assert path == README or found.is_relative_to(DOCS), f"{name_of(path)} links out of docs: {link}"


def test_every_page_is_in_the_navigation():
    """A page that no menu names is found by nobody."""
    named = set(re.findall(r'"([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8")))
    assert named == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


def tox_file():
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    return tox


def environments():
    """The environments that tox.ini has."""
    names = [name.removeprefix("testenv:") for name in tox_file().sections() if name.startswith("testenv:")]
    versions = re.search(r"torch\{([^}]*)\}", " ".join(names))[1].split(",")
    return {*names, *(f"torch{version}" for version in versions)}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_commands_are_commands_of_ours(path):
    """Each is taken by our parser; options of pytest are ours, and environments are tox's."""
    flags = {option.flag for option in OPTIONS}
    for line in command_lines(path):
        words = shlex.split(re.sub(r"\[[^\]]*\]", "", line), comments=True)
        if words[0] == "pytest-torchcompile" and words[1:] != ["--version"]:
            _make_parser(words[1:]).parse_args(words[1:])
        if words[0] == "pytest":
            assert {word.partition("=")[0] for word in words if word.startswith("--compile-")} <= flags, line
        if "tox" in words and "-e" in words:
            assert set(words[words.index("-e") + 1].split(",")) <= environments(), line


MATRIX = """version: 1
models:
  router: {factory: models:make, inputs: models:batch}
  scorer: {factory: models:make, inputs: models:batch}
axes:
  backend: [inductor, aot_eager, eager]
  mode: [default, max-autotune]
  dynamic: [auto, static]
"""
ANY_NAME = "def make(**axes): ...\ndef batch(**dims): ...\nScorer = Mlp = WithLabels = loss = make\n"
ANY_NAME += "approximate = twice_as_sum = make\n"
YAML = [(path, body) for path in PAGES for body in blocks(text_of(path), "yaml")]


@pytest.mark.parametrize(("path", "body"), YAML, ids=[name_of(path) for path, _ in YAML])
def test_yaml_is_read(path, body, tmp_path):
    """A matrix, a part of one, or a policy: by the code that reads a user's."""
    keys = yaml.safe_load(body).keys()
    if "models" not in keys and keys <= POLICY_KEYS.keys() - {"rules"} and "version" in keys:
        parse_policy(body.encode(), "release.yaml")
        return
    text = body if "models" in keys else MATRIX + body
    for module in ("models", "passes", "labelled"):
        (tmp_path / f"{module}.py").write_text(ANY_NAME)
    (tmp_path / "m.yaml").write_text(text)
    assert load_matrix(tmp_path / "m.yaml", tmp_path).cells


RUN = {
    "README.md": "test_fixtures_readme.py, test_readme_example.py",
    "docs/adopting.md": "tests/layer/wrap/test_adopting.py",
    **dict.fromkeys((name_of(page) for page in PAGES if page.parent.name == "found" and page.name != "index.md"),
                    "tests/contract/test_found.py"),
    "docs/how-to/contract.md": "tests/plugin/test_compile_contract.py",
    "docs/how-to/fuzz.md": "test_fixtures_readme.py",
    "docs/how-to/own-tests.md": "test_fixtures_readme.py",
    "docs/how-to/production-layer.md": "test_fixtures_readme.py",
    "docs/how-to/toolkit.md": "tests/plugin/test_graph_pass.py",
    "docs/how-to/without-pytest.md": "test_fixtures_readme.py",
    "docs/tutorials/compiler-engineer.md": "test_fixtures_readme.py, test_readme_example.py",
    "docs/tutorials/model-repo.md": "test_fixtures_readme.py",
}
"""Page with Python to the tests that run it."""


def test_all_python_is_run():
    """A page that begins to show Python needs a test that runs it."""
    assert {name_of(path) for path in PAGES if blocks(text_of(path), "python")} == RUN.keys()


def test_shown_files_are_the_same():
    """`models.py` of the tutorial is README's, so what is shown of one is true of the other."""
    model = files_of(README)["models.py"]
    for page in ("tutorials/model-repo.md", "how-to/own-tests.md"):
        assert files_of(DOCS / page)["models.py"] == model
    assert scripts_of(README)
