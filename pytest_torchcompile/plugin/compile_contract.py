"""@compile_contract: a function that makes a module becomes the test that compiled code keeps the contract of it."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.contract.finding_text import finding_record, finding_text
from pytest_torchcompile.contract.mutation import chosen_names
from pytest_torchcompile.dims import Dim, Dims, batch_sizes, dim_mistakes
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.plugin.compile_shapes import FUZZ, read_dim

if TYPE_CHECKING:
    from pytest_torchcompile.batch import Batch
    from pytest_torchcompile.contract.contract_search import ContractFinding, ContractResult
    from pytest_torchcompile.contract.history_run import Program

__all__ = ["ContractTest", "compile_contract", "program_of"]

_ATTRIBUTE = "_compile_contract"
"""Of the test: what it is made of."""


def compile_contract(
    *,
    inputs: Callable[..., Any],
    backend: str = "inductor",
    dynamic: bool | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    train: bool = True,
    mutations: Iterable[str] | None = None,
    seed: int = 0,
    **dims: Dim | int | str,
) -> Callable[[Callable[[], Any]], Callable[..., None]]:
    """Make a test of a function that returns a module: compiled code keeps to what eager lets a caller do.

    Histories of calls run in a process of their own, as in the check ``contract``: so many, and so long, as
    ``--compile-fuzz-examples`` and ``--compile-fuzz-seconds`` say. It fails with the shortest history and a script.

    Args:
        inputs: Makes a batch; called with the dims as keywords. It and the module come from torch's seeded generator.
        backend: Of ``torch.compile``: a name.
        dynamic: Of ``torch.compile``.
        loss: ``loss(output, batch)``, a tensor of one element; None: a weighted mean over all float outputs.
        train: Whether calls have a backward pass.
        mutations: Names of :data:`pytest_torchcompile.contract.mutation.NAMES`; None: all.
        seed: Of the module.
        **dims: As for ``compile_shapes``.

    Raises :class:`~pytest_torchcompile.errors.UsageError` for dims without sizes and for an unknown mutation.
    """
    named = {name: read_dim("compile_contract", name, value) for name, value in dims.items()}
    for name, text in dim_mistakes(named):
        raise UsageError(f"compile_contract: dim {name!r}: {text}")
    names = chosen_names(mutations)
    settings = {"backend": backend, "dynamic": dynamic}

    def decorate(factory: Callable[[], Any]) -> Callable[..., None]:
        tested = ContractTest(factory, inputs, settings, loss, train, names, seed, named)

        def keeps_contract(**fixtures: Any) -> None:
            __tracebackhide__ = True
            options, *_ = fixtures[FUZZ]
            tested.run(options)

        keeps_contract.__name__, keeps_contract.__doc__ = factory.__name__, factory.__doc__
        keeps_contract.__qualname__, keeps_contract.__module__ = factory.__qualname__, factory.__module__
        hidden = inspect.Parameter(FUZZ, inspect.Parameter.KEYWORD_ONLY)
        # What pytest takes for the test's fixtures.
        keeps_contract.__signature__ = inspect.Signature([hidden])  # type: ignore[attr-defined]
        setattr(keeps_contract, _ATTRIBUTE, tested)
        return keeps_contract

    return decorate


@dataclass(frozen=True)
class ContractTest:
    """What a test of the contract is made of."""

    factory: Callable[[], Any]
    inputs: Callable[..., Any]
    settings: Mapping[str, Any]
    loss: Callable[[Any, Any], Any] | None
    train: bool
    names: tuple[str, ...]
    seed: int
    dims: Dims

    def run(self, options: Any) -> None:
        """Search; raises AssertionError with what was found, or if nothing was compared."""
        __tracebackhide__ = True
        from pytest_torchcompile.contract.contract_search import search_contract
        from pytest_torchcompile.contract.worker import ProgramSource

        file, name = inspect.getsourcefile(self.factory) or "", self.factory.__qualname__
        data = {"file": file, "module": self.factory.__module__, "name": name}
        sizes = batch_sizes(self.dims)[0]
        source = ProgramSource(f"{__name__}:program_of", data, self.names, sizes, options.settings)
        came = search_contract(source, self.dims, options.budget(), flips=self.train, seed=options.seed,
                               database=options.database(), key=f"contract:{self.factory.__module__}:{name}")
        if came.findings:
            texts = [finding_text(self._record(finding)) for finding in came.findings]
            raise AssertionError("\n\n".join(f"{text.message}\n{text.evidence}" for text in texts))
        self._refuse_nothing_compared(came)

    def _refuse_nothing_compared(self, came: ContractResult) -> None:
        __tracebackhide__ = True
        if not came.counts["calls"]:
            raise AssertionError("compile_contract: no call was compared: eager refuses every one, or the time was "
                                 "over before the first; give more: --compile-fuzz-seconds")
        if not came.counts["graphs"]:
            raise AssertionError("compile_contract: no compiled graph ran in any history")
        if came.counts["mute"] == came.counts["calls"]:
            raise AssertionError("compile_contract: of every call nothing came but zeros, NaN, rounding noise, or "
                                 "values that eager does not repeat")
        if self.names and came.compared_none:
            raise AssertionError(f"compile_contract: no call with a mutation was compared, of {', '.join(self.names)}: "
                                 "the module has no use for them, eager refuses each, or the time was over before "
                                 "the first; choose others, or give more: --compile-fuzz-seconds")

    def _record(self, finding: ContractFinding) -> dict[str, Any]:
        from pytest_torchcompile.contract.script import Shown, written_script

        settings = dict(self.settings)
        if finding.stage:
            settings["backend"] = finding.stage
        # Where the factory puts it.
        device = next((parameter.device.type for parameter in self.factory().parameters()), "cpu")
        shown = Shown(f"{finding.told.kind}: {finding.told.message}", self.factory, self.inputs, self.loss,
                      finding.failing.sequence, settings, self.train, without=finding.without, seed=self.seed,
                      device=device, kind=finding.told.kind, where=finding.told.where)
        return finding_record(finding, (), written_script(shown))


def program_of(data: Mapping[str, Any]) -> Program:
    """The program of a decorated test, in the worker: its file is imported once more there."""
    import torch
    from torch import nn

    from pytest_torchcompile.batch import Batch
    from pytest_torchcompile.contract.history_run import Program

    tested: ContractTest = getattr(getattr(_module_of(data["file"], data["module"]), data["name"]), _ATTRIBUTE)

    def make_model() -> nn.Module:
        # Before each: the same parameters in every process, or comparisons between them mean nothing.
        torch.manual_seed(tested.seed)
        made = tested.factory()
        if not isinstance(made, nn.Module):
            raise UsageError(f"compile_contract: {data['name']} returned {type(made).__name__}; expected a module")
        return made

    def batch(sizes: Mapping[str, int], seed: int) -> Batch:
        torch.manual_seed(seed)
        return Batch.of(tested.inputs(**sizes))

    return Program(make_model, tested.settings, batch, tested.loss, tested.train, tested.seed)


def _module_of(file: str, name: str) -> Any:
    """A test's module, as pytest's import modes may have named it."""
    if name in sys.modules:
        return sys.modules[name]
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"compile_contract: {file} can't be imported")
    module = importlib.util.module_from_spec(spec)
    # Known before it runs: its classes are looked up there.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
