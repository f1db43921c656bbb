"""The gates of the production layer: they pass, and each fails where the layer itself is broken."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from pytest_torchcompile import gates
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.checks import load
from pytest_torchcompile.cli import main
from pytest_torchcompile.gates import Place, Tried, breaks, fallback, shapes, smoke
from pytest_torchcompile.layer import wrap
from pytest_torchcompile.layer.shape_stabilizer import ShapeStabilizer
from pytest_torchcompile.layer.smoketest import CompileSmoketest, SmoketestResult
from pytest_torchcompile.observation import Job, Observation
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.run.runner import run_cell

pytestmark = pytest.mark.needs_torch
CPU = Place()


def wrong(tried):
    """What a gate found wrong, by the name of what it tried."""
    return {trial.name: trial.wrong for trial in tried(CPU) if trial.wrong}


@pytest.fixture
def quick(monkeypatch):
    """Without the process of its own, which has a test of its own."""
    monkeypatch.setattr(fallback, "_own_process", lambda: "")


# the gates can pass


def test_all_pass(quick):
    """With the layer as it is nothing is wrong, and every break was tried."""
    tried = {gate: list(gate.tried(CPU)) for gate in (fallback, smoke, shapes)}
    assert [trial.wrong for trials in tried.values() for trial in trials if trial.wrong] == []
    assert {each.name for each in breaks.BREAKS if not each.late} <= {trial.name for trial in tried[smoke]}
    assert tried[fallback]
    assert tried[shapes]


def test_a_compiler_that_ends_its_process():
    """It costs the one cell its verdict, and the next cell runs."""
    assert fallback._own_process() == ""


# and fail


def test_a_layer_that_returns_the_compiled_model_anyway(quick, monkeypatch):
    """maybe_compile that tries nothing: every break is seen."""
    monkeypatch.setattr(wrap, "maybe_compile", lambda model, cfg, *_: torch.compile(model, **cfg.settings()))
    with pytest.raises(Exception, match=r"unsupported|planted|graph break"):
        wrong(fallback.tried)
    outcome = next(iter(gates.run(CPU)))
    assert (outcome.gate, outcome.ok) == ("safe_fallback", False)


def test_a_layer_that_does_not_look_for_wrong_numbers(quick, monkeypatch):
    """A smoketest that says True of all: wrong results and gradients go through."""
    def trusting(self, *_):
        self.last_result = SmoketestResult(True, "")
        return True

    monkeypatch.setattr(CompileSmoketest, "run", trusting)
    found = wrong(fallback.tried)
    assert {"wrong result", "wrong gradient"} <= found.keys()
    assert set(wrong(smoke.tried)) == {each.name for each in breaks.BREAKS if not each.late} | {
        "not compiled", "nothing left to compile"}


def test_a_layer_that_says_no_to_everything(monkeypatch):
    """A smoketest that says False of all: what works is refused."""
    def refusing(self, *_):
        self.last_result = SmoketestResult(False, "no", "forward")
        return False

    monkeypatch.setattr(CompileSmoketest, "run", refusing)
    assert set(smoke.HEALTHY) <= wrong(smoke.tried).keys()


def test_a_layer_that_leaves_state_changed(quick, monkeypatch):
    """An attempt that has moved running statistics or the random state."""
    original = wrap.maybe_compile

    def careless(model, cfg, logger, sample=None):
        if sample is not None:
            model.norm.running_mean.add_(1)
            torch.rand(1)
        return original(model, cfg, logger, sample)

    monkeypatch.setattr(wrap, "maybe_compile", careless)
    found = wrong(fallback.tried)
    assert found["error at compile"] == "the attempt left norm.running_mean, the random state changed"

    # What is returned instead does not hide what was changed.
    monkeypatch.setattr(wrap, "maybe_compile", lambda *args: copy.deepcopy(careless(*args)))
    found = next(trial.wrong for trial in fallback.tried(CPU) if trial.name == "error at compile")
    assert found == ("the attempt left norm.running_mean, the random state changed; "
                     "maybe_compile did not return the model itself")


@pytest.mark.parametrize(("method", "planted"), [
    ("bucket_batch", lambda self, batch, names=(): batch),
    ("unpad", lambda self, padded, batch, dim=1: padded),
])  # fmt: skip
def test_a_layer_that_does_not_pad(monkeypatch, method, planted):
    """Lengths that stay as they are, and padding that stays on."""
    monkeypatch.setattr(ShapeStabilizer, method, planted)
    first = next(shapes.tried(CPU))
    assert first.name == "boundaries"
    assert first.wrong


def test_a_gate_that_raises_or_tries_nothing_has_failed(monkeypatch):
    """One line says so; nothing tried is no pass."""
    def raising(place):
        yield Tried("first")
        raise KeyError("planted")

    monkeypatch.setattr(fallback, "tried", raising)
    monkeypatch.setattr(smoke, "tried", lambda place: iter(()))
    monkeypatch.setattr(shapes, "tried", lambda place: iter([Tried("a"), Tried("b", "is\nwrong")]))
    lines = [str(outcome) for outcome in gates.run(CPU)]
    assert lines[0].startswith("FAIL  safe_fallback    1 of ")
    assert "the gate itself: KeyError: 'planted' (raising:" in lines[0]
    assert lines[1].startswith("FAIL  smoketest        nothing was tried (")
    assert lines[2].startswith("FAIL  shape_stability  1 of 2 failed: b: is wrong (")


# the check safe_fallback of a cell


class Normed(nn.Module):
    """With statistics that an attempt could leave changed."""

    def __init__(self):
        super().__init__()
        self.line, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(self.line(x))


def six_columns():
    return torch.randn(4, 6)


def said_of_fallback():
    """What the check says of a cell: the messages of its problems."""
    entry = ModelEntry("model", f"{__name__}:Normed", f"{__name__}:six_columns")
    job = Job(Cell(model="model", backend="aot_eager").to_dict(), entry.to_dict(), str(Path.cwd()), ("safe_fallback",))
    section = Observation.from_dict(run_cell(job)[0]).sections["safe_fallback"]
    return [problem.message for problem in load("safe_fallback").judge(section, {})]


def test_a_cell_of_a_sound_layer():
    """Nothing is said of it."""
    assert said_of_fallback() == []


def test_wrong_numbers_are_told_where_no_outage_was_met(monkeypatch):
    """A layer that answers with other results, and has asked no compiler."""
    original = wrap.maybe_compile

    def wrong_without_sample(model, cfg, logger, sample=None):
        if sample is not None:
            return original(model, cfg, logger, sample)
        return lambda x: model(x) * 1.001

    monkeypatch.setattr(wrap, "maybe_compile", wrong_without_sample)
    told = said_of_fallback()
    assert told[0].startswith("without a fallback, output: error is ")
    assert told[-1] == "nothing was proven: the model met no outage, because nothing of it was to be compiled"


def test_changed_state_is_told_of_an_attempt_that_raises(monkeypatch):
    """The exception is told behind it."""
    def careless(model, cfg, logger, sample=None):
        model.norm.running_mean.add_(1)
        raise RuntimeError("planted")

    monkeypatch.setattr(wrap, "maybe_compile", careless)
    changed, raised = said_of_fallback()
    assert changed.startswith("the attempt left ")
    assert raised == "maybe_compile let a failure of the compiler through: RuntimeError: planted"


# the command


@pytest.mark.parametrize(("bad", "code"), [("", 0), ("is wrong", 1)])
def test_the_command(monkeypatch, capsys, bad, code):
    """One line a gate, exit code 0 or 1; device and backend are handed on."""
    asked = []

    def tried(place):
        asked.append(place)
        yield Tried("a", bad)

    for module in (fallback, smoke, shapes):
        monkeypatch.setattr(module, "tried", tried)
    assert main(["gates"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["FAIL" if bad else "pass", gate] for gate in ("safe_fallback", "smoketest", "shape_stability")]
    main(["gates", "--device", "meta"])
    main(["gates", "--backend", "eager"])
    capsys.readouterr()
    assert main(["gates", "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert (told["exit_code"], told["device"], told["backend"]) == (code, "cpu", "aot_eager")
    assert [(each["gate"], each["ok"]) for each in told["gates"]] == [
        (gate, not bad) for gate in ("safe_fallback", "smoketest", "shape_stability")]
    assert [asked[0], asked[3], asked[6]] == [Place(), Place("meta", "inductor"), Place("cpu", "eager")]


def test_a_device_that_is_not_here(capsys):
    """It is a mistake of the call, and no gate has failed."""
    assert main(["gates", "--device", "cuda:99"]) == 4
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"--device cuda:99: torch {torch.__version__} can't use it here: ")


def test_a_backend_that_torch_does_not_know(capsys):
    """Every planted failure would fail with it, and prove nothing."""
    assert main(["gates", "--backend", "inducter"]) == 4
    out, err = capsys.readouterr()
    assert not out
    assert "--backend 'inducter' is no backend of torch" in err
    assert "did you mean 'inductor'?" in err


# torch's own planted faults, in the real Inductor


@pytest.mark.slow
def test_torchs_own_faults_in_inductor():
    """What does not compile, raises or is wrong in Inductor's own kernels is refused, and falls back."""
    from pytest_torchcompile.gates.breaks import injected_breaks
    from pytest_torchcompile.state.torch_state import isolated

    place, seen = Place(backend="inductor"), []
    for broken, around in injected_breaks(place):
        seen.append(broken.name)
        with isolated([]), around:
            assert fallback._before_use(broken, place) == ""
        with around:
            assert smoke._break_not_refused(broken, place) == ""
    assert seen == ["Inductor's compile_error", "Inductor's runtime_error", "Inductor's accuracy"]
