"""``--json-report`` without a matrix, over the report of a matrix run."""

from __future__ import annotations

import json

import pytest
from runs import Run

pytestmark = pytest.mark.needs_torch
pytest.importorskip("pytest_jsonreport")


@pytest.mark.parametrize("listing", [False, True], ids=["run", "--co"])
def test_cells_of_an_earlier_run_are_kept(repo, listing):
    """Nothing is destroyed, also where no test uses our fixtures, or tests are only listed."""
    content = json.dumps({"compile_matrix": Run().blocks()[0]})
    report = repo.file(".compile-matrix/report.json", content)
    repo.file("test_it.py", "def test_it():\n    pass\n")
    result = repo.run("--json-report", f"--json-report-file={report}", "-p", "no:xdist", "-p", "no:cacheprovider",
                      "test_it.py", *(["--co"] if listing else []), option="")
    assert result.ret == 0
    assert "compile_matrix" not in json.loads(report.read_text())
    kept = json.loads((repo.path / ".compile-matrix/previous/report.json").read_text())
    assert kept["compile_matrix"] == json.loads(content)["compile_matrix"]
