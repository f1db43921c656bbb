"""What is left of a run in which a rank dies, hangs, raises or takes all memory: ``python benchmarks/chaos.py``.

Each run is a pytest of its own with three cells of two ranks; in the middle one something is done to rank 1, or to
pytest itself. Counted are the cells that do not pass (there should be that one), the processes that are left two
seconds after pytest has ended, found by a variable in their environment, and the seconds of the cell that was hit.

    --runs N         how many runs (default 30); disasters take turns
    --only DISASTER  that one alone
    --device DEVICE  cpu (over gloo, the default) or cuda (over NCCL; needs two GPUs)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

FAULTS = Path(__file__).parent.parent / "tests" / "ranks" / "rank_faults.py"
DISASTERS = ("dies", "hangs", "raises", "hogs", "interrupted", "faults", "pytest killed")
"""Functions of that file; ``interrupted`` is Ctrl-C and ``pytest killed`` kill -9 while rank 1 hangs."""
MARK = "CHAOS_RUN"
LIMITS = {"cpu": 20, "cuda": 40}
"""Seconds after which a cell that hangs is ended; a rank's first seconds on a GPU are its start."""
MATRIX = """
version: 1
models:
  net: {{factory: "rank_faults:Net", inputs: "rank_faults:rows", dims: {{B: {{choices: [4, 6]}}}}}}
axes:
  device: [{device}]
  backend: [eager]
  wrapper: [ddp, "rank_faults:{fault}*2", "rank_faults:right*2"]
rules:
  - limits: {{coverage: 0}}
    when: {{backend: eager}}
    reason: what runs compiled is not asked here
checks: [compiles, equivalence, gradients, rank_divergence]
"""


def processes(mark: str) -> list[int]:
    """Processes whose environment has the mark."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def _heed_ctrl_c() -> None:
    """In the background, where this may run, SIGINT is ignored, and that is handed on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def one(disaster: str, device: str) -> dict[str, Any]:
    """Run pytest once and tell what came of it."""
    fault = disaster if disaster in ("dies", "hangs", "raises", "hogs", "faults") else "hangs"
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    mark = uuid.uuid4().hex
    shutil.copy(FAULTS, folder)
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (folder / "matrix.yaml").write_text(MATRIX.format(fault=fault, device=device))
    environment = os.environ | {MARK: mark, "PYTEST_TORCHCOMPILE_WARM": "0", "CHAOS_HANGS": str(folder / "hangs")}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "--compile-matrix=matrix.yaml",
               f"--compile-timeout={LIMITS[device]}"]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, start_new_session=True, preexec_fn=_heed_ctrl_c)
    if disaster in ("interrupted", "pytest killed"):
        while not (folder / "hangs").exists() and process.poll() is None:
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT if disaster == "interrupted" else signal.SIGKILL)
    code = process.wait(180)
    time.sleep(2)
    found: dict[str, Any] = {"disaster": disaster, "code": code, "orphans": len(processes(mark))}
    if disaster != "pytest killed":
        cells = json.loads((folder / ".compile-matrix" / "report.json").read_text())["compile_matrix"]["cells"]
        found["statuses"] = [cell["status"] for cell in cells]
        found["seconds"] = cells[1]["seconds"]
    else:
        lines = (folder / ".compile-matrix" / "journal.jsonl").read_text().splitlines()
        finished = {json.loads(line).get("cell") for line in lines} - {None}
        found["statuses"] = ["pass"] * len(finished) + ["not_run"] * (3 - len(finished))
    shutil.rmtree(folder)
    return found


def main() -> None:
    """Run, print a line for each run and the sums; exit code 1 if something was left over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", choices=DISASTERS)
    args = parser.parse_args()
    runs, told = args.runs, []
    for k in range(runs):
        told.append(one(args.only or DISASTERS[k % len(DISASTERS)], args.device))
        print(json.dumps(told[-1]), flush=True)
    orphans = sum(run["orphans"] for run in told)
    # After Ctrl-C and kill -9 the cells behind the one that was hit are not run.
    wrong = [run for run in told if run["statuses"][0] != "pass" or run["statuses"][1] == "pass"
             or run["statuses"][2] not in (("not_run",) if run["disaster"] in ("interrupted", "pytest killed")
                                           else ("pass",))]
    print(f"{runs} runs: {orphans} processes left; {len(wrong)} runs in which anything but the one cell failed")
    print(Counter((run["disaster"], run["statuses"][1]) for run in told))
    sys.exit(bool(orphans or wrong))


if __name__ == "__main__":
    main()
