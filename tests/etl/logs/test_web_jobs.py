"""Web logs of other servers to published datasets, on Spark: labels, and what the job says of columns and pages."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.dataset as ds
import pytest

import lockstep
from lockstep.etl.logs import job
from lockstep.etl.logs.config import LogsConfig
from lockstep.jobs import _etl
from lockstep.storage.errors import ConfigError
from tests.etl.logs.web_rows import CASES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

STASH = "columns: visitor clientip, time timestamp, status response, method verb, request request\n"
CLOUD = "columns: visitor c-ip, date date, time time, status sc-status, method cs-method, target cs-uri-stem, query "
CLOUD += "cs-uri-query, referrer cs(Referer), agent cs(User-Agent)\n"


@pytest.mark.parametrize(
    ("name", "log_format", "rows", "share", "said"),
    [
        ("logstash-event.jsonl", "json", 52, 0.6154, STASH + "pages by suffix: 60 (none)\n"),
        ("cloudfront.log", "w3c", 31, 0.6452, CLOUD + "pages by suffix: 40 (none)\n"),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                ("host-is-the-server.jsonl", "json", 99, 0.6162, "columns: visitor remote_addr"),
                ("uri-is-rewritten.jsonl", "json", 99, 0.6162, "target request_uri\n"),
                ("modern-assets.log", "combined", 27, 0.6667, "pages by suffix: 28 (none)\n"),
                ("iis.log", "w3c", 31, 0.6452, "columns: visitor c-ip"),
            )
        ),
    ],
)
def test_a_log_becomes_a_dataset(
    spark: SparkSession, tmp_path: Path, name: str, log_format: str, rows: int, share: float, said: str
) -> None:
    packed, output = tmp_path / f"{name}.gz", str(tmp_path / "out")
    packed.write_bytes(gzip.compress((CASES / name).read_bytes()))
    config = LogsConfig(
        inputs=(str(packed),), output=output, log_format=log_format, fmt="parquet", split="1/1", split_bytes=1000
    )
    manifest = job.run(spark, config)
    labels = ds.dataset(output, partitioning="hive").to_table(columns=["stays"]).column("stays").to_pylist()
    assert (len(labels), round(sum(labels) / len(labels), 4)) == (rows, share)
    assert said in _etl.summary(manifest, output) and not lockstep.verify(output)
    if log_format != "json":
        return
    assert "clientip" in lockstep.describe(output) or "remote_addr" in lockstep.describe(output)
    later = LogsConfig(
        inputs=(str(CASES / name),), output=f"{output}-2", log_format="json", fmt="parquet", split="1/1",
        append_to=output, visitor_column="host" if name != "uri-is-rewritten.jsonl" else "uri",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="cannot be continued: its roles"):
        job.check(later)
