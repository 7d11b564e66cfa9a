"""A condition on the rows of a dataset in SQL, such as `age >= 18 AND country IN ('DE', 'AT')`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import errors as sql_errors
from sqlglot import exp, parse

from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, nearest

ALLOWED = (
    "columns, numbers, 'texts', TRUE and FALSE with = <> < <= > >= BETWEEN IN LIKE IS NULL, joined by AND, OR and NOT"
)
_COMPARISONS: dict[type[exp.Expression], Callable[[Any, Any], Any]] = {
    exp.EQ: pc.equal,
    exp.NEQ: pc.not_equal,
    exp.LT: pc.less,
    exp.LTE: pc.less_equal,
    exp.GT: pc.greater,
    exp.GTE: pc.greater_equal,
}
# What a node of the parser's tree may have besides what it compares; versions differ in what NOT LIKE is.
_KNOWN = {"this", "expression", "expressions", "low", "high", "quoted", "is_string", "negate"}
_LONGEST = 10_000  # characters
_DEEPEST = 200  # levels: each takes a few frames of the stack, in the parser too


@dataclass(frozen=True, slots=True)
class Condition:
    """A checked condition on the rows of a schema.

    It is SQL's: a comparison with null is neither true nor false, and only rows for which the whole is true are kept.
    Numbers are compared as numbers, whatever their dtypes, and NaN equals and exceeds nothing, as in Arrow and pandas
    (Spark sorts it above all numbers).
    """

    text: str
    """The condition in one form of writing: equal texts keep equal rows."""
    columns: tuple[str, ...]
    """The columns that it reads, in the order of the schema."""
    statistics_decide: bool
    """Whether the least and greatest value of columns can exclude that any row is kept. They do not count NaN, which
    may be kept where a comparison of floats is turned round."""
    _evaluation: _Evaluation

    @classmethod
    def parse(cls, text: str, schema: Schema) -> Condition:
        """Check a condition against the columns of a dataset. Raises ConfigError naming what does not fit."""
        tree = _tree(text)
        names = _column_names(tree, text, schema)
        unsigned = frozenset(name for name in names if schema[name].dtype == "uint64")
        whole = frozenset(name for name in names if schema[name].dtype == "int64") | unsigned
        columns = tuple(field.name for field in schema if field.name in names)
        floats = any(schema[name].dtype in ("float32", "float64") for name in names)
        decide = not floats or tree.find(exp.Not, exp.NEQ) is None
        found = cls(_text(tree), columns, decide, _Evaluation(tree, whole, unsigned))
        try:
            empty = pa.RecordBatch.from_pylist([], schema=schema.arrow_schema())
            kept = found._evaluation.of(empty.column, pa.scalar)
            found.expression()
        except _NotACondition as error:
            raise _wrong(text, str(error)) from None
        except (pa.ArrowException, TypeError, ValueError) as error:
            kinds = ", ".join(f"{name}: {schema[name].dtype}" for name in columns)
            raise _wrong(text, str(error).splitlines()[0], f"values that compare with {kinds}") from None
        if not columns or not pa.types.is_boolean(kept.type):
            raise _wrong(text, "no comparison of a column")
        return found

    def keeps(self, rows: pa.RecordBatch) -> pa.BooleanArray:
        """Whether each row is kept, (n,) bool without nulls."""
        return pc.fill_null(self._evaluation.of(rows.column, pa.scalar), False)

    def kept(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that are kept, in their order."""
        return rows.filter(self.keeps(rows))

    def expression(self) -> pc.Expression:
        """The condition as Arrow's datasets take it, which drop row groups by their statistics."""
        return self._evaluation.of(pc.field, pc.scalar)


class _NotACondition(ValueError):
    """Valid SQL that is no condition on the columns of one row."""


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """Evaluates a condition over columns that are arrays, or over their names in an expression."""

    tree: exp.Expression
    whole: frozenset[str]
    """The columns of integers, which are compared with exact numbers."""
    unsigned: frozenset[str]
    """The columns of uint64, which Arrow holds as decimals and compares with its own kind only."""

    def of(self, column: Callable[[str], Any], constant: Callable[[Any], Any]) -> Any:
        """The condition's value; `column` and `constant` make Arrow's values of names and constants."""
        return self._value(self.tree, column, constant)

    def _value(self, node: exp.Expression, column: Callable[[str], Any], constant: Callable[[Any], Any]) -> Any:
        def value(part: exp.Expression) -> Any:
            return self._value(part, column, constant)

        def compared(compare: Callable[[Any, Any], Any], *sides: exp.Expression) -> Any:
            exact = self._exact(sides)
            return compare(*(constant(_literal(side, exact)) if _is_literal(side) else value(side) for side in sides))

        if unknown := {name for name, part in node.args.items() if part} - _KNOWN:
            raise _NotACondition(f"`{node.sql(dialect='spark')}` ({', '.join(sorted(unknown))})")
        if node.args.get("negate"):
            plain = node.copy()
            plain.set("negate", None)
            return pc.invert(value(plain))
        match node:
            case exp.Paren():
                return value(node.this)
            case exp.Column():
                return column(node.name)
            case exp.And():
                return pc.and_kleene(value(node.this), value(node.expression))
            case exp.Or():
                return pc.or_kleene(value(node.this), value(node.expression))
            case exp.Not():
                return pc.invert(value(node.this))
            case exp.Between():
                low = compared(pc.greater_equal, node.this, node.args["low"])
                return pc.and_kleene(low, compared(pc.less_equal, node.this, node.args["high"]))
            case exp.In() if node.expressions:
                return _any([compared(pc.equal, node.this, each) for each in node.expressions])
            case exp.Is() if isinstance(node.expression, exp.Null):
                return pc.is_null(value(node.this))
            case exp.Like() if isinstance(node.expression, exp.Literal) and node.expression.is_string:
                return pc.match_like(value(node.this), node.expression.this)
        compare = _COMPARISONS.get(type(node))
        if compare is None:
            raise _NotACondition(f"`{node.sql(dialect='spark')}`")
        return compared(compare, node.this, node.expression)

    def _exact(self, sides: Sequence[exp.Expression]) -> type | None:
        """How constants that are compared with these columns are held: Decimal for uint64; None if as they are."""
        names = {side.name for side in sides if isinstance(side, exp.Column)}
        if names & self.unsigned and not names <= self.unsigned:
            raise ValueError(f"uint64 ({', '.join(sorted(names & self.unsigned))}) compares with constants only")
        if names & self.unsigned:
            return Decimal
        return int if names & self.whole else None


def _any(parts: list[Any]) -> Any:
    """Whether any part is true, as a balanced tree: a long list does not nest deep."""
    while len(parts) > 1:
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        parts = [pc.or_kleene(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return parts[0]


def _is_literal(node: exp.Expression) -> bool:
    return not any(True for _ in node.find_all(exp.Column))


def _literal(node: exp.Expression, exact: type | None) -> Any:
    """A constant, as a value of Python. A number that is compared with integers is an exact one."""
    match node:
        case exp.Paren():
            return _literal(node.this, exact)
        case exp.Boolean():
            return bool(node.this)
        case exp.Neg():
            number = _literal(node.this, exact)
            if isinstance(number, int | float | Decimal) and not isinstance(number, bool):
                return -number
        case exp.Literal() if node.is_string:
            return node.this
        case exp.Literal():
            if exact is Decimal or (exact is int and (not node.this.isdigit() or int(node.this) >= 1 << 63)):
                return Decimal(node.this)
            return int(node.this) if node.this.isdigit() else float(node.this)
        case exp.Null():
            raise _NotACondition("a comparison with NULL, which is never true; IS NULL finds nulls")
    raise _NotACondition(f"`{node.sql(dialect='spark')}` in place of a constant")


def one_form(text: str) -> str:
    """A condition in the one form of writing of `Condition.text`. Raises ConfigError for what is not SQL."""
    return _text(_tree(text))


def _text(tree: exp.Expression) -> str:
    return tree.sql(dialect="spark", comments=False)


def _tree(text: str) -> exp.Expression:
    if len(text) > _LONGEST:
        raise _wrong(text, f"{len(text)} characters", f"at most {_LONGEST}")
    try:
        statements = [one for one in parse(text, dialect="spark") if one is not None]
    except RecursionError:
        raise _wrong(text, f"more than {_DEEPEST} levels of parentheses and operators") from None
    except sql_errors.SqlglotError as error:
        raise _wrong(text, str(error).splitlines()[0]) from None
    if len(statements) != 1:
        raise _wrong(text, f"{len(statements)} conditions", f"one, of {ALLOWED}")
    tree = cast(exp.Expression, statements[0])
    if max(node.depth for node in tree.walk()) > _DEEPEST:
        raise _wrong(text, f"more than {_DEEPEST} levels of parentheses and operators")
    return tree


def _column_names(tree: exp.Expression, text: str, schema: Schema) -> set[str]:
    """The columns that a condition names. Raises ConfigError for those that it cannot read."""
    fields = {field.name: field for field in schema}
    found = list(tree.find_all(exp.Column))
    names = {column.name for column in found}
    if qualified := [column.sql(dialect="spark") for column in found if len(column.parts) > 1]:
        raise _wrong(text, f"`{qualified[0]}`, a name with a dot", "names of columns, in `backticks` if they have dots")
    for name in sorted(names):
        if name not in fields:
            raise _wrong(text, f"no column `{name}`{nearest(name, fields)}", ", ".join(fields))
        if fields[name].shape or fields[name].dtype == "bytes":
            scalars = [each for each, field in fields.items() if not field.shape and field.dtype != "bytes"]
            raise _wrong(text, f"`{name}`, which has no single value in a row", ", ".join(scalars))
    return names


def _wrong(text: str, got: str, allowed: str = ALLOWED) -> ConfigError:
    return ConfigError(
        f"the condition `{text[:200]}` cannot be used",
        got=got,
        allowed=allowed,
        next_step="Correct --where.",
    )
