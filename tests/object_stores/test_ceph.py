"""Ceph's gateway, as Debian ships it: the contract, publication and races, and what it does differently from S3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.storage.files.interface import FileSystem
from lockstep.storage.files.object_clients import clients
from lockstep.storage.files.object_store import ObjectStore, key
from lockstep.storage.settings import hadoop_settings
from lockstep.storage.urls import join
from tests.fs_contract import FileSystemContract, put
from tests.object_stores.conftest import in_use
from tests.object_stores.server import BUCKET, ObjectServer
from tests.object_stores.test_publication import (  # noqa: F401  they run here too
    test_a_published_directory_has_the_names_of_a_disk,
    test_a_writer_that_was_paused_after_its_check_replaces_nothing,
    test_a_writer_whose_claim_was_taken_publishes_nothing,
    test_of_writers_of_one_file_one_wins,
)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with in_use("ceph", tmp_path_factory.mktemp("ceph")) as server:
        yield server


class TestCeph(FileSystemContract):
    """The whole contract."""


def test_it_compares_versions_without_quotes_and_copies_nothing_to_a_free_name(fs: FileSystem, root: str) -> None:
    import obstore
    from obstore.exceptions import GenericError, PreconditionError

    assert isinstance(fs, ObjectStore)
    url = put(fs, join(root, "f"), b"one")
    assert fs._bare_tags and not fs._copies
    client: Any = clients("s3", BUCKET, hadoop_settings())[0]
    version = obstore.head(client, key(url))["e_tag"]
    assert version is not None and version.startswith('"')
    with pytest.raises(PreconditionError):
        obstore.put(client, key(url), b"two", mode={"e_tag": version})
    with pytest.raises(GenericError, match="411"):
        obstore.copy(client, key(url), key(url) + "2", overwrite=False)
    fs.put_over(url, b"two", {"e_tag": version})
    assert fs.read_bytes(url) == b"two"


def test_a_long_file_is_copied_whole_through_this_process(fs: FileSystem, root: str) -> None:
    data = bytes(range(256)) * (100 << 10)
    source = put(fs, join(root, "a"), data)
    fs.rename_new(source, join(root, "b"))
    assert fs.read_bytes(join(root, "b")) == data and not fs.exists(source)
