"""The jobs' Spark session, without Spark."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from jobs._session import LOG4J, _stop, quiet_start


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


def test_a_log4j2_file_of_the_user_s_is_left_alone(tmp_path: Path) -> None:
    ours = f"-Dlog4j2.configurationFile={LOG4J.as_uri()}"
    plain: dict[str, str] = {}
    quiet_start(plain)
    assert plain == {"SPARK_SUBMIT_OPTS": ours}
    more = {"SPARK_SUBMIT_OPTS": "-Xss4m", "SPARK_HOME": str(tmp_path)}
    quiet_start(more)
    assert more["SPARK_SUBMIT_OPTS"] == f"-Xss4m {ours}"
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "log4j2.xml").touch()
    for own in (
        {"SPARK_HOME": str(tmp_path)},
        {"SPARK_CONF_DIR": str(tmp_path / "conf")},
        {"SPARK_SUBMIT_OPTS": "-Dlog4j2.configurationFile=mine"},
    ):
        before = dict(own)
        quiet_start(own)
        assert own == before
