"""lockstep verify on datasets: any flipped byte, cut, missing or extra file is found, with its place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.jobs._cli import run_job
from lockstep.jobs.verify import main
from lockstep.storage.documents import canonical_bytes, seal, sha256_hex, unseal
from lockstep.storage.errors import ConfigError, NotFoundError
from lockstep.storage.formats.parquet_footer import columns_are_readable
from lockstep.storage.formats.tfrecord import frame
from lockstep.storage.verify import verify
from lockstep.storage.verify.check import Finding
from tests.builders.records import crc32c_hex
from tests.storage.make_dataset import footer_of, make_dataset

ROOT = Path(__file__).resolve().parents[3]
SHARD = "split=train/part-00001"
FORMATS = ("tfrecord", "parquet")


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("masters")
    for fmt in FORMATS:
        make_dataset(str(folder / fmt), fmt=fmt)
    return {fmt: folder / fmt for fmt in FORMATS}


@pytest.fixture
def copy(masters: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda fmt: Path(shutil.copytree(masters[fmt], tmp_path / fmt))


def flip(path: Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, [str(finding) for finding in findings]
    return findings[0]


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_whole_dataset(masters: dict[str, Path], fmt: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(masters[fmt]), "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    files = [path.relative_to(masters[fmt]).as_posix() for path in masters[fmt].rglob("*") if path.is_file()]
    intact = [line for line in lines if line.startswith("ok ") and not line.split()[1].isdigit()]
    assert sorted(line.split()[1].rstrip(":") for line in intact) == sorted(files)
    assert f"ok    {len(files)} files" in lines
    assert lines[-1].endswith("whole")


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_flipped_byte_of_every_file(copy: Callable[[str], Path], fmt: str) -> None:
    root = copy(fmt)
    for path in sorted(root.rglob("*")):
        if path.is_dir():
            continue
        data = path.read_bytes()
        # All of the small files, some of the large ones; the first and the last byte of each.
        for place in {*range(0, len(data), max(1, len(data) // 40)), len(data) - 1}:
            flip(path, place, place % 8)
            findings = verify(str(root))
            assert findings and {finding.path for finding in findings} == {path.relative_to(root).as_posix()}, place
            path.write_bytes(data)
    assert verify(str(root)) == []


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("size", [0, 1, -1, -20])
def test_every_cut_file(copy: Callable[[str], Path], fmt: str, size: int) -> None:
    root = copy(fmt)
    for path in sorted(root.rglob("*")):
        if path.is_dir() or path.stat().st_size <= abs(size):
            continue
        data = path.read_bytes()
        path.write_bytes(data[:size])
        findings = verify(str(root))
        assert {finding.path for finding in findings} == {path.relative_to(root).as_posix()}
        if path.name != "_manifest.json":
            assert len(data[:size]) in {finding.offset for finding in findings}, [str(item) for item in findings]
        path.write_bytes(data + b"x")
        assert {finding.path for finding in verify(str(root))} == {path.relative_to(root).as_posix()}
        path.write_bytes(data)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_missing_file(copy: Callable[[str], Path], fmt: str) -> None:
    root = copy(fmt)
    for path in sorted(root.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            path.unlink()
            finding = only(verify(str(root)))
            assert (finding.path, finding.what) == (path.relative_to(root).as_posix(), "missing")
            path.write_bytes(data)


@pytest.mark.parametrize("name", ["split=train/part-00002.tfrecord", ".f.0123456789abcdef.tmp", "_index/x", "new/a b"])
def test_an_extra_file(copy: Callable[[str], Path], name: str) -> None:
    root = copy("tfrecord")
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(b"")
    finding = only(verify(str(root) + "/"))
    assert finding.path == name and "extra" in finding.what


def test_record_and_offset_of_a_flipped_byte(copy: Callable[[str], Path]) -> None:
    root = copy("tfrecord")
    shard = root / f"{SHARD}.tfrecord"
    offsets = [int(line.split()[0]) for line in (root / "_index/train/part-00001.idx").read_text().splitlines()]
    flip(shard, offsets[7] + 12)
    finding = only(verify(str(root)))
    assert (finding.path, finding.record, finding.offset) == (f"{SHARD}.tfrecord", 7, offsets[7])
    assert str(finding).startswith(f"{SHARD}.tfrecord, record 7, offset {offsets[7]}: a record's data")


def test_row_group_of_a_flipped_byte_in_parquet(copy: Callable[[str], Path]) -> None:
    root = copy("parquet")
    shard = root / f"{SHARD}.parquet"
    column = pq.ParquetFile(shard).metadata.row_group(1).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    flip(shard, start + column.total_compressed_size - 2)
    finding = only(verify(str(root)))
    assert (finding.path, finding.record, finding.offset) == (f"{SHARD}.parquet", 8, start)
    assert "row group 1, column x" in finding.what


def test_a_cut_at_a_record_boundary_is_a_cut(copy: Callable[[str], Path]) -> None:
    root = copy("tfrecord")
    shard = root / f"{SHARD}.tfrecord"
    shard.write_bytes(shard.read_bytes()[: 16 + len(b"train 1 0 ")])
    findings = verify(str(root))
    assert any("cut short" in item.what and item.offset == 26 for item in findings)
    assert any(item.record == 1 for item in findings)


def _rewrite(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    doc = unseal((root / "_manifest.json").read_bytes(), "m")
    change(doc)
    fitted = {path: info for path, info in doc["files"].items() if path.startswith("_fitted/")}
    doc["digest"] = sha256_hex(canonical_bytes({"schema": doc["schema"], "fitted": fitted, "splits": doc["splits"]}))
    (root / "_manifest.json").write_bytes(seal(doc))


@pytest.mark.parametrize("fmt", FORMATS)
def test_block_offsets_are_held_against_the_shard(copy: Callable[[str], Path], fmt: str) -> None:
    root = copy(fmt)

    def change(doc: dict[str, Any]) -> None:
        shard = doc["splits"]["train"]["shards"][1]
        if fmt == "parquet":
            doc["splits"]["train"]["block_records"] = 5
            for item in doc["splits"]["train"]["shards"]:
                item["block_offsets"] = list(range(0, item["records"], 5))
        else:
            shard["block_offsets"][1] += 1

    _rewrite(root, change)
    findings = verify(str(root))
    assert f"{SHARD}.{fmt}" in {item.path for item in findings}
    assert all("begin" in item.what for item in findings)


def test_index_offsets_are_held_against_the_shard(copy: Callable[[str], Path]) -> None:
    root = copy("tfrecord")
    index = root / "_index/train/part-00000.idx"
    lines = index.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(lines[3].split()[1], b"%d" % (int(lines[3].split()[1]) + 1))
    data = b"".join(lines)
    index.write_bytes(data)
    _rewrite(
        root, lambda doc: doc["files"]["_index/train/part-00000.idx"].update(bytes=len(data), sha256=sha256_hex(data))
    )
    finding = only(verify(str(root)))
    assert (finding.path, finding.record) == ("_index/train/part-00000.idx", 3)


def test_record_counts_are_held_against_the_shard(copy: Callable[[str], Path]) -> None:
    root = copy("tfrecord")
    shard = root / "split=test/part-00000.tfrecord"
    data = shard.read_bytes() + frame(b"one more")
    shard.write_bytes(data)
    digests = {"bytes": len(data), "sha256": sha256_hex(data), "crc32c": crc32c_hex(data)}
    _rewrite(root, lambda doc: doc["splits"]["test"]["shards"][0].update(digests))
    assert any(item.record == 5 and "5 records instead of 4" in item.what for item in verify(str(root)))


def test_a_split_without_records_is_not_whole(copy: Callable[[str], Path]) -> None:
    root = copy("tfrecord")
    (root / "split=test/part-00000.tfrecord").unlink()
    (root / "_index/test/part-00000.idx").unlink()

    def empty(doc: dict[str, Any]) -> None:
        doc["splits"]["test"]["shards"] = []
        del doc["files"]["_index/test/part-00000.idx"]
        doc["counts"] = {**doc["counts"], "read": doc["counts"]["read"] - 4, "written": doc["counts"]["written"] - 4}

    _rewrite(root, empty)
    assert "split test has no records" in str(only(verify(str(root))))


def test_rejected_records_are_as_many_as_counted(copy: Callable[[str], Path]) -> None:
    root = copy("parquet")
    _rewrite(root, lambda doc: doc["counts"].update(quarantined=2, read=doc["counts"]["read"] + 1))
    found = only(verify(str(root)))
    assert found.path == "_quarantine/part-00000.parquet" and "1 rejected records" in found.what


def test_what_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        verify(str(tmp_path / "none"))
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConfigError):
            verify(str(path))


def test_exit_codes_of_the_job(
    copy: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As run_job ends this process; once as a process of its own, called by file from a foreign folder."""
    monkeypatch.setattr("lockstep.storage.files.deadlines.left_behind", lambda: 0)
    root = copy("tfrecord")

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            run_job(main, args)
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    assert run(str(root))[0] == 0
    flip(root / f"{SHARD}.tfrecord", 100)
    code, found, _ = run(str(root))
    assert code == 1 and f"WRONG {SHARD}.tfrecord, record" in found
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "jobs" / "verify.py"), str(root)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (1, found)
    for args in ([str(tmp_path / "none")], [str(tmp_path)], ["--bad"], []):
        code, _, told = run(*args)
        assert code == 2 and all(part in told for part in ("error:", "got:", "allowed:", "next:")), told


@pytest.mark.parametrize("name", ["_fitted/page.json", "_index/train/part-00000.idx", f"{SHARD}.tfrecord", "more"])
@pytest.mark.parametrize("kind", ["link", "dangling", "circle", "pipe"])
def test_links_and_pipes_are_named_and_not_followed(
    copy: Callable[[str], Path], tmp_path: Path, name: str, kind: str
) -> None:
    dataset = copy("tfrecord")
    path = dataset / name
    outside = tmp_path / "outside"
    if path.exists():
        path.rename(outside)  # the right bytes, but not in the dataset
    else:
        outside.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"link": outside, "dangling": tmp_path / "none", "circle": path}[kind])
    finding = only(verify(str(dataset)))
    assert finding.path == name and "link, pipe" in finding.what


@pytest.mark.parametrize("fmt", FORMATS)
def test_files_of_a_tebibyte_are_not_read(copy: Callable[[str], Path], fmt: str) -> None:
    dataset = copy(fmt)
    for path in sorted(path for path in dataset.rglob("*") if path.is_file()):
        size = path.stat().st_size
        os.truncate(path, 1 << 40)  # a hole: it takes no room on the disk
        findings = verify(str(dataset))
        assert findings[0].path == path.relative_to(dataset).as_posix(), [str(finding) for finding in findings]
        assert "longer than" in findings[0].what
        os.truncate(path, size)
    assert verify(str(dataset)) == []


def test_folders_deeper_than_the_stack(copy: Callable[[str], Path]) -> None:
    dataset = copy("tfrecord")
    before = Path.cwd()
    try:
        os.chdir(dataset)
        for _ in range(1100):
            os.mkdir("d")
            os.chdir("d")
        Path("extra").touch()
    finally:
        os.chdir(before)
    assert only(verify(str(dataset))).path.endswith("d/extra")
    subprocess.run(["rm", "-rf", str(dataset / "d")], check=True)  # shutil.rmtree recurses


@pytest.mark.timeout(300)  # counted one by one, the records would take years
def test_a_forged_number_of_records_costs_no_memory(copy: Callable[[str], Path]) -> None:
    path = copy("parquet") / "_manifest.json"
    document = unseal(path.read_bytes(), str(path))
    shard = document["splits"]["train"]["shards"][0]
    document["counts"]["read"] += (1 << 60) - shard["records"]
    document["counts"]["written"] += (1 << 60) - shard["records"]
    shard["records"] = 1 << 60
    path.write_bytes(seal(document))
    assert "block_offsets do not fit the shard" in str(only(verify(str(path.parent))))


def test_a_flipped_byte_of_a_footer_is_named_by_where_the_footer_begins(copy: Callable[[str], Path]) -> None:
    dataset = copy("parquet")
    path = dataset / f"{SHARD}.parquet"
    data = path.read_bytes()
    start = len(data) - len(footer_of(data))
    for place in {*range(start, len(data), 9), *range(len(data) - 8, len(data))}:
        flip(path, place, 5)
        finding = only(verify(str(dataset)))
        assert finding.path == f"{SHARD}.parquet" and "a Parquet footer is damaged" in finding.what
        assert finding.offset == start or place >= len(data) - 8  # a changed length points elsewhere
        path.write_bytes(data)


def _footer_sha256(shard: int, value: str) -> Callable[[dict[str, Any]], None]:
    return lambda doc: doc["splits"]["train"]["shards"][shard].update(footer_sha256=value)


def test_a_footer_that_is_not_the_one_listed(copy: Callable[[str], Path]) -> None:
    dataset = copy("parquet")
    _rewrite(dataset, _footer_sha256(1, "0" * 64))
    finding = only(verify(str(dataset)))
    assert finding.path == f"{SHARD}.parquet" and f"allowed {'0' * 64}" in finding.what


def _no_digest_differs(data: bytes, doc: dict[str, Any]) -> None:
    doc["splits"]["train"]["shards"][0].update(sha256=sha256_hex(data), crc32c=crc32c_hex(data))


def test_a_forged_footer_over_which_arrow_ends_the_process(copy: Callable[[str], Path]) -> None:
    # The histograms of a column's size statistics: a list whose length is not that of the column's levels.
    dataset = copy("parquet")
    path = dataset / "split=train" / "part-00000.parquet"
    data = path.read_bytes()
    aborted = []
    for place in range(len(data) - len(footer_of(data)), len(data) - 8):
        changed = bytearray(data)
        changed[place] ^= 1 << 5
        with suppress(pa.ArrowException, OSError):
            if not columns_are_readable(bytes(changed)):
                aborted.append(bytes(changed))
                if len(aborted) == 2:
                    break
    assert aborted, "no such place: Arrow may have been mended, and columns_are_readable can go"
    for changed_file in aborted:
        path.write_bytes(changed_file)
        _rewrite(dataset, _footer_sha256(0, sha256_hex(footer_of(changed_file))))
        finding = only(verify(str(dataset)))
        assert finding.path == "split=train/part-00000.parquet" and "footer cannot be read" in finding.what
        _rewrite(dataset, partial(_no_digest_differs, changed_file))
        finding = only(verify(str(dataset)))
        assert finding.path == "split=train/part-00000.parquet" and "columns contradict" in finding.what


def test_a_forged_name_of_a_column_that_is_no_text(copy: Callable[[str], Path]) -> None:
    dataset = copy("parquet")
    path = dataset / "split=train" / "part-00000.parquet"
    data = path.read_bytes()
    forged = data[: -len(footer_of(data))] + footer_of(data).replace(b"sample_id", b"\xf3ample_id")
    path.write_bytes(forged)
    _rewrite(dataset, _footer_sha256(0, sha256_hex(footer_of(forged))))
    _rewrite(dataset, partial(_no_digest_differs, forged))
    finding = only(verify(str(dataset)))
    assert finding.path == "split=train/part-00000.parquet" and "footer cannot be read: 'utf-8'" in finding.what
