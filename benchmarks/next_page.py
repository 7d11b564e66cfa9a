"""Which pages follow a page in the training split, as a table of counts, and how often the next page is among its ten.

    python -m benchmarks.next_page DATASET

DATASET is that of conf/next_page.toml. Where fewer than ten pages have followed a page, the most frequent ones of all
fill up its ten. Compare with `hit@10` and `accuracy` of jobs.evaluate.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict

import pyarrow.parquet as pq


def rows_of(dataset: str, split: str) -> list[tuple[str, int]]:
    """The last page and the number of the next one, of each row."""
    table = pq.read_table(f"{dataset}/split={split}", columns=["pages", "next_page"])
    return [(pages[-1], label) for pages, label in zip(*(column.to_pylist() for column in table), strict=True)]


def main() -> None:
    """Count, score, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    dataset = parser.parse_args().dataset
    train, test = rows_of(dataset, "train"), rows_of(dataset, "test")
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
    print(f"{len(train)} rows to count, {len(test)} to score")
    print(f"table of pairs: accuracy {right / len(test):.4f}, hit@10 {hits / len(test):.4f}")
    print(
        f"always the ten most frequent pages: hit@10 {sum(label in popular[:10] for _, label in test) / len(test):.4f}"
    )


if __name__ == "__main__":
    main()
