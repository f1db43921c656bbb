"""Pages of ``docs/found``: each script does what its page says, on the versions that it names."""

from __future__ import annotations

import re
import signal
from importlib.metadata import version
from pathlib import Path

import pytest

FOUND = Path(__file__).parents[2] / "docs" / "found"


@pytest.fixture
def run_script(run_python):
    """Runs the script of a page in a process of its own."""

    def run(page):
        script = re.findall(r"```python\n(.*?)```", (FOUND / page).read_text(encoding="utf-8"), re.DOTALL)[0]
        return run_python("-c", script)

    return run


@pytest.mark.needs_torch
def test_groupnorm_ends_the_process(run_script):
    if not version("torch").startswith(("2.12", "2.13")):
        pytest.skip("seen on torch 2.12 and 2.13")
    ended = run_script("groupnorm-channels-last-crash.md")
    assert ended.returncode == -signal.SIGSEGV, ended.stderr


@pytest.mark.needs_torch
def test_draws_of_the_forward_run_twice(run_script):
    if not version("torch").startswith("2.13"):
        pytest.skip("seen on torch 2.13")
    ended = run_script("fallback-random-drawn-twice.md")
    assert ended.stdout.split() == ["aot_eager", "True", "aot_eager_default_partitioner", "False"], ended.stderr


@pytest.mark.needs_torch
def test_gradients_of_attention(run_script):
    if not version("torch").startswith("2.13"):
        pytest.skip("seen on torch 2.13")
    assert run_script("core-aten-attention-gradients.md").stdout.split() == ["False"]


@pytest.mark.slow
@pytest.mark.needs_torch
def test_dropout_behind_a_strided_convolution(run_script):
    if not version("torch").startswith("2.13"):
        pytest.skip("seen on torch 2.13")
    ended = run_script("dropout-behind-strided-convolution.md")
    shape, error = ended.stdout.splitlines()
    assert (shape, error) == ("torch.Size([3, 10, 8])", "ValueRangeError: Invalid ranges [0:-1]"), ended.stderr


_PRINTED = {
    "softshrink-drops-nan.md": "[nan, 0.5] [0.0, 0.5]",
    "grid-sample-nan-position.md": "[nan, 1.0]\n[0.0, 1.0]\n[0.0, 1.0]",
    "max-pool-index-of-nan.md": "[[2]] [[1]]",
    "multilabel-margin-padding.md": "1.25 2.65",
    "remainder-of-large-numbers.md": "2 [2.0, 2147483648.0]\n64 [0.0, nan]",
    "floor-division.md": "[9.0, -1.0, nan] [10.0, -0.0, inf]",
    "times-zero-drops-nan.md": "[nan, nan, 0.0] [0.0, 0.0, 0.0]",
    "acosh-overflows.md": "2 89.3\n64 inf",
    "erfinv-near-one.md": "5.805 5.8054",
    "gelu-of-infinity.md": "nan inf",
    "super-inside-two-contexts.md": "expected len(self.block_stack) == 1 to be true",
    "backward-under-autocast.md": "off right\nsame_as_forward BackendCompilerFailed",
    "linear-interpolation-overflows.md": "True\nFalse",
    "dropout-in-evaluation.md": "True False",
    "margin-losses-drop-nan.md": "False True",
    "bilinear-bytes-off-by-one.md": "8 1 [8, 0]",
    "rrelu-in-evaluation-memory-order.md": "(24, 6, 1) (24, 1, 4)",
    "empty-batch-of-another-dtype.md": "(0, 4, 6, 6)\nTorchRuntimeError",
    "backward-nobody-asks-for.md": "BackendCompilerFailed",
    "infinity-of-float16.md": "inf 1000000.0",
    "bernoulli-in-another-order.md": "False (24, 1, 4) (24, 6, 1)",
}
# Where the processor has no AVX-512: its loops, eager's and compiled, are other code.
_PRINTED_WITH_AVX2 = {
    "remainder-of-large-numbers.md": "2 [0.0, nan]\n64 [0.0, nan]",
    "acosh-overflows.md": "2 inf\n64 inf",
    "gelu-of-infinity.md": "inf inf",
}


def printed_here(page):
    """What a page's script prints on this processor."""
    import torch

    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        return _PRINTED_WITH_AVX2.get(page, _PRINTED[page])
    return _PRINTED[page]


@pytest.mark.needs_torch
@pytest.mark.parametrize("page", _PRINTED)
def test_numbers_of_single_operators(run_script, page):
    """What the page says that its script prints, it prints."""
    if not version("torch").startswith("2.13"):
        pytest.skip("seen on torch 2.13")
    ended = run_script(page)
    printed = printed_here(page)
    assert ended.stdout.strip() == printed, ended.stderr
    for line in printed.splitlines():
        assert f"`{line}`" in (FOUND / page).read_text(encoding="utf-8")


@pytest.mark.needs_torch
def test_a_margin_loss_of_nothing(run_script):
    """What eager reads there may be anything; compiled code gives NaN."""
    if not version("torch").startswith("2.13"):
        pytest.skip("seen on torch 2.13")
    assert run_script("margin-loss-of-nothing.md").stdout.split()[1:] == ["True"]


@pytest.mark.needs_torch
def test_an_unfrozen_parameter(run_script):
    """Torch 2.13 compiles anew, which the page says too."""
    known = {"2.11": "[False, False]", "2.13": "[False, True]"}
    expected = known.get(".".join(version("torch").split(".")[:2]))
    if expected is None:
        pytest.skip("seen on torch 2.11 and 2.13")
    assert run_script("unfrozen-parameters-keep-no-gradient.md").stdout.strip() == expected
    assert f"`{expected}`" in (FOUND / "unfrozen-parameters-keep-no-gradient.md").read_text(encoding="utf-8")


_BY_VERSION = {
    "autocast-dtype-not-in-cache-key.md": {"2.11": "torch.float16\ntorch.float16",
                                           "2.13": "torch.float16\ntorch.bfloat16",
                                           "2.15": "torch.float16\ntorch.bfloat16"},
    "class-change-unseen.md": {"2.11": "False", "2.13": "True", "2.15": "True"},
    "amax-in-half-precision.md": {"2.11": "0\n72", "2.13": "0\n0", "2.15": "0\n0"},
    "batch-norm-of-infinity.md": {"2.11": "inf nan", "2.13": "inf nan"},
}


@pytest.mark.needs_torch
@pytest.mark.parametrize("page", _BY_VERSION)
def test_what_some_versions_have(run_script, page):
    """The page says what each version prints."""
    expected = _BY_VERSION[page].get(".".join(version("torch").split(".")[:2]))
    if expected is None:
        pytest.skip(f"seen on torch {', '.join(_BY_VERSION[page])}")
    ended = run_script(page)
    assert ended.stdout.strip() == expected, ended.stderr
    for line in expected.splitlines():
        assert f"`{line}`" in (FOUND / page).read_text(encoding="utf-8")


@pytest.mark.needs_torch
@pytest.mark.parametrize(("page", "expected"), [
    ("interpolate-under-autocast.md", "torch.float32 torch.bfloat16"),
    ("interpolate-memory-order.md", "(2240, 1, 112, 4) (2240, 560, 28, 1)"),
])
def test_interpolation_on_a_gpu(run_script, page, expected):
    import torch

    assert f"`{expected}`" in (FOUND / page).read_text(encoding="utf-8")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if not version("torch").startswith("2.11"):
        pytest.skip("seen on torch 2.11")
    assert run_script(page).stdout.strip() == expected


@pytest.mark.needs_torch
def test_attention_of_an_empty_batch(run_script):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if not version("torch").startswith("2.11"):
        pytest.skip("seen on torch 2.11")
    printed = run_script("attention-of-an-empty-batch.md").stdout.splitlines()
    assert printed[1] == "query: last dimension must be contiguous"


def test_the_index_has_every_page():
    index = (FOUND / "index.md").read_text(encoding="utf-8")
    pages = {path.name for path in FOUND.glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\(([^)]+\.md)\)", index)) == pages
