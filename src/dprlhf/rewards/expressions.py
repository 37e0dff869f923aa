"""Evaluate short expressions that a model wrote, without running code.

A completion is text that nobody has read, so none of it is ever executed. An expression is parsed
with :mod:`ast`, and its tree is walked: numbers, the names given, arithmetic, comparisons,
``and``/``or``/``not``, ``a if c else b``, and calls of ``abs``, ``min`` and ``max``. There are no
other calls, attributes, loops or powers, and length and numbers are bounded, so that an
evaluation always ends after few steps. There is no time limit: whether a limit is met depends on
what else the machine does, and a score may not.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

LONGEST = 200
"""Most characters of an expression."""
LARGEST = 10**60
"""Largest numerator and denominator of a value, and of each value on the way to it.

It has room for the product of three floats, of which each has 17 digits.
"""

_DIGITS = 1_000
"""Most characters of a number that is written as text."""

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_UNARY: dict[type, Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_CALLS: dict[str, Callable[..., Any]] = {"abs": abs, "min": min, "max": max}


def parse(text: str) -> ast.expr | None:
    """Return the tree of an expression, or None if the text is not one or is too long."""
    if len(text) > LONGEST:
        return None
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def value_of(tree: ast.expr | None, names: Mapping[str, Any] | None = None) -> Fraction | None:
    """Return the exact value of an expression, a truth value as 0 or 1.

    Args:
        tree: The tree that :func:`parse` returned.
        names: Value of each name that may occur: an integer, a float, a truth value, or a decimal
            number as text.

    Returns:
        The value; None if there is no tree, where something in it is not allowed, a value on the
        way is undefined or too large, or a name's value is no number.

    >>> value_of(parse("(1 + x) / 3"), {"x": 1})
    Fraction(2, 3)
    >>> value_of(parse("__import__('os').getcwd()")) is None
    True
    """
    try:
        given = {name: number_of(value) for name, value in (names or {}).items()}
        return None if tree is None else Fraction(_walk(tree, given))
    except (_NotAllowedError, ArithmeticError, ValueError, TypeError, RecursionError):
        return None


def number_of(value: Any) -> Fraction:
    """Return a number, a truth value or a decimal number as text as an exact fraction.

    Raises:
        ValueError: It is no finite number, or is larger than :data:`LARGEST`.
        ArithmeticError: It is no number.
    """
    value = int(value) if isinstance(value, bool) else value
    text = str(value).replace(",", "").replace("$", "").strip()
    if len(text) > _DIGITS:  # a million digits as a fraction take minutes
        raise ValueError("not a number in bounds")
    decimal = Decimal(text)
    # Before the conversion: 1e999999 as a fraction would fill the memory.
    if not decimal.is_finite() or abs(decimal.adjusted()) > len(str(LARGEST)):
        raise ValueError("not a number in bounds")
    return Fraction(decimal)


class _NotAllowedError(Exception):
    """The expression has a part that is not evaluated."""


def _walk(node: ast.expr, names: Mapping[str, Fraction]) -> Any:
    found = _EVALUATE.get(type(node), _refuse)(node, names)
    if isinstance(found, Fraction) and max(abs(found.numerator), found.denominator) > LARGEST:
        raise _NotAllowedError
    return found


def _refuse(node: Any, names: Mapping[str, Fraction]) -> Any:
    raise _NotAllowedError


def _known(table: Mapping[Any, Callable[..., Any]], key: Any) -> Callable[..., Any]:
    if key not in table:
        raise _NotAllowedError
    return table[key]


def _number(node: ast.Constant, names: Mapping[str, Fraction]) -> Any:
    if type(node.value) not in (int, float):
        raise _NotAllowedError
    return number_of(node.value)


def _name(node: ast.Name, names: Mapping[str, Fraction]) -> Any:
    if node.id not in names:
        raise _NotAllowedError
    return names[node.id]


def _binary(node: ast.BinOp, names: Mapping[str, Fraction]) -> Any:
    function = _known(_BINARY, type(node.op))
    return Fraction(function(_walk(node.left, names), _walk(node.right, names)))


def _unary(node: ast.UnaryOp, names: Mapping[str, Fraction]) -> Any:
    return _known(_UNARY, type(node.op))(_walk(node.operand, names))


def _compare(node: ast.Compare, names: Mapping[str, Fraction]) -> bool:
    values = [_walk(part, names) for part in (node.left, *node.comparators)]
    steps = zip(node.ops, values, values[1:], strict=False)
    return all(_known(_COMPARISONS, type(step))(left, right) for step, left, right in steps)


def _logic(node: ast.BoolOp, names: Mapping[str, Fraction]) -> Any:
    # As in Python, the first value that decides, be it a number: 3 or 5 is 3.
    value: Any = None
    for part in node.values:
        value = _walk(part, names)
        if bool(value) == isinstance(node.op, ast.Or):
            break
    return value


def _choice(node: ast.IfExp, names: Mapping[str, Fraction]) -> Any:
    return _walk(node.body if _walk(node.test, names) else node.orelse, names)


def _call(node: ast.Call, names: Mapping[str, Fraction]) -> Any:
    if not isinstance(node.func, ast.Name) or node.keywords:
        raise _NotAllowedError
    return _known(_CALLS, node.func.id)(*(_walk(part, names) for part in node.args))


_EVALUATE: dict[type, Callable[[Any, Mapping[str, Fraction]], Any]] = {
    ast.Constant: _number,
    ast.Name: _name,
    ast.BinOp: _binary,
    ast.UnaryOp: _unary,
    ast.Compare: _compare,
    ast.BoolOp: _logic,
    ast.IfExp: _choice,
    ast.Call: _call,
}
