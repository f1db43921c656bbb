"""The matrices that we ship keep their promises: how many cells, which, and with what sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_torchcompile.cell import DYNAMIC, MODES
from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.dims import batch_sizes
from pytest_torchcompile.fuzz.drawn_call import varying_dims
from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.report.record import GATES
from pytest_torchcompile.wrappers.wrapping import Wrapping, lane_of

FOLDER = Path(__file__).parents[2] / "matrix"
ON_ANY_MACHINE = ("default", "smoke", "nightly")
FSDP = ("regional", "fsdp1", "fsdp2", "fsdp2+tp", "pp", "ddp@wrap_then_compile")
"""Wrappers that run a part of the model, or operators of their own, eagerly."""


def shipped(name):
    """One of the matrices, expanded."""
    return load_matrix(FOLDER / f"{name}.yaml")


def test_default_is_the_main_job():
    """More than 100 cells and 500 items, all of them to be run, with every model of the zoo."""
    matrix = shipped("default")
    items = [(planned.cell.id, check) for planned in matrix.cells for check in matrix.checks
             if CHECKS[check].applies(planned.cell.axes)]
    assert len(matrix.cells) == 101  # docs/gating.md says so
    assert len(items) > 500
    assert {planned.cell.id: planned.outcome for planned in matrix.cells if planned.outcome != "run"} == {
        "residual_outside-aot_eager-default-auto-tp_inner_blocks": "xfail"}
    assert set(matrix.models) == {"tiny_head", "mini_gpt", "conv_net", "encoder", "moe_lite", "triton_op",
                                  "feed_forward", "residual_outside", "any_rows", "any_length"}


def test_default_has_every_value_of_every_axis():
    """No value is there only in rules."""
    matrix = shipped("default")
    for axis in ("model", "mode", "dynamic", "backend", "wrapper"):
        values = {planned.cell.axes[axis] for planned in matrix.cells}
        assert values == values | {excluded.cell.axes[axis] for excluded in matrix.excluded}, axis


def test_what_costs_too_much_on_one_model_another_one_shows(tmp_path):
    """The rules that spare Inductor's C++ take out no combination of mode, dynamic, backend and wrapper, and no value
    of an axis from any model, but what nightly.yaml has."""
    text = (FOLDER / "default.yaml").read_text()
    start = text.index("  # Inductor's C++ is most of a cold run.")
    spared = text[start:text.index("\n\n", start)]
    assert spared.count("- exclude:") == 10
    (tmp_path / "full.yaml").write_text(text.replace(spared, ""))
    full, ours = load_matrix(tmp_path / "full.yaml"), shipped("default")
    assert len(full.cells) == len(ours.cells) + 51

    def combinations(matrix):
        return {(cell.mode, cell.dynamic, cell.backend, cell.wrapper) for cell in (each.cell for each in matrix.cells)}

    def values_of_models(matrix):
        return {(each.cell.model, axis, value) for each in matrix.cells for axis, value in each.cell.axes.items()}

    assert combinations(ours) | combinations(shipped("nightly")) == combinations(full)
    assert values_of_models(ours) | values_of_models(shipped("nightly")) >= values_of_models(full)


def test_default_fuzzes_two_models():
    """Hypothesis draws sizes in two cells of aot_eager, for twenty seconds each."""
    matrix = shipped("default")
    fuzzed = [planned.cell for planned in matrix.cells if "fuzz" in matrix.checks_of(planned)]
    assert [cell.id for cell in fuzzed] == ["any_rows-aot_eager-default-auto-none",
                                            "any_length-aot_eager-default-auto-none"]
    assert matrix.fuzz_seconds == 20
    assert all(varying_dims(matrix.models[cell.model].dims) for cell in fuzzed)


def test_default_times_one_cell_of_a_model():
    """Of each that Inductor compiles in one process, without what only Triton's interpreter runs."""
    timed = [planned.cell for planned in shipped("default").cells if "worth" in planned.also]
    assert [cell.model for cell in timed] == ["tiny_head", "mini_gpt", "conv_net", "encoder", "moe_lite"]
    assert {(cell.backend, cell.mode, cell.wrapper) for cell in timed} == {("inductor", "default", "none")}


@pytest.mark.parametrize("name", ["default", "nightly", "fake", "multi_gpu", "gpu"])
def test_what_is_expected_to_fail_has_an_issue(name):
    """With the reason beside it."""
    expected = [planned for planned in shipped(name).cells if planned.outcome == "xfail"]
    assert expected
    assert all(planned.issue and planned.reason for planned in expected)


def test_default_expects_no_gate_to_fail():
    """A gate lets no expected failure pass, so a run of the main job could never be released."""
    for planned in shipped("default").cells:
        assert not set(planned.checks) & set(GATES), planned.cell.id


def test_default_has_the_cells_that_texts_name():
    """README, help texts and issues name these ids."""
    ids = {planned.cell.id for planned in shipped("default").cells}
    assert ids >= {"mini_gpt-inductor-default-auto-none", "tiny_head-eager-default-static-none",
                   "conv_net-inductor-max-autotune-auto-none", "conv_net-aot_eager-default-auto-regional"}


def test_smoke_is_small_and_has_both_phases():
    """About a dozen cells, of which only the smallest model's generate code."""
    cells = [planned.cell for planned in shipped("smoke").cells]
    assert 10 <= len(cells) <= 16
    assert {cell.phase for cell in cells} == {"training", "inference"}
    assert {cell.model for cell in cells if cell.backend == "inductor"} == {"tiny_head"}


@pytest.mark.parametrize("name", ON_ANY_MACHINE)
def test_sizes_are_neither_one_nor_equal(name):
    """Torch never makes 0 or 1 dynamic, and takes equal sizes for one symbol: then recompiles would be ours."""
    for entry in shipped(name).models.values():
        for sizes in batch_sizes(entry.dims):
            assert min(sizes.values()) > 1
            assert len(set(sizes.values())) == len(sizes)
            assert 3 not in sizes.values() or "H" not in sizes  # an image's channels


@pytest.mark.parametrize("name", ON_ANY_MACHINE)
def test_several_sizes_in_every_model(name):
    """Without a second size no cell could tell whether a shape recompiles; but for those that are drawn."""
    for entry in shipped(name).models.values():
        assert len(batch_sizes(entry.dims)) >= 2 or entry.name in ("any_rows", "any_length")


def test_fuzz_draws_its_sizes():
    """Every cell has a size to draw, and nothing but drawn sequences judges it."""
    matrix = shipped("fuzz")
    assert matrix.checks == ("fuzz",)
    assert all(any(dim.max for dim in entry.dims.values()) for entry in matrix.models.values())
    assert {planned.cell.phase for planned in matrix.cells} == {"training", "inference"}


def test_lower_limits_are_only_where_a_rule_says_why():
    """Full coverage and no graph break, but for regional cells, the model whose routing depends on data, and ranks."""
    for planned in shipped("default").cells:
        usual = {"coverage": 1.0, "steps": 3, "graph_breaks": 0}
        if "worth" in planned.also:
            usual["speedup"] = 0.1
        whole = planned.cell.wrapper not in FSDP and planned.cell.model != "moe_lite"
        if planned.cell.wrapper == "tp@inner_blocks" and planned.cell.model != "mini_gpt":
            whole = False
        assert (planned.limits == usual) == whole, planned.cell.id


def test_gpu_has_what_only_a_gpu_has():
    """One GPU, more than 100 cells: every mode and dtype, both phases, CUDA graphs by mode and by backend."""
    matrix = shipped("gpu")
    cells = [planned.cell for planned in matrix.cells]
    assert len(cells) >= 100
    assert {cell.device for cell in cells} == {"cuda"}
    assert {cell.mode for cell in cells} == set(MODES)
    assert {cell.dynamic for cell in cells} == set(DYNAMIC)
    assert {cell.backend for cell in cells} == {"inductor", "aot_eager", "cudagraphs"}
    assert {cell.dtype for cell in cells} == {"float32", "bfloat16", "float16"}
    assert {cell.phase for cell in cells} == {"training", "inference"}
    assert {cell.wrapper for cell in cells} == {"none", "autocast", "checkpoint", "regional"}
    assert {cell.model for cell in cells} >= {"triton_op", "moe_lite"}
    held = [cell for cell in cells if "cudagraphs" in matrix.checks and CHECKS["cudagraphs"].applies(cell.axes)]
    assert len(held) > 40
    assert {cell.backend for cell in held} == {"inductor", "cudagraphs"}
    assert 0 < matrix.autotune_choices < 10


def test_gpu_skips_nothing():
    """What does not run as it should is expected to fail."""
    assert {planned.outcome for planned in shipped("gpu").cells if planned.outcome != "run"} == {"xfail"}


def test_the_fake_lane_is_fake():
    """Every cell compiles in one process for many ranks, and no check is named that needs numbers."""
    matrix = shipped("fake")
    assert {lane_of(planned.cell.wrapper) for planned in matrix.cells} == {"fake"}
    assert {Wrapping.read(planned.cell.wrapper).ranks for planned in matrix.cells} == {4, 8, 64}
    assert all(CHECKS[name].fake for name in matrix.checks)
    assert {planned.outcome for planned in matrix.cells} == {"run", "xfail"}


def test_artifacts_ships_real_models():
    """Each by every route that has no backward pass either; one cell trains."""
    matrix = shipped("artifacts")
    assert matrix.checks == ("artifacts",)
    assert {planned.cell.backend for planned in matrix.cells} == {"inductor"}
    phases = {planned.cell.model: planned.cell.phase for planned in matrix.cells if planned.cell.phase == "inference"}
    assert {"bert", "gpt2", "llama", "t5", "vit"} <= phases.keys()
    assert [planned.cell.model for planned in matrix.cells if planned.cell.phase == "training"] == ["tiny_head"]


def test_toolkit_crosses_passes_with_wrappers():
    """At least 24 cells without a GPU; passes meet every wrapper on one model, each compiler and each table."""
    matrix = shipped("toolkit")
    cells = [planned.cell for planned in matrix.cells if planned.cell.device == "cpu"]
    assert len(cells) >= 24
    assert len(cells) < len(matrix.cells)
    assert {cell.backend for cell in cells} == {"toolkit"}
    three_passes, with_buckets, four_ranks = 3 * 6, 3, 1
    pairs = {(cell.passes, cell.wrapper) for cell in cells if cell.model == "feed_forward"}
    assert len(pairs) == three_passes + with_buckets + four_ranks
    assert {(cell.compiler, cell.decompositions) for cell in cells} == {
        ("eager", "default"), ("eager", "core_aten"), ("inductor", "default"), ("regional_inductor", "default")}
    assert {cell.model for cell in cells if cell.compiler == "regional_inductor"} == {"annotated_head"}
    assert {cell.wrapper for cell in cells} == {"none", "tp", "fsdp2", "fsdp2+tp*fake4", "simple_fsdp",
                                                "simple_fsdp+tp*fake4", "simple_fsdp+tp"}
