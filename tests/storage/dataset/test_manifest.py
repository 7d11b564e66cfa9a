"""Manifests: byte for byte, strict, and closed to hostile content."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.storage.dataset.layout import DatasetPaths, fitted_path, safe_relative, shard_path, split_name
from lockstep.storage.dataset.manifest import DatasetManifest, dataset_digest, load_dataset
from lockstep.storage.documents import SEAL, canonical_bytes, parse_canonical, seal, sha256_hex, unseal
from lockstep.storage.errors import ConfigError, CorruptionError, DataError, NotFoundError
from tests.storage.make_dataset import make_dataset

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@pytest.fixture(scope="module")
def doc(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = str(tmp_path_factory.mktemp("d") / "set")
    make_dataset(root)
    return unseal(Path(root, "_manifest.json").read_bytes(), "m")


def resealed(doc: dict[str, Any]) -> bytes:
    """What somebody writes who changes content and works out both digests anew."""
    manifest = copy.deepcopy(doc)
    fitted = {path: info for path, info in manifest["files"].items() if path.startswith("_fitted/")}
    manifest["digest"] = sha256_hex(
        canonical_bytes({"schema": manifest["schema"], "fitted": fitted, "splits": manifest["splits"]})
    )
    return seal(manifest)


@given(JSON)
def test_canonical_json_there_and_back(value: Any) -> None:
    data = canonical_bytes(value)
    assert parse_canonical(data, file="f") == value
    assert canonical_bytes(json.loads(data)) == data


def test_canonical_form() -> None:
    assert canonical_bytes({"b": [1, 2.5, None], "a": {"ü": True}}) == '{"a":{"ü":true},"b":[1,2.5,null]}'.encode()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1: 2}, {"a": {None: 1}}, b"x", "\ud800", {"x": {1, 2}}])
def test_values_without_a_canonical_form(value: Any) -> None:
    with pytest.raises(DataError):
        canonical_bytes(value)


@pytest.mark.parametrize(
    "data",
    [b'{"a": 1}', b'{"a":1}\n', b'{"b":1,"a":2}', b'{"a":1,"a":1}', b'{"a":1.0e0}', b'{"a":"\\u00fc"}', b"", b"{",
     b"\xff", b'{"a":NaN}', b"[" * 100_000, b"1" * 5000, b'{"a":"\\ud800"}'],
)  # fmt: skip
def test_other_bytes_are_not_canonical(data: bytes) -> None:
    with pytest.raises(CorruptionError) as caught:
        parse_canonical(data, file="f.json")
    assert caught.value.file == "f.json"


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda key: key != SEAL), JSON))
def test_seal_and_unseal(value: dict[str, Any]) -> None:
    assert unseal(seal(value), "f") == value
    assert seal(unseal(seal(value), "f")) == seal(value)


def test_a_flipped_bit_in_a_manifest_is_seen(doc: dict[str, Any]) -> None:
    data = seal(doc)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        with pytest.raises(DataError):
            DatasetManifest.from_bytes(bytes(changed), "m")
    for size in range(0, len(data), 7):
        with pytest.raises(CorruptionError):
            DatasetManifest.from_bytes(data[:size], "m")


def test_a_manifest_reads_back_as_it_was_built(tmp_path: Path) -> None:
    built = make_dataset(str(tmp_path / "set"))
    assert load_dataset(str(tmp_path / "set")) == built
    data = (tmp_path / "set" / "_manifest.json").read_bytes()
    assert built.to_bytes() == data
    document = json.loads(data)
    assert document.pop(SEAL) == built.manifest_sha256 == sha256_hex(canonical_bytes(document))


def test_the_digest_names_what_training_sees_and_nothing_else(tmp_path: Path) -> None:
    first = make_dataset(str(tmp_path / "a"))
    assert make_dataset(str(tmp_path / "b")).digest == first.digest
    other_source = make_dataset(str(tmp_path / "c"), config={"x": 1})
    assert other_source.digest == first.digest and other_source.manifest_sha256 != first.manifest_sha256
    assert make_dataset(str(tmp_path / "d"), vocabulary=b"[]").digest != first.digest
    assert make_dataset(str(tmp_path / "e"), records=29).digest != first.digest
    assert dataset_digest({"fields": []}, first.files, first.splits) != first.digest


def _set(path: str, value: Any) -> Any:
    def change(doc: Any) -> None:
        *way, last = path.split("|")
        for key in way:
            doc = doc[int(key) if isinstance(doc, list) else key]
        place = int(last) if isinstance(doc, list) else last
        if value is KeyError:
            del doc[place]
        else:
            doc[place] = value

    return change


SHARD = "splits|train|shards|0"
INFO = {"bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("unknown", 1),
        ("counts", KeyError),
        ("format_version", 2),
        ("format_version", True),
        ("format", "csv"),
        ("schema", []),
        ("created_by|seed", "1"),
        ("created_by|extra", 1),
        ("parent", {"url": "x"}),
        ("leakage", {"kind": "random", "checked": ["content"], "found": {}}),
        ("leakage", {"kind": "random", "checked": ["content"], "found": {"content": -1}}),
        ("leakage", {"kind": "random", "checked": [["content"]], "found": {"content": 1}}),
        ("leakage", {"kind": "random", "checked": [], "found": {}, "by_chance": {}}),
        ("leakage", {"kind": "random", "checked": [], "found": {}, "by_chance": [], "distinct": {}}),
        ("leakage", {"kind": "random", "checked": [], "found": {}, "by_chance": {}, "distinct": {"content": 1}}),
        ("source|0|sha256", None),
        ("counts|read", 1000),
        ("counts|dropped|censored", -1),
        ("counts|written", 30.0),
        ("splits|train|block_records", 0),
        (f"{SHARD}|records", -1),
        (f"{SHARD}|records", True),
        (f"{SHARD}|bytes", 1 << 63),
        (f"{SHARD}|sha256", "A" * 64),
        (f"{SHARD}|crc32c", "123"),
        (f"{SHARD}|footer_sha256", "0" * 64),
        (f"{SHARD}|footer_sha256", KeyError),
        (f"{SHARD}|extra", 1),
        (f"{SHARD}|block_offsets", [0]),
        (f"{SHARD}|block_offsets|1", 0),
        (f"{SHARD}|block_offsets|1", 1 << 40),
        (f"{SHARD}|path", "split=train/part-00001.tfrecord"),
        (f"{SHARD}|path", "../part-00000.tfrecord"),
        (f"{SHARD}|path", "/etc/passwd"),
        ("splits|../x", {"block_records": 1, "shards": []}),
        ("splits|a=b", {"block_records": 1, "shards": []}),
        ("files|_index/train/part-00000.idx", KeyError),
        ("files|_index/train/part-00007.idx", INFO),
        ("files|_fitted/../../x", INFO),
        ("files|/etc/passwd", INFO),
        ("files|_fitted//x", INFO),
        ("files|_fitted/a%2e", INFO),
        ("files|_fitted/a\nb", INFO),
        ("files|_fitted/a\\b", INFO),
        ("files|_fitted/.hidden", INFO),
        ("files|hdfs://n/x", INFO),
        ("files|_other/x", INFO),
        ("files|split=train/part-00009.tfrecord", INFO),
        ("files|", INFO),
    ],
)
def test_what_we_never_write_is_refused(doc: dict[str, Any], path: str, value: Any) -> None:
    changed = copy.deepcopy(doc)
    _set(path, value)(changed)
    try:
        data = resealed(changed)
    except KeyError:
        data = seal(changed)
    with pytest.raises(DataError) as caught:
        DatasetManifest.from_bytes(data, "the/manifest")
    assert "the/manifest" in str(caught.value)


@pytest.mark.parametrize("value", [None, KeyError, "A" * 64, "0" * 63, 1])
def test_a_parquet_shard_without_the_digest_of_its_footer_is_refused(tmp_path: Path, value: Any) -> None:
    make_dataset(str(tmp_path / "set"), fmt="parquet")
    doc = unseal((tmp_path / "set" / "_manifest.json").read_bytes(), "m")
    DatasetManifest.from_bytes(resealed(doc), "m")
    _set(f"{SHARD}|footer_sha256", value)(doc)
    with pytest.raises(DataError, match=r"split=train/part-00000\.parquet"):
        DatasetManifest.from_bytes(resealed(doc), "m")


def test_resealing_alone_is_accepted(doc: dict[str, Any]) -> None:
    read = DatasetManifest.from_bytes(resealed(doc), "m")  # else the refusals above would prove nothing
    assert read.to_bytes() == resealed(doc)


def test_a_digest_that_does_not_follow_is_refused(doc: dict[str, Any]) -> None:
    with pytest.raises(CorruptionError, match="digest"):
        DatasetManifest.from_bytes(seal({**doc, "digest": "0" * 64}), "m")
    with pytest.raises(DataError, match="digest"):
        DatasetManifest.from_bytes(seal({**doc, "digest": "0" * 63}), "m")


def test_no_dataset(tmp_path: Path) -> None:
    for url in (tmp_path / "none", tmp_path):
        with pytest.raises(NotFoundError, match="no dataset"):
            load_dataset(str(url))


@pytest.mark.parametrize(
    "path",
    ["", ".", "..", "a/..", "a/../b", "/a", "a//b", "a/", "a%b", "a b", "a\nb", "a\0", "ü", ".a", "a:b", 1, None],
)
def test_paths_that_lead_astray(path: object) -> None:
    with pytest.raises(DataError, match="somewhere"):
        safe_relative(path, where="somewhere")


def test_splits_are_shown_in_a_line_each(tmp_path: Path) -> None:
    """The counts are those of the files."""
    make_dataset(str(tmp_path / "t"))
    manifest = load_dataset(str(tmp_path / "t"))
    for name, split in manifest.splits.items():
        paths = [tmp_path / "t" / shard.path for shard in split.shards]
        assert repr(split) == f"SplitInfo({split.records} records in {len(paths)} shards)"
        for shard, path in zip(split.shards, paths, strict=True):
            assert repr(shard).startswith(f"ShardInfo('{shard.path}', {shard.records} records in ")
            assert repr(shard).endswith(f" blocks, {path.stat().st_size} bytes)"), name
    assert len(repr(manifest.splits)) < 80 * len(manifest.splits)


def test_layout() -> None:
    paths = DatasetPaths("hdfs://n/data/web")
    assert paths.manifest == "hdfs://n/data/web/_manifest.json"
    assert paths.shard("train", 3, "parquet") == "hdfs://n/data/web/split=train/part-00003.parquet"
    assert paths.index("fold-0", 3) == "hdfs://n/data/web/_index/fold-0/part-00003.idx"
    assert paths.fitted("page.json") == "hdfs://n/data/web/_fitted/page.json"
    assert paths.quarantine == "hdfs://n/data/web/_quarantine"
    assert paths.staging("j-1") == "hdfs://n/data/_staging-j-1"
    for call in (lambda: shard_path("a", 0, "csv"), lambda: split_name("a/b"), lambda: fitted_path("../a.json")):
        with pytest.raises(ConfigError):
            call()
    with pytest.raises(ConfigError):
        paths.staging("../x")
