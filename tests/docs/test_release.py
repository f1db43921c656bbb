"""The release workflow's own steps, and what makes README fit for PyPI."""

from __future__ import annotations

import importlib.util
import re
import subprocess

import pytest
import yaml
from docs.pages import README, ROOT, links_of, text_of

import pytest_torchcompile

WORKFLOW = ROOT / ".github/workflows/release.yml"
REPOSITORY = "https://example.org/us/ours"
pytestmark = pytest.mark.skipif(not WORKFLOW.is_file(), reason="an sdist has no workflows")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("absolute_links", ROOT / ".ci/absolute_links.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_of_readme_is_absolute(script, tmp_path):
    """Pictures as raw files, others as pages; what is in code stays."""
    page = tmp_path / "README.md"
    page.write_text(script.absolute(text_of(README), REPOSITORY, "v1.0"))
    before, after = links_of(README), links_of(page)
    assert len(before) == len(after) > 20
    assert all(link.startswith("https://") for link in after)
    assert f"]({REPOSITORY}/raw/v1.0/docs/pictures/page.png)" in text_of(page)
    assert f"]({REPOSITORY}/blob/v1.0/docs/adopting.md#the-layer)" in text_of(page)


def test_the_project_gets_its_urls(script):
    """Once; a second time is a mistake."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    changed = script.with_urls(text, REPOSITORY)
    assert f'Repository = "{REPOSITORY}"' in changed
    with pytest.raises(SystemExit, match=r"no \[project\.urls\] yet"):
        script.with_urls(changed, REPOSITORY)


def steps():
    return {step["name"]: step["run"] for step in workflow()["jobs"]["build"]["steps"] if "run" in step}


def workflow():
    return yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("tag", "head", "passes"), [
    ("v1.2.0", "## 1.2.0 (2027-01-31)", True),
    ("v1.2.1", "## 1.2.0 (2027-01-31)", False),
    ("v1.2.0", "## 1.2.0 (unreleased)", False),
])
def test_a_tag_is_of_its_version(tag, head, passes, tmp_path):
    """Tag, package and changelog say the same, or nothing is built."""
    (tmp_path / "pytest_torchcompile").mkdir()
    (tmp_path / "pytest_torchcompile/__init__.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changes\n\n{head}\n\n## 1.1.0 (2026-12-01)\n")
    done = subprocess.run(["bash", "-e", "-c", steps()["version"]], cwd=tmp_path, check=False,
                          env={"PATH": "/usr/bin:/bin", "GITHUB_REF_NAME": tag})
    assert (done.returncode == 0) == passes


def test_the_publisher_needs_no_secret():
    """Its token comes from the workflow's own identity, and only the job that publishes may ask for it."""
    jobs = workflow()["jobs"]
    assert "secrets." not in WORKFLOW.read_text(encoding="utf-8")
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["environment"] == "pypi"
    assert "permissions" not in jobs["build"]


def test_the_changelog_is_by_version():
    """Its first section is of the version that the package has, and each version is there once."""
    heads = re.findall(r"^## (\S+) \((?:unreleased|\d{4}-\d\d-\d\d)\)$", text_of(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert heads[0] == pytest_torchcompile.__version__
    assert len(heads) == len(set(heads)) == text_of(ROOT / "CHANGELOG.md").count("\n## ")
