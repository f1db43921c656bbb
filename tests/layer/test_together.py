"""maybe_compile over ranks: all of them run compiled or none does, no rank waits for another, nothing is changed."""

from __future__ import annotations

import pytest
import torch

two_ranks = pytest.importorskip("two_ranks") if torch.distributed.is_available() else None
pytestmark = [pytest.mark.needs_torch,
              pytest.mark.skipif(two_ranks is None, reason="this torch is built without torch.distributed")]
KINDS = ["ddp", "fsdp2", "fsdp1", "tp"]


def devices(count):
    """The CPU, and as many GPUs."""
    here = torch.cuda.device_count()
    few = pytest.mark.skipif(here < count, reason=f"needs {count} CUDA GPUs, and this machine has {here}")
    return ["cpu", pytest.param("cuda", marks=few)]


@pytest.fixture(scope="module", params=devices(2))
def ranks(request, tmp_path_factory):
    """Two warm processes."""
    pair = two_ranks.Ranks(2, tmp_path_factory.mktemp("ranks"), request.param)
    yield pair
    pair.stop()


def results(found):
    return [[record["result"] for record in each["records"]] for each in found]


def reason(each):
    return each["records"][0]["reason"]


def all_fell_back(found, *why):
    """Both ranks run eagerly, each has logged it once, nothing of either has changed, and both can go on."""
    assert results(found) == [["fallback_eager"], ["fallback_eager"]]
    for each, words in zip(found, why, strict=True):
        assert words in reason(each)
        assert not each["compiled"]
        assert each["untouched"]
        assert each["in place"] == []
        assert each["apart"] == 0


OTHER = "it failed on rank 1, and all ranks do the same; the log of that rank says why"


@pytest.mark.parametrize("kind", KINDS)
def test_healthy(ranks, kind):
    """What works is compiled on both."""
    found = ranks.run("spread_models:compiled", kind=kind, backend="healthy", steps=2)
    assert results(found) == [["compiled"], ["compiled"]]
    for each in found:
        assert "2 step(s) of forward, loss, backward and step ran compiled" in reason(each)
        assert each["compiled"]
        assert each["untouched"]
        assert each["apart"] < 1e-5


def test_dropout(ranks):
    """Means of many runs are compared, as many on each rank."""
    found = ranks.run("spread_models:compiled", kind="ddp", backend="redraws", model={"dropout": 0.5})
    assert results(found) == [["compiled"], ["compiled"]]
    assert all("agree with eager on average over" in reason(each) for each in found)


def test_serving_what_is_gathered_already(ranks):
    """FSDP2's root keeps whole parameters after a forward pass; they are not taken for the model's own."""
    found = ranks.run("spread_models:compiled", kind="fsdp2", backend="healthy", serving=True)
    assert results(found) == [["compiled"], ["compiled"]]
    assert all(each["apart"] < 1e-5 for each in found)


def test_noise_is_measured(ranks):
    """Two layers cancel most digits: what is left agrees with eager by the noise of this program only."""
    found = ranks.run("spread_models:compiled", kind="ddp", backend="wide", model={"lost": 1e3})
    assert results(found) == [["compiled"], ["compiled"]], [reason(each) for each in found]
    assert all(each["apart"] > 1e-4 for each in found)  # else nothing had to be excused


@pytest.mark.parametrize(("kind", "backend"), [
    *((kind, "no_backward") for kind in KINDS), *((kind, "refuses") for kind in KINDS), ("ddp", "raises_when_run"),
    ("tp", "raises_when_run")])
def test_a_failure_on_one_rank(ranks, kind, backend):
    """Compiling, running, or the backward pass fails on rank 1, while rank 0 may be in a collective."""
    found = ranks.run("spread_models:compiled", kind=kind, backend=backend, on=[1])
    all_fell_back(found, OTHER, "planted")


@pytest.mark.parametrize(("kind", "backend"), [
    ("ddp", "adds"), ("tp", "adds"), ("fsdp1", "doubled_gradients"), ("fsdp2", "doubled_gradients")])
def test_a_wrong_result_on_one_rank(ranks, kind, backend):
    """Results that are wrong on one rank, be they averaged with those of the others afterwards."""
    found = ranks.run("spread_models:compiled", kind=kind, backend=backend, on=[1])
    all_fell_back(found, "", "(in comparison)")


def test_noise_excuses_no_fault(ranks):
    """A fault that is larger than the noise is seen."""
    found = ranks.run("spread_models:compiled", kind="ddp", backend="adds", on=[1], model={"lost": 10.0})
    all_fell_back(found, "", "(in comparison)")


@pytest.mark.parametrize("on", [[0, 1], [1]], ids=["everywhere", "on rank 1"])
@pytest.mark.parametrize("kind", ["ddp", "tp"])
def test_inner_blocks(ranks, kind, on):
    """The whole does not compile on some rank, its blocks do: they are compiled on all ranks, as the log says."""
    found = ranks.run("spread_models:compiled", kind=kind, backend="refuses_the_whole", on=on)
    assert results(found) == [["inner_blocks"], ["inner_blocks"]]
    name = "module.blocks" if kind == "ddp" else "blocks"
    for rank, each in enumerate(found):
        assert ("planted" if rank in on else OTHER) in reason(each)
        assert f"Compiled are 2 blocks: {name}.0, {name}.1" in reason(each)
        assert each["in place"] == [f"{name}.0", f"{name}.1"]
        assert each["untouched"]
        assert each["apart"] < 1e-5


def test_blocks_whose_gradients_torch_loses(ranks):
    """Sequence parallel: torch 2.13 compiles the blocks and loses gradients before them (pytorch#191113)."""
    found = ranks.run("spread_models:compiled", kind="sequence", backend="refuses_the_whole")
    if results(found) != [["inner_blocks"]] * 2:  # which a torch in which it is mended may say
        all_fell_back(found, *["Nor do its inner blocks, each by itself"] * 2)
    assert all(each["apart"] < 1e-5 for each in found)


def test_blocks_that_do_not_compile_either(ranks):
    """Both attempts are in the one record."""
    found = ranks.run("spread_models:compiled", kind="ddp", backend="refuses", on=[1])
    assert all("Nor do its inner blocks, each by itself" in reason(each) for each in found)


def test_raise(ranks):
    """Who wants failures raised gets them on every rank, without another attempt."""
    found = ranks.run("spread_models:compiled", kind="ddp", backend="refuses_the_whole", on=[1], fail_policy="raise")
    assert results(found) == [["raised"], ["raised"]]
    assert [each["error"].partition(":")[0] for each in found] == ["CompileFailed", "CompileFailed"]


def test_a_backend_that_one_rank_does_not_know(ranks):
    """A mistake in the config is raised where it is; the others fall back."""
    found = ranks.run("spread_models:compiled", kind="ddp", backend="unknown", on=[1])
    assert results(found) == [["fallback_eager"], []]
    assert "cannot be looked up" in found[1]["error"]


def test_switched_off_on_one_rank(ranks):
    """torch.compile that does nothing on one rank is used on none."""
    found = ranks.run("spread_models:switched_off")
    assert results(found) == [["nothing_compiled"], ["nothing_compiled"]]
    assert not any(each["compiled"] for each in found)


def test_an_error_of_the_users_on_one_rank(ranks):
    """It is raised there; the other rank falls back and does not wait."""
    found = ranks.run("spread_models:user_error")
    assert results(found) == [["fallback_eager"], ["user_error"]]
    assert [each["error"] for each in found] == ["", "the model's own objection"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp1"])
def test_an_error_of_the_users_between_collectives(ranks, kind):
    """The other rank waits for this one in a collective. The error is raised as it is and says so; nothing of ours gets
    in between the model's collectives, and where the other's ends, by the group's time-out here, so does its attempt.
    """
    if ranks.device == "cuda":
        pytest.skip("NCCL ends a process whose collective times out")
    waits, raises = ranks.run("spread_models:user_error_inside", kind=kind, patience=1.0, timeout=8.0)
    assert raises["error"] == "ValueError: the model's own objection"
    assert raises["seconds"] < 6 < waits["seconds"]
    assert [record["result"] for record in raises["records"]] == ["user_error"]
    assert ("the model raises ValueError on this rank: the model's own objection; rank 0 did not end the same call, "
            "and may wait for this rank in a collective until this process ends or the process group's time-out"
            ) in reason(raises)
    assert waits["error"].startswith("RuntimeError: ")
    assert "rank 1 had to leave the same call, and the log there says why" in reason(waits)
    if kind == "ddp":  # FSDP1 can't be brought out of the middle of a call, nor can it by the user
        assert raises["untouched"]
        assert waits["untouched"]


def test_an_error_of_the_users_after_the_last_step(ranks):
    """In the forward pass that only looks whether compiled code still runs; rank 0 is in a sum over the ranks."""
    if ranks.device == "cuda":
        pytest.skip("NCCL ends a process whose collective times out")
    waits, raises = ranks.run("spread_models:user_error_late", patience=2.0, timeout=8.0)
    assert (waits["ok"], raises["ok"]) == (False, False)
    assert raises["seconds"] < waits["seconds"]
    assert "ValueError on this rank: the model's own objection; rank 0 did not end the same call" in raises["reason"]
    assert "rank 1 had to leave the same call" in waits["reason"]


@pytest.mark.parametrize("backend", ["refuses", "adds"])
def test_the_smoketest_alone(ranks, backend):
    """CompileSmoketest of a model that torch.compile has compiled says no on both ranks."""
    found = ranks.run("spread_models:smoketested", backend=backend, on=[1])
    assert [each["ok"] for each in found] == [False, False]
    assert all(each["untouched"] for each in found)
    assert "rank" not in found[1]["phase"]


def test_coverage_counts_no_operators_of_the_transport(ranks):
    """gloo gathers by operators, in threads of its own; what the model runs eagerly beside it is counted."""
    for each in ranks.run("spread_models:gathered", dynamic=False):
        assert each == {"whole": (), "part": ("aten::exp x1",)}


@pytest.mark.parametrize(("place", "given"), [
    ("before", {}), ("snapshot", {}), ("compared", {}), ("compared", {"kind": "tp"}),
    ("disturbed", {"backend": "wide", "model": {"lost": 1e3}}),
    ("means", {"backend": "redraws", "model": {"dropout": 0.5}}),
])  # fmt: skip
def test_what_fails_between_the_votes(ranks, place, given):
    """Our own work can raise on one rank too, for want of memory say: the others hear of it at their next vote."""
    found = ranks.run("spread_models:interrupted", place=place, **{"backend": "healthy"} | given)
    told = OTHER if place != "means" else "it raises on another rank"
    for each in found if place == "means" else ():
        each["apart"] = 0  # eager too draws other numbers each time
    all_fell_back(found, told, f"planted: no memory ({place})")


@pytest.mark.parametrize("device", devices(4))
def test_a_mesh_of_two_dimensions(tmp_path_factory, device):
    """Each rank hears of each other, also of one with which it shares no group."""
    four = two_ranks.Ranks(4, tmp_path_factory.mktemp("four"), device)
    try:
        for voter in (0, 3):
            found = four.run("spread_models:voters", voter=voter)
            assert found == [{"spread": True, "who": (voter,), "nobody": ()}] * 4
    finally:
        four.stop()


@pytest.mark.parametrize("kind", ["fsdp2", "tp"])
@pytest.mark.parametrize("writer", [0, 1, -1])
def test_a_write_to_a_spread_parameter_is_seen_by_all_ranks(ranks, kind, writer):
    """One rank writes to its own part. All ranks are told by one collective, and gather that parameter alone."""
    one, other = ranks.run("spread_models:written", kind=kind, writer=writer)
    assert one == other
    assert one["error"] is None
    assert one["votes"] == 1
    if writer < 0:
        assert one["mutated"] == []
        assert "gathered" not in one
    else:
        assert one["mutated"] == ["inner.blocks.0.up.weight after the call"]
        assert one["gathered"] == 1
