"""How collecting a matrix grows with its size: ``python benchmarks/collecting.py``.

Collects 100 to 12,000 cells (of 5 checks each, so that the largest is 60,000 items) with ``pytest --co``, and
fits the exponent of time over size, start-up taken off.
"""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = (100, 1000, 12_000)
MATRIX = """
version: 1
models:
  net: {{factory: "models:net", inputs: "models:batch", dims: {{B: 4}}}}
axes:
  backend: [eager, aot_eager, inductor]
  dynamic: [auto, static, dynamic]
  variant: [{variants}]
strategy: {{sample: {{n: {n}, seed: 1}}}}
"""


def collect(folder: Path, cells: int) -> tuple[float, float, int]:
    """Wall seconds, peak MiB and number of items of one collection, in a process of its own."""
    (folder / "matrix.yaml").write_text(
        MATRIX.format(variants=", ".join(map(str, range(math.ceil(cells / 9)))), n=cells))
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "pytest", "--compile-matrix=matrix.yaml", "--co", "-qq"],
                               cwd=folder, stdout=subprocess.PIPE, text=True)
    output = process.stdout.read() if process.stdout else ""
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(output[-2000:])
    items = int(output.split("matrix.yaml: ")[1].split()[0])
    return time.perf_counter() - start, usage.ru_maxrss / 1024, items


def main() -> None:
    """Print a line for each size and the exponent."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pytest.ini").write_text("[pytest]\n")
        (folder / "models.py").write_text("def net(variant):\n    ...\n\n\ndef batch(B):\n    ...\n")
        empty = min(collect(folder, 9)[0] for _ in range(3))
        print(f"start-up (9 cells): {empty:.2f} s")
        rows = []
        for size in SIZES:
            runs = sorted(collect(folder, size) for _ in range(3))
            seconds, mebibytes, items = runs[1]
            rows.append((items, seconds))
            print(f"{size:6} cells, {items:6} items: {seconds:.2f} s, peak {mebibytes:.0f} MiB")
    (few, fast), (many, slow) = rows[1], rows[-1]
    if fast > empty:
        exponent = math.log((slow - empty) / (fast - empty)) / math.log(many / few)
        print(f"exponent from {few} to {many} items, start-up taken off: {exponent:.2f}")
    else:
        print(f"no exponent: {few} items took no longer than start-up, so the machine is too busy")
    print(f"limits: 5 s and 400 MiB at 60,000 items; peak of this process itself "
          f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
