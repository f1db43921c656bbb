"""Options become settings, or a text that names the option."""

from __future__ import annotations

import pytest

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.run.options import OPTIONS
from pytest_torchcompile.run.settings import Settings


def read(**given):
    return Settings.read(lambda option: given.get(option.name, option.default))


def test_defaults():
    """Without anything given: the whole matrix, 300 seconds a cell, warm rank processes."""
    settings = read()
    assert (settings.matrix, settings.checks, settings.shard) == ("matrix/default.yaml", (), (1, 1))
    assert (settings.timeout, settings.isolation, settings.inprocess) == (300.0, "rank", False)


@pytest.mark.parametrize(("given", "text"), [
    ({"checks": "equivalance"}, "--compile-checks: 'equivalance' is not a check; did you mean 'equivalence'?"),
    ({"timeout": "soon"}, "--compile-timeout: 'soon' is not a number of seconds above 0, for example 300"),
    ({"timeout": "0"}, "--compile-timeout: '0' is not"),
    ({"timeout": "nan"}, "--compile-timeout: 'nan' is not"),
    ({"isolation": "cel"}, "--compile-isolation: 'cel' is not a way to isolate cells; did you mean 'cell'?"),
    ({"shard": "9/8"}, "9/8"),
])  # fmt: skip
def test_bad_values(given, text):
    """Each bad value is refused with the option's name and what would do."""
    with pytest.raises(UsageError) as caught:
        read(**given)
    assert text in str(caught.value)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("given", ["-1", "all", "1.5", ""])
def test_the_number_of_kept_runs(given):
    with pytest.raises(UsageError, match=r"^--compile-keep-runs: '.*' is no number of runs; expected 0 or more"):
        read(**{"keep-runs": given})


def test_help_tells_each_default_once():
    """pytest shows none by itself: what it is given as default is that nothing was typed."""
    for option in OPTIONS:
        if option.default:
            assert option.default in option.help_with_default
            assert option.help_with_default.count(f"default: {option.default}") <= 1
        else:
            assert option.help_with_default == option.help


def test_each_option_has_an_ini_twin():
    """--compile-x is compile_x in the ini file."""
    assert (OPTIONS[0].flag, OPTIONS[0].ini) == ("--compile-matrix", "compile_matrix")
    assert len({o.ini for o in OPTIONS}) == len(OPTIONS)


@pytest.mark.parametrize(("given", "reuse"), [
    ("", ""), ("false", ""), ("off", ""), ("true", "results"), ("results", "results"), ("code", "code"),
])  # fmt: skip
def test_what_is_reused(given, reuse):
    """The ini key was a flag once, and is read as one."""
    assert read(reuse=given).reuse == reuse


def test_what_can_not_be_reused():
    """The nearest word is named."""
    with pytest.raises(UsageError, match=r"^--compile-reuse: 'codes' is not what can be taken .*'code'"):
        read(reuse="codes")
