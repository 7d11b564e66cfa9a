"""Web requests in tables: the same requests whatever the format, and where the columns come from."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.etl.columns import MAX_LISTED
from lockstep.etl.input.files import find_sources
from lockstep.etl.input.unpack import unpacked
from lockstep.etl.logs import server_log
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.logs.formats import LOG_FORMATS, Form
from lockstep.etl.logs.parse import BAD, ROW, SUMMARY, parse_ranges
from lockstep.etl.logs.plan import Plan, columns_differ, kinds_in, names_asked, names_in, plan_of
from lockstep.etl.logs.roles import columns_of
from lockstep.etl.logs.server_log import seconds_of_text
from lockstep.etl.logs.values import Reasons
from lockstep.etl.logs.web import read_requests
from lockstep.storage.errors import DataError
from tests.etl.conftest import ELASTIC, nasa_lines

SCHEMA = """
[[fields]]
name = "x"
dtype = "int64"

[[fields]]
name = "y"
dtype = "bool"
kind = "label"
"""
HEADER = ("host", "logname", "time", "method", "url", "response", "bytes")


def plan(path: Path, log_format: str, parts: int = 1, **more: Any) -> Plan:
    split_bytes = -(-path.stat().st_size // parts)
    told = {"inputs": (str(path),), "output": str(path.parent / "out"), "split_bytes": split_bytes, **more}
    return plan_of(LogsConfig(log_format=log_format, **told))


def rows_of(found: Plan) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, int]]:
    """Kept rows and refused lines in order of their position, and the sums of the summaries."""
    batches = [batch for work in found.work for batch in parse_ranges([work], found.parser)]
    rows = pa.Table.from_batches(batches).sort_by("_position").to_pylist()
    sums = {"read": 0, "bad": 0}
    for row in rows:
        if row["_kind"] == SUMMARY and row["_reason"] is None:
            sums["read"] += row["_lines"]
            sums["bad"] += row["_bad"]
        elif row["_kind"] == SUMMARY:
            sums[row["_reason"]] = sums.get(row["_reason"], 0) + row["_dropped_lines"]
    kept, bad = ([row for row in rows if row["_kind"] == kind] for kind in (ROW, BAD))
    assert sums["read"] == len(kept) + sum(n for name, n in sums.items() if name != "read")
    assert sums["bad"] == len(bad)
    return kept, bad, sums


def nasa_table(count: int) -> list[tuple[str, ...]]:
    """The first requests of the NASA day as the fields of HEADER."""
    found = server_log.parse_common(pa.array(nasa_lines(count).splitlines(), pa.binary()))
    asked = zip(found.page.to_pylist(), found.query.to_pylist(), strict=True)
    urls = [f"{page}?{query}" if query else page for page, query in asked]
    columns = (found.visitor.to_pylist(), found.time.tolist(), found.method.to_pylist(), urls, found.status.tolist())
    return [
        (host, "-", str(time), method, url, str(status), "1")
        for host, time, method, url, status in zip(*columns, strict=True)
    ]


def write(path: Path, log_format: str, rows: Sequence[Sequence[str]]) -> None:
    if log_format == "tsv":  # with two empty fields more than the header has, as NASA's own table has them
        text = "\n".join(["\t".join(HEADER), *("\t".join([*row, "", ""]) for row in rows)])
    elif log_format == "csv":
        buffer = io.StringIO()
        writer = csv.writer(buffer, quoting=csv.QUOTE_ALL, lineterminator="\r\n")
        writer.writerows([HEADER, *rows])
        text = "\ufeff" + buffer.getvalue()
    else:
        text = (
            "\n".join(
                json.dumps({**dict(zip(HEADER, row, strict=True)), "time": int(row[2]) if row[2].isdigit() else row[2]})
                for row in rows
            )
            + "\n"
        )
    path.write_bytes(text.encode())


def test_the_same_requests_whatever_format_and_ranges(tmp_path: Path) -> None:
    (tmp_path / "common").write_bytes(nasa_lines(400))
    wanted, _, sums = rows_of(plan(tmp_path / "common", "common"))
    names = ("visitor", "page", "query", "time")
    rows = nasa_table(400)
    rows[100] = ("h", "-", "noon", "GET", "/", "200", "1")
    rows[101] = ("", "-", "5", "GET", "/", "200", "1")
    times = [row["time"] for row in wanted]
    for log_format in ("tsv", "csv", "json"):
        path = tmp_path / log_format
        write(path, log_format, rows)
        one = rows_of(plan(path, log_format))
        assert one == rows_of(plan(path, log_format, 2)) == rows_of(plan(path, log_format, 4))
        kept, bad, counts = one
        assert [row["_reason"] for row in bad] == ["bad_time", "missing_value:host"]
        assert [row["_raw"] for row in bad] == [
            path.read_bytes()[row["_position"] :].split(b"\n")[0].removesuffix(b"\r") for row in bad
        ]
        assert counts["read"] == 400 and abs(counts["not_a_page"] - sums["not_a_page"]) <= 2
        found = [tuple(row[name] for name in names) for row in kept]
        assert set(found) <= {tuple(row[name] for name in names) for row in wanted}
        assert len(found) >= len(times) - 2


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("804571201", 804571201),
        ("804571201.9", 804571201),
        ("-0.5", -1),
        ("-1.0", -1),
        (".5", 0),
        (" 5.5 ", 5),
        ("1436400000.99999999", 1436400000),  # a float would round it up
        ("253402300799.999999999999", 253402300799),
        ("12.", None),
        ("1e9", None),
        ("9" * 30 + ".5", None),
        ("1995-07-01T00:00:01-04:00", 804571201),
        ("1995-07-01 04:00:01.999", 804571201),
        ("[01/Jul/1995:00:00:01 -0400]", 804571201),
        ("01/Jul/1995:00:00:01 -0400", 804571201),
        ("1431857103123", None),  # milliseconds: beyond the year 9999
        ("yesterday", None),
        ("", None),
        ("1e999", None),
        ("nan", None),
        ("31/Feb/1995:00:00:01 -0400", None),
    ],
)
def test_times(text: str, seconds: int | None) -> None:
    for neighbours in ([], ["5", "x", "1.5", "1995-07-01"]):
        found, good = seconds_of_text(pa.array([*neighbours, text]))
        assert (int(found[-1]) if good[-1] else None) == seconds


def test_columns_by_the_names_that_servers_give_them() -> None:
    nginx = ["msec", "remote_addr", "request", "status"]
    assert columns_of(nginx, {}, "f") == {
        "visitor": "remote_addr",
        "time": "msec",
        "status": "status",
        "request": "request",
    }
    assert columns_of(["Host", "Timestamp", "Verb", "URI", "Status_Code"], {}, "f")["visitor"] == "Host"
    with pytest.raises(DataError, match="no column for time, method, target") as caught:
        columns_of(["host", "status"], {}, "f")
    assert "--schema" in caught.value.next_step


def test_json_times_as_numbers_and_as_text(tmp_path: Path) -> None:
    lines = [
        {"ip": "::1", "time": 804571201.7, "request": "GET /a?b HTTP/1.1", "status": 200},
        {"ip": "::1", "time": "1995-07-01T04:00:01Z", "request": "GET /a?b HTTP/1.1", "status": "304"},
        {"ip": "::1", "time": "804571201", "request": "GET /a?b HTTP/1.1", "status": 200},
        {"ip": "::1", "time": True, "request": "GET /a?b HTTP/1.1", "status": 200},
        {"ip": "::1", "time": 5, "request": "GET /a?b HTTP/1.1", "status": 200.5},
        {"ip": "::1", "time": "now", "request": "GET /a?b HTTP/1.1", "status": 200},
    ]
    for order in (lines, lines[::-1]):
        (tmp_path / "log").write_text("\n".join(map(json.dumps, order)))
        kept, bad, _ = rows_of(plan(tmp_path / "log", "json"))
        assert [(row["visitor"], row["page"], row["query"], row["time"]) for row in kept] == [
            ("::1", "/a", "b", 804571201)
        ] * 3
        assert sorted(row["_reason"] for row in bad) == [
            "bad_time",
            "bad_value:status: 200.5 is no whole number of up to 18 digits",
            "bad_value:time: true is no number of up to 26 digits and 12 after the point",
        ]


def test_a_json_time_does_not_hang_on_its_neighbours(tmp_path: Path) -> None:
    wanted = {
        '"time":0': 0,
        '"time":0.5': 0,
        '"time":1e9': 1000000000,
        '"time":1436400000.99999999': 1436400000,
        '"time":"1436400000.99999999"': 1436400000,
        '"t\\u0069me":"1436400000.99999999"': 1436400000,
        '"x":{"time":"a"},"time":7': 7,
        '"time":"1e9"': None,
        '"t\\u0069me":"1e9"': None,
        '"x":{"time":5},"time":"12."': None,
        '"time":"12."': None,
        '"time":true': None,
    }
    lines = [f'{{{time},"ip":"h","request":"GET /{n} HTTP/1.1","status":200}}' for n, time in enumerate(wanted)]
    lines.append("")
    columns = {"visitor": "ip", "time": "time", "status": "status", "request": "request"}
    for order in (lines, lines[::-1], *([line] for line in lines[:-1])):
        drops = Reasons(len(order))
        found = read_requests(pa.array(order, pa.binary()), Form("json"), (), columns, drops)
        good = found.reasons.good & drops.good
        known = {line: time for line, time in zip(lines, wanted.values(), strict=False) if time is not None}
        assert [line in known for line in order] == good.tolist()
        assert found.time[good].tolist() == [known[line] for line in order if line in known]
        assert np.asarray(pc.binary_length(found.page))[good].all()
        assert drops.good.tolist() == [line != "" for line in order]


@given(st.lists(st.ip_addresses().map(str), min_size=1, max_size=3), st.sampled_from((",", ", ", " , ")))
def test_the_visitor_is_the_first_of_a_list(addresses: list[str], mark: str) -> None:
    texts = {mark.join(addresses): addresses[0], "-": None, " ": None, mark.join(["-", *addresses]): None}
    texts |= {mark.join(["unknown", *addresses]): "unknown", "Doe, John": "Doe, John"}
    columns = {"visitor": "x_forwarded_for", "time": "time", "status": "status", "request": "request"}
    rest = {"time": 7, "status": 200, "request": "GET / HTTP/1.1"}
    names = ("x_forwarded_for", *rest)
    written = {
        "json": [json.dumps({"x_forwarded_for": text, **rest}) for text in texts],
        "tsv": ["\t".join([text, *map(str, rest.values())]) for text in texts],
    }
    for log_format, lines in written.items():
        drops = Reasons(len(texts))
        found = read_requests(pa.array(lines, pa.binary()), Form(log_format), names, columns, drops)
        good = found.reasons.good
        assert found.visitor.filter(pa.array(good)).to_pylist() == [first for first in texts.values() if first]
        assert set(found.reasons.tolist()) == {None, "missing_value:x_forwarded_for"}


@pytest.mark.parametrize(
    ("label", "names"),
    [
        ("CASE WHEN valid(clicks) THEN 1e9 END", "case when clicks then 1e9 end"),
        ("A.`b c` + `d``e` -- f\n /* g \n h */ > i", "a b`c d`e i"),
        (r"""x IN ('y', "z", 'it\'s w', 'a''b', r'\', R"v\") AND u""", "x and u"),
        ("count (*) = größe", "größe"),
    ],
)
def test_names_that_an_expression_asks_for(label: str, names: str) -> None:
    assert names_asked(label) == {name.replace("b`c", "b c") for name in names.split()}


@pytest.mark.parametrize("log_format", ["csv", "json"])
def test_a_label_asks_for_whole_names_and_takes_empty_texts(tmp_path: Path, log_format: str) -> None:
    (tmp_path / "s.toml").write_text(SCHEMA)
    rows = [{"x": "1", "e": "", "id": "", "clicks": ""}, {"x": "2", "e": "e", "id": "i", "clicks": "1"}]
    with (tmp_path / "log").open("w") as file:
        if log_format == "csv":
            writer = csv.DictWriter(file, list(rows[0]), quoting=csv.QUOTE_ALL)
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines(json.dumps({**row, "x": int(row["x"])}) + "\n" for row in rows)
    found = plan(
        tmp_path / "log", log_format, schema=str(tmp_path / "s.toml"), label="CASE WHEN valid(clicks) THEN true END"
    )
    assert found.parser.schema.names == ["x", "clicks"]
    kept, bad, _ = rows_of(found)
    assert [row["clicks"] for row in kept] == ["", "1"] and not bad


def test_the_combined_excerpt_has_one_malformed_line(tmp_path: Path) -> None:
    kept, bad, sums = rows_of(plan(ELASTIC, "combined"))
    assert (sums["read"], len(bad), bad[0]["_reason"]) == (1500, 1, "not_combined_log")
    assert all(row["agent"] is not None and row["referrer"] is not None for row in kept)
    assert np.mean([row["agent"].startswith("Mozilla") for row in kept]) > 0.5


@pytest.mark.shared_data
def test_the_whole_combined_log_and_the_ragged_table(shared_data: Path) -> None:
    _, bad, sums = rows_of(plan(shared_data / "weblogs" / "elastic_apache_combined_2015.log.gz", "combined"))
    assert (sums["read"], len(bad)) == (10_000, 1)
    _, bad, sums = rows_of(plan(shared_data / "weblogs" / "nasa_19950701_first10k.tsv.gz", "tsv"))
    assert (sums["read"], len(bad)) == (9_999, 0)


def test_the_head_of_a_json_file(tmp_path: Path) -> None:
    lines = ['{"a":1,"b":null}', "rubbish", "[1]", '{"a":1.5,"b":"x","c":{},"d":true}']
    (tmp_path / "log").write_text("\n".join([*lines, ""]))
    (source,) = find_sources([str(tmp_path / "log")])
    assert names_in(source, Form("json")) == ("a", "b", "c", "d")
    assert kinds_in([source], LOG_FORMATS["json"]) == {"a": pa.float64(), "b": pa.string(), "d": pa.bool_()}
    (tmp_path / "later").write_text('{"a":"x","e":1}\n')  # a key that only the second file has
    found = find_sources([str(tmp_path / "log"), str(tmp_path / "later")])
    for order in (found, found[::-1]):
        assert kinds_in(order, LOG_FORMATS["json"]) == {
            "a": pa.string(),
            "b": pa.string(),
            "d": pa.bool_(),
            "e": pa.int64(),
        }


@given(st.permutations([True, 1, 1.5, "x"]), st.integers(1, 4))
def test_the_widest_type_counts_in_any_order(tmp_path_factory: pytest.TempPathFactory, values: Any, many: int) -> None:
    folder = tmp_path_factory.mktemp("kinds")
    for number, value in enumerate(values[:many]):
        (folder / str(number)).write_text(json.dumps({"a": value}) + "\n")
    order = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
    widest = max(values[:many], key=lambda value: list(order).index(type(value)))
    assert kinds_in(find_sources([str(folder)]), LOG_FORMATS["json"]) == {"a": order[type(widest)]}


def test_whole_numbers_that_a_float_rounds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SCHEMA.replace("x", "f").replace("int64", "float64"))
    texts = ["1.0", "2", "9007199254740992", "9007199254740993", "-9007199254740993", "1e300", "0.1", str(1 << 70)]
    texts += [str((1 << 70) + 1), "null"]
    rows = [f'{{"f":{text},"u":{text},"y":true}}'.replace('"f":null', '"f":0') for text in texts]
    (tmp_path / "log").write_text("\n".join([*rows, ""]))
    kept, bad, _ = rows_of(plan(tmp_path / "log", "json", schema=str(tmp_path / "s.toml"), label="u > 0"))
    exact = [value for value in map(json.loads, texts) if value is None or float(value) == value]
    assert [row["u"] for row in kept] == exact
    lost = [text for text in texts if text != "null" and float(text) != json.loads(text)]
    assert [row["_reason"] for row in bad] == [f"bad_value:u: {text} is no float64" for text in lost]


@pytest.mark.parametrize(
    ("head", "log_format", "names"),
    [
        (b"a,b\n1,2\n", "csv", ("a", "b")),
        (b'\xef\xbb\xbf"a b","c,d","e""f"\r\n1', "csv", ("a b", "c,d", 'e"f')),
        (b",a,b,,\n", "csv", ("", "a", "b")),  # a column without a name cannot be asked for, but counts
        (b'a\t"b"\t\n', "tsv", ("a", '"b"')),
        (b"a", "tsv", ("a",)),
        (b"\n", "csv", None),
        (b"\xff\xfea\0,\0", "csv", None),  # UTF-16
        (b'a,"b\n', "csv", None),
        (b"a" * (2 << 20), "tsv", None),
    ],
)
def test_headers(tmp_path: Path, head: bytes, log_format: str, names: tuple[str, ...] | None) -> None:
    (tmp_path / "log").write_bytes(head)
    (source,) = find_sources([str(tmp_path / "log")])
    if names is not None:
        assert names_in(source, Form(log_format)) == names
        return
    with pytest.raises(DataError, match="names no fields"):
        names_in(source, Form(log_format))


@pytest.mark.parametrize("value", ["1e30", "1e400000000", '" 200"', '"1e99999999999999999999"'])
def test_a_number_that_has_no_room_is_no_broken_object(tmp_path: Path, value: str) -> None:
    """Arrow refuses the whole line, so Python's reader says what of it."""
    good = '{"ip":"h","time":1,"status":200,"request":"GET / HTTP/1.0"}'
    (tmp_path / "log").write_text(f"{good}\n{good.replace('200', value)}\n")
    kept, bad, _ = rows_of(plan(tmp_path / "log", "json"))
    assert len(kept) == 1 and [row["_reason"] for row in bad] == [
        f"bad_value:status: {value} is no whole number of up to 18 digits"
    ]


def test_the_head_of_a_packed_file_is_not_unpacked_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GiB of one line takes 32 KiB of zstd; the driver looks at the beginning alone."""
    (tmp_path / "bomb").write_bytes(pa.compress(bytes(16 << 20), codec="zstd", asbytes=True))
    read = []

    def counted(*told: Any) -> Iterator[bytes]:
        for piece in unpacked(*told):
            read.append(len(piece))
            yield piece

    monkeypatch.setattr("lockstep.etl.input.lines.unpacked", counted)
    with pytest.raises(DataError, match="names no fields"):
        names_in(find_sources([str(tmp_path / "bomb")])[0], Form("csv"))
    assert sum(read) <= 3 << 20


@pytest.mark.parametrize(
    "told", [{"split": "group:_file:80/20"}, {"split": "time:_position:8/2"}, {"sample": "_file=log:10%"}]
)
def test_the_place_of_a_record_is_a_column_too(tmp_path: Path, told: dict[str, Any]) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA)
    (tmp_path / "log").write_text('{"x": 1, "y": true}\n')
    found = plan(tmp_path / "log", "json", schema=str(tmp_path / "schema.toml"), **told)
    assert found.parser.schema.names == ["x", "y"], "nothing more is read for it"


def test_columns_that_are_not_there_are_told_apart_from_a_wrong_format() -> None:
    told = columns_differ("u", "csv", ["", "a", "b"], ["x"], ["a", "b"])
    assert (told.got, told.allowed) == ("no column x; more than one a, b", "its columns: a, b")
    assert "without a name" in told.next_step, "the first field has none, and no flag reads it"
    assert "without a name" not in columns_differ("u", "csv", ["a"], ["x"], []).next_step
    many = [f"column_{number}" for number in range(100)]
    listed = columns_differ("u", "tsv", many, ["x"], []).allowed.removeprefix("its columns: ")
    names, _, more = listed.partition(" and ")
    assert names.split(", ") == many[: 100 - int(more.split()[0])] and len(names) <= MAX_LISTED
    assert "looks like csv" in columns_differ("u", "tsv", ["a,b,c"], ["a"], []).next_step
    with pytest.raises(DataError, match="no web requests") as caught:
        columns_of(["host,time,status"], {}, "f")
    assert "looks like csv" in caught.value.next_step
    assert "looks like tsv" in columns_differ("u", "csv", ["a\tb"], ["a"], []).next_step
    for mark, flag in ((";", "csv --delimiter ';'"), ("|", "csv --delimiter '|'")):
        assert f"--log-format {flag}" in columns_differ("u", "csv", [mark.join("abc")], ["a"], []).next_step
        with pytest.raises(DataError) as caught:
            columns_of([mark.join(["host", "time", "status"])], {}, "f")
        assert f"--log-format {flag}" in caught.value.next_step
