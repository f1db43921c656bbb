"""What a new user's model takes is found out by trying: inputs, sizes, and whether it trains."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from pytest_torchcompile.adoption import LIBRARIES
from pytest_torchcompile.adoption.examination import examine
from pytest_torchcompile.adoption.example_inputs import ExampleTensor, batch
from pytest_torchcompile.errors import UsageError

pytestmark = pytest.mark.needs_torch
MODELS = """
import dataclasses

import torch
from torch import nn


class Features(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layer = nn.Linear(12, width)

    def forward(self, x):
        return self.layer(x)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, idx, targets=None):
        return self.head(self.embed(idx))


class Positions(Tokens):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 30, 8))

    def forward(self, idx):
        return self.head(self.embed(idx) + self.position)


@dataclasses.dataclass
class Scores:
    logits: torch.Tensor


class Recorded(Features):
    def forward(self, x):
        return Scores(self.layer(x))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Conv2d(1, 4, 5), nn.Linear(4 * 24 * 24, 3)

    def forward(self, pictures):
        return self.head(self.layer(pictures).flatten(1))


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.numbers = nn.Embedding(50, 8), nn.Linear(12, 8)

    def forward(self, words, numbers):
        return self.words(words).mean(1) + self.numbers(numbers)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x):
        return self.layer(x)


class Masked(Tokens):
    def forward(self, idx, mask):
        return self.head(self.embed(idx) * mask.unsqueeze(-1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(10, 6)

    def forward(self, x):
        return self.layer(x)[0]


class Sound(nn.Module):
    # Of 400 samples its layer leaves one step.

    def __init__(self):
        super().__init__()
        self.front, self.norm = nn.Conv1d(1, 4, 400, stride=160), nn.LayerNorm(4)

    def forward(self, wave, lengths=None, gain: float = 1.0):
        h = self.norm(self.front(wave[:, None]).mT * gain)
        if lengths is not None:
            h = h * (torch.arange(h.shape[1]) < lengths[:, None])[..., None]
        return h


class Nodes(Features):
    def forward(self, x, edge_index):
        source, target = edge_index
        h = super().forward(x)
        return {"nodes": h + torch.zeros_like(h).index_add(0, target, h[source])}


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(4)

    def forward(self, x):
        return self.layer(x)


class NoGradient(Tokens):
    def forward(self, idx):
        return super().forward(idx).argmax(-1)


class OneSample(Features):
    def forward(self, x):
        if len(x) != 4:
            raise ValueError("four, please")
        return super().forward(x)


class Half(Features):
    def __init__(self):
        super().__init__()
        self.bfloat16()


class Graphs(nn.Module):
    def forward(self, graph, edges):
        return graph.nodes[edges]


class Needs(nn.Module):
    def __init__(self, width, depth):
        super().__init__()


class Many(nn.Module):
    def forward(self, *tensors):
        return tensors[0]


class Nothing(nn.Module):
    def forward(self):
        return torch.ones(2)


class Silent(Features):
    def forward(self, x):
        return "no tensor"


class Breaks(nn.Module):
    def __init__(self):
        raise OSError("no such weights")


made = nn.Linear(2, 3)


def number():
    return 3


def rows(B, S=5):
    return torch.randn(B, 12)


def pictures(B, H, W):
    return torch.randn(B, 1, 28, 28)


def waves(B, samples):
    return torch.randn(B, samples)


def wrong(B):
    return torch.randn(B, 13)
"""


@pytest.fixture
def examined(tmp_path, request):
    """A function that examines a model of the file above."""
    name = f"models_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(MODELS)

    def look(model: str, inputs: str = "", **changes):
        asked = {"root": str(tmp_path), "factory": f"{name}:{model}", "inputs": inputs and f"{name}:{inputs}",
                 "arguments": {}, "dims": {}, "where": "init", "where_inputs": "--inputs",
                 "factory_option": "by --factory module:function", "inputs_option": "--inputs module:function",
                 "libraries": LIBRARIES, **changes}
        return examine(asked)

    def error(*args, **changes) -> str:
        with pytest.raises(UsageError) as caught:
            look(*args, **changes)
        return str(caught.value).replace(name, "models")

    look.error, look.module = error, name
    return look


@pytest.mark.parametrize(("model", "tensors", "dims", "phase"), [
    ("Features", {"x": "float32[B, 12]"}, {"B": [4, 6, 10]}, "training"),
    ("Tokens", {"idx": "int64[B, S] 3..49"}, {"B": [4, 6, 10], "S": [12, 20, 28]}, "training"),
    ("Recorded", {"x": "float32[B, 12]"}, {"B": [4, 6, 10]}, "training"),
    ("Positions", {"idx": "int64[B, S] 3..49"}, {"B": [4, 6, 10], "S": [30]}, "training"),
    ("Images", {"pictures": "float32[B, 1, 28, 28]"}, {"B": [6, 7, 10]}, "training"),
    ("Towers", {"words": "int64[B, S] 3..49", "numbers": "float32[B, 12]"},
     {"B": [4, 6, 10], "S": [18, 20, 28]}, "training"),
    ("Attends", {"x": "float32[B, S, 8]"}, {"B": [4, 6, 10], "S": [12, 20, 28]}, "training"),
    ("Masked", {"idx": "int64[B, S] 3..49", "mask": "int64[B, S] ones"},
     {"B": [4, 6, 10], "S": [12, 20, 28]}, "training"),
    ("Recurrent", {"x": "float32[S, B, 10]"}, {"B": [4, 5, 7], "S": [12, 20, 28]}, "training"),
    ("Sound", {"wave": "float32[B, S]"}, {"B": [5, 6, 7], "S": [2048, 3072, 4096]}, "training"),
    ("Nodes", {"x": "float32[B, 12]", "edge_index": "int64[2, E] 0..3"}, {"B": [4, 6, 10], "E": [18, 20, 28]},
     "training"),
    ("Lazy", {"x": "float32[B, 16]"}, {"B": [5, 6, 10]}, "training"),
    ("NoGradient", {"idx": "int64[B, S] 3..49"}, {"B": [4, 6, 10], "S": [12, 20, 28]}, "inference"),
    ("Half", {"x": "float32[B, 12]"}, {"B": [4, 6, 10]}, "training"),
    ("OneSample", {"x": "float32[B, 12]"}, {"B": [4]}, "training"),
])
def test_inputs_are_guessed(examined, model, tensors, dims, phase):
    """From the first layers, tried on the model; no size is that of a parameter where that can be avoided."""
    answer = examined(model)
    assert answer["tensors"] == tensors
    assert answer["phase"] == phase
    assert set(answer["dims"]) == set(dims)
    for name, sizes in dims.items():
        assert len(answer["dims"][name]) == len(sizes)
        if len(sizes) == 1:
            assert answer["dims"][name] == sizes


def test_lengths_of_sound(examined):
    """Short ones raise: longer ones are tried, with room for more than one step; also of named inputs."""
    assert examined("Sound")["dims"]["S"] == [2048, 3072, 4096]
    assert examined("Sound", "waves")["dims"]["samples"] == [2048, 3072, 4096]


def test_optional_arguments_are_left_out(examined):
    """Those that a guess does not give are told, in order; where the user has named the inputs, nothing is."""
    assert examined("Sound")["left_out"] == ["lengths", "gain"]
    assert examined("Tokens")["left_out"] == ["targets"]
    assert examined("Features")["left_out"] == []
    assert examined("Sound", "waves")["left_out"] == []


def test_sizes_are_no_sizes_of_parameters(examined):
    """Torch takes equal sizes for one symbol; and no two dims have equal ones."""
    dims = examined("Towers")["dims"]
    assert {8, 12, 50}.isdisjoint(dims["B"] + dims["S"])
    assert set(dims["B"]).isdisjoint(dims["S"])


@pytest.mark.parametrize(("inputs", "dims"), [("rows", {"B"}), ("pictures", {"B", "H", "W"})])
def test_inputs_that_are_named(examined, inputs, dims):
    """Their parameters without a default are the dims."""
    answer = examined({"rows": "Features", "pictures": "Images"}[inputs], inputs)
    assert answer["tensors"] == {}
    assert set(answer["dims"]) == dims


@pytest.mark.parametrize(("given", "expected"), [
    (["Needs"], "init: models:Needs takes width, depth, without a default; write a function without arguments that "
                "makes one, and name it by --factory module:function"),
    (["made"], "init: models:made is a module that is made already; name its class, or a function that makes one"),
    (["number"], "init: models:number made an object of type int; expected a torch.nn.Module (wrap a function in one)"),
    (["Many"], "init: forward of models:Many has arguments without names, so its inputs can't be guessed; write a "
               "function that returns a batch, and name it by --inputs module:function"),
    (["Nothing"], "init: forward of models:Nothing takes no argument, so there is nothing to guess; write a function "
                  "that returns a batch, and name it by --inputs module:function"),
])
def test_what_cannot_be_examined(examined, given, expected):
    """One sentence each, with what to do."""
    assert examined.error(*given) == expected


def test_errors_of_the_model_are_told(examined):
    """With the place in the user's file."""
    assert examined.error("Breaks").startswith("init: models:Breaks raised OSError: no such weights (models.py:")
    text = examined.error("Graphs")
    assert text.startswith("init: no inputs could be guessed for models:Graphs, whose forward is (graph, edges); write "
                           "a function that returns a batch, and name it by --inputs module:function (")
    assert "the first, graph: float32[B, 16], edges: float32[B, 16]: AttributeError: 'Tensor' object has no" in text
    assert "without a tensor in it" in examined.error("Silent")
    assert examined.error("Features", "wrong").startswith(
        "--inputs: models:Features does not take what models:wrong returns: RuntimeError: mat1 and mat2")


def test_a_model_of_a_library_needs_its_configuration(examined):
    """`init --from` makes one; of a library that it does not know nothing is said."""
    assert examined.error("Needs", libraries=[examined.module]) == (
        "init: models:Needs takes width, depth; `pytest-torchcompile init --from models:Needs` makes a tiny one with "
        "random weights")
    assert "--from" not in examined.error("Needs")


@pytest.mark.parametrize("text", ["float32[B, 16]", "int64[B, S] 0..99", "int64[B, S] ones", "bool[S, S] ones",
                                  "float32[B]", "float32[]"])
def test_example_tensors(text):
    """As a text, as code and as a tensor they are the same."""
    tensor = ExampleTensor.read("x", text)
    assert str(tensor) == text
    made = tensor.tensor({"B": 2, "S": 3})
    coded = eval(tensor.code(), {"torch": torch, "B": 2, "S": 3})
    assert (made.shape, made.dtype) == (coded.shape, coded.dtype)
    assert list(made.shape) == [{"B": 2, "S": 3}.get(size, size) for size in tensor.shape]


def test_a_batch_of_texts_and_sizes():
    """Numbers are sizes, texts are inputs; drawn again they differ, with the same seed they don't."""
    torch.manual_seed(1)
    made = batch(B=3, x="float32[B, 4]", ids="int64[B] 5..6", lengths="default")
    assert list(made) == ["x", "ids"]
    assert made["x"].shape == (3, 4)
    assert set(made["ids"].tolist()) <= {5, 6}
    torch.manual_seed(1)
    assert torch.equal(batch(B=3, x="float32[B, 4]")["x"], made["x"])


@pytest.mark.parametrize(("given", "expected"), [
    ({"x": "float64[B]"}, "input 'x': 'float64[B]' is no tensor; expected a text such as 'float32[B, 16]' or "
                          "'int64[B, S] 0..99'"),
    ({"x": "float32[B, Q]", "B": 2}, "input 'x': float32[B, Q] names the dim 'Q', which has no size; add it to dims"),
])
def test_mistakes_in_texts(given, expected):
    """A matrix may be edited by hand."""
    with pytest.raises(UsageError) as caught:
        batch(**given)
    assert str(caught.value) == expected


def test_lazy_layers_are_not_measured():
    """A parameter without a shape has no sizes."""
    from pytest_torchcompile.adoption.guesses import sizes_of_parameters

    assert sizes_of_parameters(nn.Sequential(nn.LazyLinear(3), nn.Linear(5, 2))) == [2, 5]


class Sizes:
    """A configuration as transformers has them."""

    model_type = "toy"
    sub_configs = types.MappingProxyType({})

    def __init__(self):
        self.hidden_size, self.num_hidden_layers, self.vocab_size, self.use_cache = 768, 12, 30_000, True
        self.eos_token_id, self.intermediate_size = 29_999, 48


class Both:
    """A configuration of two parts."""

    model_type = "toys"
    sub_configs = types.MappingProxyType({"text_config": Sizes})


def test_small_configurations():
    """Sizes that are known and larger are made small, tokens put inside of the vocabulary, also in parts."""
    from pytest_torchcompile.adoption.library_models import small_settings

    small = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 2, "use_cache": False}
    assert small_settings(Sizes) == small
    assert small_settings(Both) == {"text_config": small}


def test_code_of_library_models():
    """Each is a function `model`; what it calls is the library's."""
    from pytest_torchcompile.adoption.library_models import LibraryModel

    for library, wanted, expected in (
        ("transformers", "BertModel", "    return BertModel(config)"),
        ("diffusers", "UNet2DModel", "    return UNet2DModel("),
        ("timm", "resnet18", "    return timm.create_model("),
        ("torchvision", "resnet18", "    made = torchvision.models.resnet18("),
    ):
        code = LibraryModel(library, wanted, {"num_classes": 7}).code
        compile(code, "code", "exec")
        assert "def model():\n" in code
        assert expected in code
        assert "        num_classes=7,\n" in code
