"""A failed guard's text taken apart: expression, old and new value, line, advice."""

from __future__ import annotations

import pytest

from pytest_torchcompile.ledger.reasons import read_reason, split_reasons, user_expression


@pytest.mark.parametrize(("payload", "texts"), [
    ("0/0: tensor 'x' size mismatch", ("0/0: tensor 'x' size mismatch",)),  # torch 2.9 and later: a bare text
    ('["0/1: a == 1", "0/0: b == 2"]', ("0/1: a == 1", "0/0: b == 2")),
    ('"0/0: a == 1"', ("0/0: a == 1",)),
    ("!1/0/0: a == 1", ("!1/0/0: a == 1",)),  # under compiled autograd
    ('["0/0: "]', ()),  # torch 2.8 where another backend is the reason
    ("[]", ()), ("", ()), (None, ()),
])  # fmt: skip
def test_payloads_of_all_versions(payload, texts):
    """One text or a list of them, each with the compile id of its entry; an id alone says nothing."""
    assert split_reasons(payload) == texts


@pytest.mark.parametrize(("text", "entry"), [("0/1: a == 1", "0/1"), ("!1/0/0: a == 1", "!1/0/0"), ("a == 1", "")])
def test_the_entry_is_told_apart(text, entry):
    """The compile id is no part of the guard."""
    assert (read_reason(text).guard, read_reason(text).entry) == ("a == 1", entry)


@pytest.mark.parametrize(("text", "what", "expected", "actual"), [
    ("tensor 'x' size mismatch at index 1. expected 3, actual 4", "x.size(1)", "3", "4"),
    ("tensor 'x' stride mismatch at index 0. expected 4, actual 1", "x.stride(0)", "4", "1"),
    ("tensor 'x' rank mismatch. expected 1, actual 2", "x.dim()", "1", "2"),
    ("tensor 'x' dtype mismatch. expected Float, actual Double", "x.dtype", "Float", "Double"),
    ("tensor 'x' requires_grad mismatch. expected requires_grad=0", "x.requires_grad", "False", "True"),
    ("tensor 'x' requires_grad mismatch. expected requires_grad=1", "x.requires_grad", "True", "False"),
    ("tensor 'p' size mismatch at index 0. expected 4, actual 5. Guard failed on a parameter, consider using "
     "force_parameter_static_shapes", "p.size(0)", "4", "5"),
    ("tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU, AutogradCPU), actual "
     "DispatchKeySet(Meta, AutogradMeta)", "x.device", "CPU", "Meta"),
    ("tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU, AutogradCPU), actual "
     "DispatchKeySet(CPU, Conjugate, AutogradCPU)", "dispatch keys of x", "none more", "Conjugate"),
    ("expected type of 'y' to be a tensor type, ' but found <class 'NoneType'>", "y", "a tensor", "None"),
    ("expected type of 'y' to be <class 'torch.Tensor'>, but found <class 'int'>", "y", "a tensor", "int"),
    ("__math_isnan(y)", "y", "nan", ""),
    ("s.k == 1 (HINT: torch.compile considers integer attributes static)", "s.k", "1", ""),
    ("___check_type_id(m, 123), type=<class 'torch.nn.modules.linear.Linear'>", "type(m)", "Linear", ""),
    ("___check_obj_id(g, 123), type=<class 'function'>", "g", "function", ""),
    ("hasattr(o, 'k')", "o.k", "present", "absent"),
    ("not hasattr(o, 'k')", "o.k", "absent", "present"),
    ("___dict_contains('a', y)", "y['a']", "present", "absent"),
    ("KeyError on y['a']", "y['a']", "present", "absent"),
    ("set.__contains__(y, 'a')", "'a' in y", "present", "absent"),
    ("not set.__contains__(y, 'a')", "'a' in y", "absent", "present"),
    ("not y", "len(y)", "0", ""),
    ("len(s.b) != 1", "len(s.b)", "1", ""),
    ("y == 2", "y", "2", ""),
    ("y is None", "y", "None", ""),
    ("(type(y) is float and __math_isnan(y))", "y", "nan", ""),
    ("2 <= x.size()[0]", "x.size()[0]", "2 <= x.size()[0]", ""),
    ("(x.size()[0] % 2) == 0", "(x.size()[0] % 2)", "0", ""),
    ("___check_torch_function_mode_stack()", "", "", ""),
    ("_has_dynamo_dim_marking is present on runtime tensor but was absent at compile time", "", "", ""),
    ("something that torch may say one day", "", "", ""),
])  # fmt: skip
def test_what_was_compared(text, what, expected, actual):
    """Expression, value of the cached entry, value now; empty where the text does not say."""
    reason = read_reason(text)
    assert (reason.what, reason.expected, reason.actual) == (what, expected, actual)


def test_the_line_comes_from_the_comment():
    """Source and place stand behind the guard; torch's advice behind them."""
    reason = read_reason("s.k == 1     # return s.l(x)*s.k  # app/net.py:7 in forward (HINT: use a tensor)")
    assert (reason.guard, reason.source, reason.at) == ("s.k == 1", "return s.l(x)*s.k", "app/net.py:7")
    assert reason.advice == "use a tensor"


def test_the_line_comes_from_the_users_stack_where_torch_gives_it():
    """The stack has whole paths; its innermost frame counts."""
    reason = read_reason('s.k == 1   # return s.k  # app/net.py:7 in forward\nUser stack trace:\n'
                  '  File "/src/app/net.py", line 3, in outer\n    y = f(x)\n'
                  '  File "/src/app/net.py", line 7, in forward\n    return s.k')  # fmt: skip
    assert reason.at == "/src/app/net.py:7"
    assert reason.guard == "s.k == 1"


@pytest.mark.parametrize(("place", "source"), [
    ("_inductor/kernel/conv.py:1091 in convolution_backward_lowering", "convolution_backward_lowering"),
    ("_functorch/_aot_autograd/autograd_cache.py:1210 in _lookup_graph", ""),
    ("_dynamo/output_graph.py:500 in init_ambient_guards", ""),
])
def test_a_place_of_torchs(place, source):
    """In brackets; only the function of an operator's own code is worth telling."""
    reason = read_reason(f"(x.size()[2] // 5) == 200  # ({place})")
    assert (reason.source, reason.at, reason.advice) == (source, place.partition(" in ")[0], "")


def test_advice_without_a_place():
    """Duck sizing comes with a text instead of a line."""
    reason = read_reason("y.size()[0] == x.size()[0]  # duck sizing added this equality")
    assert (reason.source, reason.at, reason.advice) == ("", "", "duck sizing added this equality")


def test_advice_in_the_guard_is_taken_out_of_it():
    """A parameter's guard carries torch's advice as its own last sentence."""
    reason = read_reason("tensor 'p' size mismatch at index 0. expected 4, actual 5. Guard failed on it, so")
    assert reason.guard == "tensor 'p' size mismatch at index 0. expected 4, actual 5"
    assert reason.advice == "Guard failed on it, so"


@pytest.mark.parametrize(("what", "shown"), [
    ("self._modules['1'].training", "self[1].training"), ("m._parameters['bias'].size(0)", "m.bias.size(0)"),
    ("len(s._modules['b']._modules)", "len(s.b)"), ("G['SCALE']", "SCALE"), ("x.size()[1]", "x.size(1)"),
    ("___from_numpy(x).size(0)", "x.size(0)"),
    ("y", "y"),
])  # fmt: skip
def test_expressions_read_like_code(what, shown):
    """Torch's way around ``__getattr__`` and its scopes are not for users."""
    assert user_expression(what) == shown
