"""Makes a checkout ready for PyPI, which shows README without the repository around it.

``python .ci/absolute_links.py https://HOST/OWNER/NAME v1.2.0`` rewrites README's links to files into addresses at that
tag, and adds the project's URLs to pyproject.toml. The release workflow calls it, which alone knows the address.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[((?:[^\]\\]|\\.)*)\]\((?!\w+:|#)([^)\s]+)\)")


def absolute(text: str, repository: str, tag: str) -> str:
    """The Markdown with each relative link at that tag; pictures as raw files."""

    def rewritten(found: re.Match[str]) -> str:
        picture, label, target = found.groups()
        # GitHub shows a file at /blob/ and hands it out at /raw/.
        kind = "raw" if picture else "blob"
        return f"{picture}[{label}]({repository}/{kind}/{tag}/{target})"

    return LINK.sub(rewritten, text)


def with_urls(pyproject: str, repository: str) -> str:
    """The project's file with its URLs, before the entry points."""
    before = "[project.entry-points.pytest11]"
    if pyproject.count(before) != 1 or "[project.urls]" in pyproject:
        raise SystemExit(f"pyproject.toml must have one {before}, and no [project.urls] yet")
    urls = {
        "Repository": repository,
        "Documentation": f"{repository}/blob/main/docs/index.md",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    lines = "\n".join(f'{name} = "{address}"' for name, address in urls.items())
    return pyproject.replace(before, f"[project.urls]\n{lines}\n\n{before}")


def main(repository: str, tag: str) -> None:
    """Rewrite both files in place."""
    readme, project = ROOT / "README.md", ROOT / "pyproject.toml"
    readme.write_text(absolute(readme.read_text(encoding="utf-8"), repository, tag), encoding="utf-8")
    project.write_text(with_urls(project.read_text(encoding="utf-8"), repository), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
