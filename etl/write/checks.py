"""Labels as SQL expressions, checked before anything is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.storage.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def check_label(spark: SparkSession, label: str, columns: str, kinds: tuple[str, ...], allowed: str) -> None:
    """Raise ConfigError for a label over `columns` (in Spark's notation) that is no SQL, names unknown columns, has
    none of the types `kinds`, does not give one value for each row, or depends on chance or the clock. `allowed` is
    told then.
    """
    from pyspark.errors import AnalysisException, ParseException

    def bad(got: str) -> ConfigError:
        return ConfigError(
            f"--label is not a label: {label}",
            got=got,
            allowed=allowed,
            next_step="Correct --label; leave it out for the default.",
        )

    try:
        labelled = spark.createDataFrame([], columns).selectExpr("*", f"({label}) AS _label")
        kind = dict(labelled.dtypes)["_label"]
        plan = labelled._jdf.queryExecution().analyzed()
    except (AnalysisException, ParseException) as error:
        raise bad(str(error).strip().splitlines()[0]) from None
    if kind not in kinds:
        raise bad(f"type {kind}")
    jvm = spark.sparkContext._jvm  # pyspark tells nothing of a plan's expressions
    assert jvm is not None
    patterns = jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    if not plan.deterministic():
        raise bad("an expression that depends on chance")
    if plan.containsPattern(patterns.CURRENT_LIKE()):
        raise bad("an expression that depends on the clock")
    if plan.containsPattern(patterns.GENERATE()) or plan.containsPattern(patterns.PLAN_EXPRESSION()):
        raise bad("an expression that makes rows or asks another table")
