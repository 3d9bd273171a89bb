"""Whoever reads what somebody else may have written says how much at most: else one large object ends every reader."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from diloco_cli.protocol.log.operations import Get

PACKAGE = Path(__file__).resolve().parents[2] / "diloco_cli"
STORES = {
    "store",
    "_store",
    "home",
    "there",
    "bucket",
    "reader",
    "meter",
    "far",
    "near",
    "opened",
    "foreground_store",
    "open_store",
}
OWN_OBJECTS = {
    "store": "passes on what it is asked",
    "doctor": "reads what it has just written, below a prefix that nobody knows",
    "probe": "likewise",
}


def is_unbounded(node: ast.AST) -> bool:
    """Whether this is `store.get(key)`, with nothing behind the key, or None."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "get":
        return False
    value = node.func.value.func if isinstance(node.func.value, ast.Call) else node.func.value
    name = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""
    bounds = [*node.args[1:], *(keyword.value for keyword in node.keywords if keyword.arg == "max_bytes")]
    return name in STORES and all(isinstance(bound, ast.Constant) and bound.value is None for bound in bounds)


def test_every_read_of_a_store_has_a_bound() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.relative_to(PACKAGE).as_posix().startswith(tuple(f"{part}/" for part in OWN_OBJECTS))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and is_unbounded(node)
    ]
    assert found == []


def test_the_rule_can_see() -> None:
    unbounded = ("self.store.get(k)", "store.get(k, None)", "store.get(k, max_bytes=None)", "opened().get(k)")
    bounded = ("home.get(k, 9)", "home.get(k, max_bytes=MOST)", "table.get(k)", "table.get(k, None)")
    assert all(is_unbounded(ast.parse(text, mode="eval").body) for text in unbounded)
    assert not any(is_unbounded(ast.parse(text, mode="eval").body) for text in bounded)


def test_no_protocol_code_can_read_without_a_bound() -> None:
    with pytest.raises(TypeError, match="max_bytes"):
        Get("commit/000000000000.json")  # type: ignore[call-arg]
