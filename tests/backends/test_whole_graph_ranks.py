"""Over ranks: a model is one whole graph with its collectives in it, or it is said why it is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.wrappers.protocol import load

two_ranks = pytest.importorskip("two_ranks") if torch.distributed.is_available() else None
pytestmark = [pytest.mark.needs_torch,
              pytest.mark.skipif(two_ranks is None, reason="this torch is built without torch.distributed"),
              # Torch's own: Dynamo looks at `.grad` of an input that is no leaf, and makes a Function to look at it.
              pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
              pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")]
# feed_forward has 14 parameters: SimpleFSDP gathers each in the forward, and scatters each gradient in the backward.
PARAMETERS = 14


@pytest.fixture
def fake_group():
    """Rank 0 of four; nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.compiler.reset()
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()
    torch.compiler.reset()


def assert_whole(found):
    """One graph, which ran, without a break and with nothing left to eager; every parameter has its name there."""
    assert (found["graphs"], found["runs"], found["breaks"], found["eager"]) == (1, [1], 0, 0)
    assert found["unnamed"] == []
    assert found["same names"]
    assert list(found["collectives"]) == ["joint", "forward", "backward"]
    # What the partitioner has split is what was joint; it may have more, where something is computed anew.
    counts = found["collectives"]
    for name, count in counts["joint"].items():
        assert count <= counts["forward"].get(name, 0) + counts["backward"].get(name, 0)


@pytest.mark.parametrize("wrapper", ["tp", "simple_fsdp", "simple_fsdp+tp"])
def test_one_graph_in_the_fake_lane(fake_group, wrapper):
    """In the joint, the forward and the backward graph."""
    import toolkit_ranks

    found = toolkit_ranks.captured(wrapper, 4)
    assert_whole(found)
    assert all(found["collectives"].values())


@pytest.mark.parametrize("order", ["", "@wrap_then_compile", "@compile_then_wrap"])
def test_fsdp2_has_no_whole_graph(fake_group, order):
    """Torch keeps its hooks from Dynamo: said with the place, and what to take instead. Each block is one graph."""
    import toolkit_ranks

    if not order:
        found = toolkit_ranks.captured("fsdp2", 4)
        assert (found["graphs"], found["breaks"]) == (1, 0)
        assert not any(found["collectives"].values())
        return
    with pytest.raises(UsageError, match=r"_dynamo_disable in torch/distributed/fsdp/_fully_shard/_fsdp_common\.py\); "
                                         "wrapper simple_fsdp has the same collectives in the graph"):
        toolkit_ranks.captured(f"fsdp2{order}", 4)


def test_what_is_said_of_fsdp2_is_true_of_this_torch(fake_group):
    """The place that the sentence names: a model with ``fully_shard`` breaks there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    assert hasattr(_fsdp_common, "_dynamo_disable")
    net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    fully_shard(net[0], mesh=init_device_mesh("cpu", (4,)))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"_fsdp_common\.py"):
        torch.compile(net, backend="eager", fullgraph=True)(torch.randn(4, 4))


def test_a_layer_that_reads_its_parameters_elsewhere(fake_group):
    """An LSTM has a list of them; it would go on with the old ones, and get no gradient."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    net = torch.nn.Sequential(torch.nn.LSTM(4, 4))
    with pytest.raises(UsageError, match="0 of model 'rnn' is an LSTM, which reads a list of its own; take fsdp2"):
        load("simple_fsdp", Path(), "m.yaml:3:5").wrap(net, None, Cell(model="rnn", wrapper="simple_fsdp"), mesh)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two warm processes over gloo."""
    ranks = two_ranks.Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("wrapper", ["tp", "simple_fsdp"])
def test_one_graph_on_two_ranks(pair, wrapper, compiler):
    """The numbers too: each rank's output, and means of gradients over the replicas."""
    for found in pair.run("toolkit_ranks:on_rank", wrapper=wrapper, compiler=compiler):
        assert_whole(found)
        assert found["apart"] < 1e-6
        assert found["output apart"] < 1e-6
        if wrapper == "simple_fsdp":
            assert found["collectives"]["forward"] == {"all_gather_into_tensor": PARAMETERS}
            assert found["collectives"]["backward"] == {"reduce_scatter_tensor": PARAMETERS}


def test_buckets_over_two_ranks(pair):
    """All gathers become one, all scatters become one, and no number changes."""
    counting = pair.run("toolkit_ranks:on_rank", wrapper="simple_fsdp", passes=["bucket_collectives"])
    for found in counting:
        assert found["apart"] < 1e-6
        assert found["output apart"] < 1e-6
        assert "bucket_collectives" in found["changed"][0]
        assert found["collectives"]["forward"] == {"all_gather_into_tensor": 1}
        assert found["collectives"]["backward"] == {"reduce_scatter_tensor": 1}


def test_one_graph_on_a_mesh_of_two_dimensions(tmp_path):
    """Four ranks: data and tensor parallel."""
    ranks = two_ranks.Ranks(4, tmp_path)
    try:
        for found in ranks.run("toolkit_ranks:on_rank", wrapper="simple_fsdp+tp"):
            assert_whole(found)
            assert found["apart"] < 1e-6
            assert found["output apart"] < 1e-6
            assert all(found["collectives"].values())
    finally:
        ranks.stop()
