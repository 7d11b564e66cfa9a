"""Datasets that the judge holds against pandas and scikit-learn: each made once, with its raw input as a data frame."""

from __future__ import annotations

import gzip
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from lockstep.etl.images import job as image_sets
from lockstep.etl.images.config import ImagesConfig
from lockstep.etl.logs import job as logs
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.write.dataset import write_dataset
from lockstep.features.sample_id import sample_id
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.training.config import TrainConfig
from lockstep.training.reading.open import OpenSplit
from lockstep.training.run.result import RunResult
from tests.builders.blocks import read_all
from tests.builders.evaluations import evaluate
from tests.training._threads import run, run_threads

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
BATCH = 128


@dataclass(frozen=True)
class JudgedSet:
    """A dataset, its label, what it was made of, and a run on it."""

    url: str
    label: str
    raw: pd.DataFrame
    run: RunResult

    @property
    def manifest(self) -> DatasetManifest:
        """As stored."""
        return load_dataset(self.url)

    def rows(self, split: str) -> pd.DataFrame:
        """The records of a split in the order of its files, before any encoding."""
        return _read(self.url, split)[0].to_pandas()

    def fed(self, split: str) -> Any:
        """What a model is fed of them."""
        return _read(self.url, split)[1]

    def predictions(self, split: str) -> np.ndarray:
        """The exported model's outputs (n, outputs), in batches of BATCH rows, as an evaluation has them."""
        import keras

        model, fed = keras.models.load_model(Path(str(self.run.model), "model.keras")), self.fed(split)
        parts = [
            model.predict_on_batch({name: values[start : start + BATCH] for name, values in fed.x.items()})
            for start in range(0, len(fed), BATCH)
        ]
        return np.concatenate(parts)

    def evaluated(self, num_ranks: int, baseline: str, launch: Any = run_threads) -> dict[str, Any]:
        """What lockstep evaluate says of the test split."""
        return evaluate(
            self.run.run, self.url, "test", launch, num_ranks=num_ranks, batch=BATCH, baseline=baseline
        )  # fmt: skip


def _read(url: str, split: str) -> tuple[Any, Any]:
    opened = OpenSplit.at(url, split, also=("row",))
    rows = read_all(opened.reader)
    return rows, opened.encoder.encode(rows)


def trained(url: Path, model: str = "logistic", split: str = "train", **options: Any) -> RunResult:
    """A run of one rank beside the dataset."""
    settings: dict[str, Any] = {"num_ranks": 1, "global_batch": 64, "epochs": 2, "launcher": "local", **options}
    return run(
        TrainConfig(datasets=(str(url),), run=str(url.parent / f"{url.name}-run"), model=model, split=split, **settings)
    )


def incomes(spark: SparkSession, folder: Path, shared: Path) -> JudgedSet:
    """UCI Adult, 3,000 rows from the second on (the first one's age is cut off): stratified by the label, with balanced
    weights; vocabularies and standardised numbers.
    """
    with gzip.open(shared / "adult" / "adult.data.gz", "rt") as file:
        whole = pd.read_csv(file, header=None, skiprows=1, nrows=3000, skipinitialspace=True)
    raw = pd.DataFrame({
        "row": np.arange(len(whole)), "age": whole[0], "job": [None if job == "?" else job for job in whole[6]],
        "education": whole[3], "hours": whole[12].astype("float32"), "rich": whole[14] == ">50K",
    })  # fmt: skip

    def fitted(kind: str, name: str) -> dict[str, Any]:
        more = {"max_size": 50, "min_count": 5, "oov_buckets": 1} if kind == "vocabulary" else {}
        return {"kind": kind, "file": f"{name}.json", **more}

    schema = Schema((
        sample_id_field(),
        Field(name="row", dtype="int64", encoding={"kind": "ignore"}),
        Field(name="age", dtype="int64", encoding=fitted("standardise", "age")),
        Field(name="job", dtype="string", nullable=True, encoding=fitted("vocabulary", "job")),
        Field(name="education", dtype="string", encoding=fitted("vocabulary", "education")),
        Field(name="hours", dtype="float32", encoding=fitted("standardise", "hours")),
        Field(name="rich", dtype="bool", kind="label"),
    ))  # fmt: skip
    url = folder / "incomes"
    write_dataset(
        spark.createDataFrame(raw), str(url), id_columns=["row"], schema=schema, fmt="parquet",
        split="stratified:rich:80/20", weights="balanced",
    )  # fmt: skip
    return JudgedSet(str(url), "rich", raw, trained(url))


def clicks(spark: SparkSession, folder: Path) -> JudgedSet:
    """Open Bandit, the 2,000 impressions of the repository, 18 clicks: halves by the sample id."""
    source = ROOT / "data" / "open-bandit" / "bts_men_first2000.csv.gz"
    url = folder / "clicks"
    config = LogsConfig(
        inputs=(str(source),), output=str(url), log_format="csv", schema=str(ROOT / "conf" / "clicks_schema.toml"),
        split="50/50",
    )  # fmt: skip
    logs.run(spark, config)
    return JudgedSet(str(url), "click", pd.read_csv(source), trained(url))


def visits(spark: SparkSession, folder: Path) -> JudgedSet:
    """The first 8,000 lines of a day of NASA's web server: whole visitors on one side."""
    with gzip.open(ROOT / "data" / "weblogs" / "nasa_access_log_1995-07-09.log.gz") as file:
        lines = [line for line, _ in zip(file, range(8000), strict=False)]
    (folder / "access.log").write_bytes(b"".join(lines))
    url = folder / "visits"
    logs.run(spark, LogsConfig(inputs=(str(folder / "access.log"),), output=str(url), split="group:visitor:80/20"))
    return JudgedSet(str(url), "stays", requests(lines), trained(url))


def requests(lines: list[bytes]) -> pd.DataFrame:
    """Lines of the Common Log Format as a data frame, by pandas alone."""
    front, request = (
        r"^(?P<visitor>\S+) \S+ \S+ \[(?P<at>[^\]]+)\]",
        r"(?P<method>\S+) +(?P<target>.*?)(?: +(?i:HTTP)/\S*)? *",
    )
    pattern = rf'{front} "{request}" (?P<status>\d+) '
    found = pd.Series([line.decode("latin-1") for line in lines]).str.extract(pattern).dropna()
    found["time"] = pd.to_datetime(found["at"], format="%d/%b/%Y:%H:%M:%S %z", utc=True).astype("int64") // 10**9
    found[["page", "query"]] = found["target"].str.split("?", n=1, expand=True).reindex(columns=[0, 1]).fillna("")
    return found


def with_ids(requests: pd.DataFrame) -> pd.DataFrame:
    """Requests that became records, with the sample ids that they must have."""
    names = ["visitor", "page", "time", "query"]
    keys = requests[names].assign(occurrence=requests.groupby(names).cumcount())
    ids = [sample_id([str(value).encode() for value in row[:4]], row[4]) for row in keys.itertuples(index=False)]
    return requests.assign(sample_id=ids)


def garments(spark: SparkSession, folder: Path) -> JudgedSet:
    """Fashion-MNIST, 1,200 and 400 images of the repository's: splits as given, 20 training images in both."""
    rows: list[dict[str, Any]] = []
    source, cut = ROOT / "data" / "fashion-mnist", folder / "idx"
    cut.mkdir()
    kept = {"train": 1200, "t10k": 400}
    pixels, labels = {}, {}
    for name, count in kept.items():
        every = 10_000 // count if name == "train" else 2_000 // count
        pixels[name] = _idx(source / f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 784)[::every][:count].copy()
        labels[name] = _idx(source / f"{name}-labels-idx1-ubyte.gz", 8)[::every][:count].copy()
    pixels["t10k"][:20] = pixels["train"][:20]
    for name, count in kept.items():
        head = struct.pack(">4I", 0x803, count, 28, 28)
        (cut / f"{name}-images-idx3-ubyte").write_bytes(head + pixels[name].tobytes())
        (cut / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, count) + labels[name].tobytes())
        split = {"train": "train", "t10k": "test"}[name]
        rows += [
            {"split": split, "image": image.tobytes(), "label": int(label)}
            for image, label in zip(pixels[name], labels[name], strict=True)
        ]
    url = folder / "garments"
    inputs = tuple(str(path) for path in sorted(cut.iterdir()))
    image_sets.run(spark, ImagesConfig(inputs=inputs, output=str(url), split="given", fmt="parquet", num_classes=10))
    return JudgedSet(str(url), "label", pd.DataFrame(rows), trained(url, "tests.training._models:softmax"))


def _idx(path: Path, head: int) -> np.ndarray:
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), np.uint8, offset=head)


def written(judged: JudgedSet) -> pd.DataFrame:
    """All rows of a dataset, with a column `split`."""
    return pd.concat([judged.rows(split).assign(split=split) for split in ("train", "test")], ignore_index=True)
