"""Cause classes of failed guards: every text that torch makes, and those that it does not make yet."""

from __future__ import annotations

import re

import pytest

from pytest_torchcompile.ledger.reasons import CAUSES, TABLE, classify_guard, read_reason

CPU = "DispatchKeySet(CPU, BackendSelect, ADInplaceOrView, AutogradCPU)"

TEXTS = [
    ("tensor 'x' size mismatch at index 0. expected 3, actual 4", "shape"),
    ("tensor 'fn._parameters['bias']' size mismatch at index 0. expected 4, actual 5. Guard failed on a "
     "parameter, consider using torch._dynamo.config.force_parameter_static_shapes = False", "shape"),
    ("tensor 'x' rank mismatch. expected 1, actual 2", "shape"),
    ("x.ndimension() == 2    # f(x)  # a.py:3 in f", "shape"),
    ("tensor 'x' stride mismatch at index 0. expected 4, actual 1", "stride"),
    ("tensor 'x' dtype mismatch. expected Float, actual Double", "dtype"),
    ("str(x.dtype) == 'torch.float32'    # f(x)  # a.py:3 in f", "dtype"),
    ("tensor 'x' requires_grad mismatch. expected requires_grad=0", "requires_grad"),
    ("x.requires_grad == False    # f(x)  # a.py:3 in f", "requires_grad"),
    ("tensor 'x' Tensor device index mismatch. Expected device index to be 0, actual 1", "device"),
    ("str(x.device) == 'cpu'", "device"),
    (f"tensor 'x' dispatch key set mismatch. expected {CPU}, actual DispatchKeySet(CUDA, BackendSelect, "
     "ADInplaceOrView, AutogradCUDA)", "device"),
    (f"tensor 'x' dispatch key set mismatch. expected {CPU}, actual DispatchKeySet(CPU, BackendSelect, "
     "Conjugate, ADInplaceOrView, AutogradCPU)", "type"),
    ("expected type of 'y' to be a tensor type, ' but found <class 'int'>", "type"),
    ("expected type of 'y' to be a tensor type, ' but found <class 'NoneType'>", "none"),
    ("expected type of 'y' to be <class 'torch.Tensor'>, but found <class 'int'>", "type"),  # torch 2.15
    ("_has_dynamo_dim_marking is present on runtime tensor but was absent at compile time", "symbolic"),
    ("hasattr(x, '_dynamo_dynamic_indices') == False", "symbolic"),
    ("((getattr(x, '_dynamo_dynamic_indices', set()).issubset({0})) if hasattr(x, '_dynamo_dynamic_indices') "
     "else True)", "symbolic"),
    ('Duplicate tensors found: ["x", "y"]', "other"),
    ("x is y      # def f(x, y):  # a.py:3 in f", "other"),
    ("GLOBAL_STATE changed: grad_mode ", "grad_mode"),
    ("GLOBAL_STATE changed: grad_mode autocast(cpu)_enabled ", "grad_mode"),
    ("GLOBAL_STATE changed: autocast(cpu)_enabled ", "autocast"),
    ("GLOBAL_STATE changed: num_threads ", "global_state"),
    ("GLOBAL_STATE changed: deterministic_algorithms ", "global_state"),
    ("___check_global_state() against {'grad_mode': True}", "global_state"),
    ("___check_torch_function_mode_stack()", "global_state"),
    ("utils_device.CURRENT_DEVICE == None    # torch/utils/_device.py:89 in _init", "global_state"),
    ("torch._functorch.pyfunctorch.compare_functorch_state([('Vmap', 1, 'error')])", "global_state"),
    ("torch.autograd.forward_ad._current_level == -1", "global_state"),
    ("s is ___get_current_stream(torch.device('cuda'))", "global_state"),
    ("torch._functorch.aot_autograd.utils.top_saved_tensors_hooks ids == None", "backward"),
    ("fn._modules['1'].training == True    # return F.dropout(x)  # nn/modules/dropout.py:73 in forward",
     "training_mode"),
    ("hasattr(o, 'k')    # getattr(o, 'k', 1)  # a.py:3 in f", "attribute"),
    ("not hasattr(o, 'k')", "attribute"),
    ("not ___dict_contains('forward', m.__dict__)", "attribute"),
    ("KeyError on s.act", "attribute"),
    ("KeyError on y['a']", "dict"),
    ("___dict_contains('a', y)    # y['a']  # a.py:3 in f", "dict"),
    ("not ___dict_contains('a', y)", "dict"),
    ("___dict_version(y) == 17", "dict"),
    ("not set.__contains__(y, 'a')", "dict"),
    ("list(dict.keys(y)) == ['a', 'b']", "dict"),
    ("list(y.keys()) == ['a']", "dict"),
    ("len(y) == 1    # for i in y:  # a.py:3 in f", "length"),
    ("len(s._modules['b']._modules) != 1", "length"),
    ("not y    # for i in y:  # a.py:3 in f", "length"),
    ("set.__len__(y) == 2", "length"),
    ("___tuple_iterator_len(y) == 2", "length"),
    ("___list_reverseiterator_len(y) == 2", "length"),
    ("___check_obj_id(g, 139630802408512), type=<class 'builtin_function_or_method'>  # g(x)  # a.py:3 in f",
     "closure"),
    ("___check_obj_id(f.__code__, 139630809593712), type=<class 'code'>", "closure"),
    ("___check_obj_id(f, 139630809593712), type=<class 'function'>", "closure"),
    ("fn.__closure__[0].cell_contents == 1", "closure"),
    ("fn.__defaults__[0] == 1", "closure"),
    ("___check_obj_id(A, 94678184232336), type=<class 'type'>", "type"),
    ("___check_obj_id(y, 94678184232336), type=<class 'NoneType'>", "none"),
    ("___check_obj_id(y, 94678184232336), type=<enum 'Kind'>", "value"),
    ("___check_obj_id(y, 94678184232336)", "value"),  # torch 2.8 names no type
    ("___check_type_id(m, 94678184232336), type=<class 'torch.nn.modules.linear.Linear'>  # m(x)", "type"),
    ("___check_type_id(m, 94678184232336)", "type"),
    ("___check_metadata_140110_c0/0", "type"),
    ("__dtensor_spec_140110", "type"),
    ("x.raw_repr() == DispatchKeySet(CPU).raw_repr()", "type"),
    ("y is None    # if y is None:  # a.py:3 in f", "none"),
    ("y is not None    # if y is None:  # a.py:3 in f", "none"),
    ("(type(y) is float and __math_isnan(y))", "value"),
    ("__math_isnan(y)", "value"),
    ("2 <= x.size()[0]  # return x + 1  # a.py:3 in f (user code shown is first use)", "symbolic"),
    ("2 <= x.size()[0] <= 5  # if x.shape[0] > 5:  # a.py:3 in f", "symbolic"),
    ("y.size()[0] == x.size()[0]  # duck sizing added this equality", "symbolic"),
    ("(x.size()[0] % 2) == 0  # if x.shape[0] % 2 == 0:  # a.py:3 in f", "symbolic"),
    ("x.stride()[0] == x.size()[1]", "symbolic"),
    ("x.storage_offset() == 0", "symbolic"),
    ("Eq(Mod(n, 8), 0)", "symbolic"),
    ("2 <= n  # x + n  # a.py:3 in f", "symbolic"),
    ("n != 4", "symbolic"),
    ("y == 2                                                   # x + y  # a.py:3 in f", "value"),
    ("y == 'a  # b'    # f(y)  # a.py:3 in f", "value"),
    ("G['SCALE'] == 1    # x * SCALE  # a.py:3 in f", "value"),
    ("___normalize_range_iter(r) == (0, 4, 1)", "value"),
    ("Cache line invalidated because s got deallocated", "other"),
    ("Unable to find recompilation reasons", "other"),
    ("a guard that torch will only make in the future", "other"),
    ("", "other"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "cause"), TEXTS)
def test_class_of_a_text(text, cause):
    """Each known text has its class, with torch's prefix and comment as it comes."""
    assert classify_guard(read_reason(f"0/1: {text}").guard) == cause


def test_every_pattern_of_the_table_is_exercised():
    """No row of the table is dead: each is the first to match one of the texts above."""
    guards = [read_reason(text).guard for text, _ in TEXTS]
    first = {next((p.text for p in TABLE if re.search(p.text, guard)), None) for guard in guards}
    assert {p.text for p in TABLE} - first == set()


def test_the_table_speaks_of_known_classes_only():
    """A row with a class that nobody knows would be a class that no check can judge."""
    assert {p.cause for p in TABLE} <= set(CAUSES)
    assert {p.cause for p in TABLE} == set(CAUSES)


def test_a_function_without_a_type_is_known_by_what_it_is_now():
    """Torch 2.8 gives no type beside an object's id; the function that came instead tells."""
    assert classify_guard("___check_obj_id(g, 1)", actual="function cos") == "closure"
    assert classify_guard("___check_obj_id(g, 1)", actual="code <lambda> of line 3") == "closure"
    assert classify_guard("___check_obj_id(g, 1)", actual="Kind") == "value"


def test_a_comment_says_nothing_about_the_cause():
    """The source line behind the guard mentions None and len; the guard compares a value."""
    assert classify_guard(read_reason("y == 2    # return len(x) if y is None else x  # a.py:3 in f").guard) == "value"


@pytest.mark.parametrize(("guard", "cause"), [
    ("k == 1", "closure"), ("k.a == 1", "value"), ("j == 1", "value"), ("len(k) == 1", "length"),
])  # fmt: skip
def test_a_value_taken_from_an_enclosing_function_is_a_closure(guard, cause):
    """Two closures of one code differ in their free variables; that is the cause, not the value."""
    assert classify_guard(guard, freevars=("k",)) == cause
