"""The options of fuzzing, as typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.fuzz.fuzz_options import FuzzOptions


def test_as_typed(tmp_path):
    """Text becomes numbers; the database is Hypothesis' own folder."""
    options = FuzzOptions.read("7", "1.5", "12", tmp_path)
    assert (options.examples, options.seconds, options.seed) == (7, 1.5, 12)
    options.database().save(b"key", b"value")
    assert (tmp_path / ".hypothesis" / "examples").is_dir()
    assert FuzzOptions.read("7", "1", "0", None).database() is None


@pytest.mark.parametrize(("typed", "matrix", "seconds"), [
    ("", None, 60.0), ("", 20.0, 20.0), ("5", 20.0, 5.0), ("5", None, 5.0),
])
def test_how_long_a_cell_is_fuzzed(tmp_path, typed, matrix, seconds):
    """What was typed, else what the matrix says, else a minute."""
    options = FuzzOptions.read("30", typed, "0").of_cells(matrix, tmp_path)
    assert options.budget().seconds == seconds
    assert options.root == str(tmp_path)


@pytest.mark.parametrize(("given", "message"), [
    (("0", "1", "0"), "--compile-fuzz-examples: '0' is not a number of sequences above 0, for example 30"),
    (("1.5", "1", "0"), "--compile-fuzz-examples: '1.5' is not a number of sequences"),
    (("1", "soon", "0"), "--compile-fuzz-seconds: 'soon' is not a number of seconds above 0, for example 60"),
    (("1", "inf", "0"), "--compile-fuzz-seconds: 'inf'"),
    (("1", "1", "-3"), "--compile-fuzz-seed: '-3' is no seed; expected a whole number, or random"),
])
def test_what_is_no_number(given, message):
    """A bad value is named with its option."""
    with pytest.raises(UsageError) as error:
        FuzzOptions.read(*given, Path())
    assert message in str(error.value)


def test_settings_of_torch():
    typed = "torch._dynamo.config.recompile_limit=9, torch._functorch.config.cse=False,"
    options = FuzzOptions.read("1", "1", "0", None, typed)
    assert options.settings == ("torch._dynamo.config.recompile_limit=9", "torch._functorch.config.cse=False")
    assert FuzzOptions(**options.to_dict()) == options
    assert FuzzOptions.read("1", "1", "0").settings == ()


@pytest.mark.parametrize("typed", ["cse=False", "torch._functorch.config.cse", "os.path.sep=x", "torch.x=1;y"])
def test_what_is_no_setting(typed):
    with pytest.raises(UsageError) as error:
        FuzzOptions.read("1", "1", "0", None, typed)
    assert str(error.value) == (
        f"--compile-fuzz-settings: {typed!r} is no setting; expected a module of torch, a name in it and a value, for "
        "example torch._dynamo.config.capture_scalar_outputs=True")
