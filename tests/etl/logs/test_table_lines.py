"""TSV, CSV and JSON lines, line by line, with the reason for each case; and their parsers against slow definitions."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.etl.logs.fields import split_fields
from lockstep.etl.logs.formats import Form, read_table
from lockstep.etl.logs.server_log import seconds_of_text
from lockstep.etl.logs.values import Column, Reasons

NAMES = ("a", "b", "c")
COLUMNS = (Column("a", pa.int64()), Column("b", pa.string()), Column("c", pa.string(), nullable=True))
TAGS = pa.list_(pa.field("element", pa.string()))
JSON_COLUMNS = (*COLUMNS, Column("f", pa.float32(), nullable=True), Column("tags", TAGS, nullable=True))


def read(lines: list[bytes], form: Form, columns: tuple[Column, ...] = COLUMNS) -> list[Any]:
    """For each line its values in order of the columns, or the reason why there are none."""
    reasons, drops = Reasons(len(lines)), Reasons(len(lines))
    found = read_table(pa.array(lines, pa.binary()), form, NAMES, columns, reasons, drops)
    values = list(zip(*(found[column.name].to_pylist() for column in columns), strict=True))
    told = zip(reasons.tolist(), drops.tolist(), values, strict=True)
    return [refused or dropped or value for refused, dropped, value in told]


def among_others(line: bytes, form: Form, columns: tuple[Column, ...] = COLUMNS) -> Any:
    """What a line gives between good and bad neighbours; the same as alone."""
    plain = b"7\tx\ty" if form.log_format == "tsv" else b"7,x,y"
    good = b'{"a":7,"b":"x"}' if form.log_format == "json" else plain
    around = [good, b'"', line, b"\xff", good]
    found = read(around, form, columns)
    assert isinstance(found[0], tuple) and found[0] == found[4] and found[3] == "not_utf8"
    assert read([line], form, columns) == [found[2]]
    return found[2]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"1,x,y", (1, "x", "y")),
        (b"1,,", (1, "", None)),  # null only where the column may be
        (b'1,"",""', (1, "", "")),  # quotes tell an empty text from nothing
        (b'"1","a,b","c""d"', (1, "a,b", 'c"d')),
        (b'1,"""",""""""', (1, '"', '""')),
        (b" +1 ,x ,y", (1, "x ", "y")),  # blanks around a number say nothing, in a text they stay
        (b"1,x,y,,", (1, "x", "y")),  # fields too many that are all empty
        (b"1,x,NA", (1, "x", None)),
        (b'1,x,"NA"', (1, "x", "NA")),
        ("1,ä,\U0001f600".encode(), (1, "ä", "\U0001f600")),
        (b"1,x", "too_few_fields"),
        (b"1,x,y,z", "too_many_fields"),
        (b"1,x,y,,z", "too_many_fields"),
        (b'1,"x,y', "open_quote"),
        (b'1,x"y,z"', "bad_quotes"),
        (b'1,"x"y,z', "bad_quotes"),
        (b'1,"x" ,z', "bad_quotes"),
        (b"", "empty_line"),
        (b",x,y", "missing_value:a"),
        (b'"",x,y', "missing_value:a"),
        (b"NA,x,y", "missing_value:a"),
        (b"1,NA,y", "missing_value:b"),
        (b"one,x,y", "bad_value:a"),
        (b"1.0,x,y", "bad_value:a"),
        (b"0x1F,x,y", "bad_value:a"),  # Arrow would read 31
        (b"9223372036854775808,x,y", "bad_value:a"),
        (b"-9223372036854775808,x,y", (-(1 << 63), "x", "y")),
        (b"1,\xff,y", "not_utf8"),
        (b"1,x\0,y", "not_utf8"),
    ],
)
def test_csv(line: bytes, found: Any) -> None:
    assert among_others(line, Form("csv", null_texts=("NA",))) == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'1\t"x\t"', (1, '"x', '"')),  # a quote is a character like any other
        (b"1\tx,y\tz\t\t", (1, "x,y", "z")),
        (b"\t\t", "missing_value:a"),
        (b"1 x y", "too_few_fields"),
    ],
)
def test_tsv(line: bytes, found: Any) -> None:
    assert among_others(line, Form("tsv")) == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"a":1,"b":"x"}', (1, "x", None, None, None)),
        (b' {"b":"","a":-0,"c":null,"tags":[],"f":0.5} \t', (0, "", None, 0.5, [])),
        (b'{"a":1,"b":"\\u00e4","z":{"a":[1,{"b":2}]}}', (1, "ä", None, None, None)),  # others hold anything
        (b'{"a":1,"b":"}x NaN: Infinity"}', (1, "}x NaN: Infinity", None, None, None)),
        (b"", "empty_line"),
        (b" \t", "empty_line"),
        (b"{}", "missing_value:a"),
        (b'{"a":null,"b":"x"}', "missing_value:a"),
        (b'{"a":1,"b":"x"', "not_json_object"),
        (b'{"a":1,"b":"x"}{"a":1,"b":"x"}', "not_json_object"),  # two in a line
        (b'{"a":1,"b":"x"}null{}', "not_json_object"),  # this one ends Arrow's process
        (b"null", "not_json_object"),  # and this
        (b"[1]", "not_json_object"),
        (b"1", "not_json_object"),
        (b'{"a":01,"b":"x"}', "not_json_object"),
        (b"{'a':1}", "not_json_object"),
        (b'{"a":1,"b":"x",}', "not_json_object"),
        (b'{"a":1,"b":"x\ty"}', "not_json_object"),
        (b'{"a":1,"b":"x","z":NaN}', "not_json_object"),  # Python writes it, JSON has it not
        (b'{"a":1,"b":"x","z":"\\ud800"}', "not_json_object"),
        (b'{"a":1,"b":"\\ud800"}', "bad_value:b"),
        (b'{"a":1,"b":"x\\u0000"}', "not_utf8"),  # as a NUL in the line itself
        (b'{"a":1,"b":"x","tags":["u","\\u0000v"]}', "not_utf8"),
        (b'{"a":1,"b":"x\\\\u0000"}', (1, "x\\u0000", None, None, None)),  # a backslash and letters
        (b'{"a":1,"b":"x","z":"\\u0000"}', (1, "x", None, None, None)),  # in a field that nobody reads
        (b'{"a":1,"a":1,"b":"x"}', "duplicate_key:a"),
        (b'{"a":null,"\\u0061":1,"b":"x"}', "duplicate_key:a"),
        (b'{"a":1.0,"b":"x"}', "bad_value:a"),
        (b'{"a":"1","b":"x"}', "bad_value:a"),
        (b'{"a":true,"b":"x"}', "bad_value:a"),
        (b'{"a":9223372036854775808,"b":"x"}', "bad_value:a"),
        (b'{"a":1,"b":2}', "bad_value:b"),
        (b'{"a":1,"b":{"c":"x"}}', "bad_value:b"),
        (b'{"a":1,"b":"x","f":1e39}', "bad_value:f"),  # beyond float32
        (b'{"a":1,"b":"x","f":1e999}', "bad_value:f"),
        (b'{"a":1,"b":"x","f":' + b"1" * 400 + b"}", "bad_value:f"),
        (b'{"a":1,"b":"x","tags":["u",null]}', "bad_value:tags"),
        (b'{"a":1,"b":"x","tags":["u",1]}', "bad_value:tags"),
        (b'{"a":1,"b":"x","tags":["u"]}', (1, "x", None, None, ["u"])),
        (b"{" + b'"z":{' * 3000 + b"}" * 3001, "missing_value:a"),  # deeper than Python reads
    ],
)
def test_json(line: bytes, found: Any) -> None:
    assert among_others(line, Form("json"), JSON_COLUMNS) == found


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (pa.float32(), "1e39", "bad_value:a"),
        (pa.float64(), "1e39", 1e39),
        (pa.float64(), "1e999", "bad_value:a"),
        (pa.float64(), "-inf", float("-inf")),
        (pa.float64(), " .5", 0.5),
        (pa.bool_(), "TRUE", True),
        (pa.bool_(), " 0", False),
        (pa.bool_(), "2", "bad_value:a"),
        (pa.binary(), "ä", "ä".encode()),
        (pa.timestamp("us"), "2019-11-24 00:00:17.004101+01:00", 1574550017004101),
        (pa.timestamp("us"), "2019-11-24T00:00:17Z", 1574553617000000),
        (pa.timestamp("us"), "2019-11-24", 1574553600000000),  # no zone: UTC
        (pa.timestamp("us"), "24.11.2019", "bad_value:a"),
        (pa.timestamp("us"), "2019-11-24T00:00:17.0041019Z", 1574553617004101),  # .NET's 7 digits are rounded down
        (pa.timestamp("us"), "2019-11-24 00:00:17.004101999+01:00", 1574550017004101),  # and nanoseconds
        (pa.timestamp("us"), "1969-12-31T23:59:59.9999999", -1),
        (pa.timestamp("us"), "2019-11-24T00:00:17.0041019.1", "bad_value:a"),
    ],
)
def test_types(kind: pa.DataType, text: str, value: Any) -> None:
    for lines in ([f"{text},x,y".encode()], [b"rubbish,x,y", f"{text},x,y".encode(), b"1,x,y", b"2019-01-01,x,y"]):
        reasons, drops = Reasons(len(lines)), Reasons(len(lines))
        columns = (Column("a", kind),)
        found = read_table(pa.array(lines, pa.binary()), Form("csv"), NAMES, columns, reasons, drops)["a"]
        place = int(len(lines) > 1)
        plain = found.cast(pa.int64()) if pa.types.is_timestamp(kind) else found
        assert (reasons.tolist()[place] or plain[place].as_py()) == value


@given(
    st.datetimes(datetime.fromisoformat("0001-01-02"), datetime.fromisoformat("9999-12-30")),
    st.text("0123456789", max_size=9),
    st.sampled_from(["", "Z", "+02:00", "-0530"]),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_times_are_read_as_python_reads_them_without_digits_after_microseconds(
    moment: datetime, digits: str, zone: str, with_t: bool
) -> None:
    text = moment.strftime("%H:%M:%S") + (f".{digits}" if digits else "")
    text = f"{moment.date().isoformat()}{'T' if with_t else ' '}{text}{zone}"
    whole = datetime.fromisoformat(text.replace(f".{digits}", "." + digits[:6].ljust(6, "0")) if digits else text)
    whole = whole if whole.tzinfo else whole.replace(tzinfo=UTC)
    micros = (whole - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    columns = (Column("a", pa.timestamp("us")),)
    for line, form in ((f"{text},x,y", Form("csv")), (json.dumps({"a": text}), Form("json"))):
        reasons = Reasons(1)
        found = read_table(pa.array([line.encode()]), form, NAMES, columns, reasons, Reasons(1))["a"]
        assert (reasons.tolist(), found.cast(pa.int64()).to_pylist()) == ([None], [micros])
    seconds, good = seconds_of_text(pa.array([text]))
    assert (good.tolist(), seconds.tolist()) == ([True], [micros // 1_000_000])


def test_the_quarantine_shows_a_bad_value_and_the_type_wanted() -> None:
    columns = (Column("a", pa.float32(), nullable=True), Column("c", TAGS, nullable=True))
    nines = f'"{"9" * 59}...'
    of_json = {
        b'{"a":"1","c":[]}': 'bad_value:a: "1" is no float32',
        b'{"a":1e39,"c":[]}': "bad_value:a: 1e39 is no float32",
        b'{"a":{"b":1}}': "bad_value:a: {...} is no float32",
        b'{"c":["u",null,1.50]}': 'bad_value:c: ["u", null, 1.50] is no list of string',
        b'{"c":["u",null]}': 'bad_value:c: ["u", null] is no list of string',
        b'{"c":[]} []': "not_json_object",
    }
    table: list[tuple[str, tuple[Column, ...], dict[bytes, str]]] = [
        ("csv", (Column("a", pa.int64()),), {b"o\ne,x,y": 'bad_value:a: "o\\ne" is no int64', b"x": "too_few_fields"}),
        (
            "csv",
            (Column("c", pa.timestamp("us")),),
            {b"1,x," + b"9" * 99: f"bad_value:c: {nines} is no time in ISO 8601"},
        ),
        ("json", columns, of_json),
    ]
    for log_format, kinds, cases in table:
        good = {"csv": b"7,x,2019-11-24", "json": b'{"a":7,"c":["x"]}'}[log_format]
        lines = [line for bad in cases for line in (good, bad)]
        reasons, drops = Reasons(len(lines)), Reasons(len(lines))
        read_table(pa.array(lines, pa.binary()), Form(log_format), NAMES, kinds, reasons, drops)
        assert reasons.names(~reasons.good).to_pylist() == list(cases.values())
        assert set(reasons.counts()) == {reason.partition(": ")[0] for reason in cases.values()}


def one_by_one(text: str, width: int) -> list[str] | None:
    """The definition of a CSV line, a character at a time."""
    fields, plain, at = [], [], 0
    while True:
        value = ""
        quoted = text[at : at + 1] == '"'
        if quoted:
            at += 1
            while text[at : at + 1] != '"' or text[at : at + 2] == '""':
                if at >= len(text):
                    return None
                value += text[at]
                at += 2 if text[at] == '"' else 1
            at += 1
            if text[at : at + 1] not in ("", ","):
                return None
        else:
            while text[at : at + 1] not in ("", ","):
                if text[at] == '"':
                    return None
                value += text[at]
                at += 1
        fields.append(value)
        plain.append(value == "" and not quoted)
        if at >= len(text):
            break
        at += 1
    return fields[:width] if len(fields) >= width and all(plain[width:]) else None


@given(st.lists(st.text('",xä', max_size=12), min_size=1, max_size=6), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_csv_is_what_one_character_after_the_other_gives(lines: list[str], width: int) -> None:
    reasons = Reasons(len(lines))
    fields = split_fields(pa.array(lines), ",", width, reasons, quotes=True)
    values = fields.values.to_pylist()
    found = [None if at < 0 else values[at * width : (at + 1) * width] for at in fields.line.tolist()]
    assert found == [one_by_one(line, width) for line in lines]
    assert [reason is None for reason in reasons.tolist()] == [row is not None for row in found]


PIECES = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    " ",
    '"a"',
    '"b"',
    '"x"',
    "1",
    "-0.5e3",
    "null",
    "true",
    "NaN",
    "\\",
    '"',
    "é",
    "\t",
]
GOOD = [json.dumps({"a": n, "b": "x" * n, "c": None, "tags": ["t"], "z": {"y": [n]}}) for n in range(3)]


@given(
    st.lists(st.one_of(st.sampled_from(GOOD), st.lists(st.sampled_from(PIECES), max_size=9).map("".join)), max_size=9)
)
@settings(max_examples=100, deadline=None)
def test_json_that_is_none_neither_ends_the_process_nor_changes_its_neighbours(lines: list[str]) -> None:
    raw = [line.encode() for line in lines]
    found = read(raw, Form("json"), JSON_COLUMNS)
    assert found == [read([line], Form("json"), JSON_COLUMNS)[0] for line in raw]
    for line, row in zip(lines, found, strict=True):
        if line in GOOD:
            assert row[0] == json.loads(line)["a"]
        elif isinstance(row, tuple):
            document = json.loads(line)
            assert (row[0], row[1]) == (document["a"], document["b"])


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=8), st.sampled_from(["tsv", "csv", "json"]))
@settings(max_examples=100, deadline=None)
def test_any_bytes_give_a_row_or_a_reason(lines: list[bytes], log_format: str) -> None:
    lines = [line.replace(b"\n", b"") for line in lines]
    found = read(lines, Form(log_format), JSON_COLUMNS if log_format == "json" else COLUMNS)
    assert all(isinstance(row, tuple | str) for row in found) and len(found) == len(lines)
