"""Predicted speed-ups beside measured ones, of every cell of a report that the check `worth` has timed.

    python benchmarks/predictions.py .compile-matrix/report.json

A prediction rests on an eager step alone (gauges/speed_prediction.py). It ends with 1 where less than four of five
cells are predicted within a quarter. Cells without a prediction are listed below, and not counted. "Of its roof" is the
least time of the step by this GPU's peaks, as a share of the compiled step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WITHIN = 0.25
WANTED = 0.8


def sections_of(report: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Axes of each cell, and what the check `worth` measured of it; empty where it measured nothing."""
    for cell in report["compile_matrix"]["cells"]:
        yield cell["axes"], (cell["observation"] or {}).get("sections", {}).get("worth", {})


def why_not(section: dict[str, Any]) -> str:
    """Why nothing is predicted of a cell."""
    return section.get("raised") or section.get("wrong") or ("not predicted" if section else "not timed")


def row(axes: dict[str, Any], section: dict[str, Any]) -> str:
    """The figures of one cell."""
    low, high = section["interval"]
    predicted, sides, roof = section["predicted"], section["sides"], section["roof"]
    return (f"| {axes['model']} | {axes['mode']} | {axes['phase']} | {1e3 * sides['eager']['median']:.2f} ms "
            f"| {sides['eager']['kernels']}, {sides['compiled']['kernels']} | {roof['share']:.0%} "
            f"| {section['speedup']:.2f} ({low:.2f} to {high:.2f}) "
            f"| {predicted['speedup']:.2f} | {predicted['error']:+.0%} |")


def main() -> int:
    """Print the table, and how many of the predictions hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, nargs="+")
    given = parser.parse_args()
    good = all_cells = 0
    without = []
    print("| model | mode | phase | eager step | kernels, eager and compiled | compiled, of its roof | measured "
          "| predicted | error |")
    print("|---|---|---|---:|---:|---:|---|---:|---:|")
    for file in given.report:
        for axes, section in sections_of(json.loads(file.read_text(encoding="utf-8"))):
            if not section.get("predicted"):
                without.append(f"{axes['model']}, {axes['mode']}, {axes['phase']}: {why_not(section)}")
                continue
            print(row(axes, section))
            all_cells += 1
            good += abs(section["predicted"]["error"]) <= WITHIN
    print(f"\n{good} of {all_cells} are predicted within {WITHIN:.0%}")
    for text in without:
        print(f"without a prediction: {text}")
    return 0 if all_cells and good >= WANTED * all_cells else 1


if __name__ == "__main__":
    sys.exit(main())
