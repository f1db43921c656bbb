"""The fast path of torch's attention modules is tried as the cause before its switch is advised."""

from __future__ import annotations

import pytest
import torch

from pytest_torchcompile import CompileConfig
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.layer.equivalence import compare
from pytest_torchcompile.oracle.calls import Call, Side, TrialOptions
from pytest_torchcompile.oracle.fast_path import SWITCH
from pytest_torchcompile.oracle.torch_hints import try_hints
from pytest_torchcompile.oracle.trial import Trial
from pytest_torchcompile.state.torch_state import isolated

pytestmark = pytest.mark.needs_torch
EAGER = CompileConfig(enabled=True, backend="eager")


class Padded(torch.nn.Module):
    """Eager makes nested tensors of it in evaluation, and zeros at padded positions; what Dynamo captures does not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 1)

    def forward(self, x):
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[0, 3:] = True
        return self.encoder(x, src_key_padding_mask=padding)


class WrongBeside(Padded):
    """Wrong for another reason too, so that the switch mends nothing."""

    def forward(self, x):
        return super().forward(x) + 1e-2 * torch.compiler.is_compiling()


class Breaks(Padded):
    """A break that stands for those of versions of torch that have no fake kernel of the operator."""

    def forward(self, x):
        if torch.backends.mha.get_fastpath_enabled():
            torch._dynamo.graph_break()
        return x * 2


def compared(model, train=False):
    return compare(model.eval(), [torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))], EAGER,
                   train=train)


def test_numbers_that_the_switch_mends():
    """The advice says what was tried, and what else changes; and the switch is left as it was."""
    model = Padded()
    found = compared(model)
    assert not found.ok
    assert found.stages.endswith(
        f"\n{SWITCH}, called where the model is made, was tried: compiled code agrees with eager with it. Torch's "
        "attention modules then run the same operators in evaluation as in training; eager's outputs at padded "
        "positions, which the fast path leaves zero, are computed then")
    assert torch.backends.mha.get_fastpath_enabled()


def test_what_else_changes(monkeypatch):
    """As the advice says: eager's outputs at padded positions alone, by more than rounding."""
    model, x = Padded().eval(), torch.randn(2, 5, 8)
    with torch.no_grad():
        fast = model(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            plain = model(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert not fast[0, 3:].any()
    assert plain[0, 3:].abs().min() > 0
    torch.testing.assert_close(fast[0, :3], plain[0, :3])
    torch.testing.assert_close(fast[1], plain[1])


@pytest.mark.parametrize(("model", "train"), [(WrongBeside, False), (Padded, True)], ids=["wrong beside", "training"])
def test_no_advice_that_does_not_help(model, train):
    """Of what is wrong for another reason, or where nothing is wrong, the switch is not spoken of."""
    found = compared(model(), train)
    assert found.ok == train
    assert SWITCH not in found.stages


def hint_tried(graph_break):
    """What is said of a break of ``Breaks``."""
    model = Breaks().eval()

    def make(settings):
        return Side(model if settings is None else torch.compile(model, **settings), model)

    trial = Trial(make, model, {"backend": "eager"}, [Call(0, Batch.of(torch.ones(2, 5, 8)), {})],
                  TrialOptions(train=False))
    with isolated([]):
        trial.run()
        (found,) = trial.compiled.seen["graph_breaks"]
        return try_hints(trial, [found | graph_break])


def test_a_graph_break_at_an_operator_of_it():
    told = hint_tried({"reason": "Unsupported: aten._transformer_encoder_layer_fwd.default has no fake kernel"})
    assert told == {0: f"{SWITCH}, called where the model is made, was tried: this break is gone with it"}
    assert hint_tried({"reason": "Call to torch._dynamo.graph_break()"}) == {}
