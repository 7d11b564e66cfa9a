"""The jobs' Spark session, without Spark."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from jobs._session import LOG4J, java_options, stop_session


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
            stop_session(session)
    assert "Java process had ended" in caplog.text


def test_java_options_of_the_user_s_are_left_alone(tmp_path: Path) -> None:
    quick, quiet = "-XX:TieredStopAtLevel=1", f"-Dlog4j2.configurationFile={LOG4J.as_uri()}"
    plain: dict[str, str] = {}
    java_options(plain, short=True)
    assert plain == {"SPARK_SUBMIT_OPTS": f"{quick} {quiet}"}
    more = {"SPARK_SUBMIT_OPTS": "-Xss4m", "SPARK_HOME": str(tmp_path)}
    java_options(more, short=True)
    assert more["SPARK_SUBMIT_OPTS"] == f"-Xss4m {quick} {quiet}"
    long: dict[str, str] = {}
    java_options(long, short=False)
    assert long == {"SPARK_SUBMIT_OPTS": quiet}
    compiled = {"SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=4"}
    java_options(compiled, short=True)
    assert compiled["SPARK_SUBMIT_OPTS"] == f"-XX:TieredStopAtLevel=4 {quiet}"
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "log4j2.xml").touch()
    for own in (
        {"SPARK_HOME": str(tmp_path)},
        {"SPARK_CONF_DIR": str(tmp_path / "conf")},
        {"SPARK_SUBMIT_OPTS": "-Dlog4j2.configurationFile=mine"},
    ):
        before = own.get("SPARK_SUBMIT_OPTS", "")
        java_options(own, short=True)
        assert own["SPARK_SUBMIT_OPTS"] == f"{before} {quick}".strip()
