"""The kinds of baselines, and what lockstep baseline trains on what; loads neither NumPy nor Spark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lockstep.storage.errors import nearest, require
from lockstep.storage.urls import absolute

CLUSTERS = ("kmeans", "gaussian-mixture")


class Kind(NamedTuple):
    """The estimators of pyspark.ml for classes and for a number, "" where there is none; whether the former takes only
    yes or no.
    """

    of_classes: str
    of_numbers: str
    two_classes: bool = False


KINDS = {
    "linear-svc": Kind("classification.LinearSVC", "", two_classes=True),
    "logistic": Kind("classification.LogisticRegression", ""),
    "tree": Kind("classification.DecisionTreeClassifier", "regression.DecisionTreeRegressor"),
    "forest": Kind("classification.RandomForestClassifier", "regression.RandomForestRegressor"),
    "gbt": Kind("classification.GBTClassifier", "regression.GBTRegressor", two_classes=True),
    "kmeans": Kind("clustering.KMeans", ""),
    "gaussian-mixture": Kind("clustering.GaussianMixture", ""),
    "als": Kind("", "recommendation.ALS"),
    "linear-regression": Kind("", "regression.LinearRegression"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineConfig:
    """What to train on what. Raises ConfigError for an unknown kind, and for columns that it does not take."""

    dataset: str
    kind: str
    split: str = "test"
    """The split to predict."""
    train_split: str = "train"
    """The split to train on, or folds with commas between."""
    settings: tuple[str, ...] = ()
    """NAME=VALUE: parameters of the estimator by pyspark.ml's names; values as in TOML, or plain text."""
    user: str | None = None
    item: str | None = None
    """Columns for als, of any type."""
    rating: str | None = None
    """The column that als predicts; None: the label."""
    seed: int = 0
    deadline_s: float = 3600.0
    """Seconds after which Spark's work is cancelled."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", absolute(self.dataset))
        require(self.kind in KINDS, "--kind", self.kind + nearest(self.kind, KINDS), ", ".join(KINDS))
        given = [f"--{name}" for name in ("user", "item", "rating") if getattr(self, name) is not None]
        good = {"--user", "--item"} <= {*given} if self.kind == "als" else not given
        allowed = "--user and --item, perhaps --rating" if self.kind == "als" else "none of them: they are for als"
        require(good, f"--kind {self.kind}", ", ".join(given), allowed)
        names = self.train_split.split(",")
        require(len({*names}) == len(names), "--train-split", self.train_split, "each split once: its rows count once")
        require(self.deadline_s > 0, "--deadline", f"{self.deadline_s:g}", "a number of seconds above 0")
        require(-(2**63) <= self.seed < 2**63, "--seed", str(self.seed), "an integer from -2^63 to 2^63 - 1")
