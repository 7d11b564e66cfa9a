"""Image sources on a real HDFS: the same rows as from a local disk, however an archive is cut."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from lockstep.etl.images import cifar, folders, tar
from lockstep.etl.images.planned_task import read_files
from lockstep.etl.images.source import RECORD, ImagePlan
from lockstep.features.images.decode import Limits
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from tests.etl.images.test_image_pieces import FILES, GOOD, INTAKE, batch, make_tar, make_tree, rows
from tests.fs_contract import put

pytestmark = pytest.mark.cluster


def seen(plan: ImagePlan) -> list[tuple[object, ...]]:
    names = ("kind", "_position", "_place", "_split", "name", "class", "image", "_reason", "_sha256")
    return sorted((tuple(row[name] for name in names) for row in rows(plan, INTAKE)), key=repr)


def test_folder_tar_and_cifar(hadoop: Any, tmp_path: Path) -> None:
    root = join(hadoop.hdfs_url, f"images-{uuid.uuid4().hex}")
    files = {f"set/{name}": data for name, data in FILES.items() if data}  # `put` of nothing is no file
    files["a set 100%/train/é/1 2.png"] = FILES["train/cat/1.png"]
    local = make_tree(tmp_path, files)
    make_tar(local / "set.tar", FILES)
    (local / "data_batch_1.bin").write_bytes(batch(20))
    for path in (path for path in local.rglob("*") if path.is_file()):
        put(filesystem(root), join(root, str(path.relative_to(local))), path.read_bytes())
    for name in ("set", "a set 100%"):
        found = seen(folders.plan([join(root, name)], split_bytes=200))
        assert found == seen(folders.plan([str(local / name)], split_bytes=1 << 20)) and found
    for step in (600, 1 << 20):
        found = seen(tar.plan([join(root, "set.tar")], split_bytes=step))
        assert found == seen(tar.plan([str(local / "set.tar")], split_bytes=1 << 20))
        assert sum(row[0] == RECORD for row in found) == len(GOOD)
    good = {name: data for name, data in FILES.items() if name != "train/none.png"}  # which has no class
    put(filesystem(root), join(root, "good.tar"), make_tar(local / "good.tar", good).read_bytes())
    listed = tar.plan([join(root, "good.tar")], split_bytes=600, listed=Limits()).files
    assert listed is not None
    content = read_files([join(root, "good.tar")], listed.files[::-1])  # in any order
    assert dict(zip(listed.files.column("name").to_pylist()[::-1], content, strict=True)).items() <= good.items()
    plans = [
        cifar.plan([join(place, "data_batch_1.bin")], "cifar10", given=False, num_classes=10, split_bytes=9000)
        for place in (root, str(local))
    ]
    assert len(plans[0].pieces) > 5 and seen(plans[0]) == seen(plans[1])
    filesystem(root).delete(root, recursive=True)
