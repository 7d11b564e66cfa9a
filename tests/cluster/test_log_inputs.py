"""Logs that lie on HDFS: patterns over its folders, packed files, and what only half arrived."""

from __future__ import annotations

import bz2
import gzip
from typing import Any

import pyarrow as pa
import pytest

from lockstep.etl.input.files import find_sources, plan_ranges
from lockstep.etl.input.lines import Lines, read_lines
from lockstep.storage.errors import ConfigError, DataError, NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join

pytestmark = pytest.mark.cluster

DATA = b"".join(b"line %d\n" % number for number in range(30_000))


def test_patterns_and_packed_files(hadoop: Any) -> None:
    root = join(hadoop.hdfs_url, "log-inputs")
    fs = filesystem(root)
    packed = {
        "2015-01/a.gz": gzip.compress(DATA),
        "2015-01/b.zst": pa.compress(DATA, codec="zstd", asbytes=True),
        "2015-02/c.bz2": bz2.compress(DATA),
        "2015-02/d.log": DATA,
        "2015-02/e.log._COPYING_": DATA,
        "2016-01/cut.bz2": bz2.compress(DATA)[:-9],
    }
    for name, content in packed.items():
        with fs.create(join(root, name)) as writer:
            writer.write(content)
    sources = find_sources([join(root, "2015-*", "*")])
    assert [source.url.removeprefix(root) for source in sources] == [f"/{name}" for name in list(packed)[:4]]
    for source in sources:
        found = [lines for part in plan_ranges([source], 50_000) for lines in read_lines(part)]
        assert (
            b"".join(b"\n".join([*item.values.to_pylist(), b""]) for item in found if isinstance(item, Lines)) == DATA
        )
    (cut,) = find_sources([join(root, "2016-01")])
    with pytest.raises(DataError, match="damaged bzip2"):
        list(read_lines(plan_ranges([cut], 1)[0]))
    with pytest.raises(ConfigError, match="is given twice"):
        find_sources([join(root, "2015-01"), join(root, "2015-0?", "a.gz")])
    with pytest.raises(NotFoundError, match="names no file"):
        find_sources([join(root, "2017-*")])
    fs.delete(root, recursive=True)
