"""Thousands of damaged reports through the command: ``python benchmarks/gate_damage.py [COUNT] [SEED]``.

Prints how the gate ended for each kind of damage (tests/damage.py), and for files of 200 MB. Exits with 1 if one
of them passed, or ended in anything but a verdict.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
STORED = TESTS / "reports"
SIZE = 200_000_000


def large(good: str) -> Iterator[tuple[str, str]]:
    """Files of 200 MB, each wrong."""
    yield "200 MB of blanks", " " * SIZE
    yield "200 MB cut off", good.rstrip()[:-1] + ', "x": "' + "x" * SIZE
    yield "200 MB of brackets", "[" * SIZE
    content = json.loads(good)
    content["compile_matrix"]["cells"][0]["checks"]["compiles"] |= {"verdict": "skip", "note": "x" * SIZE}
    yield "200 MB of a reason for a skip", json.dumps(content)
    content = json.loads(good)
    content["compile_matrix"]["cells"] *= SIZE // len(good)
    yield "200 MB of the same cells", json.dumps(content)


def ended(folder: Path, texts: list[str]) -> tuple[int, str]:
    """Exit code and output of the command over these files."""
    from pytest_torchcompile.cli import main

    paths = [folder / f"report-{k}.json" for k in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main(["gate", *map(str, paths)])
    return code, output.getvalue()


def main() -> None:
    """Run all, print a table."""
    sys.path.insert(0, str(TESTS))
    from damage import damages

    given = [int(text) for text in sys.argv[1:]]
    count, seed = (*given, *(10_000, 20261121)[len(given):])
    reports, journals = ([(STORED / f"shard-{k}.{e}").read_text() for k in (1, 2)] for e in ("json", "jsonl"))
    codes: dict[str, Counter[int]] = {}
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        cases = ((name.partition(": ")[2], texts) for name, texts in damages(reports, journals, count, seed))
        for case in (cases, ((name, [text, reports[1]]) for name, text in large(reports[0]))):
            for kind, texts in case:
                code, output = ended(Path(name), texts)
                codes.setdefault(kind, Counter())[code] += 1
                if code not in (1, 2, 3) or "Traceback" in output:
                    wrong += 1
                    print(f"WRONG: {kind}: exit code {code}\n{output[:2000]}")
    for kind, counts in codes.items():
        print(f"{kind:32} " + ", ".join(f"{n} x exit {code}" for code, n in sorted(counts.items())))
    print(f"{sum(map(Counter.total, codes.values()))} damaged inputs (seed {seed}): {wrong} passed or ended badly")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
