"""The registry of log formats: an entry and its parser are all that a format needs."""

from __future__ import annotations

import ast
import csv
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from lockstep.etl.choices import LOG_FORMAT_NAMES
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.logs.fields import looks_delimited, names_of_header, read_fields
from lockstep.etl.logs.formats import LOG_FORMATS, Form, LogFormat
from lockstep.etl.logs.parse import BAD, ROW
from lockstep.etl.logs.propose import propose
from lockstep.etl.logs.rejected import look
from lockstep.etl.logs.server_log import Requests, asked, part, readable, seconds_of_text
from lockstep.etl.logs.values import Reasons
from lockstep.etl.reasons import BAD_TIME, NOT_COMMON_LOG
from lockstep.jobs import etl_logs
from lockstep.storage.errors import ConfigError, DataError
from tests.etl.conftest import ROOT
from tests.etl.logs.web_rows import kept, parsed, plan

SQUID = (
    r"^(?P<time>\d+\.\d+) +\d+ (?P<visitor>\S+) \w+/(?P<status>\d{3}) \d+"
    r" (?P<method>[A-Z]+) http://[^/]+(?P<page>/\S*) .*$"
)
NOT_SQUID = "not_squid_log"
LINES = (
    b"1286536308.779    180 192.0.2.4 TCP_MISS/200 411 GET http://www.example.com/a?b=1 - DIRECT/192.0.2.9 text/html",
    b"1286536311.100     12 192.0.2.5 TCP_HIT/404 99 GET http://www.example.com/lost - NONE/- text/html",
    b"1286536312.000      7 192.0.2.5 TCP_HIT/200 99 GET http://www.example.com/c - NONE/- text/html",
)


def parse_squid(lines: pa.Array) -> Requests:
    """Parse lines (n,) binary of a proxy's log."""
    reasons = Reasons(len(lines))
    found = pc.extract_regex(readable(lines, reasons), pattern=SQUID)
    reasons.add(np.asarray(pc.is_null(found), dtype=bool), NOT_SQUID)
    time, timely = seconds_of_text(part(found, "time"))
    reasons.add(~timely, BAD_TIME)
    request = pc.binary_join_element_wise(part(found, "method"), part(found, "page"), "HTTP/1.0", " ")
    method, page, query = asked(pc.fill_null(request, ""))
    status = np.asarray(pc.fill_null(part(found, "status"), "0").cast(pa.int64()))
    return Requests(pc.fill_null(part(found, "visitor"), ""), method, page, query, time, status, reasons)


SQUID_FORMAT = LogFormat(name="squid", parse=parse_squid, misfits={NOT_SQUID: lambda text: "its first word"})
PIPES = LogFormat(
    name="pipes",
    read=partial(read_fields, delimiter="|"),
    names_of=partial(names_of_header, delimiter="|"),
    looks_like=partial(looks_delimited, delimiter="|"),
    delimiter="|",
)


@pytest.fixture(autouse=True)
def more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two formats more: one that fixes its fields, and one whose header names them."""
    for form in (SQUID_FORMAT, PIPES):
        monkeypatch.setitem(LOG_FORMATS, form.name, form)


def test_a_format_that_fixes_its_fields_needs_its_parser_and_an_entry(tmp_path: Path) -> None:
    (tmp_path / "access.log").write_bytes(b"\n".join([*LINES, b"rubbish", b""]))
    found = plan("squid", tmp_path)
    rows = parsed(found)
    assert [row["_reason"] for row in rows if row["_kind"] == BAD] == [NOT_SQUID]
    pages = kept(found, [row for row in rows if row["_kind"] == ROW])
    read = [match.groupdict() for line in LINES if (match := re.match(SQUID, line.decode()))]
    good = [one for one in read if one["status"] == "200"]
    assert pages["visitor"].tolist() == [one["visitor"] for one in good]
    assert pages["time"].tolist() == [int(float(one["time"])) for one in good]
    assert (pages["page"] + pages["query"].map(lambda text: f"?{text}" if text else "")).tolist() == [
        one["page"] for one in good
    ]
    # an error about its lines says where they stop, and an error about lines of another format names it
    assert look([(b"rubbish", NOT_SQUID)], found.parser.form, records=False).words.endswith("stops at its first word")
    step = look([(line, NOT_COMMON_LOG) for line in LINES], Form("common"), records=False).next_step
    assert "--log-format squid reads these lines" in step


TABLE = [
    "time|client_ip|method|url|status", "100|192.0.2.1|GET|/a|200", "101|192.0.2.2|GET|/b", "102|192.0.2.3|GET|/c|200",
]  # fmt: skip


def test_a_format_whose_header_names_the_fields_needs_an_entry(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join([*TABLE, ""]))
    found = plan("pipes", tmp_path / "log")
    rows = parsed(found)
    good = [row for row in csv.DictReader(TABLE, delimiter="|") if row["status"] is not None]
    pages = kept(found, [row for row in rows if row["_kind"] == ROW])
    assert pages["page"].tolist() == [row["url"] for row in good]
    assert pages["visitor"].tolist() == [row["client_ip"] for row in good]
    assert [row["_reason"] for row in rows if row["_kind"] == BAD] == ["too_few_fields"]
    with pytest.raises(DataError) as caught:
        plan("csv", tmp_path / "log")
    assert caught.value.next_step == "The file looks like pipes: correct --log-format."
    # records of a schema, and a schema for them
    proposed = propose(LogsConfig(inputs=(str(tmp_path),), output=str(tmp_path / "s.toml"), log_format="pipes"))
    assert "5 fields" in proposed and 'name = "client_ip"' in (tmp_path / "s.toml").read_text()
    kept_rows = [
        row for row in parsed(plan("pipes", tmp_path / "log", schema=str(tmp_path / "s.toml"))) if row["_kind"] == ROW
    ]
    assert [row["status"] for row in kept_rows] == [int(row["status"]) for row in good]


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"schema": "[[fields]]"}, "with --log-format tsv, csv, json or pipes"),
        ({"visitor_column": "a"}, "with --log-format tsv, csv, json, w3c or pipes"),
        ({"columns": "a"}, "with --log-format tsv, csv or pipes"),
        ({"quoted_newlines": True}, "with --log-format csv"),
    ],
)
def test_refusals_name_it(options: dict[str, Any], allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LogsConfig(inputs=("in",), output="out", log_format="squid", **options)
    assert caught.value.allowed == allowed


OWN = [form for name, form in LOG_FORMATS.items() if name not in ("squid", "pipes")]


def test_help_names_each_format() -> None:
    assert tuple(form.name for form in OWN) == LOG_FORMAT_NAMES, "a command line lists them without loading parsers"
    assert " | ".join(LOG_FORMAT_NAMES) in " ".join(etl_logs.parser().format_help().split())


@pytest.mark.parametrize("form", [*OWN, SQUID_FORMAT, PIPES], ids=lambda form: form.name)
def test_an_entry_fixes_its_fields_or_reads_them_by_their_names(form: LogFormat) -> None:
    assert (form.parse is None) != (form.read is None)
    assert form.has_columns == ((form.names_of is None) != (form.object_of is None)) == (form.looks_like is not None)
    assert form.delimiter is None or form.names_of is not None


def test_only_the_registry_and_the_page_know_the_names() -> None:
    names = {form.name for form in OWN}
    page = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert [name for name in rows if name in names] == [form.name for form in OWN]
    files = [*(ROOT / "etl" / "logs").glob("*.py"), ROOT / "jobs" / "etl_logs.py", ROOT / "etl" / "write" / "config.py"]
    found = [
        (path.name, node.value)
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names and path.name != "formats.py"
    ]
    # the default, twice; a suffix of files that are no pages
    assert sorted(found) == [("config.py", "common"), ("etl_logs.py", "common"), ("pages.py", "json")]
