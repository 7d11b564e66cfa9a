"""The features of a dataset as one vector a row, by pyspark.ml's transformers, which are fitted on training rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lockstep.etl import columns as c
from lockstep.etl.baseline.plan import Plan, listed
from lockstep.etl.baseline.trees import MOST_BUCKETS, indexed
from lockstep.features.schema.fields import Field
from lockstep.storage.errors import require

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MAX_CATEGORIES = 10_000  # of a text without a vocabulary; rarer values share one


class Vectors(NamedTuple):
    """Two frames with the columns label, weight and features (a vector)."""

    train: DataFrame
    test: DataFrame
    left_out: list[str]
    """The features that are in no vector."""
    most_categories: int
    """The most categories of a column, for trees; 2 or more."""


@dataclass(slots=True)
class Inputs:
    """The columns from which transformers make vectors, named by the transformer that they need."""

    derived: list[Column]
    """All of them as expressions over the dataset's columns, also label and weight."""
    numbers: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Categories as texts."""
    lists: list[str] = field(default_factory=list)
    """Lists of categories as texts."""
    sizes: dict[str, int] = field(default_factory=dict)
    """The most categories that texts and lists keep, by column."""
    left_out: list[str] = field(default_factory=list)
    """The features of which no column is made."""

    @classmethod
    def of(cls, plan: Plan, classes: int | None) -> Inputs:
        """The inputs of a dataset whose label has `classes`, None for a number."""
        from pyspark.sql import functions as F

        weight = "1.0" if plan.schema.weight is None else c.quoted(plan.schema.weight.name)
        # Estimators would count the classes in the data, which may lack the last one.
        nominal = {"ml_attr": {"name": "label", "type": "nominal", "num_vals": classes}} if classes else {}
        label = F.lit(0.0) if plan.label is None else F.expr(c.quoted(plan.label.name)).cast("double")
        found = cls([label.alias("label", metadata=nominal), F.expr(weight).cast("double").alias("weight")])
        for position, feature in enumerate(plan.schema.features):
            found.add(f"f{position}", feature)
        return found

    def add(self, name: str, feature: Field) -> None:
        """Add the column `name` for a feature, or leave the feature out."""
        from pyspark.sql import functions as F

        encoding, column = feature.encoding or {}, c.quoted(feature.name)
        inner = encoding.get("of", encoding)
        categories = inner.get("buckets") or inner.get("ids") or inner.get("max_size")
        number = f"nanvl(CAST({column} AS double), CAST(NULL AS double))"
        if encoding.get("kind") in ("ignore", "image") or (feature.is_list and not categories):
            self.left_out.append(feature.name)
            return
        if feature.is_tensor:
            kind, made = self.tensors, _vector(feature)
        elif feature.is_list:
            kind, made = self.lists, F.expr(f"transform({column}, x -> CAST(x AS string))")
        elif encoding.get("kind") == "bucketise":
            bucket = " + ".join(f"CAST({number} >= {float(bound)!r}D AS int)" for bound in encoding["boundaries"])
            kind, made = self.texts, F.expr(f"CAST({bucket} AS string)")
        elif categories or feature.dtype in ("string", "bytes"):
            kind, made = self.texts, F.expr(f"CAST({column} AS string)")
        else:
            kind, made = self.numbers, F.expr(number)
        kind.append(name)
        self.derived.append(made.alias(name))
        self.sizes[name] = categories or MAX_CATEGORIES


@dataclass(slots=True)
class _Assembly:
    """The rows on their way to vectors: what was fitted so far is applied to both frames."""

    train: DataFrame
    test: DataFrame
    stages: list[Any] = field(default_factory=list)
    """The transformers that are still to be fitted, in order."""
    parts: list[str] = field(default_factory=list)
    """The columns that make up the vector, in order."""
    most: dict[str, int] = field(default_factory=dict)
    """How many categories each column of texts has, with the one for unseen texts."""

    def apply(self, change: Callable[[DataFrame], DataFrame]) -> None:
        """Change both frames alike."""
        self.train, self.test = change(self.train), change(self.test)

    def fill(self, numbers: list[str]) -> None:
        """Put the mean in place of null and NaN, as where a model is fed."""
        from pyspark.sql import functions as F

        means = self.train.agg(*(F.mean(name).alias(name) for name in numbers)).head(1)[0]
        filled = {name: F.coalesce(F.col(name), F.lit(means[name] or 0.0)) for name in numbers}
        self.apply(lambda rows: rows.withColumns(filled))

    def scale(self, columns: list[str]) -> None:
        """Bring numbers to mean 0 and deviation 1."""
        from pyspark.ml import feature as ml

        self.stages.append(ml.VectorAssembler(inputCols=columns, outputCol="unscaled"))
        self.stages.append(ml.StandardScaler(inputCol="unscaled", outputCol="scaled", withMean=True, withStd=True))
        self.parts.append("scaled")

    def categorise(self, texts: list[str], sizes: dict[str, int], limit: int | None) -> None:
        """Number the texts by frequency. They become one-hot columns or, for trees, one of up to `limit` categories."""
        from pyspark.ml import feature as ml

        ids = [f"{name}_id" for name in texts]
        indexer = ml.StringIndexer(inputCols=texts, outputCols=ids, handleInvalid="keep").fit(self.train)
        self.apply(indexer.transform)
        known = {name: len(labels) for name, labels in zip(texts, indexer.labelsArray, strict=True)}
        self.most = {name: min(known[name], sizes[name]) + 1 for name in texts}
        if limit is not None:
            self.apply(lambda rows: indexed(rows, self.most, limit))
            self.parts += [f"{name}_tree" for name in texts]
            return
        hot = [f"{name}_hot" for name in texts]
        capped = ", ".join(f"least({name}_id, {float(sizes[name])}) AS {name}_capped" for name in texts)
        self.stages += [
            ml.SQLTransformer(statement=f"SELECT *, {capped} FROM __THIS__"),
            ml.OneHotEncoder(inputCols=[f"{name}_capped" for name in texts], outputCols=hot, handleInvalid="keep"),
        ]
        self.parts += hot

    def hash(self, name: str, buckets: int) -> None:
        """Make a list of texts the columns of its buckets, 1 where the list has a text of the bucket."""
        from pyspark.ml import feature as ml

        bag = f"{name}_bag"
        self.stages.append(ml.HashingTF(inputCol=name, outputCol=bag, numFeatures=buckets, binary=True))
        self.parts.append(bag)

    def vectors(self) -> tuple[DataFrame, DataFrame]:
        """Fit the stages, and return both frames with their vectors."""
        from pyspark.ml import Pipeline
        from pyspark.ml import feature as ml

        stages = [*self.stages, ml.VectorAssembler(inputCols=self.parts, outputCol="features")]
        fitted = Pipeline(stages=stages).fit(self.train)
        self.apply(lambda rows: fitted.transform(rows).select("label", "weight", "features"))
        return self.train, self.test


def with_features(train: DataFrame, test: DataFrame, plan: Plan, classes: int | None, limit: int | None) -> Vectors:
    """Make vectors of both frames by what is fitted on `train`. With a `limit`, for trees, categories are numbers of up
    to so many and not one-hot. Raises ConfigError if no feature can be in a vector.
    """
    inputs = Inputs.of(plan, classes)
    rows = _Assembly(train.select(*inputs.derived), test.select(*inputs.derived))
    if inputs.numbers:
        rows.fill(inputs.numbers)
    if inputs.numbers or inputs.tensors:
        rows.scale([*inputs.numbers, *inputs.tensors])
    if inputs.texts:
        rows.categorise(inputs.texts, inputs.sizes, limit)
    for name in inputs.lists:
        rows.hash(name, inputs.sizes[name] if limit is None else min(inputs.sizes[name], MOST_BUCKETS))
    seen = "features that are numbers, texts, lists of texts or tensors"
    got = f"only {listed(inputs.left_out)}"
    require(bool(rows.parts), "the dataset", got, seen, "Declare others, or use --kind als.")
    most = max([2, *(min(one, limit or 0) for one in rows.most.values())])
    return Vectors(*rows.vectors(), inputs.left_out, most)


def _vector(feature: Field) -> Column:
    """A tensor's bytes as a vector of all its values."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F

    dtype = np.dtype(feature.dtype).newbyteorder("<")

    values = F.udf(lambda data: np.frombuffer(data, dtype).astype(np.float64).tolist(), "array<double>")
    return array_to_vector(values(F.col(c.quoted(feature.name))))
