"""Damaged reports never pass the gate, and never end in a traceback.

A few hundred here; COMPILE_GATE_DAMAGES=2400 (or benchmarks/gate_damage.py) runs as many as you like.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from damage import OF_JOURNALS, OF_REPORTS, damages

from pytest_torchcompile.cli import main

STORED = Path(__file__).parents[1] / "reports"
COUNT = int(os.environ.get("COMPILE_GATE_DAMAGES", "240"))
POLICY = """version: 1
limits: [{recompiles: 1, silent_eager: 0, when: {backend: [aot_eager, eager]}}]
"""


@pytest.fixture
def files(tmp_path):
    """Write texts as files; returns their names."""
    def write(texts):
        paths = [tmp_path / f"report-{k}.json" for k in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text, encoding="utf-8")
        return list(map(str, paths))

    return write


@pytest.fixture(scope="module")
def stored():
    """Reports and journals of a good run."""
    return [[(STORED / f"shard-{k}.{ending}").read_text() for k in (1, 2)] for ending in ("json", "jsonl")]


def test_what_is_not_damaged_passes(files, stored):
    """Else the tests below could not fail."""
    for texts in stored:
        assert main(["gate", *files(texts)]) == 0


def test_no_damage_passes(files, stored, tmp_path, capsys):
    """Whatever is wrong: not 0, and no traceback. Every third with a policy."""
    policy = tmp_path / "p.yaml"
    policy.write_text(POLICY)
    codes: Counter[int] = Counter()
    for number, (name, texts) in enumerate(damages(*stored, COUNT)):
        code = main(["gate", *files(texts), *(["--policy", str(policy)] if number % 3 == 0 else [])])
        out, err = capsys.readouterr()
        codes[code] += 1
        assert code in (1, 2, 3), f"{name}: exit code {code}\n{out}{err}"
        assert "Traceback" not in out + err, f"{name}: {out}{err}"
        assert out.startswith(("FAIL: ", "UNUSABLE: ", "NOTHING TO JUDGE: ")), f"{name}: {out}"
    assert codes[2] > COUNT / 2


@pytest.mark.parametrize("damage", [*OF_REPORTS, *OF_JOURNALS])
def test_every_damage_changes_something(damage, stored):
    """A damage that leaves the reports as they were would test nothing."""
    import random

    texts = stored[1] if damage in OF_JOURNALS else stored[0]
    assert all(damage(random.Random(seed), list(texts)) != texts for seed in range(3))
