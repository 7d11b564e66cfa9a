"""lockstep index: a manifest beside files of somebody else, which stay as they are."""

from __future__ import annotations

import gzip
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lockstep.etl.index.tfrecord import Scan
from lockstep.features.schema.declare import load_schema
from lockstep.features.schema.schema import Columns, foreign_field
from lockstep.features.shards.blocks import indexed_blocks, indexed_fields, read_gzip
from lockstep.features.shards.foreign_files import find_files
from lockstep.features.shards.read import Lenient
from lockstep.jobs import index
from lockstep.storage.dataset.indexed import IndexedManifest, read_indexed
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.dataset.manifest_entries import ShardInfo
from lockstep.storage.documents import seal, unseal
from lockstep.storage.errors import CorruptionError, DataError, ExistsError, LockstepError, NotFoundError, StorageError
from lockstep.storage.formats.tfrecord import frame
from lockstep.storage.fs import filesystem
from lockstep.storage.verify import verify
from pyspark_tfrecord import DefaultSource
from tests.builders.records import encode_example
from tests.pyspark_tfrecord.published import publish

SCHEMA = Columns((foreign_field("n", "int64", False), foreign_field("w", "bytes", True)))


def write(folder: Path, packed: bool = False) -> dict[str, bytes]:
    """Three files, one of them gzip if `packed`; returns their bytes."""
    for number, name in enumerate(("b.tfrecord-00001", "a/c.tfrecord", "a/d.tfrecord.gz")):
        rows = [{"n": 100 * number + i, "w": [b"\xff" * i] * (i % 3)} for i in range(20)]
        data = b"".join(frame(encode_example(SCHEMA, row)) for row in rows)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("gz") and packed:
            data = subprocess.run(["gzip", "-n"], input=data, capture_output=True, check=True).stdout
        (folder / name).write_bytes(data)
    return {file.path: Path(file.url).read_bytes() for file in find_files(str(folder), "*")}


def manifest_of(folder: Path) -> IndexedManifest:
    path = folder / "_manifest.json"
    return read_indexed(path.read_bytes(), str(path))


def test_the_files_are_described_and_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "theirs"
    before = write(folder, packed=True)
    times = {path: os.stat(folder / path).st_mtime_ns for path in before}
    assert index.main([str(folder), "--sample-records", "30"]) == 0
    told = capsys.readouterr().out
    assert "3 files, 60 records" in told and "w: list of bytes" in told and "n: int64" in told
    assert {path: (folder / path).read_bytes() for path in before} == before
    assert {path: os.stat(folder / path).st_mtime_ns for path in before} == times
    manifest = manifest_of(folder)
    assert [(file.path, file.records) for file in manifest.files] == [(path, 20) for path in sorted(before)]
    assert manifest.gzip == {"a/d.tfrecord.gz"} and sorted(manifest.indexes) == ["a/c.tfrecord", "b.tfrecord-00001"]
    lines = (folder / "_index/a/c.tfrecord.idx").read_text().splitlines()
    assert len(lines) == 20 and sum(map(int, lines[-1].split())) == len(before["a/c.tfrecord"])
    rows = [
        row for block in indexed_blocks(str(folder), manifest) for batch in block.read() for row in batch.to_pylist()
    ]
    assert [row["n"] for row in rows] == [*range(100, 120), *range(200, 220), *range(20)]
    assert rows[5]["w"] == [b"\xff" * 5] * 2
    with pytest.raises(ExistsError, match="indexed already"):
        index.main([str(folder)])
    assert sorted(entry.name for entry in folder.iterdir()) == ["_index", "_manifest.json", "a", "b.tfrecord-00001"]


def test_a_dataset_needs_no_index(tmp_path: Path) -> None:
    publish(tmp_path, {"train": (3,)})
    manifest = tmp_path / "_manifest.json"
    with pytest.raises(ExistsError, match="needs no index") as caught:
        index.main([str(tmp_path)])
    assert "delete" not in str(caught.value)
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.raises(ExistsError, match="cannot be read") as caught:
        index.main([str(tmp_path)])
    assert "Delete nothing" in caught.value.next_step
    manifest.unlink()
    with pytest.raises(ExistsError, match="has a folder _index") as caught:
        index.main([str(tmp_path)])
    assert "If this is a dataset, restore" in caught.value.next_step


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (lambda data: data[:-3], CorruptionError),
        (lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], CorruptionError),
        (lambda data: frame(b"no Example"), DataError),
    ],
)
def test_damage_is_told_and_nothing_is_left(tmp_path: Path, harm: object, error: type[LockstepError]) -> None:
    folder = tmp_path / "theirs"
    data = write(folder)["b.tfrecord-00001"]
    assert callable(harm)
    (folder / "b.tfrecord-00001").write_bytes(harm(data))
    told = "b.tfrecord-00001" if error is CorruptionError else "no one schema fits"
    with pytest.raises(error, match=told) as caught:
        index.main([str(folder)])
    assert "lockstep verify" not in caught.value.next_step  # which takes no files without a manifest
    assert sorted(entry.name for entry in folder.iterdir()) == ["a", "b.tfrecord-00001"]


def test_a_manifest_that_was_changed_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    index.main([str(tmp_path)])
    data = (tmp_path / "_manifest.json").read_bytes()
    with pytest.raises(CorruptionError):
        read_indexed(data.replace(b'"records":20', b'"records":21'), "m")
    # Forged and sealed again: paths that lead out, more blocks than records, indexes for files that are not there.
    for path, value in (
        (("files", 0, "path"), "../c.tfrecord"),
        (("files", 0, "path"), "/etc/passwd"),
        (("files", 0, "records"), 1 << 40),
        (("files", 0, "records"), True),
        (("files", 0, "block_offsets"), [1]),
        (("files", 0, "gzip"), 1),
        (("indexes",), {}),
        (("schema", 0, "dtype"), "object"),
        (("schema", 0, "list"), "no"),
        (("block_records",), 0),
        (("kind",), "dataset"),
        (("format_version",), True + 1),
    ):
        doc = unseal(data, "m")
        place: Any = doc
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(DataError):
            read_indexed(seal(doc), "m")


@pytest.mark.parametrize("flags", [["--sample-records", "0"], ["--pattern", "*.none"], ["--format", "csv"]])
def test_a_call_that_cannot_be_right(tmp_path: Path, flags: list[str]) -> None:
    write(tmp_path)
    with pytest.raises(LockstepError):
        index.main([str(tmp_path), *flags])


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no such directory .*none"):
        index.main([str(tmp_path / "none")])
    with pytest.raises(NotFoundError, match=r"--schema: no such file .*none.toml"):
        load_schema(str(tmp_path / "none.toml"))


def test_verification_names_what_changed_since(tmp_path: Path) -> None:
    write(tmp_path, packed=True)
    index.main([str(tmp_path)])

    def faults() -> list[str]:
        return [str(finding) for finding in verify(str(tmp_path))]

    (tmp_path / "later.txt").write_text("theirs, and none of ours")
    assert faults() == []
    with pytest.raises(DataError, match="no dataset") as caught:
        load_dataset(str(tmp_path))
    assert "lockstep.write_dataset" in caught.value.next_step
    for path in ("a/d.tfrecord.gz", "_index/b.tfrecord-00001.idx"):
        data = (tmp_path / path).read_bytes()
        (tmp_path / path).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (tmp_path / "a/c.tfrecord").unlink()
    told = faults()
    assert len(told) == 3 and "a/c.tfrecord: missing" in told[0], told
    assert "a/d.tfrecord.gz" in told[1] and "_index/b.tfrecord-00001.idx" in told[2]


def test_a_manifest_that_cannot_be_written_takes_the_indexes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    before = sorted(os.listdir(tmp_path))

    def broken(*_: object) -> None:
        raise StorageError("no room")

    with monkeypatch.context() as patched:
        patched.setattr("lockstep.etl.index.tfrecord.write_file", broken)
        with pytest.raises(StorageError, match="no room"):
            index.main([str(tmp_path)])
    assert sorted(os.listdir(tmp_path)) == before
    assert index.main([str(tmp_path)]) == 0


def test_a_second_attempt_does_not_meet_the_first(tmp_path: Path) -> None:
    write(tmp_path / "theirs")
    (tmp_path / "aside").mkdir()
    scan = Scan(str(tmp_path / "theirs"), str(tmp_path / "aside"), 8, (("n", "int64", False),), {})
    first, second = scan.scan("a/c.tfrecord"), scan.scan("a/c.tfrecord")
    assert replace(first, place=second.place) == second and first.place != second.place
    assert first.columns == (("n", "int64", False), ("w", "bytes", True))


class Late(NamedTuple):
    """Records that come late in a file, and what the schema has for them."""

    features: dict[str, Any]
    column: tuple[str, str, bool] | None


@pytest.mark.parametrize(
    "late",
    [
        Late({"n": 1, "promo": 5}, ("promo", "int64", False)),
        Late({"n": 1, "promo": [0.5, 1.5]}, ("promo", "float32", True)),
        Late({"n": [1, 2]}, ("n", "int64", True)),
        Late({"n": 1, "t": b"\xff"}, ("t", "bytes", False)),
        Late({"n": 0.5}, None),
    ],
)
@pytest.mark.parametrize("name", ["one.tfrecord", "two.tfrecord"])
def test_a_feature_that_comes_late_is_a_column(late: Late, name: str, tmp_path: Path) -> None:
    before = [example({"n": n, "t": "text"}) for n in range(1200)]
    (tmp_path / "one.tfrecord").write_bytes(b"".join(map(frame, before)))
    with (tmp_path / name).open("ab") as file:
        file.write(b"".join(frame(example(late.features)) for _ in range(100)))
    if late.column is None:
        with pytest.raises(DataError, match=r"`n`|no one schema fits") as caught:
            index.main([str(tmp_path), "--sample-records", "1000"])
        # Of a file in the sample the names of features are compared before its place is known.
        assert name in str(caught.value) or "files after it" in str(caught.value)
        assert "float" in caught.value.got
        return
    assert index.main([str(tmp_path), "--sample-records", "1000"]) == 0
    manifest = manifest_of(tmp_path)
    assert late.column in manifest.columns and manifest.sampled == 1300
    rows = [
        row for block in indexed_blocks(str(tmp_path), manifest) for batch in block.read() for row in batch.to_pylist()
    ]
    key = late.column[0]
    wanted = [values_of(late.features[key])] * 100
    assert [values for row in rows if (values := values_of(row[key]))][-100:] == wanted and len(rows) == 1300


def example(features: dict[str, Any]) -> bytes:
    """An Example with these features."""
    dtypes = {int: "int64", float: "float32", str: "string", bytes: "bytes"}
    found = {name: (values_of(value)[0], isinstance(value, list)) for name, value in features.items()}
    fields = [foreign_field(name, dtypes[type(first)], many) for name, (first, many) in sorted(found.items())]
    return encode_example(Columns(tuple(fields)), features)


def values_of(value: Any) -> list[Any]:
    """The values of a feature."""
    return value if isinstance(value, list) else [] if value is None else [value]


def test_a_gzip_file_is_held_against_the_manifest(tmp_path: Path) -> None:
    write(tmp_path, packed=True)
    index.main([str(tmp_path)])
    manifest, path = manifest_of(tmp_path), tmp_path / "a/d.tfrecord.gz"
    (info,) = (file for file in manifest.files if file.path in manifest.gzip)
    whole = path.read_bytes()
    framed = gzip.decompress(whole)

    def read(info: ShardInfo, full: bool) -> int:
        decode = Lenient(indexed_fields(manifest))
        return sum(batch.num_rows for batch in read_gzip(filesystem(str(path)), str(path), info, decode, full=full))

    assert read(info, True) == read(info, False) == 20
    same_length = whole[:4] + b"\1\2\3\4" + whole[8:]  # another time in the header: the same records
    path.write_bytes(same_length)
    assert read(info, False) == 20
    with pytest.raises(CorruptionError, match="does not match its digest"):
        read(info, True)
    with pytest.raises(CorruptionError, match="another number of records"):
        read(replace(info, records=19), False)
    with pytest.raises(CorruptionError, match="another number of records"):
        read(replace(info, records=21), False)
    path.write_bytes(gzip.compress(framed + framed))
    for full in (True, False):
        with pytest.raises(CorruptionError, match="another length"):
            read(info, full)
    with pytest.raises(CorruptionError, match="another length"):
        for block in indexed_blocks(str(tmp_path), manifest):
            list(block.read())
    for verify_option in ("records", "full"):
        source = DefaultSource({"path": str(tmp_path), "verify": verify_option})
        reader = source.reader(source.schema())
        with pytest.raises(CorruptionError, match="another length"):
            for part in reader.partitions():
                list(reader.read(part))
