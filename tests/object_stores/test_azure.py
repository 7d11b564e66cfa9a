"""Azure Blob Storage, as Microsoft's emulator Azurite serves it: the contract, publication and races."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockstep.storage.files.interface import FileSystem
from tests.fs_contract import FileSystemContract
from tests.object_stores.conftest import in_use
from tests.object_stores.server import ObjectServer
from tests.object_stores.test_contract import test_a_file_in_parts_appears_when_it_is_closed  # noqa: F401  runs here too
from tests.object_stores.test_publication import (  # noqa: F401  they run here too
    test_a_published_directory_has_the_names_of_a_disk,
    test_a_writer_that_was_paused_after_its_check_replaces_nothing,
    test_a_writer_whose_claim_was_taken_publishes_nothing,
    test_of_writers_of_one_file_one_wins,
)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with in_use("azure", tmp_path_factory.mktemp("azure")) as server:
        yield server


class TestAzure(FileSystemContract):
    """The whole contract."""


def test_errors_name_the_server(s3: ObjectServer, fs: FileSystem) -> None:
    assert fs.whom == f"the object store of {s3.url} at {s3.endpoint}"
