"""Which cached entry a new call was nearest to, over guards as torch writes them."""

from __future__ import annotations

import pytest

from pytest_torchcompile.ledger.entries import commonest_reason, count_differences, nearest_reason
from pytest_torchcompile.ledger.reasons import Reason, read_reason

GRAD = '___check_global_state() against {"grad_mode":true,"num_threads":1}'
NO_GRAD = '___check_global_state() against {"grad_mode":false,"num_threads":1}'


def x(size, *more):
    """Guards on an input."""
    return [f"check_tensor(L['x'], Tensor, size=[{size}])", "hasattr(L['x'], '_dynamo_static_indices') == 0", *more]


@pytest.mark.parametrize(("old", "new", "count"), [
    ([], [], 0),
    ([GRAD, *x(3)], [GRAD, *x(3)], 0),
    ([GRAD, *x(3)], [GRAD, *x(4)], 1),
    ([NO_GRAD, *x(3)], [GRAD, *x(4)], 2),
    (x(3), x(None, "2 <= L['x'].size()[0]"), 1),  # one thing, whatever is said of it
    ([*x(3), "L['y'] is None"], [*x(3), "check_tensor(L['y'], Tensor, size=[3])"], 1),
    ([*x(3), "L['self'].a == 1", "L['self'].b == 1"], [*x(3), "L['self'].a == 2", "L['self'].b == 2"], 2),
    ([*x(3), "L['d']['k'] == 1", "L['l'][0] == 1"], [*x(3), "L['d']['k'] == 2", "L['l'][0] == 2"], 2),
    ([*x(3), "L['flag'] == True", "L['self'].a == 1"], [*x(3), "L['flag'] == False", "L['self'].b == 1"], 1),
    ([*x(3), "len(L['y']) == 1"], [*x(3), "len(L['y']) == 2"], 1),
    ([*x(3), "G['SCALE'] == 1"], [*x(3), "G['SCALE'] == 2"], 1),
])  # fmt: skip
def test_differences(old, new, count):
    """Things that both speak of, and differently; what only one path looks at is no difference."""
    assert count_differences(old, new) == count


def test_the_nearest_entry_tells():
    """The entry last used comes first, and counts only among the nearest."""
    grad = read_reason("0/1: GLOBAL_STATE changed: grad_mode")
    size = read_reason("0/0: tensor 'x' size mismatch at index 0. expected 3")
    entries = {"0/1": [NO_GRAD, *x(3)], "0/0": [GRAD, *x(3)]}
    assert nearest_reason([grad, size], [GRAD, *x(4)], entries) is size
    assert nearest_reason([grad, size], [GRAD, *x(3)], entries) is size
    assert nearest_reason([grad, size], [NO_GRAD, *x(4)], entries) is grad
    assert nearest_reason([grad, size], [], {}) is grad  # nothing is known of the entries


def test_a_bare_guard_on_the_global_state_is_a_difference_too():
    """Torch 2.8 to 2.10 write that guard without the state, the same for each entry."""
    grad = read_reason("0/1: GLOBAL_STATE changed: grad_mode")
    size = read_reason("0/0: tensor 'x' size mismatch at index 0. expected 3")
    bare = "___check_global_state()"
    assert nearest_reason([grad, size], [bare, *x(4)], {"0/1": [bare, *x(3)], "0/0": [bare, *x(3)]}) is size


def test_an_entry_of_another_backend_is_no_reason():
    """Only where a guard failed there was a recompile."""
    other = read_reason("0/1: BACKEND_MATCH failure: torch.compile detected different backend callables")
    assert nearest_reason([other], [], {}) == Reason("")
    assert nearest_reason([other, read_reason("0/0: k == 1")], [], {}).guard == "k == 1"


def test_the_commonest_kind_tells():
    """Where no new entry was made: what varies most."""
    reasons = [read_reason(text) for text in ("0/2: GLOBAL_STATE changed: grad_mode",
                                       "0/1: tensor 'x' size mismatch at index 0. expected 4, actual 5",
                                       "0/0: tensor 'x' size mismatch at index 0. expected 3, actual 5")]  # fmt: skip
    assert commonest_reason(reasons) is reasons[1]
    assert commonest_reason(reasons[:2]) is reasons[0]
    assert commonest_reason([]) == Reason("")
