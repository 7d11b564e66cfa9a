"""lockstep describe --sample: each record by its id, as another reader has it, and its picture as Pillow has it."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lockstep.etl.describe.sample import Sample, _in_likely_order, find_sample, sample_id_of
from lockstep.etl.index.parquet import ParquetIndexConfig, index_parquet
from lockstep.features.sample_id import shard_keys
from lockstep.features.schema.schema import Schema
from lockstep.jobs import describe as job
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.dataset.manifest_entries import FileInfo
from lockstep.storage.documents import seal
from lockstep.storage.errors import ConfigError, DataError, ExistsError, LockstepError, NotFoundError
from lockstep.training.reading.reader import SplitReader
from tests.builders.blocks import read_all
from tests.training._tiny import write_images, write_table

MASK = (1 << 64) - 1


def rows_of(url: str, manifest: DatasetManifest, split: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_all(
        SplitReader(url, manifest, split, Schema.from_json(manifest.schema))
    ).to_pylist()
    return rows


@pytest.mark.parametrize("fmt", ["tfrecord", "parquet"])
@pytest.mark.parametrize("write", [write_table, write_images])
def test_each_record_is_found_at_its_place(tmp_path: Path, fmt: str, write: Callable[..., DatasetManifest]) -> None:
    manifest = write(tmp_path / "d", fmt=fmt, records={"train": 43, "test": 9}, shards=3)
    seen = 0
    for split, info in manifest.splits.items():
        rows = read_all(
            SplitReader(str(tmp_path / "d"), manifest, split, Schema.from_json(manifest.schema))
        ).to_pylist()
        places = [(shard.path, number) for shard in info.shards for number in range(shard.records)]
        for row, (shard, record) in zip(rows, places, strict=True):
            found = find_sample(str(tmp_path / "d"), row["sample_id"])
            assert (found.split, found.shard, found.record) == (split, shard, record)
            assert repr(found.values) == repr(row)  # of NaN, too
            seen += 1
    assert seen == 52


def test_the_shard_that_the_order_says_comes_first_and_each_comes_once(tmp_path: Path) -> None:
    manifest = write_table(tmp_path / "d", records={"train": 40, "test": 30}, shards=5)
    for sample in (0, -1, 1 << 62, 12345):
        order = list(_in_likely_order(manifest, sample))
        every = [(name, number) for name in manifest.splits for number in range(len(manifest.splits[name].shards))]
        assert sorted(order) == sorted(every)
        key = int(shard_keys(np.array([sample]), manifest.created_by["seed"])[0])
        assert order[:2] == [(name, key * len(manifest.splits[name].shards) >> 64) for name in manifest.splits]


def test_a_record_and_its_picture_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = write_images(tmp_path / "d", fmt="parquet", shards=2)
    row = pq.read_table(tmp_path / "d" / manifest.splits["train"].shards[1].path).to_pylist()[3]
    text = f"0x{row['sample_id'] & MASK:016x}"
    picture = tmp_path / "one.png"
    assert job.main([str(tmp_path / "d"), "--sample", text, "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"sample {text} ({row['sample_id']})\n")
    assert "split train, record 3 of split=train/part-00001.parquet" in printed
    assert "image (feature): uint8 of shape 8x8x1" in printed and f"label (label): {row['label']}" in printed
    assert f"picture: {picture}" in printed
    pixels = np.asarray(Image.open(picture))
    assert (pixels == np.frombuffer(row["image"], np.uint8).reshape(8, 8)).all()
    with pytest.raises(ExistsError):
        job.main([str(tmp_path / "d"), "--sample", text, "--picture", str(picture)])


def test_stored_files_are_decoded_and_named(tmp_path: Path) -> None:
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    packed = io.BytesIO()
    image.save(packed, "PNG")
    found = find_sample_of(tmp_path, packed.getvalue())
    assert (np.asarray(Image.open(io.BytesIO(found.picture()))) == np.asarray(image)).all()
    assert f"{len(packed.getvalue())} bytes, 89504e47" in found.text()
    for data in (b"no picture", packed.getvalue()[:40]):
        with pytest.raises(DataError, match="no picture that can be decoded"):
            find_sample_of(tmp_path, data).picture()


def find_sample_of(folder: Path, data: bytes) -> Sample:
    (folder / "_manifest.json").unlink(missing_ok=True)
    pq.write_table(pa.table({"photo": [b"", data], "n": [1, 2]}), folder / "a.parquet")
    index_parquet(ParquetIndexConfig(url=str(folder), id_columns=("n",)))
    digest = hashlib.sha256(bytes([1, 0, 0, 0, 0, 0, 0, 0]) + b"2" + bytes(8)).digest()
    found = find_sample(str(folder), int.from_bytes(digest[:8], "little", signed=True))
    assert (found.shard, found.record, found.values["n"]) == ("a.parquet", 1, 2)
    return found


def test_the_file_that_a_record_was_is_named(tmp_path: Path) -> None:
    manifest = write_images(tmp_path / "d", records={"train": 20}, shards=2)
    files = {}
    for number, shard in enumerate(manifest.splits["train"].shards):
        ids = pq.read_table(tmp_path / "d" / shard.path).column("sample_id")
        path = tmp_path / "d" / f"_files/train/part-{number:05d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        names = [f"cat/{number}-{row}.png" for row in range(len(ids))]
        pq.write_table(pa.table({"sample_id": ids, "file": names}), path)
        data = path.read_bytes()
        files[f"_files/train/part-{number:05d}.parquet"] = FileInfo(len(data), hashlib.sha256(data).hexdigest())
    doc = json.loads(replace(manifest, files={**manifest.files, **files}).to_bytes())
    doc.pop("manifest_sha256")
    (tmp_path / "d" / "_manifest.json").write_bytes(seal(doc))
    row = pq.read_table(tmp_path / "d" / load_dataset(str(tmp_path / "d")).splits["train"].shards[1].path)
    assert "  file cat/1-4.png\n" in find_sample(str(tmp_path / "d"), row.column("sample_id")[4].as_py()).text()


@pytest.mark.parametrize(
    ("text", "number"),
    [("0x1", 1), ("0xffffffffffffffff", -1), ("FFFFFFFFFFFFFFFE", -2), ("-5", -5), ("12", 12),
     ("1000000000000000", 1 << 60), ("0x8000000000000000", -(1 << 63)), ("-9223372036854775808", -(1 << 63))],
)  # fmt: skip
def test_ids_as_audits_errors_and_columns_write_them(text: str, number: int) -> None:
    assert sample_id_of(text) == number


@pytest.mark.parametrize("text", ["", "0x", "xyz", "0x10000000000000000", "1.5", "9999999999999999999", "0x-1"])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no sample id"):
        sample_id_of(text)


def test_calls_that_cannot_be_right(tmp_path: Path) -> None:
    write_table(tmp_path / "d")
    url = str(tmp_path / "d")
    with pytest.raises(NotFoundError, match="0x0000000000000001"):
        job.main([url, "--sample", "0x1"])
    sample = str(
        read_all(SplitReader(url, load_dataset(url), "test", Schema.from_json(load_dataset(url).schema)))[0][0]
    )
    for flags, kind in (
        (["--picture", "x.png"], ConfigError),
        (["--sample", sample, "--html", str(tmp_path / "x.html")], LockstepError),
        (["--sample", sample, "--picture", str(tmp_path / "x.png")], DataError),
    ):
        with pytest.raises(kind):
            job.main([url, *flags])
    assert not (tmp_path / "x.png").exists()
