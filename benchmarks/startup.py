"""What a pytest run that does not use this plugin pays for it: ``python benchmarks/startup.py``.

Two figures: the plugin's own import and hooks, timed inside a fresh interpreter that has pytest loaded (median of
many), and whole pytest runs with and without the plugin, interleaved, as a ratio of CPU seconds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = 21
INSIDE = """
import time, _pytest.config
config = _pytest.config._prepareconfig([])
start = time.perf_counter()
import pytest_torchcompile.plugin as plugin
config.pluginmanager.register(plugin, "ours")  # declares the options
loaded = time.perf_counter() - start
config._parser.parse_known_args([], namespace=config.option)
start = time.perf_counter()
plugin.pytest_configure(config)
import sys
print(loaded + time.perf_counter() - start,
      [n for n in ("torch", "hypothesis", "yaml", "pydantic") if n in sys.modules])
"""


def inside() -> float:
    """Seconds for import, options and configure in one fresh interpreter."""
    out = subprocess.run([sys.executable, "-c", INSIDE], capture_output=True, text=True, check=True,
                         env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, cwd=tempfile.gettempdir()).stdout
    seconds, loaded = out.split(maxsplit=1)
    if loaded.strip() != "[]":
        raise SystemExit(f"the plugin loaded {loaded}")
    return float(seconds)


def whole(folder: Path, *args: str) -> float:
    """CPU seconds of one pytest run over one plain test."""
    before = os.times()
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args], cwd=folder,
                   capture_output=True, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Print both figures."""
    own = [inside() for _ in range(RUNS)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_it.py").write_text("def test_it():\n    pass\n")
        (folder / "pytest.ini").write_text("[pytest]\n")
        pairs = [(whole(folder), whole(folder, "-p", "no:torchcompile")) for _ in range(RUNS)]
    start = time.strftime("%Y-%m-%d")
    print(f"{start}, Python {sys.version.split()[0]}, {os.cpu_count()} cores, medians of {RUNS}")
    print(f"import, options and configure: {statistics.median(own) * 1e3:.2f} ms (limit 3 ms)")
    with_us, without = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"whole run, CPU seconds: {with_us:.3f} with, {without:.3f} without, "
          f"ratio {statistics.median(a / b for a, b in pairs):.3f}")


if __name__ == "__main__":
    main()
