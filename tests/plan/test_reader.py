"""Values out of a YAML text: what each method of Reader takes, what it refuses, in which words and at which column."""

from __future__ import annotations

import datetime
import os

import pytest

from pytest_torchcompile.errors import MatrixError
from pytest_torchcompile.plan.nodes import MAX_DEPTH, MAX_NODES, compose, describe_node, read_bytes
from pytest_torchcompile.plan.reader import LONGEST, MISSING, SHOWN_PROBLEMS, Reader


def value_node(text):
    """The node of ``text`` behind a key, which begins in column 4."""
    return compose(f"k: {text}\n".encode(), "f.yaml").value[0][1]


def read(text, method, *arguments, **options):
    """What a method makes of a text, and its mistake; no mistake is an empty text."""
    reader = Reader("f.yaml")
    found = getattr(reader, method)(value_node(text), *arguments, **options)
    assert len(reader.mistakes) <= 1
    if not reader.mistakes:
        return found, ""
    assert (reader.mistakes[0].line, reader.mistakes[0].column) == (1, 4)
    return found, reader.mistakes[0].text


# ------------------------------------------------------------------------------------------------------ single values
@pytest.mark.parametrize(("text", "value"), [
    ("abc", "abc"), ("a b", "a b"), ("'yes'", "yes"), ("'1'", "1"), ('""', ""), ("''", ""),
    ("true", True), ("false", False), ("null", None), ("~", None),
    ("0", 0), ("-7", -7), ("999999999999999999", 999999999999999999),
    ("0.5", 0.5), ("-1.25", -1.25), ("1e3", 1000.0), ("1.5E-2", 0.015), ("2.0", 2.0),
])
def test_scalars(text, value):
    """What is quoted is a text, whatever it looks like."""
    found, mistake = read(text, "scalar", "x")
    assert (found, type(found), mistake) == (value, type(value), "")


@pytest.mark.parametrize(("text", "mistake"), [
    ("yes", "x: found 'yes', which YAML reads as a boolean; quote it to mean a text"),
    ("off", "x: found 'off', which YAML reads as a boolean; quote it to mean a text"),
    ("True", "x: found 'True', which YAML reads as a boolean; quote it to mean a text"),
    ("NULL", "x: found 'NULL', which YAML reads as nothing; quote it to mean a text"),
    ("012", "x: found '012', which YAML reads as a number; quote it to mean a text"),
    ("0x1f", "x: found '0x1f', which YAML reads as a number; quote it to mean a text"),
    ("1_000", "x: found '1_000', which YAML reads as a number; quote it to mean a text"),
    ("1:30", "x: found '1:30', which YAML reads as a number; quote it to mean a text"),
    (".inf", "x: found '.inf', which YAML reads as a number; quote it to mean a text"),
    ("2027-03-01", "x: found '2027-03-01', which YAML reads as a date; quote it to mean a text"),
    ("<<", "x: found '<<', which YAML reads as a merge key; quote it to mean a text"),
    ("=", "x: found '=', which YAML reads as a default key; quote it to mean a text"),
    ("2.10", "x: YAML reads 2.10 as 2.1; quote it to mean a text"),
    ("1e999", "x: 1e999 is too large a number"),
    ("[a]", "x: found a list, expected a text, a number, true, false or null"),
    ("{a: 1}", "x: found a mapping, expected a text, a number, true, false or null"),
])
def test_what_yaml_and_a_human_read_differently(text, mistake):
    assert read(text, "scalar", "x") == (MISSING, mistake)


@pytest.mark.parametrize(("text", "value", "mistake"), [
    ("abc", "abc", ""), ("'7'", "7", ""), ("'no'", "no", ""), ("a.b:c", "a.b:c", ""),
    ("7", None, "x: YAML reads 7 as a number, expected a text; quote it"),
    ("no", None, "x: YAML reads no as a boolean, expected a text; quote it"),
    ("2027-03-01", None, "x: YAML reads 2027-03-01 as a date, expected a text; quote it"),
    ("", None, "x: found nothing, expected a text"),
    ("''", None, "x: found '', expected a text"),
    ("'  '", None, "x: found '  ', expected a text"),
    ("[a]", None, "x: found a list, expected a text"),
])
def test_texts(text, value, mistake):
    reader = Reader("f.yaml")
    assert reader.text(value_node(text), "x") == value
    assert [each.text for each in reader.mistakes] == [mistake] * bool(mistake)


@pytest.mark.parametrize(("text", "options", "value", "mistake"), [
    ("0", {}, 0, ""), ("12", {"least": 12, "most": 12}, 12, ""), ("-3", {"least": -3}, -3, ""),
    ("0.5", {"whole": False}, 0.5, ""), ("1e2", {"whole": False}, 100.0, ""), ("3", {"whole": False}, 3, ""),
    ("-1", {}, None, "x: found -1, expected a whole number at least 0"),
    ("1", {"least": 2}, None, "x: found 1, expected a whole number at least 2"),
    ("4", {"least": 1, "most": 3}, None, "x: found 4, expected a whole number from 1 to 3"),
    ("1.5", {"whole": False, "most": 1}, None, "x: found 1.5, expected a number from 0 to 1"),
    ("1.0", {}, None, "x: found '1.0', expected a whole number"),
    ("'3'", {}, None, "x: found '3', expected a whole number"),
    ("0777", {}, None, "x: found '0777', expected a whole number"),
    ("1_0", {"whole": False}, None, "x: found '1_0', expected a number"),
    (".nan", {"whole": False}, None, "x: found '.nan', expected a number"),
    ("1000000000000000000", {}, None, "x: found '1000000000000000000', expected a whole number"),
    ("[1]", {}, None, "x: found a list, expected a whole number"),
])
def test_numbers(text, options, value, mistake):
    found, told = read(text, "number", "x", **options)
    assert (found, type(found), told) == (value, type(value), mistake)


@pytest.mark.parametrize(("text", "value"), [
    ("2027-03-01", datetime.date(2027, 3, 1)), ("'2028-02-29'", datetime.date(2028, 2, 29)), ("2027-02-29", None),
    ("2027-3-1", None), ("20270301", None), ("2027-03-01 10:00:00", None), ("soon", None), ("[2027-03-01]", None),
])
def test_days(text, value):
    found, mistake = read(text, "date", "until")
    assert found == value
    if value is None:
        assert mistake == f"until: found {describe_node(value_node(text))}, expected a day as YYYY-MM-DD"


def test_names():
    """One of those that are known; the nearest one is told."""
    assert read("full", "name", "a strategy", ["full", "sample"]) == ("full", "")
    found, mistake = read("ful", "name", "a strategy", ["full", "sample"])
    assert found is None
    assert mistake.startswith("'ful' is not a strategy; ")
    assert "full" in mistake
    assert read("[full]", "name", "a strategy", ["full"])[1].startswith("a list is not a strategy; ")


# -------------------------------------------------------------------------------------------------- lists and mappings
@pytest.mark.parametrize(("text", "alone", "length", "mistake"), [
    ("[a, b]", False, 2, ""), ("a", True, 1, ""), ("[a]", True, 1, ""),
    ("a", False, 0, "x: found 'a', expected a list"),
    ("{a: 1}", True, 0, "x: found a mapping, expected a list"),
    ("[]", False, 0, "x: the list is empty; expected at least one entry"),
])
def test_lists(text, alone, length, mistake):
    found, told = read(text, "items", "x", alone=alone)
    assert (len(found), told) == (length, mistake)


@pytest.mark.parametrize(("text", "keys", "mistakes"), [
    ("{a: 1, b: 2}", ["a", "b"], []),
    ("{b: 2}", ["b"], ["x: key 'a' is missing"]),
    ("[a]", [], ["x: found a list, expected a mapping"]),
    ("{a: 1, a: 2}", ["a"], ["key 'a' is given twice, first in line 1"]),
    # After another mistake the key is likely there, misspelt.
    ("{aa: 1}", [], ["unknown key 'aa' in x; "]),
    ("{1: 2, a: 1}", ["a"], ["a key of x: YAML reads 1 as a number, expected a text; quote it"]),
])
def test_mappings(text, keys, mistakes):
    reader = Reader("f.yaml")
    assert list(reader.fields(value_node(text), "x", ["a", "b"], ["a"])) == keys
    assert len(reader.mistakes) == len(mistakes)
    for found, expected in zip(reader.mistakes, mistakes, strict=True):
        assert found.text.startswith(expected)


# ------------------------------------------------------------------------------------------------ how mistakes are told
def test_no_mistake_is_no_error():
    Reader("f.yaml").finish()


def test_mistakes_are_told_in_the_order_of_the_file_and_once_each():
    """A node that an alias stands for is read twice, and is wrong once."""
    reader, root = Reader("f.yaml"), compose(b"- a\n-  b\n- c\n", "f.yaml")
    for index in (1, 0, 1):
        reader.wrong(root.value[index], f"mistake {index}")
    with pytest.raises(MatrixError) as caught:
        reader.finish()
    assert str(caught.value) == "f.yaml:1:3: mistake 0\nf.yaml:2:4: mistake 1"
    assert reader.where(root.value[1]) == "f.yaml:2"


@pytest.mark.parametrize(("count", "lines", "last"), [
    (SHOWN_PROBLEMS, SHOWN_PROBLEMS, "f.yaml:20:3: wrong"), (SHOWN_PROBLEMS + 1, SHOWN_PROBLEMS + 1, "... and 1 more"),
    (SHOWN_PROBLEMS + 9, SHOWN_PROBLEMS + 1, "... and 9 more"),
])
def test_a_long_list_is_cut(count, lines, last):
    reader = Reader("f.yaml")
    for node in compose(b"- a\n" * count, "f.yaml").value:
        reader.wrong(node, "wrong")
    with pytest.raises(MatrixError) as caught:
        reader.finish()
    told = str(caught.value).splitlines()
    assert (len(told), told[-1]) == (lines, last)


def test_a_long_text_is_cut():
    reader = Reader("f.yaml")
    reader.wrong(value_node("a"), "x" * LONGEST)
    reader.wrong(value_node("a"), "x" * (LONGEST + 1))
    assert [each.text for each in reader.mistakes] == ["x" * LONGEST, "x" * LONGEST + "..."]


# ------------------------------------------------------------------------------------------------------ the tree itself
@pytest.mark.parametrize(("text", "told"), [
    ("", "nothing"), ("''", "''"), ("abc", "'abc'"), ("[a]", "a list"), ("{}", "a mapping"), ("x" * 60, repr("x" * 60)),
    ("x" * 61, repr("x" * 57 + "...")),
])
def test_nodes_in_words(text, told):
    assert describe_node(value_node(text)) == told


def nested(levels):
    return b"[" * levels + b"]" * levels


def aliased(width, levels):
    """A text whose aliases stand for ``width ** levels`` nodes, and more."""
    lines = [f"a0: &a0 [{', '.join(['x'] * width)}]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join(lines).encode()


@pytest.mark.parametrize("data", [nested(MAX_DEPTH), aliased(10, 4), b"\xef\xbb\xbfa: 1"])
def test_what_is_within_bounds(data):
    """Deep, wide by aliases, and with a byte order mark."""
    mark = compose(data, "f.yaml").start_mark
    assert (mark.line, mark.column) == (0, 0)


@pytest.mark.parametrize(("data", "told"), [
    (b"", "f.yaml:1:1: the file is empty; expected at least the keys version and models"),
    (b"# nothing\n", "f.yaml:1:1: the file is empty; expected at least the keys version and models"),
    (nested(MAX_DEPTH + 1), f"f.yaml:1:33: nested deeper than {MAX_DEPTH} levels"),
    (nested(100_000), f"f.yaml:1:33: nested deeper than {MAX_DEPTH} levels"),
    (aliased(10, 5), f"f.yaml:5:5: aliases expand to more than {MAX_NODES:,} nodes"),
    (b"a: &a [*a]", "f.yaml:1:4: an alias that contains itself"),
    (b"a: !!python/object:os.system x",
     "f.yaml:1:4: tag '!!python/object:os.system' would build an object; expected plain data"),
    (b"a: !mine x", "f.yaml:1:4: tag '!mine' would build an object; expected plain data"),
    (b"a: 1\nb: \xff", "f.yaml:2:4: byte 0xff is not UTF-8; save the file as UTF-8"),
    (b"a: [1", "malformed YAML: "), (b"a: 1\n---\nb: 2\n", "malformed YAML: "), (b"a: *nobody", "malformed YAML: "),
    (b"a: 1\n\x07: 2", "f.yaml:2:1: malformed YAML: "),
])
def test_what_is_refused_at_once(data, told):
    with pytest.raises(MatrixError) as caught:
        compose(data, "f.yaml")
    assert told in str(caught.value)
    assert str(caught.value).startswith("f.yaml:")


@pytest.mark.parametrize(("name", "told"), [
    ("", "is a folder; expected a policy file; it holds a.yaml, b.yml"),
    ("empty", "is a folder; expected a policy file"),
    ("aa.yaml", "no such file; did you mean '"),
    ("fifo", "is no regular file; expected a policy file"),
    ("long.txt", "is longer than 1,048,576 bytes, too long for a policy"),
])
def test_what_is_no_file(tmp_path, name, told):
    for file in ("a.yaml", "b.yml"):
        (tmp_path / file).write_text("x")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "long.txt").write_bytes(b"x" * ((1 << 20) + 1))
    path = tmp_path / name
    with pytest.raises(MatrixError) as caught:
        read_bytes(path, str(path), "policy")
    assert str(caught.value).startswith(f"{path}:1:1: {told}")


def test_the_longest_file_is_read(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"x" * (1 << 20))
    assert len(read_bytes(path, "a.yaml")) == 1 << 20
