"""How long the gate takes for large reports: ``python benchmarks/gate_speed.py``.

Reports of 1,000 and 10,000 cells are made of the cells of a stored one, as they are and with twenty leaves that are not
bitwise equal, as Inductor's are. The gate runs as a command, in a process of its own, also with policy and baseline.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pytest_torchcompile.cell import AXES, Cell
from pytest_torchcompile.report.provenance import add_seal, cell_fingerprint

STORED = Path(__file__).parents[1] / "tests" / "reports"
LEAF = {"call": "call 1 (B=4)", "name": "gradient of up.weight", "kind": "gradient", "numel": 128, "dtype": "float32",
        "rms": 0.71, "bias": 0.2, "peak": 1.9, "index": [3, 7], "eager": 0.125, "compiled": 0.1250001,
        "expected": 0.125, "draws": 5}
POLICY = """version: 1
limits:
  - {recompiles: 3, silent_eager: 0, compile_seconds: 60}
pass_rate: {total: 1.0, backend: 1.0}
ran_at_least: 1
"""
LIMIT = 2.0


def report(cells: int, leaves: int) -> dict:
    """A whole report of so many cells, as a run would have written it."""
    content = json.loads((STORED / "shard-1.json").read_text())
    block = content["compile_matrix"]
    cell, made = block["cells"][0], []
    for number in range(cells):
        each = copy.copy(cell)
        each["axes"] = {**cell["axes"], "variant": number}
        each["id"] = Cell(**{name: each["axes"][name] for name in AXES}, user=(("variant", number),)).id
        sections = dict(cell["observation"]["sections"])
        sections["equivalence"] = {**sections["equivalence"], "leaves": [LEAF] * leaves, "inexact": leaves}
        each["observation"] = {**cell["observation"], "cell": each["id"], "sections": sections}
        made.append({**each, "evidence_sha256": cell_fingerprint(each)})
    block["cells"], block["shard"] = made, {"index": 1, "of": 1}
    block["matrix"]["cells_planned"] = [each["id"] for each in made]
    tests = content["tests"][:len(cell["checks"])]
    content["tests"] = [{**test, "nodeid": f"m.yaml::{each['id']}::{name}"}
                        for each in made for test, name in zip(tests, cell["checks"], strict=True)]
    return content


def timed(*arguments: str) -> float:
    """CPU seconds of one command, the least of three; it has one thread, so idle wall seconds are the same.

    Its exit code must be 0.
    """
    found = []
    for _ in range(3):
        before = os.times()
        done = subprocess.run([sys.executable, "-m", "pytest_torchcompile", "gate", *arguments],
                              capture_output=True, text=True, check=False)
        after = os.times()
        found.append(after.children_user + after.children_system - before.children_user - before.children_system)
        if done.returncode:
            raise SystemExit(done.stdout[:2000] + done.stderr)
    return min(found)


def main() -> None:
    """Print a line for each size; exit with 1 where the largest takes longer than the limit."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy, path = folder / "policy.yaml", folder / "report.json"
        policy.write_text(POLICY)
        took = 0.0
        for cells, leaves in ((1, 0), (1000, 0), (10_000, 0), (10_000, 20)):
            path.write_text(add_seal(json.dumps(report(cells, leaves))))
            start = time.process_time()
            json.loads(path.read_text())
            alone = time.process_time() - start
            line = f"{cells:6} cells, {path.stat().st_size / 1e6:6.1f} MB: {timed(str(path)):.2f} s " \
                   f"(json.loads alone: {alone:.2f} s)"
            if leaves == 0:
                took = timed(str(path))
                line += f", with policy {timed(str(path), '--policy', str(policy)):.2f} s"
                line += f", and baseline {timed(str(path), '--policy', str(policy), '--baseline', str(path)):.2f} s"
            print(line, flush=True)
    print(f"limit: {LIMIT} CPU s for 10,000 cells")
    sys.exit(took > LIMIT)


if __name__ == "__main__":
    main()
