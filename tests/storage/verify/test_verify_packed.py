"""lockstep verify and the manifest of a gzip dataset: what is changed or forged is found, with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.documents import seal, unseal
from lockstep.storage.errors import DataError
from lockstep.storage.verify import verify
from tests.storage.dataset.test_manifest import resealed
from tests.storage.make_dataset import make_dataset
from tests.storage.repacked import repacked


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_dataset(str(tmp_path / "plain"))
    repacked(tmp_path / "plain", tmp_path / "d")
    return tmp_path / "d"


def test_a_whole_dataset_and_every_flipped_byte_of_its_shards(root: Path) -> None:
    assert verify(str(root)) == []
    for path in sorted(root.glob("split=*/*.tfrecord.gz")):
        data = path.read_bytes()
        for place in {*range(0, len(data), max(1, len(data) // 60)), len(data) - 1}:
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
            findings = verify(str(root))
            assert findings and {finding.path for finding in findings} == {path.relative_to(root).as_posix()}, place
        path.write_bytes(data)
    assert verify(str(root)) == []


def test_the_place_of_a_change_is_told(root: Path) -> None:
    shard = DatasetManifest.from_bytes((root / "_manifest.json").read_bytes(), "m").splits["train"].shards[0]
    path = root / shard.path
    data, second = path.read_bytes(), shard.block_offsets[1]

    def found(changed: bytes) -> list[tuple[int | None, int | None]]:
        path.write_bytes(changed)
        return [(finding.record, finding.offset) for finding in verify(str(root))]

    assert found(data[:second] + b"\xff" + data[second + 1 :]) == [(8, second)]
    assert found(b"\x1e" + data[1:]) == [(None, 0)]  # no gzip file
    assert found(data[:-6] + bytes([data[-6] ^ 1]) + data[-5:]) == [(None, len(data) - 10)]  # a length in the trailer
    assert found(data[: second + 5]) == [(8, second), (None, second + 5)]  # cut, within that block
    assert found(data + b"x") == [(None, len(data))]


def _set(*way: Any, value: Any) -> Any:
    def change(doc: Any) -> None:
        *path, last = way
        for key in path:
            doc = doc[key]
        doc[last] = value

    return change


SHARD = ("splits", "train", "shards", 0)
INDEX = {"bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "change",
    [
        _set("format_version", value=2),
        _set("compression", value="zlib"),
        _set("compression", value=None),
        _set("format", value="parquet"),
        _set(*SHARD, "path", value="split=train/part-00000.tfrecord"),
        _set(*SHARD, "unpacked_offsets", value=[0, 5]),  # no end of the last block
        _set(*SHARD, "unpacked_offsets", value=[0, 5, 5]),
        _set(*SHARD, "unpacked_offsets", value=[1, 5, 9]),
        _set(*SHARD, "unpacked_offsets", value=[]),
        _set(*SHARD, "unpacked_offsets", value=None),
        _set(*SHARD, "block_offsets", 0, value=0),  # a gzip header lies there
        _set(*SHARD, "block_offsets", 1, value=1 << 40),
        _set("files", "_index/train/part-00000.idx", value=INDEX),  # an index could name no place in the file
    ],
)
def test_a_forged_manifest_is_refused(root: Path, change: Any) -> None:
    doc = unseal((root / "_manifest.json").read_bytes(), "m")
    change(doc)
    with pytest.raises(DataError):
        DatasetManifest.from_bytes(seal(doc), "m")


@pytest.mark.parametrize(("packed", "empty_bytes"), [(True, 20), (False, 0)])
def test_an_empty_shard_has_no_room_for_anything_else(root: Path, packed: bool, empty_bytes: int) -> None:
    """Bytes that belong to no block would be read by nobody but other programs."""
    doc = unseal((root / "_manifest.json" if packed else root.parent / "plain/_manifest.json").read_bytes(), "m")
    split = doc["splits"]["train"]
    left = sum(shard["records"] for shard in split["shards"])
    doc["counts"] |= {key: doc["counts"][key] - left for key in ("read", "written")}
    del split["shards"][1:]
    doc["files"].pop("_index/train/part-00001.idx", None)
    forged = {"records": 0, "bytes": empty_bytes, "block_offsets": [], **({"unpacked_offsets": [0]} if packed else {})}
    split["shards"][0] |= forged
    DatasetManifest.from_bytes(resealed(doc), "m")
    split["shards"][0]["bytes"] = empty_bytes + 400
    with pytest.raises(DataError, match="block_offsets do not fit"):
        DatasetManifest.from_bytes(resealed(doc), "m")


def test_a_plain_manifest_knows_no_compression(root: Path) -> None:
    plain = unseal((root.parent / "plain/_manifest.json").read_bytes(), "m")
    packed = unseal((root / "_manifest.json").read_bytes(), "m")
    assert set(packed) - set(plain) == {"compression"}
    assert "unpacked_offsets" not in plain["splits"]["train"]["shards"][0]
    assert DatasetManifest.from_bytes(seal(packed), "m").to_bytes() == seal(packed)
