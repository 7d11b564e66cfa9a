"""The jobs' Spark session, without Spark."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from jobs._session import _stop


class DeadSession:
    """What pyspark's session does when its JVM is gone."""

    def stop(self) -> None:
        raise ConnectionRefusedError(111, "Connection refused")


def test_end_of_a_dead_session_hides_no_error(caplog: pytest.LogCaptureFixture) -> None:
    session: Any = DeadSession()
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="the job's own"):
        try:
            raise ValueError("the job's own")
        finally:
            _stop(session)
    assert "Java process had ended" in caplog.text
