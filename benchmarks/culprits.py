"""Is the right part of the compiler named, and the right operator? Every planted fault of ``faults/wrong_compiler.py``.

    python benchmarks/culprits.py [WORDS ...]

Each runs in a process of its own, as a cell's does; then its model without the fault, of which nobody may be accused.
Prints what was named, lines of the script, compiles' CPU seconds. Needs a C++ compiler.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from contextlib import nullcontext

SECONDS = 400.0


def run(name: str, planted: bool, connection) -> None:
    import torch

    from pytest_torchcompile.culprit.culprit_search import find_culprit
    from pytest_torchcompile.faults.wrong_compiler import WRONG_COMPILERS
    from pytest_torchcompile.layer.config import CompileConfig
    from pytest_torchcompile.layer.equivalence import ObjectTrial

    torch.set_num_threads(1)
    fault = next(each for each in WRONG_COMPILERS if each.name == name)
    config = CompileConfig(enabled=True, backend="inductor")
    trial = ObjectTrial(fault.build_model(), [fault.make_batch()], config, None, steps=1)
    with fault.plant() if planted else nullcontext():
        culprit = find_culprit(trial, fault.backend, frozenset({"numbers"}), SECONDS)
    times = os.times()
    connection.send((culprit.to_dict(), times.user + times.system + times.children_user + times.children_system))


def in_process(name: str, planted: bool):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(name, planted, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def main() -> int:
    from pytest_torchcompile.culprit.culprit_record import Culprit, culprit_text
    from pytest_torchcompile.faults.wrong_compiler import WRONG_COMPILERS

    chosen = [fault for fault in WRONG_COMPILERS
              if not sys.argv[1:] or any(word in fault.name for word in sys.argv[1:])]
    right, silent, lengths, cpu = 0, 0, [], []
    for fault in chosen:
        began = time.monotonic()
        plain, seconds = in_process(fault.name, True)
        culprit = Culprit.from_dict(plain)
        named = culprit.subsystem == fault.subsystem and fault.word in (culprit.operator + " ".join(culprit.left))
        right += named
        lengths.append(len(culprit.script.splitlines()))
        cpu.append(seconds)
        clean, _ = in_process(fault.name, False)
        accused = bool(clean["operator"] or clean["subsystem"] or clean["left"])
        silent += not accused
        print(f"{'right' if named else 'WRONG'}, {'ACCUSED' if accused else 'clean twin silent'}: {fault.name}, "
              f"{seconds:.0f} CPU s, {time.monotonic() - began:.0f} s, script of {lengths[-1]} lines")
        print("    " + culprit_text(culprit).replace("\n", "\n    "), flush=True)
    print(f"{right} of {len(chosen)} right, {silent} of {len(chosen)} clean twins silent; scripts have a median of "
          f"{statistics.median(lengths):.0f} lines, a search {statistics.median(cpu):.0f} CPU s")
    return right != len(chosen) or silent != len(chosen)


if __name__ == "__main__":
    sys.exit(main())
