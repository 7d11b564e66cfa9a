"""Logs of IIS, CloudFront and AWS load balancers, against plain Python."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.logs.parse import BAD, SUMMARY
from lockstep.etl.logs.propose import propose
from lockstep.storage.errors import ConfigError, DataError
from tests.etl.logs.web_rows import CASES, kept, parsed, plan, stays

FIELDS = ("date", "time", "s-ip", "cs-method", "cs-uri-stem", "cs-uri-query", "c-ip", "cs(User-Agent)", "sc-status")
ROW = {
    "date": "2024-05-03",
    "time": "08:07:57",
    "s-ip": "10.0.0.1",
    "cs-method": "GET",
    "cs-uri-stem": "/a",
    "cs-uri-query": "-",
    "c-ip": "192.0.2.1",
    "cs(User-Agent)": "Mozilla/5.0+(X11)",
    "cs(Referer)": "https://from/a+b",
    "sc-status": "200",
}


def text(fields: Sequence[str], *rows: dict[str, str], mark: str = " ") -> str:
    """A section: its directive, and its lines."""
    lines = (mark.join({**ROW, **row}[name] for name in fields) for row in rows)
    return "\n".join([f"#Fields: {' '.join(fields)}", *lines, ""])


@pytest.mark.parametrize(("name", "mark"), [("iis", " "), ("cloudfront", "\t")])
def test_the_logs_of_two_servers(name: str, mark: str) -> None:
    path = CASES / f"{name}.log"
    lines = path.read_text().splitlines()
    names = next(line for line in lines if line.startswith("#Fields:")).split()[1:]
    rows = [dict(zip(names, line.split(mark), strict=True)) for line in lines if not line.startswith("#")]
    found = kept(plan("w3c", path))
    times = [int(datetime.fromisoformat(f"{row['date']}T{row['time']}+00:00").timestamp()) for row in rows]
    wanted = [[row["c-ip"], row["cs-uri-stem"], row["cs-uri-query"].removeprefix("-")] for row in rows]
    assert found[["visitor", "page", "query"]].values.tolist() == wanted and found["time"].tolist() == times
    assert round(float(np.mean(stays(found, max(times)))), 4) == 0.6452
    if name == "cloudfront":
        assert set(found["agent"]) == {"Mozilla/5.0 (X11; Linux x86_64) Example/1.0"} and set(found["referrer"]) == {""}


@st.composite
def sections(draw: st.DrawFn) -> list[tuple[list[str], list[dict[str, str]]]]:
    """Sections of a log as a server writes them when its fields are changed: fields, and rows."""
    found = []
    for number in range(draw(st.integers(1, 4))):
        fields = draw(st.permutations([*FIELDS, *draw(st.sampled_from([[], ["cs(Referer)"], ["x-edge-location"]]))]))
        rows = []
        for place in range(draw(st.integers(0, 4))):
            rows.append(
                {
                    "time": f"0{number}:00:{place:02}{draw(st.sampled_from(['', '.5']))}",
                    "c-ip": draw(st.sampled_from(["192.0.2.1", "2001:db8::1"])),
                    "cs-uri-stem": draw(st.sampled_from(["/", "/a+b", "/c%20d", "/é.html", '/"q"'])),
                    "cs-uri-query": draw(st.sampled_from(["-", "q=1", "a+b=%2B"])),
                    "sc-status": draw(st.sampled_from(["200", "304", "404", "-", "000"])),
                    "cs-method": draw(st.sampled_from(["GET", "POST", "-"])),
                    "x-edge-location": "FRA50",
                }
            )
        found.append((fields, rows))
    return found


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(log=sections(), mark=st.sampled_from([" ", "\t"]), packed=st.booleans(), ends=st.sampled_from(["\n", "\r\n"]))
def test_fields_that_change_within_a_file(
    tmp_path: Path, log: list[tuple[list[str], list[dict[str, str]]]], mark: str, packed: bool, ends: str
) -> None:
    path = tmp_path / "log"
    whole = "".join("#Software: x\n#Date: y\n" + text(fields, *rows, mark=mark) for fields, rows in log)
    body = ("\ufeff" + whole.replace("\n", ends)).encode()
    path.write_bytes(gzip.compress(body) if packed else body)
    rows = [row for _, rows in log for row in rows]
    wanted = [
        [row["c-ip"], row["cs-uri-stem"], row["cs-uri-query"].removeprefix("-"), f"2024-05-03T{row['time'][:8]}+00:00"]
        for row in rows
        if row["cs-method"] == "GET" and row["sc-status"] in ("200", "304")
    ]
    found = plan("w3c", path, split_bytes=50)
    table = parsed(found)
    pages = kept(found, table)
    pages["time"] = [datetime.fromtimestamp(time, UTC).isoformat() for time in pages["time"]]
    assert pages[["visitor", "page", "query", "time"]].values.tolist() == wanted
    read = [row["_lines"] for row in table if row["_kind"] == SUMMARY and row["_reason"] is None]
    assert sum(read) == len(rows), "directives are no records"


def test_what_clients_say_is_read_as_they_said_it(tmp_path: Path) -> None:
    said = 'Mozilla/5.0 (X11; "a" 100%) +http://bot'
    fields = [*FIELDS, "cs(Referer)"]
    cloud = {"cs(User-Agent)": quote(said, safe="/()+;:"), "cs(Referer)": "https://from/a%2520b"}
    twice = {**cloud, "cs(User-Agent)": quote(quote(said, safe="/()+;:"), safe="/()+;:")}
    (tmp_path / "cloud").write_text(text(fields, cloud, twice, {"cs(Referer)": "-"}, mark="\t"))
    found = kept(plan("w3c", tmp_path / "cloud"))
    assert found["agent"].tolist()[:2] == [said, said] and found["referrer"].tolist()[::2] == ["https://from/a%20b", ""]
    (tmp_path / "iis").write_text(text(fields, {"cs(User-Agent)": 'Mozilla/5.0+(a;+"b")'}))
    found = kept(plan("w3c", tmp_path / "iis"))
    assert found[["agent", "referrer"]].values.tolist() == [['Mozilla/5.0 (a; "b")', "https://from/a+b"]]
    quoted = {"cs(User-Agent)": '"Mozilla/5.0 (a) ""b"""', "cs(Referer)": '"-"'}
    (tmp_path / "proxy").write_text(text(fields, quoted, {"cs(User-Agent)": '"open'}))
    found = kept(plan("w3c", tmp_path / "proxy"))
    assert found["agent"].tolist() == ['Mozilla/5.0 (a) "b"', '"open']
    assert plan("w3c", tmp_path / "proxy").combined and not plan("w3c", CASES / "iis.log").combined


def test_lines_that_are_no_records_of_their_section_are_refused(tmp_path: Path) -> None:
    short = [name for name in FIELDS if name != "sc-status"]
    lines = [
        text(FIELDS, {}, {"c-ip": "-"}, {"time": "noon"}, {"date": "-"}),
        "2024-05-03 08:07:57 10.0.0.1 GET /a\n\n",
        text(short, {"cs-uri-stem": "/b"}),
        text(FIELDS, {"cs-uri-stem": "/c"}),
    ]
    (tmp_path / "log").write_text("".join(lines))
    reasons = [row["_reason"] for row in parsed(plan("w3c", tmp_path / "log")) if row["_kind"] == BAD]
    assert reasons == [
        "missing_value:c-ip",
        "bad_time",
        "missing_value:date",
        "too_few_fields",
        "missing_value:sc-status",
    ]


def test_what_no_such_log_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--propose-schema"):
        propose(LogsConfig(inputs=(str(CASES / "iis.log"),), output=str(tmp_path / "s.toml"), log_format="w3c"))
    (tmp_path / "bare").write_text("2024-05-03 08:07:57 10.0.0.1\n" + text(FIELDS, {}))
    with pytest.raises(DataError, match="does not name its fields"):
        plan("w3c", tmp_path / "bare")
    (tmp_path / "undated").write_text(text(FIELDS[1:], {}))
    with pytest.raises(DataError, match="no column for date"):
        plan("w3c", tmp_path / "undated")
    with pytest.raises(DataError, match="no web requests") as caught:
        plan("tsv", CASES / "iis.log")
    assert "looks like w3c" in str(caught.value.next_step)
    for more in ({"schema": "s.toml"}, {"columns": "a,b"}, {"null_texts": "-"}):
        with pytest.raises(ConfigError):
            LogsConfig(inputs=("i",), output="o", log_format="w3c", **more)  # type: ignore[arg-type]


ALB = (
    "{kind} 2024-05-03T08:07:57.186641Z app/lb/50dc 192.0.2.1:2817 10.0.0.1:80 0.086 0.048 0.037 {status} 200 0 57 "
    '"{request}" "curl/7.46.0 (a \\"b\\")" ECDHE TLSv1.2 arn:aws:target "Root=1-58" "www" "session" 1 2018 "waf" "-"'
)


@pytest.mark.parametrize(
    ("kind", "request_line", "status", "page"),
    [
        ("https", "GET https://www.example.com:443/shop/item?id=3 HTTP/1.1", "200", ("/shop/item", "id=3")),
        ("h2", "GET https://10.0.1.252:443/ HTTP/2.0", "304", ("/", "")),
        ("http", "GET http://h:80/a.webp HTTP/1.1", "200", None),
        ("http", "- http://h:80- ", "400", None),
        ("ws", "GET http://h:80/live HTTP/1.1", "101", None),
        ("http", "GET http://h:80/b HTTP/1.1", "-", None),
    ],
)
def test_a_load_balancers_line(
    tmp_path: Path, kind: str, request_line: str, status: str, page: tuple[str, str] | None
) -> None:
    line = ALB.format(kind=kind, request=request_line, status=status)
    classic = line.removeprefix(f"{kind} ")
    other = line.replace("192.0.2.1:2817", "2001:db8::1:2817")
    (tmp_path / "log").write_text(f"{line}\n{classic}\n{other}\n")
    found = kept(plan("alb", tmp_path / "log"))
    times = int(datetime(2024, 5, 3, 8, 7, 57, tzinfo=UTC).timestamp())
    visitors = ["192.0.2.1", "192.0.2.1", "2001:db8::1"]
    wanted = [] if page is None else [[visitor, *page, times] for visitor in visitors]
    assert found[["visitor", "page", "query", "time"]].values.tolist() == wanted


def test_no_load_balancers_line(tmp_path: Path) -> None:
    good = ALB.format(kind="http", request="GET http://h:80/a HTTP/1.1", status="200")
    (tmp_path / "log").write_text(
        "\n".join([good, good.replace("2024-05-03", "2024-05-99"), good[:90], "", "x" + good])
    )
    reasons = [row["_reason"] for row in parsed(plan("alb", tmp_path / "log")) if row["_kind"] == BAD]
    assert reasons == ["bad_time", "not_alb_log", "not_alb_log"]
