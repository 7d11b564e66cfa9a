"""One S3 for each process of the tests, and a new prefix for each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from tests.object_stores.server import PYTHON, ObjectServer, serving


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    assert PYTHON.exists(), "run `make stores-venv` first; `make test` does"
    before = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    with serving(tmp_path_factory.mktemp("s3")) as server:
        os.environ.update(server.environment)
        yield server
        for name in server.environment:
            os.environ.pop(name)
        os.environ.update(before)


@pytest.fixture
def root(s3: ObjectServer) -> str:
    return join(s3.url, uuid.uuid4().hex)


@pytest.fixture
def fs(root: str) -> FileSystem:
    return filesystem(root)
