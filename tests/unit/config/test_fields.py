"""YAML is read by version 1.2's rules, with places, and without its traps."""

from __future__ import annotations

import math

import pytest

from diloco_cli.config.fields import parse_yaml, read_yaml_file
from diloco_cli.errors import UsageError


def scalar(text):
    return parse_yaml(f"key: {text}", "x.yaml").value["key"].value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("True", "True"),
        ("true", True),
        ("false", False),
        ("~", None),
        ("12", 12),
        ("1:30", "1:30"),
        ("0x1F", "0x1F"),
        ("'7'", "7"),
        ("2026-01-01", "2026-01-01"),
        ("-.inf", -math.inf),
    ],
)
def test_scalars_follow_the_core_schema(text, value):
    read = scalar(text)
    assert read == value
    assert type(read) is type(value)


def test_every_value_knows_its_line():
    tree = parse_yaml("a: 1\nb:\n  c: 2\n  d: [3,\n    4]\n", "x.yaml")
    assert tree.value["a"].where == "x.yaml:1"
    assert tree.value["b"].value["c"].where == "x.yaml:3"
    assert tree.value["b"].value["d"].value[1].where == "x.yaml:5"


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "x.yaml:3", "the key 'a' is given twice (before: x.yaml:1)"),
        ("a: &x 1\nb: 2\n", "x.yaml:1", "anchors and aliases"),
        ("a: 1\nb: *x\n", "x.yaml:2", "a"),
        ("a: !!python/object:os.system 1\n", "x.yaml:1", "the tag"),
        ("a: 1\n---\nb: 2\n", "x.yaml:2", "a second document"),
        ("? [a]\n: 1\n", "x.yaml:1", "a key must be plain text"),
        ("a: " + "[" * 20 + "]" * 20, "x.yaml:1", "nested deeper than"),
        ("a: " + "x" * 5000, "x.yaml:1", "longer than"),
        ("a: [1, 2\nb: 3\n", "x.yaml", "not valid YAML"),
        ("\ta: 1\n", "x.yaml:1", "not valid YAML"),
        ("", "x.yaml", "the file is empty"),
        ("# nothing\n", "x.yaml", "the file is empty"),
        ("a: \x00", "x.yaml", "not valid YAML"),
    ],
)
def test_traps_are_refused_with_their_place(text, where, message):
    with pytest.raises(UsageError) as caught:
        parse_yaml(text, "x.yaml")
    assert caught.value.where.startswith(where)
    assert message in caught.value.message


def test_a_missing_file_and_a_binary_one_are_usage_errors(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        read_yaml_file(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_yaml_file(tmp_path / "binary.yaml")
    with pytest.raises(UsageError, match="cannot read"):
        read_yaml_file(tmp_path)
