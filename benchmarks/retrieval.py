"""How often a held-out item is among the ten that a model of users and items ranks first, of all items new to the user.

    python -m benchmarks.retrieval DATASET RUN [--split fold-0]

DATASET is the one of docs/ready-models.md in Parquet; RUN was trained on all other splits. Printed for comparison: the
ten most frequent items of these splits, and the model's scores plus the logarithm of each item's frequency, since a
model trained against the items of a batch has learnt how much more probable than its frequency an item is.
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd
import pyarrow.dataset as ds

import lockstep


def hits(scores: pd.DataFrame, seen: pd.Series, held_out: pd.Series) -> float:
    """hit@10 over `held_out`: items by user. `scores` has a row for each user and a column for each item; `seen` items
    are left out.
    """
    values = scores.to_numpy().copy()
    rows = scores.index.get_indexer(seen.index)
    values[rows[rows >= 0], scores.columns.get_indexer(pd.Index(seen))[rows >= 0]] = -np.inf
    ten = np.argsort(-values, axis=1, kind="stable")[:, :10]
    at, items = scores.index.get_indexer(held_out.index), scores.columns.get_indexer(pd.Index(held_out))
    return float(np.mean((ten[at] == items[:, None]).any(axis=1)))


def main() -> None:
    """Score, rank, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("dataset", "run"):
        parser.add_argument(name)
    parser.add_argument("--split", default="fold-0")
    args = parser.parse_args()
    rows = ds.dataset(args.dataset, partitioning="hive").to_table(columns=["user_id", "item_id", "split"]).to_pandas()
    is_test = rows["split"].astype(str) == args.split
    train, test = (rows[keep].set_index("user_id")["item_id"] for keep in (~is_test, is_test))
    known = test.index.isin(train.index) & test.isin(train)  # a model has vectors of these alone
    test = test[known]
    counts = train.value_counts()
    users, items = np.array(sorted(set(test.index))), counts.index.to_numpy()
    pairs = {"user_id": np.repeat(users, len(items)), "item_id": np.tile(items, len(users))}
    found = lockstep.predict(args.run, pairs, batch=8192).reshape(len(users), len(items))
    scores = pd.DataFrame(found, index=users, columns=items)
    popular = pd.DataFrame(np.tile(counts.to_numpy(float), (len(users), 1)), index=users, columns=items)
    print(f"{len(test)} rows, {len(items)} items; {1 - known.mean():.4f} are of others, unknown to the model")
    print(f"model: hit@10 {hits(scores, train, test):.4f}")
    print(f"model, with the logarithm of frequencies: hit@10 {hits(scores + np.log(popular), train, test):.4f}")
    print(f"most frequent items: hit@10 {hits(popular, train, test):.4f}")


if __name__ == "__main__":
    main()
