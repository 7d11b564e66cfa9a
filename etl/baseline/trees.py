"""Trees of pyspark.ml see categories as numbers of values: a one-hot column for each would be a wide row in memory.

Spark keeps all columns of all training rows as whole numbers while it grows trees: 14,000 one-hot columns of 72,000
rows are 4 GB, each read again at each level. A tree that knows a column's categories splits them as well in one column.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.storage.errors import ConfigError, LockstepError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TREES = ("tree", "forest", "gbt")
MOST_CATEGORIES = 1_000
"""The most categories that a column of texts keeps; rarer texts share one. `--set maxBins` changes it, which Spark
needs to be as large."""
MOST_BUCKETS = 256
"""The most columns that a list of texts becomes: one column for each bucket."""
MOST_CELLS = 4 << 30
"""Rows by columns, of 4 bytes each, at which a baseline is refused."""
# Measured on 2 busy cores with Spark 4.3.0: gbt of 4 trees of depth 5 on 39 columns took 15 s for one partition of
# 72,000 rows, 20 s for one of 200,000.
CELLS_PER_S = 20_000_000
"""Cells that a core looks up in a second at one level of one tree."""
LEVEL_S = 0.4
"""What a level of a tree costs whatever its rows: two stages of Spark."""
AGAIN_S = 0.2
"""Seconds between two attempts to cancel Spark's jobs."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How much work trees of these settings on so many rows and columns are."""

    kind: str
    rows: int
    columns: int
    trees: int
    depth: int
    slots: int

    @classmethod
    def of(cls, kind: str, rows: int, columns: int, estimator: Any, slots: int) -> Growth:
        """Return the growth that the settings of pyspark.ml's estimator ask for."""
        name = {"forest": "numTrees", "gbt": "maxIter"}.get(kind)
        trees = 1 if name is None else int(estimator.getOrDefault(name))
        return cls(kind, rows, columns, trees, int(estimator.getOrDefault("maxDepth")), slots)

    @property
    def cells(self) -> int:
        """The number of cells: rows times columns."""
        return self.rows * self.columns

    @property
    def levels(self) -> int:
        """Levels that are grown one after the other; those of a forest's trees are grown together."""
        return self.depth * (self.trees if self.kind == "gbt" else 1)

    @property
    def seconds(self) -> float:
        """About how many seconds the training takes."""
        return self.levels * LEVEL_S + self.cells * self.trees * self.depth / (CELLS_PER_S * self.slots)

    def words(self) -> str:
        """Describe the size and the time in a line that people read."""
        size = f"{self.rows:,} rows of {self.columns:,} columns, {self.cells * 4 / 2**20:,.0f} MiB in memory"
        minutes = math.ceil(self.seconds / 60)
        time = "under a minute" if minutes < 2 else f"some {minutes:,} minutes"
        trees = f"{self.trees} tree{'s' if self.trees > 1 else ''} of depth {self.depth}"
        return f"{self.kind}: {size}; {trees}, {time} on {self.slots} core{'s' if self.slots > 1 else ''}"

    def check(self) -> None:
        """Raise ConfigError for more than can be expected to end."""
        if self.cells > MOST_CELLS:
            raise ConfigError(
                f"the baseline {self.kind} would not end: it keeps all columns of all rows in memory",
                got=self.words(),
                allowed=f"up to {MOST_CELLS:,} rows times columns",
                next_step="Fit on a smaller --train-split, or take --kind logistic or linear-regression.",
            )


def category_limit(settings: Mapping[str, Any]) -> int:
    """The most categories of one column."""
    return int(settings.get("maxBins", MOST_CATEGORIES))


def indexed(rows: DataFrame, ids: Mapping[str, int], limit: int) -> DataFrame:
    """Return `rows` with columns NAME_tree of the categories of the columns NAME_id: the most frequent `limit` - 1, and
    one for all others. `ids` is how many each column has, by NAME.
    """
    from pyspark.sql import functions as F

    made = {}
    for name, known in ids.items():
        size = max(2, min(known, limit))
        nominal = {"ml_attr": {"name": f"{name}_tree", "type": "nominal", "num_vals": size}}
        column = F.least(F.col(f"{name}_id"), F.lit(float(size - 1)))
        made[f"{name}_tree"] = column.alias(f"{name}_tree", metadata=nominal)
    return rows.select("*", *made.values())


@contextmanager
def within(spark: SparkSession, deadline_s: float, what: str) -> Iterator[None]:
    """Cancel Spark's jobs after `deadline_s` seconds, and raise LockstepError in place of Spark's error."""
    done, late = threading.Event(), threading.Event()

    def cancel() -> None:
        after = deadline_s
        while not done.wait(after):
            late.set()
            spark.sparkContext.cancelAllJobs()
            after = AGAIN_S  # a job that starts a moment later must end too

    thread = threading.Thread(target=cancel, name="lockstep-deadline", daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        if not late.is_set():
            raise
        raise LockstepError(
            f"{what} has not ended in time",
            got=f"more than {deadline_s:g} s",
            allowed="--deadline, in seconds",
            next_step="Raise --deadline, fit on a smaller --train-split, or lower --set maxIter, numTrees or maxDepth.",
        ) from error
    finally:
        done.set()
        thread.join()
