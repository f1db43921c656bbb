"""The gates of the production layer: they pass, and each fails where the layer itself is broken."""

from __future__ import annotations

import pytest
import torch

from pytest_torchcompile import gates
from pytest_torchcompile.cli import main
from pytest_torchcompile.gates import Place, Tried, breaks, fallback, shapes, smoke
from pytest_torchcompile.layer import wrap
from pytest_torchcompile.layer.shape_stabilizer import ShapeStabilizer
from pytest_torchcompile.layer.smoketest import CompileSmoketest, SmoketestResult

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
    assert "left norm.running_mean, the random state changed" in found["error at compile"]


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
