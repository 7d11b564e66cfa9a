"""What small tables of hashed ids cost on a log of clicks: AUC with room for all ids, and with smaller tables.

    python -m benchmarks.hashed_ids FOLDER [--buckets 8 64 512 16384] [--seeds 0 1 2] [--epochs 4]

A row is a click of a day of a web server, its label whether the visit continues. It has three ids: the page, the page
before, and both as a pair; each is hashed into a table of so many rows of `wide-deep`. All sizes have the same five
folds. A figure is the mean AUC of the folds that were held out, a row the mean of the seeds and its range.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import lockstep
from benchmarks.shared.shapes import machine

LOG = Path(__file__).resolve().parent.parent / "data/weblogs/nasa_access_log_1995-07-09.log.gz"
IDS = ("page", "before", "pair")


def schema_of(buckets: int) -> str:
    """The three ids, hashed; the hour; the label."""
    return f"""
[[fields]]
names = {[*IDS]}
dtype = "string"
encoding = {{ kind = "hash", buckets = {buckets} }}

[[fields]]
name = "hour"
dtype = "int64"
encoding = {{ kind = "hash", buckets = 24 }}

[[fields]]
name = "stays"
dtype = "bool"
kind = "label"
"""


def write(folder: Path, sizes: list[int]) -> None:
    """A dataset for each size of the tables; prints how many ids there are."""
    with lockstep.spark_session("hashed ids", "local[2]") as spark:
        if not (folder / "clicks").exists():
            lockstep.write_logs(spark, str(LOG), str(folder / "clicks"), split="1/1")
        before = "coalesce(prev_page, '')"
        rows = (
            spark.read.format("tfrecord")
            .load(str(folder / "clicks"))
            .selectExpr(
                "sample_id AS row",
                "page",
                f"{before} AS before",
                f"concat_ws(' ', {before}, page) AS pair",
                "hour",
                "stays",
            )
        )
        names = ", ".join(f"count(DISTINCT {name}) AS {name}" for name in IDS)
        print(rows.selectExpr("count(*) AS rows", "count_if(stays) AS continue", *names.split(", ")).first())
        for size in sizes:
            if not (folder / f"data-{size}").exists():
                schema = lockstep.load_schema(schema_of(size))
                lockstep.write_dataset(rows, folder / f"data-{size}", schema=schema, id_columns="row", split="kfold:5")


def main() -> None:
    """Write the datasets, train, and print a row for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--buckets", type=int, nargs="+", default=[8, 64, 512, 16384])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    print(machine("tensorflow", "keras"))
    write(args.folder, args.buckets)
    print("| rows of each table | AUC | log loss |\n| --- | --- | --- |")
    for size in args.buckets:
        found: dict[str, list[float]] = {"auc": [], "log_loss": []}
        for seed in args.seeds:
            data, runs = str(args.folder / f"data-{size}"), str(args.folder / f"{size}-{seed}")
            options = {"global_batch": 128, "epochs": args.epochs, "seed": seed}
            result = lockstep.cross_validate(data, runs, "wide-deep", **options)
            for name, values in found.items():
                values.append(result["metrics"][name]["mean"])
        cells = (f"{statistics.mean(each):.4f} ({min(each):.4f} to {max(each):.4f})" for each in found.values())
        print(f"| {size} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
