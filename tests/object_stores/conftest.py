"""One S3 for each process of the tests, and a new prefix for each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from tests.object_stores.server import PYTHON, ObjectServer, serving

PREFIXES = ("AWS_", "AZURE_", "STORAGE_EMULATOR_", "GOOGLE_")


@contextmanager
def in_use(server: ObjectServer) -> Iterator[ObjectServer]:
    """Make this process and its children use the server, and no other one."""
    before = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    for name in before:
        os.environ.pop(name)
    os.environ.update(server.environment)
    yield server
    for name in server.environment:
        os.environ.pop(name)
    os.environ.update(before)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    assert PYTHON.exists(), "run `make stores-venv` first; `make test` does"
    with serving(tmp_path_factory.mktemp("s3")) as server, in_use(server):
        yield server


@pytest.fixture
def root(s3: ObjectServer) -> str:
    return join(s3.url, uuid.uuid4().hex)


@pytest.fixture
def fs(root: str) -> FileSystem:
    return filesystem(root)
