"""What an append takes from its parent, and reads of it: ids out of shards of both formats, without Spark."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lockstep.etl.write.append import Parent, ids_of, open_parent
from lockstep.etl.write.carried import check_carried, digest_of_carried
from lockstep.etl.write.config import WriteConfig
from lockstep.features.examples.foreign import decode_foreign_frames
from lockstep.features.sample_id import sample_id
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import SEQUENCE_EXAMPLE, Schema
from lockstep.storage.dataset.layout import DatasetPaths
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import FileInfo, ShardInfo
from lockstep.storage.errors import ConfigError, CorruptionError, DataError, NotFoundError
from lockstep.storage.formats.tfrecord import frame
from lockstep.storage.fs import filesystem
from tests.builders.records import encode_example
from tests.training._tiny import write_rows, write_table


@pytest.mark.parametrize("fmt", ["tfrecord", "parquet"])
def test_ids_are_read_out_of_shards(tmp_path: Path, fmt: str) -> None:
    manifest = write_table(tmp_path / "d", fmt=fmt, records={"train": 43, "test": 9}, shards=3)
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    urls = [str(tmp_path / "d" / shard.path) for shard in shards]
    found = [batch for url, shard in zip(urls, shards, strict=True) for batch in ids_of(url, shard)]
    assert all(batch.schema == pa.schema([("sample_id", pa.int64())]) for batch in found)
    ids = np.concatenate([np.asarray(batch["sample_id"]) for batch in found]).tolist()
    assert sorted(ids) == sorted(sample_id([str(row).encode()], 0) for row in range(52))
    damaged = bytearray(Path(urls[0]).read_bytes())
    damaged[-3] ^= 1  # the footer of Parquet, the last checksum of a TFRecord
    Path(urls[0]).write_bytes(damaged)
    with pytest.raises(CorruptionError):
        list(ids_of(urls[0], shards[0]))


def test_ids_are_read_out_of_sequence_examples(tmp_path: Path) -> None:
    """They lie in the context of each: its feature lists are no reason to refuse it here."""
    schema = Schema((sample_id_field(), Field(name="l", dtype="int64", shape=(None,))), SEQUENCE_EXAMPLE)
    rows = pa.RecordBatch.from_pydict({"sample_id": [5, -7], "l": [[1, 2], []]}, schema=schema.arrow_schema())
    manifest = write_rows(str(tmp_path / "d"), schema, rows, {"train": 2}, "tfrecord", 1, 8, 0)
    shard = manifest.splits["train"].shards[0]
    found = list(ids_of(str(tmp_path / "d" / shard.path), shard))
    assert [sample for batch in found for sample in batch["sample_id"].to_pylist()] == [5, -7]


NEW = Field(name="device", dtype="string", nullable=True, default="desktop")
HASHED = {"kind": "hash", "buckets": 9, "seed": 42}
WORDS = {"kind": "vocabulary", "file": "device.json", "max_size": 9, "min_count": 1, "oov_buckets": 1}


@pytest.mark.parametrize(
    ("change", "what", "next_step"),
    [
        (lambda fields: [*fields, NEW], None, ""),
        (lambda fields: [fields[0], replace(NEW, encoding=HASHED), *fields[1:]], None, ""),
        (lambda fields: [*fields, replace(NEW, default=None)], "it lacks device", "default = ..."),
        (lambda fields: [*fields, replace(NEW, encoding=WORDS)], "no statistics of device", "another encoding"),
        (lambda fields: [*fields[:-1], NEW], "its schema is another one", "Give the same schema"),  # one is removed
        (lambda fields: [fields[0], replace(fields[1], dtype="float64"), *fields[2:], NEW], "its schema", "the same"),
        (lambda fields: [fields[0], fields[2], fields[1], *fields[3:], NEW], "its schema", "the same"),
    ],
)
def test_an_append_may_add_a_column_that_states_a_default(
    tmp_path: Path, change: Any, what: str | None, next_step: str
) -> None:
    tiny = write_table(tmp_path / "tiny")
    parent = Parent(((str(tmp_path / "tiny"), tiny),))
    schema = Schema(tuple(change(list(Schema.from_json(tiny.schema).fields))))
    if what is None:
        parent.check_schema(schema)
        return
    with pytest.raises(ConfigError, match=what) as caught:
        parent.check_schema(schema)
    assert next_step in caught.value.next_step


@pytest.mark.parametrize("fmt", ["tfrecord", "parquet"])
def test_a_shard_of_other_records_is_refused(tmp_path: Path, fmt: str) -> None:
    shard = write_table(tmp_path / "d", fmt=fmt, records={"train": 43, "test": 9}).splits["train"].shards[0]
    url = str(tmp_path / "d" / shard.path)
    with pytest.raises(CorruptionError, match="another number of records"):
        list(ids_of(url, replace(shard, records=shard.records + 1)))
    damaged = bytearray(Path(url).read_bytes())
    damaged[20] ^= 1
    Path(url).write_bytes(damaged)
    with pytest.raises(CorruptionError):
        list(ids_of(url, shard))


def test_large_records_are_not_held_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema((sample_id_field(), Field(name="image", dtype="bytes")))
    record = encode_example(schema, {"image": b"x" * (1 << 19), "sample_id": 7})
    (tmp_path / "part").write_bytes(frame(record) * 40)
    held = []

    def seen(fields: Any, data: np.ndarray, offsets: np.ndarray, **options: Any) -> pa.RecordBatch:
        held.append(len(data))
        return decode_foreign_frames(fields, data, offsets, **options)

    monkeypatch.setattr("lockstep.etl.write.append.decode_foreign_frames", seen)
    info = ShardInfo(path="part", records=40, bytes=0, sha256="", crc32c="", footer_sha256=None, block_offsets=())
    found = [batch["sample_id"].to_pylist() for batch in ids_of(str(tmp_path / "part"), info)]
    assert [sample for batch in found for sample in batch] == [7] * 40
    assert max(held) <= 5 << 20


def published(
    folder: Path, name: str, manifest: DatasetManifest, parent: dict[str, str] | None, **config: object
) -> DatasetManifest:
    """A dataset of nothing but a manifest."""
    own = {"version": "0.1.0", "config": {"split": "80/20", "weights": "none", "sample": None, **config}, "seed": 0}
    made = DatasetManifest.from_bytes(replace(manifest, created_by=own, parent=parent).to_bytes(), name)
    (folder / name).mkdir()
    filesystem(str(folder)).create(DatasetPaths(str(folder / name)).manifest).write(made.to_bytes())
    return made


def test_a_chain_of_appends_is_followed_by_digest(tmp_path: Path) -> None:
    tiny = write_table(tmp_path / "tiny")
    first = published(tmp_path, "a", tiny, None)
    link = {"url": str(tmp_path / "a"), "digest": first.digest}
    published(tmp_path, "b", tiny, link)
    schema = Schema.from_json(tiny.schema)
    config = WriteConfig(output=str(tmp_path / "c"), append_to=str(tmp_path / "b"))
    parent = open_parent(str(tmp_path / "b"), config)
    assert [url for url, _ in parent.chain] == [str(tmp_path / "b"), str(tmp_path / "a")]
    assert parent.block_records == {"train": 8, "test": 8} and parent.fitted() == {}
    other = replace(schema, fields=(*schema.fields[:-1], replace(schema.fields[-1], name="bought", dtype="int64")))
    with pytest.raises(ConfigError, match="its schema is another one") as caught:
        parent.check_schema(other)
    assert caught.value.got == "no field `label`; field `bought` (not there)"
    assert caught.value.allowed == f"the schema of {tmp_path / 'b'}"
    published(tmp_path, "lost", tiny, {**link, "digest": "0" * 64})
    with pytest.raises(DataError, match="is another one now"):
        open_parent(str(tmp_path / "lost"), config)
    published(tmp_path, "gone", tiny, {**link, "url": str(tmp_path / "nowhere")})
    with pytest.raises(NotFoundError):
        open_parent(str(tmp_path / "gone"), config)
    published(tmp_path, "itself", tiny, {"url": str(tmp_path / "itself"), "digest": tiny.digest})
    with pytest.raises(DataError, match="more datasets than a chain may have"):  # a chain that bites its tail ends too
        open_parent(str(tmp_path / "itself"), config)


def test_an_append_of_a_log_needs_what_its_parent_carries(tmp_path: Path) -> None:
    tiny = write_table(tmp_path / "tiny")
    carrying = replace(tiny, files={**tiny.files, "_carried/part-00000.parquet": FileInfo(9, "0" * 64)})
    carried: dict[str, object] = {"log_end": 9, "hold_s": 1, "open": 2, "past": 3, "reopened": 0, "parent_sha256": None}

    def opened(name: str) -> Parent:
        return open_parent(
            str(tmp_path / name), WriteConfig(output=str(tmp_path / "new"), append_to=str(tmp_path / name))
        )

    published(tmp_path, "old", tiny, None)
    with pytest.raises(ConfigError, match="does not carry what an append needs"):
        check_carried(opened("old"))
    for number, odd in enumerate(({**carried, "open": "2"}, {**carried, "more": 1}, 3)):
        published(tmp_path, f"odd{number}", carrying, None, carried=odd)
        with pytest.raises(ConfigError, match=r"created_by\.config\.carried that cannot be read"):
            check_carried(opened(f"odd{number}"))
    first = published(tmp_path, "first", carrying, None, carried=carried)
    assert check_carried(opened("first")).open == 2
    link = {"url": str(tmp_path / "first"), "digest": first.digest}
    own = {**carried, "reopened": 2, "parent_sha256": digest_of_carried(first)}
    published(tmp_path, "second", carrying, link, carried=own)
    assert check_carried(opened("second")).reopened == 2
    # The first one, made again: of equal shards, so of equal digest, and of other open requests.
    again = replace(tiny, files={**tiny.files, "_carried/part-00000.parquet": FileInfo(9, "1" * 64)})
    shutil.rmtree(tmp_path / "first")
    assert published(tmp_path, "first", again, None, carried=carried).digest == first.digest
    with pytest.raises(DataError, match="carries other requests"):
        check_carried(opened("second"))


@pytest.mark.parametrize(
    ("stored", "told", "refused"),
    [
        ({"weights": "none", "sample": None}, {}, None),
        ({"weights": "none", "sample": None}, {"weights": "balanced"}, "weights"),
        ({"weights": "balanced", "sample": None}, {}, "weights"),
        ({"weights": "none", "sample": None}, {"sample": "b=0:50%"}, "sample"),
        ({"weights": "none", "sample": "b=0:50%"}, {}, "sample"),
        ({"weights": "none", "sample": "b=0:50%"}, {"sample": "b=0:25%"}, "sample"),
        ({"sample": "b=0:50%,b=1:25%"}, {"sample": "b=1:25%,b=0:50%"}, None),  # the same in another order
    ],
)
def test_an_append_is_weighed_and_sampled_as_its_parent(
    tmp_path: Path, stored: dict[str, str | None], told: dict[str, str], refused: str | None
) -> None:
    tiny = write_table(tmp_path / "tiny")
    above = str(tmp_path / "a")
    published(tmp_path, "a", tiny, None, **stored)
    options: dict[str, Any] = {"output": str(tmp_path / "b"), "append_to": above, **told}
    if refused is None:
        assert len(open_parent(above, WriteConfig(**options)).chain) == 1
        return
    with pytest.raises(ConfigError, match=f"its {refused} is another one") as caught:
        open_parent(above, WriteConfig(**options))
    there = stored[refused]
    assert caught.value.got and caught.value.allowed == (f"no --{refused}" if there is None else f"--{refused} {there}")
    assert ("Leave out" in caught.value.next_step) is (there is None) and f"--{refused}" in caught.value.next_step


@pytest.mark.parametrize("split", ["time:at:6/2/2", "kfold:3:a:balanced"])
def test_a_split_that_more_records_change_is_not_continued(tmp_path: Path, split: str) -> None:
    """Whatever split is asked for, the same answer, and none that leads to the next refusal."""
    published(tmp_path, "a", write_table(tmp_path / "tiny"), None, split=split)
    with pytest.raises(ConfigError) as ours:
        WriteConfig(output=str(tmp_path / "b"), append_to=str(tmp_path / "a"), split=split)
    with pytest.raises(ConfigError) as theirs:
        open_parent(str(tmp_path / "a"), WriteConfig(output=str(tmp_path / "b"), append_to=str(tmp_path / "a")))
    assert ours.value.what == theirs.value.what and "does not go with" in ours.value.what
    assert ours.value.next_step == theirs.value.next_step and "one dataset from all inputs" in ours.value.next_step
    assert split in theirs.value.got and split not in theirs.value.allowed


def test_an_append_is_weighed_by_the_classes_of_its_parent(tmp_path: Path) -> None:
    """A class weighs the same in all of a chain, so that they can be trained on together."""
    tiny, counts = write_table(tmp_path / "tiny"), {"false": 90, "true": 10}
    made: dict[str, Any] = {"weights": "balanced", "class_counts": counts}
    published(tmp_path, "a", tiny, None, **made)
    config = WriteConfig(output=str(tmp_path / "b"), append_to=str(tmp_path / "a"), weights="balanced")
    assert open_parent(str(tmp_path / "a"), config).class_counts == counts


@pytest.mark.parametrize(
    "counts", [{"a": 0}, {"a": -1}, {"a": "x"}, {"a": 1.5}, {"a": True}, {}, 5, [["a", 1]], None], ids=repr
)
def test_counts_of_classes_that_somebody_wrote_into_a_manifest(tmp_path: Path, counts: Any) -> None:
    published(tmp_path, "a", write_table(tmp_path / "tiny"), None, weights="balanced", class_counts=counts)
    config = WriteConfig(output=str(tmp_path / "b"), append_to=str(tmp_path / "a"), weights="balanced")
    with pytest.raises(ConfigError, match=r"/a cannot be continued: .*class_counts that cannot be read"):
        open_parent(str(tmp_path / "a"), config)


@pytest.mark.parametrize("sample", [5, "x", "b=0:150%", ["b=0:50%"], {}], ids=repr)
@pytest.mark.parametrize("ours", [None, "b=0:50%"])
def test_a_sample_that_somebody_wrote_into_a_manifest(tmp_path: Path, sample: Any, ours: str | None) -> None:
    """It is the parent's that is wrong, not the caller's flag."""
    published(tmp_path, "a", write_table(tmp_path / "tiny"), None, sample=sample)
    config = WriteConfig(output=str(tmp_path / "b"), append_to=str(tmp_path / "a"), sample=ours)
    with pytest.raises(ConfigError, match=r"/a cannot be continued: .*config[.]sample that cannot be read"):
        open_parent(str(tmp_path / "a"), config)
