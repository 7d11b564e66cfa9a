"""Archives with repeated names and links: their images are those of the files that tarfile extracts."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.etl.images import tar as tar_images
from lockstep.etl.images.source import BAD, DROPPED, RECORD
from lockstep.features.images.decode import Limits
from lockstep.storage.errors import DataError

from .test_image_pieces import STEP, picture, pixels, rows

NAMES = ("a/1.png", "a/2.png", "b/1.png", "b/" + "n" * 120 + ".png", "b/é.png")
PICTURES = [picture(seed) for seed in range(6)]
Entry = tuple[str, str, int | str]

entries = st.lists(
    st.one_of(
        st.tuples(st.just("file"), st.sampled_from(NAMES), st.integers(0, 5)),
        st.tuples(st.just("hard"), st.sampled_from(NAMES), st.sampled_from(NAMES)),
        st.tuples(st.just("link"), st.sampled_from(NAMES), st.sampled_from((*NAMES, "gone.png", "../out.png"))),
    ),
    min_size=1,
    max_size=9,
)


def archive(found: list[Entry], dialect: int, prefix: str = "") -> bytes:
    """An archive of these entries; a hard link to a name that did not come yet, which tar cannot make, is left out."""
    file, seen = io.BytesIO(), set[str]()
    with tarfile.open(fileobj=file, mode="w", format=dialect) as tar:
        for kind, name, what in found:
            info = tarfile.TarInfo(prefix + name)
            if kind == "file":
                data = PICTURES[int(what)]
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            elif kind == "link":
                info.type, info.linkname = tarfile.SYMTYPE, os.path.relpath(str(what), os.path.dirname(name))
                tar.addfile(info)
            elif what in seen and what != name:
                info.type, info.linkname = tarfile.LNKTYPE, prefix + str(what)
                tar.addfile(info)
            else:
                continue
            seen.add(name)
    return file.getvalue()


def extracted(data: bytes, folder: Path) -> dict[str, bytes]:
    """The files that tarfile leaves, by name, through links; links that lead to no file of the archive are left out."""
    folder.mkdir()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for info in tar:
            place = folder / info.name
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.is_symlink() or place.exists():
                place.unlink()  # as tar xf does
            if info.issym():
                place.symlink_to(info.linkname)
            elif info.islnk():
                os.link(folder / info.linkname, place, follow_symlinks=False)
            else:
                source = tar.extractfile(info)
                assert source is not None
                place.write_bytes(source.read())
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def read(path: Path, split_bytes: int = STEP) -> list[dict[str, Any]]:
    return rows(tar_images.plan([str(path)], split_bytes=split_bytes))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    found=entries,
    dialect=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    prefix=st.sampled_from(["", "./"]),
    split_bytes=st.sampled_from([1, 700, STEP]),
)
def test_images_are_those_of_the_files_that_tar_extracts(
    tmp_path_factory: pytest.TempPathFactory, found: list[Entry], dialect: int, prefix: str, split_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("tar")
    data = archive(found, dialect, prefix)
    wanted = {name: pixels(PICTURES.index(content)) for name, content in extracted(data, folder / "x").items()}
    path = folder / "set.tar"
    path.write_bytes(data)
    got = read(path, split_bytes)
    assert {row["name"]: row["image"] for row in got if row["kind"] == RECORD} == wanted
    with tarfile.open(path) as tar:
        members = tar.getnames()
    assert len(got) == len(members)  # read = written + quarantined + dropped
    assert sum(row["_reason"] == "replaced" for row in got) == len(members) - len(set(members))
    assert {row["_reason"] for row in got if row["kind"] == BAD} <= {"not_a_regular_file"}
    listed = tar_images.plan([str(path)], split_bytes=split_bytes, listed=Limits()).files
    assert listed is not None
    at = {
        row["_position"]: (row["name"], data[row["_offset"] : row["_offset"] + row["_length"]])
        for row in listed.files.to_pylist()
    }
    assert {name: pixels(PICTURES.index(content)) for name, content in at.values()} == wanted
    assert list(at) == sorted(row["_position"] for row in got if row["kind"] == RECORD)
    others = [row for batch in listed.other for row in batch.to_pylist()]
    outcome = ("_position", "kind", "_reason")
    assert sorted([row[key] for key in outcome] for row in others) == sorted(
        [row[key] for key in outcome] for row in got if row["kind"] != RECORD
    )
    packed = folder / "set.tar.gz"
    packed.write_bytes(gzip.compress(data))
    if len(set(members)) < len(members):
        with pytest.raises(DataError, match="holds two members of one name"):
            read(packed)
    else:
        assert {row["name"]: row["image"] for row in read(packed) if row["kind"] == RECORD} == wanted


def test_a_broken_picture_that_was_replaced_is_not_counted_as_bad(tmp_path: Path) -> None:
    path = tmp_path / "set.tar"
    with tarfile.open(path, "w") as tar:
        for data in (b"", PICTURES[0][:40], PICTURES[1]):
            info = tarfile.TarInfo("a/1.png")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    found = [(row["kind"], row["_reason"], row["image"]) for row in read(path)]
    assert found == [(RECORD, None, pixels(1)), *[(DROPPED, "replaced", None)] * 2]


def test_links_that_lead_in_circles_or_outside_are_named(tmp_path: Path) -> None:
    path = tmp_path / "set.tar"
    targets = {
        "a/1.png": "2.png",
        "a/2.png": "1.png",
        "a/3.png": "/etc/passwd",
        "a/4.png": "../../a/5.png",
        "a/6.png": ".",
    }
    with tarfile.open(path, "w") as tar:
        for name, target in targets.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    found = read(path)
    assert [(row["_reason"], row["_raw"].decode()) for row in found] == [("not_a_regular_file", n) for n in targets]
