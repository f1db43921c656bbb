"""What pytest sees of this package. A run that does not use it pays for this file, the fixtures and options.py."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_torchcompile.plan.matrix_path import names_matrix
from pytest_torchcompile.plugin import fixtures, graph_pass
from pytest_torchcompile.run.options import OPTIONS, REUSES, Option

if TYPE_CHECKING:
    from pytest_torchcompile.fuzz.fuzz_options import FuzzOptions

MARKERS = (
    "compile_cell(**axes): on every item of a matrix; selects exactly, for example "
    "-m \"compile_cell(backend='eager')\"",
    "compile_modes(*modes, dynamic='auto', backend='inductor', wrapper='none', fullgraph=False): run a test that uses "
    "the fixture compiled_model once for each valid combination; each keyword is one value or a list of them",
    "compile_limits(recompiles=None, graph_breaks=None, eager_frames=None): fail a test that passed if it went over "
    "one of these numbers, or if no compiled code ran",
    "shape_buckets(*sizes): the sizes of the fixture shape_buckets",
    "graph_passes([pass, ...], capture='joint', decompositions=None, train=True, dynamic=None): the passes that the "
    "fixture graph_pass judges",
)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the options, each with an ini twin."""
    group = parser.getgroup("compile", "torch.compile matrix (pytest-torchcompile)")
    for option in OPTIONS:
        if not option.metavar:
            parser.addini(option.ini, option.help, type="bool", default=False)
            group.addoption(option.flag, action="store_true", default=None, help=option.help)
            continue
        parser.addini(option.ini, option.help_with_default, default=option.default)
        value: dict[str, Any] = {"nargs": "?", "const": option.bare} if option.optional else {}
        group.addoption(option.flag, default=None, metavar=option.metavar, help=option.help_with_default, **value)
    # Behind the keys of the ini file, one of which says where a report is.
    _mark_earlier_report(pluginmanager.getplugin("pytestconfig"))


# Before pytest-json-report looks at its own option.
@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers, and hand over to the matrix session if one is asked for."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    config.pluginmanager.register(fixtures, "torchcompile-fixtures")
    config.pluginmanager.register(graph_pass, "torchcompile-graph-pass")
    _fix_seed(config)
    _name_matrix_of_model(config)
    # Nearly every run of a project is one without a matrix, and must not pay for the imports below.
    if config.getoption("compile_matrix") is None:
        _configure_without_matrix(config)
        return
    _give_back_what_is_no_matrix(config)
    from pytest_torchcompile.errors import UsageError
    from pytest_torchcompile.plugin.startup import refuse_options, start_matrix
    from pytest_torchcompile.run.settings import Settings

    try:
        refuse_options(config.getoption)
        start_matrix(config, Settings.read(lambda option: _option_value(config, option)))
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def _configure_without_matrix(config: pytest.Config) -> None:
    """Refuse options that only a matrix has use for, and report the tests that use our fixtures."""
    if config.getoption("compile_inputs"):
        raise pytest.UsageError("--compile-inputs is for --compile-model, which is not given; a matrix file names the "
                                "inputs of each model itself")
    for name in _OF_CELLS:
        option = _BY_NAME[name]
        if config.getoption(option.ini):
            raise pytest.UsageError(f"{option.flag} is about the cells of a matrix, and none is asked for; add "
                                    "--compile-matrix, or take it off")
    # A bad value is told now, not by the first test that is fuzzed.
    if any(_option_value(config, _BY_NAME[name]) != _BY_NAME[name].default for name in _FUZZ):
        fuzz_options(config)
    if getattr(config.option, "json_report", False):
        from pytest_torchcompile.plugin.test_lane import report_tests

        report_tests(config, None)


def _mark_earlier_report(config: pytest.Config | None) -> None:
    """Mark the report of an earlier run while nothing can have ended this one yet, no mistake in an option either.

    The arguments are still texts: the first hook that has them read runs only if they hold no mistake. Workers of xdist
    are no runs of their own.
    """
    if config is None or "PYTEST_XDIST_WORKER" in os.environ:
        return
    typed = [*shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), *config.invocation_params.args]
    arguments = [*config.getini("addopts"), *typed]
    if not any(text.startswith(("--compile-matrix", "--compile-model", "--json-report")) for text in arguments):
        return
    from pytest_torchcompile.report.earlier import later_run_mark, left_by_earlier_runs, mark_earlier

    files = config.rootpath
    if folder := config.getini(_BY_NAME["folder"].ini):
        files = config.invocation_params.dir / folder
    for path in left_by_earlier_runs(files, config.invocation_params.dir, arguments):
        # The run itself says that it can't write there.
        with contextlib.suppress(OSError):
            mark_earlier(path, later_run_mark(arguments))


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """``--compile-selftest`` runs planted faults instead of tests."""
    # `--help` and `--version` answer first, as pytest has it.
    asked_for_help = config.getoption("help", default=False) or config.getoption("version", default=False)
    if config.getoption("compile_selftest") is None or asked_for_help:
        return None
    from pytest_torchcompile.errors import UsageError
    from pytest_torchcompile.faults.selftest import selftest

    try:
        return selftest(_option_value(config, _BY_NAME["selftest"]), partial(print, flush=True),
                        _option_value(config, _BY_NAME["selftest-device"]))
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def _name_matrix_of_model(config: pytest.Config) -> None:
    """``--compile-model`` is ``--compile-matrix`` with the name of a matrix that is made for the model."""
    if config.getoption("compile_model") is None:
        return
    if config.getoption("compile_matrix") is not None:
        raise pytest.UsageError("--compile-model runs a model without a matrix file, and --compile-matrix one from a "
                                "file; take one of them off")
    from pytest_torchcompile.adoption.matrix_text import name_of_model

    model, inputs = (str(_option_value(config, _BY_NAME[name])) for name in ("model", "inputs"))
    if not model:
        raise pytest.UsageError("--compile-model names no model, nor does the ini key compile_model; expected "
                                "--compile-model=module:Class")
    # Workers of xdist get it as it is from here on.
    config.option.compile_matrix, config.option.compile_model = name_of_model(model, inputs), None
    config.option.compile_inputs = None


def _give_back_what_is_no_matrix(config: pytest.Config) -> None:
    """In ``pytest --compile-matrix tests`` argparse takes ``tests`` for the option's value: it is pytest's.

    What is written ``--compile-reuse=tests`` is a mistake, which the settings tell.
    """
    for name, is_value in (("compile_matrix", names_matrix), ("compile_reuse", REUSES.__contains__)):
        given = getattr(config.option, name)
        is_joined = name == "compile_reuse" and f"--compile-reuse={given}" in config.invocation_params.args
        if given and not is_value(given) and not is_joined:
            setattr(config.option, name, _BY_INI[name].bare)
            _give_to_pytest(config, given)


def _give_to_pytest(config: pytest.Config, given: str) -> None:
    """Have pytest collect what argparse took for the value of an option."""
    named: list[str] = []
    # Otherwise they are of the ini file or the folder that pytest was started in, which a typed one replaces.
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        named = config.args
    config.args, config.args_source = [given, *named], pytest.Config.ArgsSource.ARGS


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Say what pytest's own error does not: that a marker was given a lone function."""
    report = yield
    if report.failed:
        from pytest_torchcompile.plugin.marker_mistakes import lone_pass_hint

        if hint := lone_pass_hint(report.longreprtext):
            report.sections.append(("graph_passes", hint))
    return report


def pytest_report_header(config: pytest.Config) -> list[str]:
    """The seed of fuzzing, if it is not the one that every run has."""
    seed = _option_value(config, _BY_NAME["fuzz-seed"])
    return [] if seed == "0" else [f"torch.compile fuzzing: --compile-fuzz-seed={seed}"]


def fuzz_options(config: pytest.Config) -> FuzzOptions:
    """The options of fuzzing. Raises :class:`pytest.UsageError` for a value that is none."""
    from pytest_torchcompile.errors import UsageError
    from pytest_torchcompile.fuzz.fuzz_options import FuzzOptions

    examples, seconds, seed, settings = (str(_option_value(config, _BY_NAME[name])) for name in _FUZZ)
    try:
        return FuzzOptions.read(examples, seconds, seed, config.rootpath, settings)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


_BY_NAME = {option.name: option for option in OPTIONS}
_BY_INI = {option.ini: option for option in OPTIONS}
# What a run without a matrix can do nothing with.
_OF_CELLS = ("checks", "shard", "baseline")
_FUZZ = ("fuzz-examples", "fuzz-seconds", "fuzz-seed", "fuzz-settings")


def _fix_seed(config: pytest.Config) -> None:
    """Draw the seed ``random`` once, before xdist hands the options to its workers."""
    if _option_value(config, _BY_NAME["fuzz-seed"]) == "random":
        import random

        # Put into the options, which xdist hands on: all workers must draw by the same seed.
        config.option.compile_fuzz_seed = str(random.SystemRandom().randrange(1, 10**9))


def _option_value(config: pytest.Config, option: Option) -> Any:
    """Command line before ini file before default."""
    given = config.getoption(option.ini)
    if given is None or given == "":
        return config.getini(option.ini)
    return given
