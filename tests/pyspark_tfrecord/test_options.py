from __future__ import annotations

import pytest

from lockstep.storage.errors import ConfigError
from pyspark_tfrecord.options import ReadOptions, WriteOptions


def test_names_are_taken_in_any_case_and_columns_in_two_forms() -> None:
    read = ReadOptions.of({"PATH": "/d", "PartitionBytes": "7", "columns": "a, b", "verify": "FULL"})
    assert (read.path, read.partition_bytes, read.columns, read.verify) == ("/d", 7, ("a", "b"), "full")
    assert ReadOptions.of({"path": "/d", "columns": '["a,b", "c"]'}).columns == ("a,b", "c")
    write = WriteOptions.of({"path": "hdfs://h/d", "mustBeNew": "true", "hadoopSettings": '{"dfs.a": "b"}'})
    assert (write.must_be_new, write.compression, write.hadoop) == (True, None, {"dfs.a": "b"})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"path": ""},
        {"path": "/d", "colums": "a"},  # a slip must not read all columns in silence
        {"path": "/d", "paths": '["/d"]'},  # what Spark makes of several paths
        {"path": "/d", "columns": "a,,b"},
        {"path": "/d", "columns": "a,a"},
        {"path": "/d", "columns": "[1]"},
        {"path": "/d", "columns": '["a"'},
        {"path": "/d", "partitionBytes": "0"},
        {"path": "/d", "sampleRecords": "-1"},
        {"path": "/d", "sampleRecords": "²"},  # a digit for str.isdigit, none for int
        {"path": "/d", "verify": "none"},  # reading without checksums is not offered
        {"path": "/d", "hadoopSettings": '{"dfs.a": 1}'},
    ],
)
def test_a_call_that_cannot_be_right_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        ReadOptions.of(options)


@pytest.mark.parametrize(
    "extra", [{"compression": "zstd"}, {"doubles": "float16"}, {"mustBeNew": "yes"}, {"split": "a"}]
)
def test_options_of_writing(extra: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        WriteOptions.of({"path": "/d", **extra})
