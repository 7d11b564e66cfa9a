"""From a log to a published dataset, on Spark."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from lockstep.etl.logs import job as logs
from lockstep.etl.logs import web
from lockstep.etl.logs.config import DEFAULT_LABEL, LogsConfig
from lockstep.etl.logs.parse import ROW
from lockstep.etl.logs.plan import plan_of
from lockstep.features.encode.encoder import Encoder
from lockstep.features.examples import decode_batch
from lockstep.features.schema.fitted import Vocabulary
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError, DataError, ExistsError, NotFoundError
from lockstep.storage.formats.tfrecord import parse_records
from lockstep.storage.verify import verify
from tests.etl.conftest import NASA, large_offsets, nasa_lines, run, tree

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

START, HALF_HOUR = 805_262_400, 1800


def config(source: Path, output: Path, **more: Any) -> LogsConfig:
    return LogsConfig(**{"inputs": (str(source),), "output": str(output), "split": "group:visitor:80/20", **more})


@pytest.fixture(scope="module")
def nasa(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DatasetManifest]:
    output = tmp_path_factory.mktemp("nasa") / "dataset"
    return output, logs.run(spark, config(NASA, output))


@pytest.fixture(scope="module")
def small(spark: SparkSession, small_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("small") / "dataset"
    logs.run(spark, config(small_log, output, shard_bytes=100_000))
    return output


@pytest.fixture(scope="module")
def parquet(spark: SparkSession, small_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("parquet") / "dataset"
    logs.run(spark, config(small_log, output, shard_bytes=100_000, fmt="parquet"))
    return output


def rows_of_shards(folder: Path, manifest: DatasetManifest, split: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for shard in manifest.splits[split].shards:
        data = (folder / shard.path).read_bytes()
        rows += decode_batch(Schema.from_json(manifest.schema), parse_records(data, file=shard.path)).to_pylist()
    return rows


def test_the_nasa_day(nasa: tuple[Path, DatasetManifest]) -> None:
    folder, manifest = nasa
    counts = manifest.counts
    assert (counts.read, counts.quarantined) == (35_272, 0)
    assert counts.dropped == {"not_a_page": 22_861, "censored": 308}
    assert counts.written == 35_272 - 22_861 - 308
    labels = [row["stays"] for split in ("train", "test") for row in rows_of_shards(folder, manifest, split)]
    assert len(labels) == counts.written
    assert abs(sum(labels) / len(labels) - 0.771) < 0.001
    assert not list(verify(str(folder)))
    source = manifest.source[0]
    assert (source.bytes, source.sha256) == (NASA.stat().st_size, hashlib.sha256(NASA.read_bytes()).hexdigest())
    assert [path.name for path in folder.parent.iterdir()] == ["dataset"], "no staging folder stays"


def test_visitors_are_named_in_what_appends_need_alone(nasa: tuple[Path, DatasetManifest]) -> None:
    folder, _ = nasa
    hosts = {line.split(b" ")[0] for line in nasa_lines(300).splitlines()}
    content = b"".join(data for path, data in tree(folder).items() if not path.startswith("_carried/"))
    assert not [host for host in hosts if len(host) > 8 and host in content]
    parts = [pq.read_table(path).column("visitor") for path in (folder / "_carried").iterdir()]
    assert hosts & {name.encode() for part in parts for name in part.to_pylist()}
    assert stat.S_IMODE((folder / "_carried").stat().st_mode) == 0o700


def test_records_lie_in_order_and_blocks_begin_where_the_manifest_says(nasa: tuple[Path, DatasetManifest]) -> None:
    from tests.builders.records import shard_key

    folder, manifest = nasa
    for name, split in manifest.splits.items():
        rows = rows_of_shards(folder, manifest, name)
        keys = [shard_key(row["sample_id"], 0) for row in rows]
        assert keys == sorted(keys) and len(set(keys)) == len(keys)
        (shard,) = split.shards
        lines = (folder / f"_index/{name}/part-00000.idx").read_text().splitlines()
        assert list(shard.block_offsets) == [int(line.split()[0]) for line in lines[:: split.block_records]]
        assert 60 <= len(shard.block_offsets) <= 64


def test_vocabularies_come_of_the_training_split_alone(nasa: tuple[Path, DatasetManifest]) -> None:
    folder, manifest = nasa
    rows = rows_of_shards(folder, manifest, "train")
    vocabulary = Vocabulary.from_json(json.loads((folder / "_fitted/page.json").read_bytes()))
    assert vocabulary.fitted_on == ("train",)
    pages = [row["page"] for row in rows]
    assert [pages.count(token) for token in vocabulary.tokens] == list(vocabulary.counts)
    assert {page for page in pages if pages.count(page) >= 3} == set(vocabulary.tokens)
    everything = {path: vocabulary_at(folder, path) for path in manifest.files if path.startswith("_fitted/")}
    encoder = Encoder(Schema.from_json(manifest.schema), {v.name: v for v in everything.values()})
    assert encoder.signature.features["page"].shape == (len(vocabulary.tokens) + 1,)
    assert encoder.signature.label is not None and encoder.signature.label.dtype == "float32"


def vocabulary_at(folder: Path, path: str) -> Vocabulary:
    return Vocabulary.from_json(json.loads((folder / path).read_bytes()))


def test_the_same_bytes_however_the_input_is_cut(
    spark: SparkSession, small: Path, parquet: Path, small_log: Path, tmp_path: Path
) -> None:
    """Records in two pieces and Parquet in four; records in three are below, where tasks are killed."""
    size = small_log.stat().st_size
    for parts, fmt, expected in ((2, "tfrecord", small), (4, "parquet", parquet)):
        output = tmp_path / fmt
        with large_offsets(spark) if parts == 2 else nullcontext():
            logs.run(spark, config(small_log, output, shard_bytes=100_000, split_bytes=-(-size // parts), fmt=fmt))
        assert tree(output) == tree(expected) and len(tree(output)) > 8


def test_many_small_files_are_read_once_by_few_tasks(
    spark: SparkSession, small: Path, small_log: Path, tmp_path: Path
) -> None:
    many = tmp_path / "many"
    many.mkdir()
    lines = small_log.read_bytes().splitlines(keepends=True)
    for number in range(0, len(lines), 40):
        data = b"".join(lines[number : number + 40])
        packed = number % 3 == 0
        (many / f"{number:05d}.log{'.gz' if packed else ''}").write_bytes(gzip.compress(data) if packed else data)
    assert spark.sparkContext._jsc is not None
    store = spark.sparkContext._jsc.sc().statusStore()
    before = store.jobsList(None).size()
    spark.sparkContext.setJobDescription("mine")
    manifest = logs.run(spark, config(many, tmp_path / "out", shard_bytes=100_000))
    assert spark.sparkContext.getLocalProperty("spark.job.description") == "mine"
    spark.sparkContext.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]
    jobs = store.jobsList(None)
    new = [jobs.apply(number) for number in range(jobs.size() - before)][::-1]
    assert [(job.description().get(), job.numTasks()) for job in new][:1] == [("Lockstep: read and parse the log", 2)]
    assert {job.description().get() for job in new} == {
        f"Lockstep: {what}"
        for what in (
            "read and parse the log",
            "make ids, splits and records",
            "check for leakage between splits",
            "count vocabularies",
            "order the records and write the shards",
            "write what the next append needs",
            "write the rejected input",
        )
    }
    assert manifest.digest == DatasetManifest.from_bytes((small / "_manifest.json").read_bytes(), "small").digest
    for source in manifest.source:
        data = Path(source.url).read_bytes()
        assert (source.bytes, source.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert len(manifest.source) == 100
    rejected = pq.read_table(tmp_path / "out" / "_quarantine").to_pylist()
    places = [(row["source"], row["position"]) for row in rejected]
    assert places == sorted(places) and len(places) == 4
    for row in rejected:
        data = Path(row["source"]).read_bytes()
        data = gzip.decompress(data) if row["source"].endswith(".gz") else data
        assert data[row["position"] :].startswith(row["raw"])


def test_noise_ends_with_one_clear_error_and_killed_tasks_change_no_byte(
    small: Path, small_log: Path, tmp_path: Path
) -> None:
    """Two jobs of one process, which starts Java once."""
    noise, folder = tmp_path / "noise", tmp_path / "folder"
    noise.write_bytes(b"no log at all\n" * 50)
    folder.mkdir()
    script = Path(__file__).with_name("killed_tasks.py")
    done = run(str(script), str(small_log), str(folder / "killed"), "100000", str(noise), cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    assert tree(folder / "killed") == tree(small)

    of_noise, separator, _ = done.stderr.partition("noise ended with 2\n")
    error = of_noise[of_noise.index("error: ") :].splitlines()
    assert separator and error[0] == "error: 50 of 50 records are bad, more than --max-bad allows"
    assert [line.split(":")[0].strip() for line in error[1:4]] == ["got", "allowed", "next"]
    assert "noise at byte 0: not_common_log" in error[1] and "--log-format" in error[3]
    for trace in ("Traceback", "\tat ", "Exception in task"):
        assert trace not in of_noise
    assert "_quarantine-out" in error[3] and len(pq.read_table(folder / "_quarantine-out")) == 50
    there = sorted(path.name for path in folder.iterdir() if path.name != "spark-warehouse")
    assert there == ["_quarantine-out", "killed"]


def lost(parts: str, small_log: Path, folder: Path, *what: str) -> subprocess.CompletedProcess[str]:
    """Run lost_parts.py into folder/out, with Spark's scratch folders in folder/tmp."""
    for name in ("marks", "tmp"):
        (folder / name).mkdir()
    script = Path(__file__).with_name("lost_parts.py")
    call = [parts, str(small_log), str(folder / "out"), "100000", str(folder / "marks"), *what]
    scratch = str(folder / "tmp")
    return run(str(script), *call, cwd=folder, TMPDIR=scratch, SPARK_LOCAL_DIRS=scratch)


def test_a_lost_executor_and_lost_shuffle_files_change_no_byte(small: Path, small_log: Path, tmp_path: Path) -> None:
    done = lost("local-cluster[2,1,1024]", small_log, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(path.name for path in (tmp_path / "marks").iterdir()) == ["executor", "shuffle"]
    assert tree(tmp_path / "out") == tree(small)


def test_a_job_whose_driver_was_killed_is_run_again_with_clean(
    spark: SparkSession, small: Path, small_log: Path, tmp_path: Path
) -> None:
    assert lost("local[2,4]", small_log, tmp_path, "driver").returncode == -signal.SIGKILL
    (staging,) = tmp_path.glob("_staging-*")
    again = config(small_log, tmp_path / "out", shard_bytes=100_000, clean=True)
    os.utime(staging / "_job.json", (time.time() - 3600,) * 2)
    logs.run(spark, again)
    assert tree(tmp_path / "out") == tree(small) and not staging.exists()


def test_shards_are_as_many_as_their_bytes_ask_for(small: Path) -> None:
    manifest = DatasetManifest.from_bytes((small / "_manifest.json").read_bytes(), "manifest")
    for split in manifest.splits.values():
        assert len(split.shards) == -(-sum(shard.bytes for shard in split.shards) // 100_000)
    assert len(manifest.splits["train"].shards) > 2
    assert not list(verify(str(small)))


def test_the_quarantine_keeps_place_reason_and_bytes(small: Path, small_log: Path) -> None:
    data, rows = small_log.read_bytes(), pq.read_table(small / "_quarantine" / "part-00000.parquet").to_pylist()
    assert [row["reason"] for row in rows] == ["not_utf8"] * 4
    for row in rows:
        raw = data[row["position"] :].split(b"\n")[0]
        assert (row["source"], row["raw"], row["length"]) == (str(small_log), raw, len(raw))
        assert row["sha256"] == hashlib.sha256(raw).hexdigest() and raw.startswith(b"\xff")
    assert stat.S_IMODE((small / "_quarantine").stat().st_mode) == 0o700


def test_other_readers_need_no_help(spark: SparkSession, small: Path, parquet: Path) -> None:
    import tensorflow as tf

    manifest = DatasetManifest.from_bytes((parquet / "_manifest.json").read_bytes(), "manifest")
    count = manifest.splits["train"].records
    columns = [field.name for field in web.schema()]
    by_spark = spark.read.parquet(str(parquet / "split=train")).select(*columns).toPandas()
    by_arrow = ds.dataset(parquet / "split=train").to_table().to_pylist()
    assert len(by_spark) == len(by_arrow) == count
    assert spark.read.parquet(str(parquet)).where("split = 'train'").count() == count
    files = sorted(str(path) for path in (small / "split=train").glob("*.tfrecord"))
    wanted = {
        "sample_id": tf.io.FixedLenFeature([], tf.int64),
        "page": tf.io.FixedLenFeature([], tf.string),
        "page_tokens": tf.io.RaggedFeature(tf.string),
        "seconds_since_prev": tf.io.VarLenFeature(tf.int64),
    }
    by_id = {row["sample_id"]: row for row in by_arrow}
    seen = 0
    for batch in tf.data.TFRecordDataset(files).batch(1000):
        parsed = tf.io.parse_example(batch, wanted)
        gaps = tf.sparse.to_dense(parsed["seconds_since_prev"], default_value=-1)[:, 0].numpy().tolist()
        ids, pages = parsed["sample_id"].numpy().tolist(), parsed["page"].numpy().tolist()
        for sample, page, tokens, gap in zip(ids, pages, parsed["page_tokens"].to_list(), gaps, strict=True):
            row = by_id[sample]
            assert (row["page"].encode(), [token.encode() for token in row["page_tokens"]]) == (page, tokens)
            assert row["seconds_since_prev"] == (None if gap == -1 else gap)
            seen += 1
    assert seen == count


def requests(spark: SparkSession, *rows: tuple[str, int, str]):
    columns = "visitor string, time bigint, page string, query string, _source int, _position bigint"
    return spark.createDataFrame([(*row, "", 0, number) for number, row in enumerate(rows)], columns)


def test_the_default_label(spark: SparkSession) -> None:
    end = START + 10_000
    pages = requests(
        spark,
        ("a", START, "/"),  # another one 1,800 s later: stays
        ("a", START + HALF_HOUR, "/x"),  # the next comes too late
        ("a", START + 2 * HALF_HOUR + 1, "/"),  # alone, and the half hour ends before the log
        ("b", START + 5, "/"),
        ("b", START + 5, "/y"),  # of the same second: not later
        ("c", end - HALF_HOUR, "/"),  # the half hour ends with the log
        ("d", end - HALF_HOUR + 1, "/"),  # nobody can know
        ("e", end - HALF_HOUR, "/"),
        ("e", end - HALF_HOUR + 1, "/"),  # known, but only because the visit continues
        ("e", end - 1, "/"),
    )
    found = {
        (row["visitor"], row["_position"]): (row["stays"], row["_dropped"])
        for row in web.rows_of(pages, DEFAULT_LABEL, end).collect()
    }
    yes, no, unknown = (True, None), (False, None), (None, "censored")
    assert [found[key] for key in sorted(found)] == [yes, no, no, no, no, no, unknown, yes, unknown, unknown]


def test_features_of_a_small_log(spark: SparkSession) -> None:
    pages = requests(
        spark,
        ("a", START + 3600, "/A/b-c/d.html"),
        ("b", START, "/"),
        ("a", START + 3610, "/"),
        ("a", START + 3650, "/"),
    )
    rows = sorted(web.rows_of(pages, "true", START).collect(), key=lambda row: row["_position"])
    assert rows[0]["page_tokens"] == ["/a/", "/a/b-c/", "/a/b-c/d.html/", "a", "b", "c", "d", "html"]
    assert [row["requests_so_far"] for row in rows] == [0, 0, 1, 2]
    assert [row["prev_page"] for row in rows] == [None, None, "/A/b-c/d.html", "/"]
    assert [row["seconds_since_prev"] for row in rows] == [None, None, 10, 40]
    assert [row["mean_gap_s"] for row in rows] == [None, None, 10, 25]
    assert [row["hour"] for row in rows] == [5, 4, 5, 5]
    assert [row["_occurrence"] for row in rows] == [0, 0, 0, 0]


def test_nothing_later_than_a_request_enters_its_features(spark: SparkSession, tmp_path: Path) -> None:
    whole, cut = (tmp_path / name for name in ("whole.log", "cut.log"))
    whole.write_bytes(nasa_lines(3000))
    cut.write_bytes(nasa_lines(1500))
    found = []
    for path in (whole, cut):
        plan = plan_of(config(path, tmp_path / "out"))
        parsed = logs.parsed(spark, plan.work, plan.parser)
        rows = web.rows_of(parsed.where(f"_kind = {ROW}"), DEFAULT_LABEL, START).drop("stays", "_dropped").collect()
        found.append({row["_position"]: row for row in rows})
    later, earlier = found
    assert len(earlier) > 300 and len(later) > 1.5 * len(earlier)
    assert {position: later[position] for position in earlier} == earlier


@pytest.mark.parametrize(
    ("label", "why"),
    [
        ("time >", "no SQL"),
        ("host = 'a'", "an unknown column"),
        ("time + 1", "no boolean"),
        ("rand() > 0.5", "chance"),
        ("time > unix_timestamp()", "the clock"),
        ("year(current_date()) > 2000", "the clock"),
        ("count(*) > 1", "one value for all rows"),
        ("explode(array(true, false))", "two rows for each"),
        ("exists(SELECT 1 FROM range(3))", "another table"),
    ],
)
def test_a_label_that_is_none_is_told_before_the_input_is_read(
    spark: SparkSession, small_log: Path, tmp_path: Path, label: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="--label is not a label") as caught:
        logs.run(spark, config(small_log, tmp_path / "out", label=label))
    assert caught.value.got and caught.value.allowed and caught.value.next_step, why
    assert not list(tmp_path.iterdir())
    assert "SQLSTATE" not in capfd.readouterr().err, "pyspark has told the error, with Java's stack, before us"


def test_wrong_input_publishes_nothing(spark: SparkSession, small_log: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "noise").write_bytes(bytes(range(256)) * 100)
    (folder / "empty").touch()
    packed = NASA.read_bytes()
    (folder / "cut.gz").write_bytes(packed[: len(packed) // 2])
    (folder / "one.log").write_bytes(nasa_lines(1))
    (tmp_path / "there").mkdir()
    output, kept = tmp_path / "out", tmp_path / "_quarantine-out"
    cases: list[tuple[LogsConfig, type[Exception], str]] = [
        (config(folder / "noise", output), DataError, "are bad, more than --max-bad allows"),
        (config(folder / "empty", output), DataError, "is empty"),
        (config(folder / "cut.gz", output), DataError, "damaged gzip"),
        (config(folder / "none", output), NotFoundError, "does not exist"),
        (config(folder / "one.log", output), DataError, "shorter than the default label's window of 1800 s"),
        (
            config(folder / "one.log", output, label="CAST(NULL AS BOOLEAN)"),
            DataError,
            "1 censored; records in no split",
        ),
        (config(small_log, output, label="1 DIV (time - time) > 0"), Exception, "DIVIDE_BY_ZERO"),
        (config(small_log, tmp_path / "there"), ExistsError, "exists already"),
        (config(small_log, output, split="group:host:80/20"), ConfigError, "names the column `host`"),
        (config(small_log, output, max_bad="0.09%"), DataError, "4 of 4000 records are bad"),
    ]
    for told, kind, text in cases:
        with pytest.raises(kind) as caught:
            logs.run(spark, told)
        assert text in str(caught.value), str(caught.value)
        assert str(caught.value).count("\n") == 3, str(caught.value)
        there = [kept.name] * ("are bad" in text) + ["in", "there"]
        assert sorted(path.name for path in tmp_path.iterdir()) == there, text
        if kept.exists() and told is not cases[-1][0]:
            shutil.rmtree(kept)
    assert len(pq.read_table(kept)) == 4


def test_settings_of_the_session_are_put_back(spark: SparkSession, nasa: tuple[Path, DatasetManifest]) -> None:
    assert spark.conf.get("spark.sql.shuffle.partitions") == "4"
