"""Torch alone: a test that needs torch and the user's module, and nothing of ours. Pure text, no torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LONE_IMPORTS", "LoneTest", "lone_test_text"]

LONE_IMPORTS = ("import copy", "import dataclasses", "import random", "from collections.abc import Mapping")
"""What the text needs besides torch and ``sys``."""

_PARTS = '''

def seed_all(seed):
    """The random numbers of Python, NumPy and torch: a model may draw from each."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)


def move(value, device=DEVICE, dtype=DTYPE):
    """A copy on the device; floating tensors change their dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype if value.is_floating_point() else value.dtype, copy=True)
    if isinstance(value, Mapping):
        return {name: move(item) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(move(item) for item in value)
    return value


def call(model, batch):
    if isinstance(batch, Mapping):
        return model(**batch)
    if type(batch) not in (tuple, list):
        return model(batch)
    if len(batch) == 2 and type(batch[0]) in (tuple, list) and isinstance(batch[1], Mapping):
        return model(*batch[0], **batch[1])
    return model(*batch)


def tensors(output, name="output"):
    """The tensors of an output by name, in order."""
    if isinstance(output, torch.Tensor):
        return {name: output}
    if isinstance(output, Mapping):
        parts = {f"{name}.{key}": part for key, part in output.items()}
    elif dataclasses.is_dataclass(output):
        parts = {f"{name}.{field.name}": getattr(output, field.name) for field in dataclasses.fields(output)}
    elif isinstance(output, (tuple, list)):
        parts = {f"{name}[{place}]": part for place, part in enumerate(output)}
    else:
        parts = {}
    found = {}
    for key, part in parts.items():
        found.update(tensors(part, key))
    return found
'''

_MEAN_SQUARE = '''

def mean_square(output):
    """Of all floating outputs. The weights are there because a normalised output's own mean square is constant."""
    total = 0.0
    for tensor in tensors(output).values():
        if tensor.is_floating_point() and tensor.numel():
            weights = torch.linspace(0.5, 1.5, tensor.numel(), device=tensor.device).view(tensor.shape)
            # One masked logit would make every gradient NaN.
            finite = tensor.float().nan_to_num(0.0, 0.0, 0.0)
            total = total + (finite.square() * weights).mean()
    return total
'''

_FOR_LOSS = '''

def for_loss(batch):
    """A dict that is the only argument is what the loss is given."""
    is_one = type(batch) in (tuple, list) and len(batch) == 1
    return batch[0] if is_one and isinstance(batch[0], Mapping) else batch
'''

_INFERENCE = '''

def run(model, batch, seed):
    """Every output, by name."""
    seed_all(seed)
    with torch.no_grad():
        return tensors(call(model, move(batch)))
'''

_TRAINING = '''

def run(model, batch, seed):
    """Every output and gradient, by name."""
    model.zero_grad()
    batch = move(batch)
    seed_all(seed)
    output = call(model, batch)
    results = {name: tensor.detach().clone() for name, tensor in tensors(output).items()}
    loss = LOSS_OF_OUTPUT
    # Whole numbers have no gradients.
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            # torch.compile puts a name of its own in front.
            results["gradient of " + name.removeprefix("_orig_mod.")] = parameter.grad.clone()
    return results
'''


@dataclass(frozen=True)
class LoneTest:
    """What the test is made of, each as Python source."""

    name: str
    """The test's, without ``test_``."""
    model: str
    """What makes the model, on its device, in its dtype and its mode."""
    inputs: str
    """The function that makes a batch of sizes."""
    loss: str
    """The function of output and batch; empty for the mean square."""
    is_training: bool
    backend: str
    """An expression: a name in quotes, or a function."""
    mode: str
    dynamic: bool | None


def lone_test_text(test: LoneTest) -> str:
    """The helpers and the test, as they stand in a file that has ``DEVICE``, ``DTYPE`` and ``SIZES``."""
    if not test.is_training:
        return "".join([_PARTS, _INFERENCE, _test(test)])
    loss, helper = "mean_square(output)", _MEAN_SQUARE
    if test.loss:
        loss, helper = f"{test.loss}(output, for_loss(batch))", _FOR_LOSS
    return "".join([_PARTS, helper, _TRAINING.replace("LOSS_OF_OUTPUT", loss), _test(test)])


def _test(test: LoneTest) -> str:
    settings = f"backend={test.backend}, mode={test.mode!r}, dynamic={test.dynamic!r}"
    lines = [
        "", "",
        f"def test_{test.name}_with_torch_alone():",
        '    """By torch.testing\'s tolerances, which may be coarser or finer than what found it."""',
        "    torch._inductor.config.fallback_random = True  # Inductor draws the random numbers that eager draws",
        "    seed_all(0)",
        f"    model = {test.model}",
        f"    compiled = torch.compile(copy.deepcopy(model), {settings})",
        "    for seed, sizes in enumerate(SIZES):",
        "        seed_all(seed)",
        f"        batch = {test.inputs}(**sizes)",
        "        expected, actual = run(model, batch, seed), run(compiled, batch, seed)",
        "        assert actual.keys() == expected.keys()",
        "        for name, tensor in expected.items():",
        "            print(name, 'at', sizes)  # pytest shows the last one where the next line fails",
        "            torch.testing.assert_close(actual[name], tensor, equal_nan=True)",
    ]
    return "\n".join(lines) + "\n"
