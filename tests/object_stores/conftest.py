"""One S3 for each process of the tests, and a new prefix for each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from tests.object_stores.server import ObjectServer
from tests.object_stores.servers import SERVERS, why_not

PREFIXES = ("AWS_", "AZURE_", "STORAGE_EMULATOR_", "GOOGLE_")


@contextmanager
def in_use(name: str, folder: Path) -> Iterator[ObjectServer]:
    """A server by its name, that this process and its children use, and no other one; skips where it is not here."""
    if (why := why_not(name)) is not None:
        assert name != "moto", "run `make stores-venv` first; `make test` does"
        pytest.skip(why)
    before = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    with SERVERS[name](folder, 0) as server:
        for variable in before:
            os.environ.pop(variable)
        os.environ.update(server.environment)
        yield server
        for variable in server.environment:
            os.environ.pop(variable)
        os.environ.update(before)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with in_use("moto", tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def root(s3: ObjectServer) -> str:
    return join(s3.url, uuid.uuid4().hex)


@pytest.fixture
def fs(root: str) -> FileSystem:
    return filesystem(root)
