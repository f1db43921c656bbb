"""The decorator ``compile_contract``, run by pytest: the page's own example, and a module that breaks the contract."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs_torch
PAGE = Path(__file__).parents[2] / "docs/how-to/contract.md"
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
# Compiled, it takes its first input for one whose rows follow each other in memory.
BROKEN = EXAMPLE.replace("        return self", """        if torch.compiler.is_compiling() and not x.is_contiguous():
            x = x + 1
        return self""")


@pytest.mark.slow
def test_the_example_of_the_page(pytester):
    pytester.makepyfile(EXAMPLE)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_a_module_that_breaks_the_contract_fails(pytester):
    """With the shortest history and the mutation that shows it."""
    assert BROKEN != EXAMPLE
    pytester.makepyfile(BROKEN)
    run = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    run.assert_outcomes(failed=1)
    run.stdout.fnmatch_lines(["*strides*"])
