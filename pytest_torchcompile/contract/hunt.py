"""The hunt: the contract's search over many small programs, for as long as it is given. No torch: workers have it.

A folder holds all of it: each program's file, each finding's script and draft, and where to go on.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.contract.contract_search import ContractFinding, search_with
from pytest_torchcompile.contract.finding_text import finding_record, operator_script_of
from pytest_torchcompile.contract.layer_library import LAYERS, chain_source, layer_source
from pytest_torchcompile.contract.mutation import NAMES
from pytest_torchcompile.contract.operator_library import OPERATORS, operator_source
from pytest_torchcompile.contract.script import Shown, written_script
from pytest_torchcompile.contract.worker import OwnFailure, ProgramSource, Worker
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.fuzz.search import Budget

if TYPE_CHECKING:
    from pytest_torchcompile.batch import Batch
    from pytest_torchcompile.contract.history_run import Program

__all__ = ["ZOO", "Hunt", "HuntFinding", "HuntProgress", "cause_of", "hunted_programs", "program_of"]

ZOO: Final = {
    "tiny_head": ("vector_batch", {"B": Dim(min=1, max=5)}),
    "feed_forward": ("vector_batch", {"B": Dim(min=1, max=5)}),
    "conv_net": ("image_batch", {"B": Dim(min=2, max=5), "H": Dim(size=16), "W": Dim(size=20)}),
    "mini_gpt": ("token_batch", {"B": Dim(min=1, max=3), "S": Dim(min=4, max=12)}),
}
"""Models of the zoo with their batch and sizes."""
_SOURCES: Final = {"chain": chain_source, "layer": layer_source, "operator": operator_source}
"""By the kind of a program what writes its file."""
_STATE: Final = "hunt.json"
_DRAWN: Final = 12
"""Histories drawn for a program in a turn."""
_PROGRAM_SECONDS: Final = 300.0
_LAST_WORDS: Final = 600
"""Characters of an error that are kept."""
_ROUNDS: Final = 4
"""Searches of one program in a turn: each leaves out what those before it have found."""


@dataclass(frozen=True)
class HuntFinding:
    """A cause, with the first history that showed it."""

    cause: str
    program: str
    record: dict[str, Any]
    """Of :func:`~pytest_torchcompile.contract.finding_text.finding_record`."""
    number: int = 0
    times: int = 1
    """How often it was met."""


@dataclass
class HuntProgress:
    """What is kept between runs of one folder."""

    places: dict[str, int] = field(default_factory=dict)
    """By backend, seed and device how many programs were searched."""
    counts: Counter[str] = field(default_factory=Counter)
    """``programs, histories, calls, refused, mute`` and so on, of all runs."""
    findings: list[HuntFinding] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Programs that could not be searched, with the reason."""
    failed: dict[str, str] = field(default_factory=dict)
    """Programs at which this package itself failed, with its last lines."""

    @classmethod
    def read(cls, folder: Path) -> HuntProgress:
        """What an earlier run has left. Raises UsageError for a file that is none of ours."""
        path = folder / _STATE
        if not path.exists():
            return cls()
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            findings = [HuntFinding(**each) for each in data["findings"]]
            return cls(data["places"], Counter(data["counts"]), findings, data["skipped"], data.get("failed", {}))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path}: not the state of a hunt ({error}); name another folder by --output") from None

    def write(self, folder: Path) -> None:
        """Keep it; a run that is ended meanwhile leaves the one before."""
        beside = folder / f"{_STATE}.new"
        data = {"places": self.places, "counts": dict(self.counts), "skipped": self.skipped, "failed": self.failed,
                "findings": [asdict(each) for each in self.findings]}
        beside.write_text(json.dumps(data, indent=1), encoding="utf-8")
        beside.replace(folder / _STATE)

    def add(self, finding: HuntFinding) -> HuntFinding | None:
        """Count a finding; returns it with its number if its cause is new."""
        for place, known in enumerate(self.findings):
            if known.cause == finding.cause:
                self.findings[place] = replace(known, times=known.times + 1)
                return None
        numbered = replace(finding, number=len(self.findings) + 1)
        self.findings.append(numbered)
        return numbered


def hunted_programs(seed: int, start: int = 0) -> Iterator[tuple[int, str, int]]:
    """Without an end: place, kind of program (``layer``, ``operator``, ``zoo``, ``chain``), and its number or seed.

    Layers, operators and the zoo take turns with chains, which are new ones each time.
    """
    known = _known_programs()
    place = start
    while True:
        index, is_chain = divmod(place, 2)
        if is_chain:
            yield place, "chain", seed * 1_000_000 + index
        else:
            # Another seed begins elsewhere, so that short hunts do not all see the same layers.
            yield place, *known[(index + seed * 37) % len(known)]
        place += 1


def _known_programs() -> list[tuple[str, int]]:
    """Kind and number of each program that is not drawn."""
    known: list[tuple[str, int]] = []
    for kind, count in (("layer", len(LAYERS)), ("operator", len(OPERATORS)), ("zoo", len(ZOO))):
        known += [(kind, number) for number in range(count)]
    return known


@dataclass
class Hunt:
    """One run: searches programs until its time is over."""

    folder: Path
    backend: str
    seed: int
    seconds: float
    tell: Callable[[str], object]
    device: str = "cpu"
    progress: HuntProgress = field(init=False)
    new: list[HuntFinding] = field(default_factory=list)
    """Causes that this run has found first."""
    failed: list[str] = field(default_factory=list)
    """Programs at which this package itself failed in this run."""

    def __post_init__(self) -> None:
        (self.folder / "programs").mkdir(parents=True, exist_ok=True)
        self.progress = HuntProgress.read(self.folder)

    def run(self) -> None:
        """Go on where the last run ended."""
        key = f"{self.backend} {self.seed}"
        if self.device != "cpu":
            key += f" {self.device}"
        deadline, worker = time.monotonic() + self.seconds, None
        try:
            for place, kind, number in hunted_programs(self.seed, self.progress.places.get(key, 0)):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                worker = self._search(worker, kind, number, place, left)
                self.progress.places[key] = place + 1
                self.progress.write(self.folder)
        finally:
            if worker is not None:
                worker.close()

    def _search(self, worker: Worker | None, kind: str, number: int, place: int, left: float) -> Worker | None:
        """Search one program; returns the worker for the next one, None where it has gone."""
        name, source = self._program(kind, number)
        try:
            if worker is None:
                worker = Worker(source)
            else:
                worker.load(source)
            self.progress.counts["programs"] += 1
            self._search_rounds(worker, name, place, left)
        except OwnFailure as error:
            self.progress.failed[name] = str(error)[-_LAST_WORDS:]
            self.failed.append(name)
            self.tell(f"{name}: pytest-torchcompile itself failed here; {self.folder / _STATE} has its last lines")
        except (UsageError, EOFError, OSError) as error:
            # A layer that this torch does not have, or a chain whose shapes do not fit.
            self.progress.skipped[name] = str(error)[-_LAST_WORDS:]
            self.progress.counts["skipped"] += 1
        else:
            return worker
        if worker is not None:
            worker.close()
        return None

    def _program(self, kind: str, number: int) -> tuple[str, ProgramSource]:
        if kind == "zoo":
            name = list(ZOO)[number]
            inputs, dims = ZOO[name]
            data = {"zoo": name, "inputs": inputs}
            sizes = {dim: each.size or max(2, each.min or 2) for dim, each in dims.items()}
        else:
            name, sizes = f"{kind}_{number}", {"B": 2}
            text = _SOURCES[kind](number)
            path = self.folder / "programs" / f"{name}.py"
            path.write_text(text, encoding="utf-8")
            data = {"file": str(path)}
        target = f"{__name__}:program_of"
        return name, ProgramSource(target, data | {"backend": self.backend, "device": self.device}, NAMES, sizes)

    def _search_rounds(self, worker: Worker, name: str, place: int, left: float) -> None:
        """Search, and again without the choices that showed something, so that one fault hides no other."""
        offered, ends = worker.offered, time.monotonic() + left
        dims = {"B": Dim(min=1, max=5)}
        if name in ZOO:
            dims = ZOO[name][1]
        first_turn = place < 2 * len(_known_programs())
        for turn in range(_ROUNDS):
            seconds = min(_PROGRAM_SECONDS, ends - time.monotonic())
            if seconds <= 0:
                return
            came = search_with(worker, offered, dims, Budget(_DRAWN, seconds), flips=True,
                               seed=self.seed * 997 + place + turn, swept=first_turn)
            self.progress.counts.update({each: int(came.counts[each]) for each in _COUNTED})
            if not came.findings:
                return
            shown: set[tuple[str, str]] = set()
            for finding in came.findings:
                self._keep(worker, name, finding)
                for call in finding.failing.sequence:
                    shown.update(call.mutations)
            if not shown:
                # A plain call shows it: everything else would show it too.
                return
            offered = _without_choices(offered, shown)

    def _keep(self, worker: Worker, name: str, finding: ContractFinding) -> None:
        record = finding_record(finding, [("", _layer_name(name))], self._script(worker, finding))
        cause = cause_of(record, name)
        if self.device != "cpu":
            cause += f" | {self.device}"
        found = HuntFinding(cause, name, record)
        numbered = self.progress.add(found)
        if numbered is None:
            return
        self.new.append(numbered)
        (self.folder / f"finding-{numbered.number:03}.py").write_text(record["script"], encoding="utf-8")
        if operator := operator_script_of(record):
            (self.folder / f"finding-{numbered.number:03}-operator.py").write_text(operator, encoding="utf-8")
        self.tell(f"finding {numbered.number}: {name}: {record['kind']} after {record['code']}"
                  f"{' on ' + record['stage'] if record['stage'] else ''}")

    def _script(self, worker: Worker, finding: ContractFinding) -> str:
        factory, inputs = parts_of(worker.source.data)
        settings = {"backend": finding.stage or self.backend}
        shown = Shown(f"{finding.told.kind}: {finding.told.message}", factory, inputs, None,
                      finding.failing.sequence, settings, without=finding.without, device=self.device,
                      kind=finding.told.kind, where=finding.told.where)
        try:
            return written_script(shown)
        except (OSError, TypeError) as error:
            return f"# no script: {error}\n"


_COUNTED: Final = ("histories", "calls", "refused", "mute", "graphs")


def _without_choices(offered: Mapping[str, list[str]], shown: set[tuple[str, str]]) -> dict[str, list[str]]:
    left: dict[str, list[str]] = {}
    for name, choices in offered.items():
        others = [choice for choice in choices if (name, choice) not in shown]
        if others:
            left[name] = others
    return left


def _layer_name(name: str) -> str:
    """The class of a layer, without its options: `Conv2d(4, 6, 3)` and `Conv2d(4, 4, 3, groups=4)` are one."""
    if name.startswith("operator_"):
        return OPERATORS[int(name.removeprefix("operator_"))][0]
    if not name.startswith("layer_"):
        return name
    return LAYERS[int(name.removeprefix("layer_"))][0].partition("(")[0]


def cause_of(record: Mapping[str, Any], name: str) -> str:
    """What two findings of one cause have in common: kind, stage, the layer or the chain, what the caller did."""
    program = _layer_name(name)
    where = record["where"] if record["kind"] in ("crash", "hang") else ""
    did: set[str] = set()
    for call in record["history"]:
        did |= set(call.get("mutations", {}))
    leaf = re.sub(r"\d+", "#", record["message"].partition(":")[0])[:60] if record["kind"] == "error" else ""
    return " | ".join([record["kind"], where, record["stage"], program, " ".join(sorted(did)), leaf])


def parts_of(data: Mapping[str, Any]) -> tuple[Any, Any]:
    """The functions that make the model and a batch; imports torch."""
    if "zoo" in data:
        zoo = importlib.import_module("pytest_torchcompile.zoo")
        return getattr(zoo, data["zoo"]), getattr(zoo, data["inputs"])
    path = Path(data["file"])
    spec = importlib.util.spec_from_file_location(f"hunted_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} can't be imported")
    module = importlib.util.module_from_spec(spec)
    # Dynamo looks a class's globals up there, where another file's class inherits from it.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.model, module.inputs


def program_of(data: Mapping[str, Any]) -> Program:
    """The program of a hunted model, in the worker."""
    import torch

    from pytest_torchcompile.batch import Batch
    from pytest_torchcompile.contract.history_run import Program

    factory, inputs = parts_of(data)
    device = data["device"]

    def make_model() -> torch.nn.Module:
        torch.manual_seed(0)
        made: torch.nn.Module = factory()
        return made.to(device)

    def batch(sizes: Mapping[str, int], seed: int) -> Batch:
        torch.manual_seed(seed)
        made = Batch.of(inputs(**sizes))
        # A copy of what autograd has made is no leaf; on the CPU it is taken as it comes.
        return made if device == "cpu" else made.to(device)

    return Program(make_model, {"backend": data["backend"]}, batch)
