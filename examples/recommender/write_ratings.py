"""Write ratings of films by users as Parquet in folders `split=...`: a user's taste, a film's quality, and noise."""

from __future__ import annotations

import argparse
from pathlib import Path

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
# Folder by folder: after pandas' own `partition_cols`, pyarrow may abort the process at its end (apache/arrow 36980).
for split, part in rows.groupby("split"):
    folder = Path(args.out, f"split={split}")
    folder.mkdir(parents=True, exist_ok=True)
    part.drop(columns="split").to_parquet(folder / "part-0.parquet", row_group_size=2000, index=False)
print(f"{args.out}: {len(rows)} ratings, mean {rows['rating'].mean():.2f}")
