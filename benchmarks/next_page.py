"""Which pages follow a page in the training rows, as a table of counts, and how often the next page is among its ten.

    python -m benchmarks.next_page DATASET

DATASET is that of conf/next_page.toml, also with `--split kfold:5:visitor`: then each fold is scored by a table of the
others. Where fewer than ten pages have followed a page, the most frequent ones of all fill up its ten. Compare with
`hit@10` and `accuracy` of lockstep evaluate or lockstep cross_validate.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

Rows = list[tuple[str, int]]
"""The last page and the number of the next one, of each row."""


def rows_of(dataset: str, splits: Sequence[str]) -> Rows:
    """The rows of all these splits."""
    tables = [pq.read_table(f"{dataset}/split={split}", columns=["pages", "next_page"]) for split in splits]
    return [
        (pages[-1], label)
        for table in tables
        for pages, label in zip(*(column.to_pylist() for column in table), strict=True)
    ]


def scores(train: Rows, test: Rows) -> tuple[float, float, float]:
    """Accuracy and hit@10 of the table of pairs, and hit@10 of the ten most frequent pages."""
    popular = [label for label, _ in Counter(label for _, label in train).most_common()]
    follows: dict[str, Counter[int]] = defaultdict(Counter)
    for page, label in train:
        follows[page][label] += 1
    first = {page: [label for label, _ in counts.most_common(10)] for page, counts in follows.items()}
    ranked = {
        page: [*best, *(label for label in popular[:20] if label not in best)][:10] for page, best in first.items()
    }
    hits = sum(label in ranked.get(page, popular[:10]) for page, label in test)
    right = sum(label == ranked.get(page, popular)[0] for page, label in test)
    always = sum(label in popular[:10] for _, label in test)
    return right / len(test), hits / len(test), always / len(test)


def main() -> None:
    """Count, score, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    dataset = parser.parse_args().dataset
    splits = sorted(path.name.removeprefix("split=") for path in Path(dataset).glob("split=*"))
    found = []
    for held_out in splits if "train" not in splits else ["test"]:
        train, test = rows_of(dataset, [one for one in splits if one != held_out]), rows_of(dataset, [held_out])
        found.append(scores(train, test))
        print(f"{held_out}: {len(test)} rows by a table of {len(train)}: hit@10 {found[-1][1]:.4f}")
    accuracy, hits, always = np.mean(found, axis=0)
    print(f"table of pairs: accuracy {accuracy:.4f}, hit@10 {hits:.4f}")
    print(f"always the ten most frequent pages: hit@10 {always:.4f}")


if __name__ == "__main__":
    main()
