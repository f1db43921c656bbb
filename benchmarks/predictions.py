"""Predicted speed-ups beside measured ones, of every cell of a report that the check `worth` has timed.

    python benchmarks/predictions.py .compile-matrix/report.json

A prediction rests on an eager step alone (gauges/speed_prediction.py). It ends with 1 where less than four of five
cells are predicted within a quarter.
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


def timed_cells(report: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Axes and figures of the cells that were timed, and whose speed is predicted."""
    for cell in report["compile_matrix"]["cells"]:
        section = (cell["observation"] or {}).get("sections", {}).get("worth", {})
        if section.get("predicted"):
            yield cell["axes"], section


def main() -> int:
    """Print the table, and how many of the predictions hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, nargs="+")
    given = parser.parse_args()
    good = all_cells = 0
    print("| model | mode | phase | kernels, eager and compiled | measured | predicted | error |")
    print("|---|---|---|---:|---|---:|---:|")
    for file in given.report:
        for axes, section in timed_cells(json.loads(file.read_text(encoding="utf-8"))):
            low, high = section["interval"]
            predicted, sides = section["predicted"], section["sides"]
            print(f"| {axes['model']} | {axes['mode']} | {axes['phase']} "
                  f"| {sides['eager']['kernels']}, {sides['compiled']['kernels']} "
                  f"| {section['speedup']:.2f} ({low:.2f} to {high:.2f}) "
                  f"| {predicted['speedup']:.2f} | {predicted['error']:+.0%} |")
            all_cells += 1
            good += abs(predicted["error"]) <= WITHIN
    print(f"\n{good} of {all_cells} are predicted within {WITHIN:.0%}")
    return 0 if all_cells and good >= WANTED * all_cells else 1


if __name__ == "__main__":
    sys.exit(main())
