"""Write ratings of films by users as Parquet in folders `split=...`: a user's taste, a film's quality, and noise."""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", required=True)
parser.add_argument("--users", type=int, default=300)
parser.add_argument("--films", type=int, default=150)
parser.add_argument("--ratings", type=int, default=24000)
args = parser.parse_args()

draws = np.random.default_rng(5)
taste, kind = draws.normal(size=(args.users, 3)), draws.normal(size=(args.films, 3))
mild, good = draws.normal(0, 0.3, args.users), draws.normal(0, 0.5, args.films)
pair = draws.choice(args.users * args.films, args.ratings, replace=False)  # each user rates a film once
user, film = np.divmod(pair, args.films)
score = 3.5 + mild[user] + good[film] + 0.45 * (taste[user] * kind[film]).sum(1) + draws.normal(0, 0.5, args.ratings)
rows = pd.DataFrame({"user": user, "film": film, "rating": np.clip(np.round(2 * score) / 2, 0.5, 5).astype(np.float32)})
rows["split"] = np.where(draws.random(args.ratings) < 0.8, "train", "test")
rows.to_parquet(args.out, partition_cols=["split"], row_group_size=2000, basename_template="part-{i}.parquet")
print(f"{args.out}: {len(rows)} ratings, mean {rows['rating'].mean():.2f}")
