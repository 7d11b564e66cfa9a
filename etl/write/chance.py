"""Chance in a data frame: what makes its rows differ each time they are computed, found in Spark's plan.

Spark's own flag `deterministic` covers expressions such as rand(). It says nothing of operators that take rows by their
place: a sample, a limit, the first of a group. Decision record: docs/decisions/061-splits-and-leakage.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lockstep.storage.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Aggregates whose value is that of the row which Spark meets first, or whose list has the order of meeting.
_BY_ORDER = {
    "First": "first, any_value",
    "Last": "last",
    "AnyValue": "any_value",
    "CollectList": "collect_list, array_agg",
    "CollectSet": "collect_set",
}
_SORTS = ("SortArray", "ArraySort", "ArraySize", "Size")  # around a list, they leave nothing of its order
_KEEP_ORDER = ("Project", "Filter", "SubqueryAlias", "LocalLimit", "GlobalLimit", "Offset", "View")


def refuse_chance(df: DataFrame) -> None:
    """Raise ConfigError for a data frame whose rows differ each time they are computed."""
    found = chance_in(df)
    if found is not None:
        raise ConfigError(
            "the rows of the input differ each time it is read",
            got=found,
            allowed="stored values and functions of them (a seed does not help: it draws by a row's place)",
            next_step="Store those rows first, as a table or Parquet, or by checkpoint() of a data frame; or choose"
            " rows by their values: WHERE pmod(xxhash64(id), 10) = 0, ORDER BY id LIMIT 1000, min(x) for any_value(x);"
            " --sample thins out a class.",
        )


def chance_in(df: DataFrame) -> str | None:
    """What makes the rows of a data frame differ each time they are computed, or None."""
    plan = df._jdf.queryExecution().analyzed()  # pyspark has no way to a plan's expressions
    if not plan.deterministic():
        return "an expression that depends on chance"
    if plan.containsPattern(patterns(df.sparkSession).CURRENT_LIKE()):
        return "an expression that depends on the clock"
    return next((found for node in nodes(plan) if (found := _chance_of(node)) is not None), None)


def patterns(spark: SparkSession) -> Any:
    """Spark's names of what a plan may contain."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    return jvm.org.apache.spark.sql.catalyst.trees.TreePattern


def nodes(plan: Any) -> Iterator[Any]:
    """All nodes of a plan, those of its subqueries among them."""
    waiting = [plan]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [*_items(node.children()), *_items(node.subqueries())]


def _items(found: Any) -> Iterator[Any]:
    return (found.apply(number) for number in range(found.size()))


def _chance_of(node: Any) -> str | None:
    kind = node.nodeName()
    if kind == "Sample":
        return "a sample: TABLESAMPLE, sample() or randomSplit()"
    if kind in ("LocalLimit", "GlobalLimit", "Offset", "Tail") and not _is_sorted(node.child()):
        return "LIMIT or OFFSET without ORDER BY: which rows come first is chance"
    if kind == "Deduplicate" and node.keys().size() < node.child().output().size():
        return "dropDuplicates() by some of the columns: which of the rows stays is chance"
    if kind == "Aggregate":
        for expression in _items(node.aggregateExpressions()):
            if (name := _by_order(expression, "")) is not None:
                return f"{name}: which row of a group comes first is chance"
    return None


def _is_sorted(plan: Any) -> bool:
    while (kind := plan.nodeName()) in _KEEP_ORDER:
        plan = plan.child()
    return kind == "Sort" and bool(getattr(plan, "global")())  # a keyword of Python


def _by_order(expression: Any, above: str) -> str | None:
    kind = expression.getClass().getSimpleName()
    if kind in _BY_ORDER and above not in _SORTS:
        return _BY_ORDER[kind]
    if kind == "ListAgg" and not expression.orderExpressions().size():
        return "listagg without WITHIN GROUP"
    around = above if kind == "AggregateExpression" else kind
    return next((name for one in _items(expression.children()) if (name := _by_order(one, around))), None)
