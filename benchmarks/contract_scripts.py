"""How long the scripts of findings are: ``python benchmarks/contract_scripts.py FOLDER...`` of ``contract_clean.py``.

Each error of torch that those runs met, once for each program and kind: its history is made minimal as a search does
it, and its script written. Prints the lines that hold anything, and all lines.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from contract_clean import source_of

from pytest_torchcompile.contract.hunt import parts_of
from pytest_torchcompile.contract.script import Shown, written_script
from pytest_torchcompile.contract.worker import Worker
from pytest_torchcompile.fuzz.drawn_call import Sequence, as_code, call
from pytest_torchcompile.fuzz.shrinking import minimal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    options = parser.parse_args()
    met: dict[tuple[str, str], tuple[dict, str, str]] = {}
    for log in (log for folder in options.folders for log in folder.glob("*.jsonl")):
        for each in map(json.loads, log.read_text().splitlines()):
            for history, kind, *_, at in each["findings"]:
                if at >= 0:
                    met.setdefault((each["about"], kind), (each, history, log.stem))
    full, every = [], []
    folder = Path(".compile-matrix/contract_scripts")
    folder.mkdir(parents=True, exist_ok=True)
    for (about, kind), (each, history, backend) in met.items():
        source, dims = source_of(each["program"], each["text"], folder, backend, "cpu")
        with Worker(source) as worker:
            def shows(sequence: Sequence, worker: Worker = worker, kind: str = kind) -> bool:
                return worker.run(sequence).kind == kind

            # The history is the code of calls.
            drawn = tuple(eval(history, {"call": call}))
            if not shows(drawn):
                print(f"gone: {kind}: {about}", flush=True)
                continue
            small = minimal(drawn, dims, shows)
            told = worker.run(small)
        factory, inputs = parts_of(source.data)
        shown = Shown(f"{kind}: {told.message.splitlines()[0]}", factory, inputs, None, small, {"backend": backend},
                      kind=kind, where=told.where)
        lines = written_script(shown).splitlines()
        full.append(sum(map(bool, lines)))
        every.append(len(lines))
        print(f"{full[-1]:4} {every[-1]:4}  {kind}: {about}: {as_code(small)}", flush=True)
    print(f"{len(full)} scripts: median {statistics.median(full)} lines, {statistics.median(every)} with empty ones")


if __name__ == "__main__":
    main()
