"""Write a click log in the form of Criteo's: TSV without a header, 13 numbers and 26 hashes, some empty."""

from __future__ import annotations

import argparse
import gzip

import numpy as np

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", required=True)
parser.add_argument("--rows", type=int, default=12000)
args = parser.parse_args()

draws = np.random.default_rng(26)
numbers = draws.negative_binomial(1, 0.05, (args.rows, 13))
sizes = draws.integers(5, 400, 26)
categories = np.minimum(draws.zipf(1.4, (args.rows, 26)), sizes) - 1  # few values are frequent, most are rare
# A click depends on all values of some columns, and on one pair of columns together, as an advertiser in a place does.
score = 0.35 * np.log1p(numbers[:, :4]).sum(1) - 5.2
for column in range(12):
    score += draws.normal(0, 0.5, sizes[column])[categories[:, column]]
score += draws.normal(0, 0.7, (sizes[0], sizes[1]))[categories[:, 0], categories[:, 1]]
clicks = draws.random(args.rows) < 1 / (1 + np.exp(-score))
empty = draws.random((args.rows, 39)) < 0.08

with gzip.open(args.out, "wt", encoding="utf-8") as file:
    for click, row, kinds, lost in zip(clicks, numbers, categories, empty, strict=True):
        texts = [str(value) for value in row] + [f"{(column << 20) ^ (kind * 2654435761) & 0xFFFFFFFF:08x}"
                                                 for column, kind in enumerate(kinds.tolist())]  # fmt: skip
        file.write(
            "\t".join([str(int(click)), *("" if gone else text for gone, text in zip(lost, texts, strict=True))])
        )
        file.write("\n")
print(f"{args.out}: {args.rows} lines, {clicks.mean():.3f} clicked")
