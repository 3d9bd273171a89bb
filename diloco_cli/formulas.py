"""Numbers that carry their formula.

A number that `plan --explain` tells is computed by a function that returns one expression, marked with `@formula`.
While `told` runs a computation, each call of such a function is kept; the function's own source gives the formula in
words and with the numbers put in. So a formula stands in one place, where it is computed.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import update_wrapper
from textwrap import dedent
from typing import Any, Generic, Literal, ParamSpec, TypeVar

P = ParamSpec("P")
Number = TypeVar("Number", bound=float)
Section = Literal["model", "schedule", "island", "prediction", "syncer", "money"]
MAX_WRITTEN = 12  # terms up to which a sum or a product of many is written out
UNITS = ("_s", "_gb", "_bps", "_mbps")  # last in a name; the words leave them out
SYMBOLS = {"round_s": "T", "every": "H", "local_steps": "H_i"}  # of the papers


@dataclass(frozen=True)
class Explanation:
    """One number. `of`: what it belongs to, such as "model" or an island's name. `numbers`: arithmetic that can be
    evaluated (with max, min, round, ceil), and gives `value`; empty if there is too much of it."""

    of: str
    name: str
    formula: str
    numbers: str
    value: float
    unit: str = ""


@dataclass
class _Telling:
    section: Section
    of: str
    kept: dict[str, Explanation]


_listening: list[_Telling] = []  # at most one: whoever listens now


class Formula(Generic[P, Number]):
    """A function that tells its calls while `told` listens to its section. Of two calls the first counts."""

    def __init__(self, function: Callable[P, Number], section: Section, name: str, unit: str, text: str) -> None:
        self.function, self.section, self.name, self.unit, self.text = function, section, name, unit, text
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Number:
        value = self.function(*args, **kwargs)
        for listener in _listening:
            if listener.section == self.section and self.name not in listener.kept:
                values = inspect.signature(self.function).bind(*args, **kwargs).arguments
                listener.kept[self.name] = self._explained(listener.of, values, value)
        return value

    def named(self, name: str) -> Formula[P, Number]:
        """The same arithmetic for another number."""
        return Formula(self.function, self.section, name, self.unit, self.text)

    def _explained(self, of: str, values: Mapping[str, Any], value: float) -> Explanation:
        if self.text:
            text = self.text.format(**{name: _listed(given) for name, given in values.items()})
            return Explanation(of, self.name, text, "", value, self.unit)
        known = {**self.function.__globals__, **values}
        words, numbers = (_written(self.function, known, as_words) for as_words in (True, False))
        return Explanation(of, self.name, words.replace(" * ", " x "), numbers, value, self.unit)


def formula(
    section: Section, name: str, unit: str = "", text: str = ""
) -> Callable[[Callable[P, Number]], Formula[P, Number]]:
    """Marks a function that is a formula. `text`: the formula in words, for one that is no single expression; its
    arguments may stand in it."""
    return lambda function: Formula(function, section, name, unit, text)


def told(section: Section, compute: Callable[[], object], of: str = "") -> list[Explanation]:
    """What the formulas of a section tell during `compute`. `of`: what their numbers belong to; else the section."""
    listener = _Telling(section, of or section, {})
    _listening[:] = [listener]
    try:
        compute()
    finally:
        _listening.clear()
    return list(listener.kept.values())


def short(value: float) -> str:
    """Short enough to read, exact enough to compute with: 1e+09 as 1e9."""
    text = f"{value:.6g}"
    return text.replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


def _listed(value: Any) -> str:
    if not isinstance(value, tuple | list):
        return short(value)
    return ", ".join(map(short, value)) if len(value) <= MAX_WRITTEN else f"{len(value)} of them"


def _written(function: Callable[..., Any], known: Mapping[str, Any], as_words: bool) -> str:
    """The expression that a function returns, its local variables replaced by what they stand for. Empty numbers if
    there are too many."""
    (definition,) = ast.parse(dedent(inspect.getsource(function))).body
    assert isinstance(definition, ast.FunctionDef)
    writer = _Writer(known, as_words)
    for statement in definition.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            writer.local[statement.targets[0].id] = writer.visit(statement.value)
        if isinstance(statement, ast.Return) and statement.value is not None:
            text = ast.unparse(writer.visit(statement.value))
            return "" if writer.too_long else text
    raise TypeError(f"{function.__name__} is no formula: it returns nothing")


class _Writer(ast.NodeTransformer):
    """Writes names as words, or as the numbers that they stand for. What a condition leaves out is not written."""

    def __init__(self, known: Mapping[str, Any], as_words: bool) -> None:
        self.known, self.as_words, self.too_long = dict(known), as_words, False
        self.local: dict[str, ast.AST] = {}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self.local[node.id] if node.id in self.local else self._leaf(node.id, self.known[node.id])

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._leaf(node.attr, self._value(node))

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Name(short(float(node.value)))  # type: ignore[arg-type]

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        chosen: ast.AST = self.visit(node.body if self._value(node.test) else node.orelse)
        return chosen

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in ("sum", "prod"):
            return ast.Call(ast.Name(name), [self.visit(argument) for argument in node.args], [])
        terms = self._terms(node.args[0])
        if self.as_words:
            return ast.Name(f"{'sum' if name == 'sum' else 'product'} of {ast.unparse(terms[0])}")
        self.too_long = len(terms) > MAX_WRITTEN
        joined, operator = terms[0], ast.Add() if name == "sum" else ast.Mult()
        for term in terms[1:]:
            joined = ast.BinOp(joined, operator, term)
        return joined

    def _terms(self, node: ast.expr) -> list[ast.expr]:
        """Those of a sum or product: of all values of a sequence, or of what is computed of each."""
        if not isinstance(node, ast.GeneratorExp):
            values = self._value(node)
            return [self._leaf(getattr(node, "id", ""), value) for value in values] or [ast.Name("0")]
        (loop,) = node.generators
        terms = []
        for value in self._value(loop.iter):
            names = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
            given = value if isinstance(loop.target, ast.Tuple) else [value]
            self.known.update((name.id, each) for name, each in zip(names, given, strict=True))  # type: ignore[attr-defined]
            terms.append(self.visit(ast.parse(ast.unparse(node.elt), mode="eval").body))
        return terms

    def _value(self, node: ast.expr) -> Any:
        """Of a name, of a field, of a comparison of two of them, of a negation."""
        match node:
            case ast.Name(name):
                return self.known[name]
            case ast.Attribute(owner, name):
                return getattr(self._value(owner), name)
            case ast.Compare(left, [ast.LtE()], [right]):
                return self._value(left) <= self._value(right)
        raise TypeError(f"a formula cannot depend on {ast.unparse(node)}")

    def _leaf(self, name: str, value: Any) -> ast.expr:
        if not self.as_words:
            number = float(value)
            return ast.Name(short(number)) if number >= 0 else ast.UnaryOp(ast.USub(), ast.Name(short(-number)))
        return ast.Name(_words(name))


def _words(name: str) -> str:
    """`tokens_per_s` -> tokens per second, `rtt_s` -> rtt, `GB` -> GB."""
    if name in SYMBOLS or (name.isupper() and len(name) <= 4):
        return SYMBOLS.get(name, name)
    name = name.lower()
    if name.endswith("_per_s"):
        return f"{name.removesuffix('_s')} second".replace("_", " ")
    unit = next((unit for unit in UNITS if name.endswith(unit)), "")
    return name.removesuffix(unit).replace("_", " ")
