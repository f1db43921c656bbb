"""Are the bytes that `explain` tells of a kernel those that the GPU moves? Its hardware counters are asked, by ncu.

Models of the zoo are explained, compiled again, and one warm step is profiled. The caches of the GPU are emptied before
each kernel, so that what memory gives (``dram__bytes_read``) is all that the kernel reads, and each of it once. What it
writes is counted where it comes to the L2 cache (``lts__t_sectors_srcunit_tex_op_write``, sectors of 32 bytes), because
that cache may keep it. All writes of that cache (``lts__t_sectors_op_write``) would be half as many again on an H100:
its cache has two parts, and what belongs into the other one is counted in both.

    python benchmarks/kernel_bytes.py                  # needs a GPU, and ncu in the PATH
    python benchmarks/kernel_bytes.py mini_gpt --output kernels.json
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

READ, WRITTEN = "dram__bytes_read.sum", "lts__t_sectors_srcunit_tex_op_write.sum"
SECTOR = 32
"""Bytes of a sector of the L2 cache."""
SMALL = 2**20
"""A kernel that touches less is not judged: its own code and arguments are read from memory too."""
WITHIN = 0.1
_UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "sector": 1, "": 1}


@dataclass
class KernelBytes:
    """A generated kernel: what is told of it, and what was counted."""

    model: str
    name: str
    told_read: int
    told_written: int
    read: float = 0.0
    written: float = 0.0

    @property
    def told(self) -> int:
        """All that it touches, as told."""
        return self.told_read + self.told_written

    @property
    def error(self) -> float:
        """How far what is told is from what was counted, as a share of that."""
        counted = self.read + self.written
        return self.told / counted - 1 if counted else 0.0


def programs() -> dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[..., Any] | None]]:
    """Factory, batch and loss; without a loss it is inference."""
    from pytest_torchcompile import zoo

    def mean(output: Any, *_: Any) -> Any:
        return output.float().mean()

    return {
        "mini_gpt": (zoo.mini_gpt_aligned, lambda: zoo.token_batch(256, 128), None),
        "mini_gpt_training": (zoo.mini_gpt_aligned, lambda: zoo.token_batch(256, 128), zoo.lm_loss),
        "conv_net": (zoo.conv_net_aligned, lambda: zoo.image_batch(256, 64, 64), None),
        "conv_net_training": (zoo.conv_net_aligned, lambda: zoo.image_batch(256, 64, 64), mean),
        "feed_forward_training": (zoo.feed_forward, lambda: zoo.vector_batch(262144), mean),
        "tiny_head": (zoo.tiny_head, lambda: zoo.vector_batch(65536), None),
        "encoder": (zoo.encoder, lambda: zoo.padded_batch(1024, 128), None),
    }


def run_programs(names: list[str], output: Path) -> None:
    """Explain each program, and run one step of it while the profiler counts. Called under ncu."""
    import torch

    from pytest_torchcompile.explain import explain

    told = []
    for name in names:
        build, make_batch, loss = programs()[name]
        torch.manual_seed(0)
        model = build().cuda().train(loss is not None)
        batch = make_batch()
        if isinstance(batch, dict):
            batch = {key: value.cuda() for key, value in batch.items()}
        else:
            batch = batch.cuda()
        explained = explain(model, batch, loss_fn=loss, train=loss is not None)
        for call in explained.kernels:
            if call.name.startswith("triton_"):
                told.append(asdict(KernelBytes(name, call.name, call.bytes_read, call.bytes_written)))
        torch.compiler.reset()
        compiled = torch.compile(model)

        def step(compiled: Any = compiled, batch: Any = batch, loss: Any = loss) -> None:
            args, kwargs = ((), batch) if isinstance(batch, dict) else ((batch,), {})
            if loss is None:
                with torch.no_grad():
                    compiled(*args, **kwargs)
                return
            loss(compiled(*args, **kwargs), batch).backward()

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        step()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    output.write_text(json.dumps(told), encoding="utf-8")


def counted_kernels(names: list[str]) -> list[KernelBytes]:
    """What is told of each generated kernel, beside what ncu counted."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("ncu is not in the PATH: the GPU's counters can't be read")
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder) / "told.json", Path(folder) / "ncu.csv"
        command = [ncu, "--profile-from-start", "off", "--cache-control", "all", "--metrics", f"{READ},{WRITTEN}",
                   "--kernel-name", "regex:^triton_", "--csv", "--page", "raw", "--log-file", str(log),
                   sys.executable, __file__, *names, "--output", str(output), "--under-ncu"]
        done = subprocess.run(command, check=False)
        if done.returncode or not output.exists():
            tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
            raise SystemExit(f"ncu ended with {done.returncode}\n{tail}")
        kernels = [KernelBytes(**entry) for entry in json.loads(output.read_text(encoding="utf-8"))]
        counts = list(read_counts(log.read_text(encoding="utf-8").splitlines()))
    if [name for name, _, _ in counts] != [kernel.name for kernel in kernels]:
        raise SystemExit(f"other kernels ran than were told: {[name for name, _, _ in counts]}, "
                         f"{[kernel.name for kernel in kernels]}")
    for kernel, (_, read, written) in zip(kernels, counts, strict=True):
        kernel.read, kernel.written = read, written
    return kernels


def read_counts(lines: list[str]) -> Iterator[tuple[str, float, float]]:
    """Name, bytes read and bytes written of each launch, in order, out of ncu's table of raw values."""
    begin = next(number for number, text in enumerate(lines) if text.startswith('"ID"'))
    rows = csv.DictReader(lines[begin:])
    units = next(rows)
    for row in rows:
        read = float(row[READ].replace(",", "")) * _UNITS[units[READ]]
        written = float(row[WRITTEN].replace(",", "")) * _UNITS[units[WRITTEN]] * SECTOR
        yield row["Kernel Name"].partition("(")[0], read, written


def main() -> int:
    """Count, compare, print; ends with 1 where less than nine kernels of ten are within a tenth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="programs; all of them by default")
    parser.add_argument("--output", type=Path, help="write the kernels as JSON")
    parser.add_argument("--under-ncu", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.names or list(programs())
    if given.under_ncu:
        run_programs(names, given.output)
        return 0
    kernels = counted_kernels(names)
    if given.output:
        given.output.write_text(json.dumps([asdict(kernel) for kernel in kernels], indent=1), encoding="utf-8")
    judged = [kernel for kernel in kernels if kernel.told >= SMALL]
    for kernel in kernels:
        print(f"{kernel.model:22} {kernel.name:60.60} read {kernel.told_read / SMALL:8.2f} MiB told, "
              f"{kernel.read / SMALL:8.2f} counted; written {kernel.told_written / SMALL:8.2f} told, "
              f"{kernel.written / SMALL:8.2f} counted; {kernel.error:+.1%}")
    good = sum(abs(kernel.error) <= WITHIN for kernel in judged)
    told, counted = sum(kernel.told for kernel in judged), sum(kernel.read + kernel.written for kernel in judged)
    print(f"{good} of {len(judged)} kernels of at least 1 MiB are within {WITHIN:.0%}; "
          f"all of them together {told / counted - 1:+.1%}")
    return 0 if good >= 0.9 * len(judged) else 1


if __name__ == "__main__":
    sys.exit(main())
