"""Write, for each request of a server's log, the visitor's up to ten pages before it: Parquet in `split=...`."""

from __future__ import annotations

import argparse
import gzip
import re
import zlib
from pathlib import Path

import pandas as pd

REQUEST = re.compile(rb'^(\S+) .*?"GET (/[^ "?]*)[^"]*" (?:200|304) \S+$')
PAGES, BEFORE = 100, 10  # the label is one of the most frequent pages

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--log", required=True)
parser.add_argument("--out", required=True)
args = parser.parse_args()

with gzip.open(args.log) as log:
    found = [match.groups() for match in map(REQUEST.match, log) if match]
seen = pd.DataFrame(found, columns=["visitor", "page"]).map(lambda text: text.decode())
seen = seen[seen["page"].str.contains(r"/$|\.htm")]  # neither pictures nor scripts
number = {page: place for place, page in enumerate(seen["page"].value_counts(sort=True).index[:PAGES])}
rows = []
for visitor, pages in seen.groupby("visitor")["page"]:
    visit = pages.tolist()
    split = "test" if zlib.crc32(str(visitor).encode()) % 5 == 0 else "train"  # a visitor is on one side
    for place in range(1, len(visit)):
        if visit[place] in number:
            rows.append((split, visitor, place, visit[max(0, place - BEFORE) : place], number[visit[place]]))
table = pd.DataFrame(rows, columns=["split", "visitor", "place", "pages", "next_page"])
table["last"] = table["pages"].str[-1]
# Folder by folder: after pandas' own `partition_cols`, pyarrow may abort the process at its end (apache/arrow 36980).
for side, part in table.groupby("split"):
    folder = Path(args.out, f"split={side}")
    folder.mkdir(parents=True, exist_ok=True)
    part.drop(columns="split").to_parquet(folder / "part-0.parquet", row_group_size=512, index=False)
print(f"{args.out}: {len(table)} requests of {table['visitor'].nunique()} visitors")
