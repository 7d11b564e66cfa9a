"""What the error for bad input says of the first lines, and files without a line among others."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pyarrow as pa
import pytest

from lockstep.etl.input.files import find_lines
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.logs.formats import Form
from lockstep.etl.logs.parse import BAD, parse_ranges
from lockstep.etl.logs.plan import plan_of
from lockstep.etl.logs.rejected import look
from lockstep.features.schema.declare import load_schema
from lockstep.storage.errors import DataError

COMMON = b'192.0.2.1 - - [03/May/2024:08:07:57 +0000] "GET / HTTP/1.1" 200 512'
COMBINED = COMMON + b' "-" "Mozilla/5.0 (KHTML, like Gecko)"'
OBJECT = b'{"time": 1, "client_ip": "a"}'
ALB = (
    b"http 2018-07-02T22:23:00.186641Z app/lb/50dc 192.168.131.39:2817 10.0.0.1:80 0.000 0.001 0.000 200 200 34 366"
    b' "GET http://www.example.com:80/ HTTP/1.1" "curl/7.46.0" - - arn:target "Root=1-58337262"'
)


@pytest.mark.parametrize(
    ("line", "reason", "log_format", "words", "formats"),
    [
        (COMMON, "not_combined_log", "combined", 'column 68, where a "referrer" should be', "common"),
        (COMBINED.replace(b"[", b"("), "not_common_log", "common", "column 15, where a [time] should be", ""),
        (COMBINED.replace(b" 200", b" 2000"), "not_common_log", "common", "column 61, where a status should be", ""),
        (OBJECT, "not_combined_log", "combined", "column 24, where a [time] should be", "json"),
        (b"time,client_ip,status", "not_common_log", "common", "where an ident should be", "csv"),
        (b"time\tclient_ip\tstatus", "not_common_log", "common", "where an ident should be", "tsv"),
        (COMBINED, "not_json_object", "json", "column 6: Extra data", "combined or common"),
        (b"[1]", "not_json_object", "json", "column 1: a list, not an object", ""),
        (b'1,pipe 5" long', "bad_quotes", "csv", "column 9, a quote inside a field", ""),
        (b'1,"a"b', "bad_quotes", "csv", "column 6, text behind a closing quote", ""),
        (b'1,"a\nb', "open_quote (2 lines)", "csv", "its end: the quote of column 3 is not closed", ""),
        (b"#Fields: date time c-ip", "not_combined_log", "combined", "column 20, where a [time] should be", "w3c"),
        (ALB, "not_combined_log", "combined", "where a [time] should be", "alb"),
        (b"a,b", "too_few_fields", "csv", "its end, after 2 fields", ""),
        (b"1,5;b;c", "too_few_fields", "csv", "its end, after 2 fields", "csv --delimiter ';'"),
        (b'"a;b"|2', "bad_quotes", "csv", "column 6, text behind a closing quote", "csv --delimiter '|'"),
        (b"a\xff", "not_utf8", "csv", "byte 2, which is no UTF-8", ""),
        (b"a\0", "not_utf8", "csv", "byte 2, a NUL", ""),
    ],
)
def test_the_first_line_where_it_stops_and_the_formats_that_read_it(
    line: bytes, reason: str, log_format: str, words: str, formats: str
) -> None:
    found = look([(line, reason)] * 3, Form(log_format), records=False)
    shown = json.dumps(line.decode("utf-8", "replace"), ensure_ascii=False)
    assert found.words.startswith(f"; {shown} stops at ") and words in found.words
    assert (f"--log-format {formats} reads these lines" in found.next_step) == bool(formats)


def test_a_long_line_is_cut_and_one_good_line_less_is_no_other_format() -> None:
    found = look([(COMMON * 20, "not_common_log"), (OBJECT, "not_common_log")], Form("common"), records=False)
    assert len(found.words) < 400 and "no other format" in found.next_step
    assert look([(b"1,soon", 'bad_value:x: "soon" is no int64')], Form("csv"), records=True).next_step == ""


@pytest.mark.parametrize(
    ("field", "value", "step"),
    [
        ('name = "a"\ndtype = "int64"\nencoding = { kind = "ignore" }', "03.11.2026 14:05", "to_timestamp(a, "),
        ('name = "a"\ndtype = "bool"\nkind = "label"', "ja", """--label "a = 'ja'\""""),
        ('name = "a"\ndtype = "bool"\nkind = "label"', "ja", "class_names"),
        ('name = "a"\ndtype = "float64"', "3,5", "replace(a, ',', '.')"),
    ],
)
def test_values_in_another_form_are_followed_by_what_to_do(tmp_path: Path, field: str, value: str, step: str) -> None:
    """The reason is that of the job's own parser for such a value."""
    (tmp_path / "a.csv").write_text(f"a;b\n{value};1\n")
    times = ("a",) if "int64" in field else ()
    schema, output = f"[[fields]]\n{field}\n", str(tmp_path / "out")
    config = LogsConfig(
        inputs=(str(tmp_path),), output=output, log_format="csv", delimiter=";", schema=schema, time_columns=times
    )
    plan = plan_of(config)
    rows = pa.Table.from_batches(list(parse_ranges(plan.work, plan.parser))).to_pylist()
    bad = [(row["_raw"], row["_reason"]) for row in rows if row["_kind"] == BAD]
    assert len(bad) == 1 and step in look(bad, plan.parser.form, records=True).next_step


@pytest.mark.parametrize("empty", [b"", b"\n", b"\r\n\n", b"a,b\n", b"\xef\xbb\xbfa,b", b"a,b\r\n\r\n"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_without_a_line_is_skipped_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, empty: bytes, packed: bool
) -> None:
    (tmp_path / "access.log").write_bytes(gzip.compress(empty) if packed else empty)
    with pytest.raises(DataError, match="the input is empty: "):
        find_lines([str(tmp_path)], header=True)
    (tmp_path / "access.log.1").write_bytes(b"a,b\n1,2\n")
    (tmp_path / "access.log.2").write_bytes(gzip.compress(b"a,b\n1,2\n"))
    with caplog.at_level(logging.WARNING):
        found = find_lines([str(tmp_path)], header=True)
    assert [Path(source.url).name for source in found] == ["access.log.1", "access.log.2"]
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("input: skipped") and told.endswith("access.log")
    # where no line is a header, one line is content, also a blank in a table
    assert len(find_lines([str(tmp_path)], header=False)) == 2 + (b"a" in empty)


def test_a_long_header_and_a_damaged_file_are_left_to_their_readers(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"a," * 9000 + b"b\n1,2\n"))
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"a,b\n1,2\n")[:-9])
    assert len(find_lines([str(tmp_path)], header=True)) == 2


def test_a_schema_may_be_given_as_an_object(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,yes\n")
    text = '{"fields": [{"name": "a", "dtype": "int64"}, {"name": "b", "dtype": "bool", "kind": "label"}]}'
    plans = [
        plan_of(LogsConfig(inputs=(str(tmp_path),), output=str(tmp_path / "out"), log_format="csv", schema=schema))
        for schema in (text, load_schema(text))
    ]
    assert plans[0].parser == plans[1].parser and plans[0].target.rows == plans[1].target.rows
