"""The dataset that most tests of strategies train on."""

from __future__ import annotations

import pytest

from tests.training._tiny import write_table


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """200 rows to train on, and 30 to test."""
    folder = tmp_path_factory.mktemp("data") / "table"
    write_table(folder, records={"train": 200, "test": 30})
    return str(folder)
