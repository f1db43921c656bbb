"""What the markers may say: combinations, limits, bucket sizes; every mistake has its text."""

from __future__ import annotations

import re
from functools import partial

import pytest

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.plan.markers import (
    Combination,
    MarkerLimits,
    read_bucket_sizes,
    read_combinations,
    read_limits,
)


class Unhashable:
    """A backend that is an object, compared by value."""

    def __eq__(self, other):
        return self is other

    def __call__(self, graph, inputs):
        return graph


def ids(*args, **kwargs):
    return [made.id for made in read_combinations(args, kwargs)]


@pytest.mark.parametrize(("args", "kwargs", "expected"), [
    ((), {}, ["default"]),
    (("default", "max-autotune"), {"dynamic": ["auto", "dynamic"]},
     ["default", "default-dynamic", "max-autotune", "max-autotune-dynamic"]),
    (("default", "max-autotune"), {"backend": ["inductor", "eager"]}, ["default", "default-eager", "max-autotune"]),
    ((), {"backend": "aot_eager", "wrapper": ("none", "autocast"), "fullgraph": [False, True]},
     ["default-aot_eager", "default-aot_eager-fullgraph", "default-aot_eager-autocast",
      "default-aot_eager-autocast-fullgraph"]),
    ((), {"backend": "my.backends:mine", "dynamic": "static"}, ["default-static-my.backends_mine"]),
    ((), {"backend": [print, partial(print, 1), lambda gm, inputs: gm, Unhashable(), Unhashable]},
     ["default-print", "default-print", "default-lambda", "default-Unhashable", "default-Unhashable"]),
])  # fmt: skip
def test_combinations(args, kwargs, expected):
    """The valid combinations, the modes varying slowest; ids show the mode and what is not at its default."""
    assert ids(*args, **kwargs) == expected


def test_the_plain_combination():
    """Without a marker a model is compiled as torch.compile does by itself."""
    assert read_combinations((), {}) == (Combination(),)
    assert Combination() == Combination("default", "auto", "inductor", "none", False)


@pytest.mark.parametrize(("args", "kwargs", "text"), [
    ((), {"dynamc": "auto"}, "unknown argument 'dynamc'; did you mean 'dynamic'? Known: backend, dynamic, fullgraph, "),
    ((), {"mode": "default"}, "unknown argument 'mode' (modes are given by place); "),
    (("max-autotun",), {}, "unknown mode 'max-autotun'; did you mean 'max-autotune'? Known: default, "),
    ((3,), {}, "mode=3; expected a name"),
    ((), {"wrapper": "ddp*2"},
     "wrapper 'ddp*2' asks for several ranks, and a test has one process; put it into a matrix"),
    ((), {"wrapper": "m.p:wrap*4"}, "wrapper 'm.p:wrap*4' asks for several ranks"),
    ((), {"dynamic": "dynamc"}, "unknown dynamic 'dynamc'; did you mean 'dynamic'? Known: auto, dynamic, static"),
    ((), {"dynamic": True}, "dynamic=True; torch.compile(dynamic=True) is called 'dynamic' here"),
    ((), {"dynamic": [None]}, "dynamic=None; torch.compile(dynamic=None) is called 'auto' here"),
    ((), {"backend": "inducter"}, "unknown backend 'inducter'; did you mean 'inductor'? Known: "),
    ((), {"backend": "inducter"}, ", or module:attribute of your own"),
    ((), {"backend": 3}, "backend=3; expected a name, or module:attribute of your own, or the backend itself"),
    (("max-autotune",), {"backend": ["inductor", print]},
     "backend 'print' takes no modes, so no combination is left for it; add the mode 'default'"),
    (("default", "max-autotune"), {"backend": print},
     "mode 'max-autotune' is for backends that take modes (inductor), and here there is only 'print'; "),
    ((), {"backend": [print, print]}, "is given twice"),
    ((), {"backend": "dynamo_minifier_backend"}, "needs arguments that only torch gives it; name another"),
    ((), {"wrapper": "autocats"}, "unknown wrapper 'autocats'; did you mean 'autocast'? Known: "),
    ((), {"fullgraph": "yes"}, "fullgraph='yes'; expected True or False"),
    ((), {"backend": []}, "backend=[] is empty; expected one value or more"),
    (("default", "default"), {}, "mode 'default' is given twice"),
    (("max-autotune",), {"backend": ["inductor", "eager"]},
     "backend 'eager' takes no modes, so no combination is left for it; add the mode 'default'"),
    (("default", "max-autotune"), {"backend": ["eager", "aot_eager"]},
     "mode 'max-autotune' is for backends that take modes (inductor), and here there is only 'eager', 'aot_eager'; "),
])  # fmt: skip
def test_mistakes_in_compile_modes(args, kwargs, text):
    """Each mistake is told in one line, with the nearest known name."""
    with pytest.raises(UsageError, match=re.escape(text)):
        read_combinations(args, kwargs)


def test_limits():
    """Limits that are not given are None."""
    assert read_limits((), {"recompiles": 1, "eager_frames": 0}) == MarkerLimits(1, None, 0)


@pytest.mark.parametrize(("args", "kwargs", "text"), [
    ((2,), {}, "2 has no name; expected recompiles=2 or another of recompiles, graph_breaks, eager_frames"),
    ((), {}, "names no limit; expected one or more of recompiles, graph_breaks, eager_frames"),
    ((), {"recompile": 1}, "unknown argument 'recompile'; did you mean 'recompiles'? Known: "),
    ((), {"recompiles": -1}, "recompiles=-1; expected a whole number from 0 on"),
    ((), {"recompiles": True}, "recompiles=True; expected a whole number from 0 on"),
    ((), {"graph_breaks": 0.5}, "graph_breaks=0.5; expected a whole number from 0 on"),
])  # fmt: skip
def test_mistakes_in_compile_limits(args, kwargs, text):
    """A limit without a name, unknown, or no count is refused."""
    with pytest.raises(UsageError, match=re.escape(text)):
        read_limits(args, kwargs)


def test_bucket_sizes():
    """The sizes as they are written."""
    assert read_bucket_sizes((128, 256), {}) == (128, 256)


@pytest.mark.parametrize(("args", "kwargs", "text"), [
    ((), {}, "buckets=(): expected at least one length, for example (128, 256)"),
    ((256, 128), {}, "buckets=(256, 128): 128 comes after 256; expected each larger than the one before"),
    ((128.0,), {}, "buckets=(128.0,): 128.0 is no length; expected whole numbers from 1 on"),
    ((128,), {"step": 2}, "unknown argument 'step'; expected sizes alone, as in shape_buckets(128, 256)"),
])  # fmt: skip
def test_mistakes_in_shape_buckets(args, kwargs, text):
    """No size, sizes out of order, or anything else is refused."""
    with pytest.raises(UsageError, match=re.escape(text)):
        read_bucket_sizes(args, kwargs)
