"""Write visits of a shop as Parquet in Hive's layout, `split=train/month=2026-01/...`, as pandas leaves it."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", required=True)
parser.add_argument("--rows", type=int, default=8000)
args = parser.parse_args()

draws = np.random.default_rng(7)
country = draws.choice(["de", "fr", "it", "pl"], args.rows, p=[0.4, 0.3, 0.2, 0.1])
device = draws.choice(["phone", "desktop"], args.rows)
pages = draws.poisson(4, args.rows) + 1
seconds = np.round(draws.gamma(2, 20, args.rows) * pages, 1)
# Who stays long and has seen many pages buys, on a phone less often, in Poland more often.
score = 0.9 * np.log1p(seconds) + 0.2 * pages - 1.1 * (device == "phone") + 0.8 * (country == "pl") - 6.0
visits = pd.DataFrame(
    {
        "visit": np.arange(args.rows),
        "country": country,
        "device": device,
        "pages": pages,
        "seconds": seconds,
        "bought": draws.random(args.rows) < 1 / (1 + np.exp(-score)),
        "month": draws.choice(["2026-01", "2026-02", "2026-03", "2026-04"], args.rows),
    }
)
visits["split"] = np.where(visits["month"] == "2026-04", "test", "train")  # the newest month judges
# Folder by folder: after pandas' own `partition_cols`, pyarrow may abort the process at its end (apache/arrow 36980).
for (split, month), part in visits.groupby(["split", "month"]):
    folder = Path(args.out, f"split={split}", f"month={month}")
    folder.mkdir(parents=True, exist_ok=True)
    part.drop(columns=["split", "month"]).to_parquet(folder / "part-0.parquet", row_group_size=500, index=False)
print(f"{args.out}: {len(visits)} visits, {visits['bought'].mean():.3f} bought")
