"""Which column is which: by names that mean one thing, by flags, or refused; against pandas."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.logs.plan import _check_parent
from lockstep.etl.logs.roles import columns_of
from lockstep.etl.write.append import Parent
from lockstep.storage.errors import ConfigError, DataError
from tests.etl.logs.web_rows import CASES, kept, plan, stays

NGINX = {"remote_addr": "1.1.1.1", "time": 9000, "method": "GET", "request_uri": "/a?b=1", "status": 200}


@pytest.mark.parametrize(
    ("name", "columns", "rows", "share"),
    [
        ("host-is-the-server", ("remote_addr", "time", "uri"), 99, 0.6162),
        ("logstash-event", ("clientip", "timestamp", "request"), 52, 0.6154),
        ("uri-is-rewritten", ("remote_addr", "time", "request_uri"), 99, 0.6162),
    ],
)
def test_logs_with_a_second_candidate(name: str, columns: tuple[str, str, str], rows: int, share: float) -> None:
    path = CASES / f"{name}.jsonl"
    table = pd.read_json(path, lines=True, convert_dates=False)
    visitor, time, target = columns
    shape = "%d/%b/%Y:%H:%M:%S %z" if name == "logstash-event" else "ISO8601"
    seconds = pd.to_datetime(table[time], format=shape, utc=True).map(lambda at: int(at.timestamp()))
    pages = table[target].str.split("?").str[0]
    wanted = pd.DataFrame({"visitor": table[visitor], "page": pages, "time": seconds})
    found = kept(plan("json", path))
    pd.testing.assert_frame_equal(found[["visitor", "page", "time"]], wanted, check_dtype=False)
    labels = stays(found, int(seconds.max()))
    assert (len(labels), round(float(np.mean(labels)), 4)) == (rows, share)


# Each role: names that mean one thing, and names that other software uses otherwise.
SURE = {
    "visitor": ("remote_addr", "clientip", "Client-IP", "c-ip", "source.ip"),
    "target": ("request_uri", "cs-uri-stem", "url.original"),
    "method": ("verb", "requestMethod", "http.request.method"),
    "status": ("status_code", "sc-status", "http.response.status_code"),
    "time": ("time_iso8601",),
}
LOOSE = {
    "visitor": ("host", "ip"),
    "target": ("uri", "path", "url"),
    "method": ("method",),
    "status": ("status",),
    "time": ("time", "@timestamp"),
}
PAGES = ("a", "b.html", "c.webp")
OTHERS = ("bytes", "referer", "request_time", "upstream_status", "server_name", "scheme")


@st.composite
def logs(draw: st.DrawFn) -> tuple[dict[str, list[str]], list[dict[str, Any]]]:
    """The columns of each role in a log, and rows in which every column has values of its own."""
    columns = {}
    for role in SURE:
        sure = draw(st.lists(st.sampled_from(SURE[role]), max_size=2 if draw(st.booleans()) else 1, unique=True))
        loose = draw(st.lists(st.sampled_from(LOOSE[role]), min_size=not sure, max_size=2, unique=True))
        columns[role] = [*sure, *loose]
    others = draw(st.lists(st.sampled_from(OTHERS), max_size=2, unique=True))
    order = draw(st.permutations([name for names in columns.values() for name in names] + others))
    rows = []
    for number in range(draw(st.integers(1, 8))):
        row: dict[str, Any] = dict.fromkeys(others, "x")
        row |= {name: f"{name}-{draw(st.integers(0, 2))}" for name in columns["visitor"]}
        row |= {
            name: f"/{name}/{draw(st.sampled_from(['a', 'b.html', 'c.webp']))}?q={number}" for name in columns["target"]
        }
        row |= {name: draw(st.sampled_from(["GET", "POST"])) for name in columns["method"]}
        row |= {name: draw(st.sampled_from([200, 304, 404])) for name in columns["status"]}
        row |= {name: f"2024-05-0{3 + place}T08:00:{number:02}Z" for place, name in enumerate(columns["time"])}
        rows.append({name: row[name] for name in order})
    return columns, rows


def chosen(columns: dict[str, list[str]]) -> dict[str, list[str]]:
    """For each role the candidates that are left: sure ones, or the others where there is none."""
    return {role: [name for name in names if name in SURE[role]] or names for role, names in columns.items()}


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(log=logs(), log_format=st.sampled_from(["json", "csv", "tsv", "w3c"]), told=st.booleans())
def test_any_log_is_read_by_its_sure_names_or_refused_by_both(
    tmp_path: Path, log: tuple[dict[str, list[str]], list[dict[str, Any]]], log_format: str, told: bool
) -> None:
    columns, rows = log
    path, flags = tmp_path / "log", {}
    left = chosen(columns)
    if told:  # a flag decides, whatever else is there
        left = {role: [names[-1]] for role, names in columns.items()}
        flags = {f"{role}_column": names[0] for role, names in left.items()}
    table = pd.DataFrame(rows)
    day = "2024-05-03" if log_format == "w3c" and left["time"] == ["time"] else ""
    if log_format == "json":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif log_format == "w3c":
        text = table.assign(date=day or "-", **({"time": table["time"].str[11:19]} if day else {}))
        body = text.to_csv(sep=" ", index=False, header=False, lineterminator="\n")
        path.write_text(f"#Version: 1.0\n#Fields: {' '.join(text.columns)}\n{body}")
    else:
        table.to_csv(path, index=False, sep={"csv": ",", "tsv": "\t"}[log_format])
    doubtful = [(role, names) for role, names in left.items() if len(names) > 1]
    if doubtful:
        with pytest.raises(ConfigError) as caught:
            plan(log_format, path)
        role, names = next(pair for pair in doubtful if f"may be the {pair[0]}" in caught.value.what)
        assert {*caught.value.got.split(", ")} == {*names} and f"--{role}-column" in str(caught.value.next_step)
        return
    name = {role: names[0] for role, names in left.items()}
    target = table[name["target"]].str.split("?", expand=True)
    seconds = pd.to_datetime(table[name["time"]], utc=True).map(lambda at: int(at.timestamp()))
    if day:
        seconds = pd.to_datetime(day + "T" + table["time"].str[11:19] + "Z", utc=True).map(
            lambda at: int(at.timestamp())
        )
    page = (table[name["method"]] == "GET") & table[name["status"]].isin([200, 304]) & ~target[0].str.endswith("webp")
    wanted = pd.DataFrame({"visitor": table[name["visitor"]], "page": target[0], "query": target[1], "time": seconds})
    found = plan(log_format, path, **flags)
    assert {role: found.created["roles"][role] for role in name} == name
    pages = kept(found)[["visitor", "page", "query", "time"]]
    pd.testing.assert_frame_equal(pages, wanted[page].reset_index(drop=True), check_dtype=False)


@pytest.mark.parametrize(
    ("there", "columns"),
    [
        # Nginx: the line is what was asked for, `uri` what the server made of it
        (["msec", "remote_addr", "request", "request_method", "uri", "status"], {"request": "request"}),
        (["msec", "remote_addr", "request", "request_method", "request_uri", "status"], {"target": "request_uri"}),
        # one instant in three spellings, and one client in two
        (["time_local", "time_iso8601", "msec", "remote_addr", "request", "status"], {"time": "time_iso8601"}),
        (["time", "remote_host", "remote_addr", "request", "status"], {"visitor": "remote_addr"}),
        (["time", "host", "request", "status", "response"], {"visitor": "host", "status": "status"}),
        (["time", "remote_addr", "http_x_forwarded_for", "request", "status"], {"visitor": "remote_addr"}),
    ],
)
def test_names_that_go_together(there: list[str], columns: dict[str, str]) -> None:
    assert columns.items() <= columns_of(there, {}, "f").items()


@pytest.mark.parametrize(
    ("there", "both"),
    [
        (["time", "remote_addr", "client_ip", "request", "status"], "remote_addr, client_ip"),
        (["time", "host", "x_forwarded_for", "request", "status"], "host, x_forwarded_for"),
        (["time", "@timestamp", "remote_addr", "request", "status"], "time, @timestamp"),
        (["time", "ip", "method", "url", "path", "status"], "url, path"),
        (["time", "Host", "host", "request", "status"], "Host, host"),
        (["time", "host", "host", "request", "status"], "host, host"),
    ],
)
def test_two_that_are_equally_good_are_refused(there: list[str], both: str) -> None:
    with pytest.raises(ConfigError) as caught:
        columns_of(there, {}, "the.log")
    assert caught.value.got == both and "the.log" in caught.value.what
    assert ("a name of its own" if both == "host, host" else "-column COLUMN") in str(caught.value.next_step)


def test_a_request_is_a_line_or_the_target_alone(tmp_path: Path) -> None:
    lines = [
        {**NGINX, "request": "GET /line?x HTTP/1.1"},
        {**NGINX, "request": "/alone?y=/z"},
        {**NGINX, "request": "http://h/far"},
        {**NGINX, "request": "/posted", "verb": "POST"},
        {**NGINX, "request": "a81f33"},  # an id of the request is no page
        {**NGINX, "request": "/unknown", "verb": None},
    ]
    path = tmp_path / "log"
    for row in lines:
        row.setdefault("verb", "GET")
        del row["request_uri"], row["method"]
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    found = kept(plan("json", path))
    assert list(zip(found["page"], found["query"], strict=True)) == [
        ("/line", "x"),
        ("/alone", "y=/z"),
        ("http://h/far", ""),
    ]


def test_values_inside_objects_are_named_in_the_refusal(tmp_path: Path) -> None:
    ecs = {
        "@timestamp": "2024-05-03T08:00:00Z",
        "host": {"name": "web-01"},
        "source": {"ip": "1.1.1.1"},
        "url": {"original": "/a"},
        "http": {"request": {"method": "GET"}, "response": {"status_code": 200}},
    }
    path = tmp_path / "log"
    path.write_text(json.dumps(ecs) + "\n")
    with pytest.raises(DataError, match="no column for visitor, status, method, target") as caught:
        plan("json", path)
    assert "source.ip" in str(caught.value.got) and "objects" in str(caught.value.next_step)
    path.write_text(json.dumps({**NGINX, "host": "web-01", "source": {"ip": "1.1.1.1"}, "remote_addr": {}}) + "\n")
    with pytest.raises(ConfigError) as doubt:
        plan("json", path)
    assert doubt.value.got == "host, source.ip"
    assert plan("json", path, visitor_column="host").created["roles"]["visitor"] == "host"
    flat = {"@timestamp": 9000, "source.ip": "1.1.1.1", "url.original": "/a", "verb": "GET", "status": 200}
    path.write_text(json.dumps(flat) + "\n")
    assert kept(plan("json", path))["visitor"].tolist() == ["1.1.1.1"]


def test_flags_decide_and_name_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "log"
    row = {**NGINX, "peer": "2.2.2.2", "asked": "/x", "args": "p=2"}
    path.write_text(json.dumps(row) + "\n")
    found = kept(plan("json", path, visitor_column="peer", target_column="asked", query_column="args"))
    assert found[["visitor", "page", "query"]].values.tolist() == [["2.2.2.2", "/x", "p=2"]]
    other = ["remote_addr", "client_ip", "time", "request", "status"]
    assert columns_of(other, {"time": "client_ip"}, "f")["visitor"] == "remote_addr", "one role a column"
    with pytest.raises(ConfigError, match="--visitor-column") as caught:
        plan("json", path, visitor_column="client")
    assert "remote_addr, time" in caught.value.allowed
    for more in (
        {"request_column": "a", "target_column": "b"},
        {"visitor_column": "a", "time_column": "a"},
        {"log_format": "common", "visitor_column": "a"},
        {"log_format": "csv", "schema": "s.toml", "visitor_column": "a"},
        {"log_format": "csv", "schema": "s.toml", "asset_suffixes": "pdf"},
        {"page_suffixes": "json", "asset_suffixes": ".JSON"},
        {"page_suffixes": "a/b"},
    ):
        with pytest.raises(ConfigError):
            LogsConfig(inputs=("i",), output="o", **cast(Any, {"log_format": "json", **more}))


def test_files_with_other_columns_are_refused_by_name(tmp_path: Path) -> None:
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    table = pd.DataFrame([NGINX])
    table.to_csv(one, index=False)
    table.rename(columns={"remote_addr": "client_ip"}).to_csv(two, index=False)
    with pytest.raises(DataError, match=r"two\.csv has other columns .*one\.csv") as caught:
        plan("csv", one, two)
    assert "visitor client_ip" in caught.value.got and "visitor remote_addr" in caught.value.allowed
    table[list(reversed(table.columns))].to_csv(two, index=False)
    assert len(kept(plan("csv", one, two))) == 2, "another order is no other column"


def test_an_append_takes_its_parents_columns() -> None:
    stored = {"log_format": "json", "roles": {"visitor": "clientip"}, "page_suffixes": [], "asset_suffixes": []}
    parent = cast(Parent, SimpleNamespace(url="p", manifest=SimpleNamespace(created_by={"config": stored})))
    config = LogsConfig(inputs=("i",), output="o", log_format="json")
    _check_parent({"visitor": "clientip"}, config, parent)
    with pytest.raises(ConfigError, match="p cannot be continued: its roles") as caught:
        _check_parent({"visitor": "host"}, config, parent)
    assert "'clientip'" in caught.value.allowed and "'host'" in caught.value.got
    with pytest.raises(ConfigError, match="asset suffixes"):
        _check_parent({"visitor": "clientip"}, LogsConfig(inputs=("i",), output="o", asset_suffixes=("pdf",)), parent)


def test_csv_is_read_as_pandas_reads_it(tmp_path: Path) -> None:
    text = 'host,"remote_addr",time,method,uri,status\nweb,1.1.1.1,9000,GET,"/a,b?c",200\nweb,2.2.2.2,9001,GET,/d,200\n'
    (tmp_path / "log").write_text(text)
    table = pd.read_csv(io.StringIO(text))
    found = kept(plan("csv", tmp_path / "log"))
    assert found["visitor"].tolist() == table["remote_addr"].tolist()
    assert found["page"].tolist() == table["uri"].str.split("?").str[0].tolist()
