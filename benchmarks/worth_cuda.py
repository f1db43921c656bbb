"""On a CUDA GPU: is it worth it, why is it not, and how near to the roof is it? At most 150 seconds.

``python benchmarks/worth_cuda.py`` runs the cells of worth_cuda.yaml with the check `worth`. Nine models have one cause
planted each, or none; it prints what was told of each, and ends with 1 where the cause was not named, or one was made
up. Then it times mini_gpt in three modes with `pytest-torchcompile benchmark` (``--quick`` leaves that out).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pytest_torchcompile.checks.slow_causes import idle_causes, slow_causes
from pytest_torchcompile.checks.step_evidence import SlowCause, gpu_share, kernel_time

HERE = Path(__file__).parent
PLANTED = {"outside": "coverage", "again": "recompiles", "sorting": "fusion", "tiny": "launches", "copying": "roof",
           "product": "roof", "reading": "host", "sleeping": "host", "healthy": ""}
"""Model to the kind of cause that has to be named first, or told of one that is faster; nothing: there is none."""
MOST_BUSY = 1.1
"""Kernels of a profiled step that take longer than so many steps are not those of a step."""
CELL = "mini_gpt-inductor-default-static-none-cuda-inference"


def environment() -> dict[str, str]:
    """Where the planted models are found."""
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths}


def sections(folder: Path) -> dict[str, dict[str, Any]]:
    """What `worth` measured, by model."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "pytest", "-q", f"--compile-matrix={HERE / 'worth_cuda.yaml'}",
               f"--json-report-file={report}", "-p", "no:cacheprovider"]
    subprocess.run(command, cwd=HERE.parent, env=environment(), check=False)
    found = {}
    for cell in json.loads(report.read_text())["compile_matrix"]["cells"]:
        observed = cell["observation"] or {}
        found[cell["axes"]["model"]] = observed.get("sections", {}).get("worth", {"raised": "no section"})
    return found


def told(section: dict[str, Any]) -> list[SlowCause]:
    """What is said of a model that is not faster, or faster with a GPU that waits most of the step."""
    if section.get("raised") or section.get("wrong"):
        return []
    if section["verdict"] == "faster":
        return idle_causes(section)
    # Slower, no different or not told: which of them is chance on a machine that is not quiet.
    return slow_causes({**section, "verdict": "no difference"})


def line(name: str, section: dict[str, Any]) -> str:
    """The figures of one model."""
    if section.get("raised") or section.get("wrong"):
        return f"{name}: not measured: {section.get('raised') or section.get('wrong')}"
    low, high = section["interval"]
    words = [f"{name}: {section['verdict']}, {section['speedup']:.2f} ({low:.2f} to {high:.2f})"]
    sides = section["sides"]
    words.append(f"kernels {sides['eager']['kernels']} to {sides['compiled']['kernels']}")
    words.append(f"memory {section['memory_delta_mib']:+.1f} MiB")
    if section["roof"]:
        words.append(f"{section['roof']['share']:.0%} of the roof ({section['roof']['bound']})")
    predicted = section.get("predicted")
    if predicted:
        words.append(f"predicted {predicted['speedup']:.2f} (error {predicted['error']:+.0%})")
    busy = gpu_share(section)
    if busy is not None:
        words.append(f"GPU busy {busy:.0%}")
    return ", ".join(words)


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="without the three modes of mini_gpt")
    parser.add_argument("-o", "--output", type=Path, help="write the sections as JSON")
    given = parser.parse_args()
    began, failed = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        found = sections(Path(folder))
    for name, section in found.items():
        causes = told(section)
        print(line(name, section))
        for cause in causes:
            print(f"    {cause.kind} ({cause.share:.2f}): {cause.text}")
        kind = PLANTED.get(name)
        if kind is not None and (causes[0].kind if causes else "") != kind:
            failed.append(f"{name}: expected {kind or 'no cause'} first, found {[cause.kind for cause in causes]}")
        measured = "sides" in section
        if measured and (kernel_time(section) or 0.0) > MOST_BUSY:
            failed.append(f"{name}: the kernels of one step take {kernel_time(section):.0%} of its time")
    if given.output:
        given.output.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"{time.monotonic() - began:.0f} s")
    if not given.quick:
        subprocess.run([sys.executable, "-m", "pytest_torchcompile", "benchmark", CELL, "--matrix",
                        str(HERE / "worth_cuda.yaml")], cwd=HERE.parent, env=environment(), check=False)
        print(f"{time.monotonic() - began:.0f} s")
    for text in failed:
        print("FAILED", text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
