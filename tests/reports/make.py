"""Make the stored reports of this folder again: ``python tests/reports/make.py``. Needs torch; about a minute.

A small repository is run in two shards, as it is and with a regression planted (a branch on a tensor's value). Stored
are the files as pytest wrote them, without the folder they were made in.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
GOOD = """
import torch


class Scorer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 8), torch.nn.Linear(8, 1)

    def forward(self, x):
        h = torch.relu(self.up(x))
        return self.down(h)


def batch(B):
    return torch.randn(B, 16)
"""
BROKEN = GOOD.replace("        return self.down(h)", "        if h.mean().item() > 9:\n            h = h / 2\n"
                                                     "        return self.down(h)")
MATRIX = """
version: 1
models:
  scorer: {factory: "models:Scorer", inputs: "models:batch", dims: {B: {choices: [4, 6]}}}
axes:
  backend: [aot_eager, eager]
  dynamic: [auto, dynamic]
"""


def run(folder: Path, models: str, shard: str) -> list[str]:
    """Report and journal of one shard."""
    (folder / "models.py").write_text(models)
    (folder / "matrix").mkdir(exist_ok=True)
    (folder / "matrix" / "smoke.yaml").write_text(MATRIX)
    (folder / "pytest.ini").write_text("[pytest]\n")
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--compile-shard={shard}",
                    "--compile-matrix=matrix/smoke.yaml",
                    "--json-report-omit", "collectors", "keywords", "log", "streams", "traceback"],
                   cwd=folder, check=False)
    written = [(folder / ".compile-matrix" / name).read_text() for name in ("report.json", "journal.jsonl")]
    if any(str(folder) in text for text in written[1:]):
        raise SystemExit(f"the journal names {folder}")
    return [text.replace(str(folder), "/repository") for text in written]


def main() -> None:
    """Write reports and journals of shard-1, shard-2 and, with the regression, broken-2."""
    with tempfile.TemporaryDirectory() as name:
        for target, models, shard in (("shard-1", GOOD, "1/2"), ("shard-2", GOOD, "2/2"), ("broken-2", BROKEN, "2/2")):
            report, journal = run(Path(name), models, shard)
            content = json.loads(report)
            del content["compile_matrix_seal"]  # the text is another one
            (HERE / f"{target}.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")
            if target != "broken-2":
                (HERE / f"{target}.jsonl").write_text(journal)


if __name__ == "__main__":
    main()
