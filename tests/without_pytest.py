"""Run by `tox -e layer`, where pytest is not installed: the parts that are no plugin work without it."""

import logging
from importlib import import_module
from importlib.util import find_spec

if find_spec("pytest") is not None:
    raise SystemExit("pytest is installed: this proves nothing")

import torch

from pytest_torchcompile import BucketConfig, CompileConfig, CompileSmoketest, ShapeStabilizer, maybe_compile
from pytest_torchcompile.ledger import observe

for name in ("ledger", "gauges", "state", "oracle", "plan.matrix", "ranks.rank", "run.runner", "zoo", "run.verdicts"):
    import_module(f"pytest_torchcompile.{name}")


def demand(holds: bool, what: str) -> None:
    """End with what is wrong."""
    if not holds:
        raise SystemExit(what)


class Records(logging.Handler):
    """The results that the layer has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the result."""
        self.results.append(record.torchcompile["result"])  # type: ignore[attr-defined]


def refuses(graph, inputs):
    """A backend that compiles nothing."""
    raise RuntimeError("planted")


def layer() -> None:
    """A model that works, one that does not, one that fails later; each as promised, each logged."""
    logger, records, x = logging.getLogger("without_pytest"), Records(), torch.ones(3, 4)
    logger.setLevel(logging.INFO)
    logger.addHandler(records)
    logger.propagate = False
    torch.manual_seed(0)  # one model in sixteen has four dead units: nothing but zeros proves nothing
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    expected = model(x)
    demand(maybe_compile(model, CompileConfig(), logger, x) is model, "disabled, and not the same object")
    good = maybe_compile(model, CompileConfig(enabled=True, backend="aot_eager"), logger, x)
    demand(good is not model and torch.allclose(good(x), expected), "a model that works was not compiled")
    demand(list(good.state_dict()) == list(model.state_dict()), "the keys of state_dict changed")
    demand(CompileSmoketest(1).run(good, x), "the smoketest fails")
    bad = CompileConfig(enabled=True, backend=refuses)
    demand(maybe_compile(model, bad, logger, x) is model, "a model that does not compile was not returned itself")
    demand(torch.equal(maybe_compile(model, bad, logger)(x), expected), "it did not fall back in its first call")
    demand(records.results == ["compiled", "fallback_eager", "deferred", "fallback_eager"], f"{records.results}")
    padded = ShapeStabilizer(buckets=BucketConfig((8,))).bucket_batch(torch.ones(2, 3, dtype=torch.int64))
    demand(padded.shape == (2, 8), "a batch was not padded")


with observe() as seen:
    torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.ones(3))
demand(bool(seen.graphs and seen.graphs[0].runs), "nothing was compiled")
layer()
print("without pytest: ok")
