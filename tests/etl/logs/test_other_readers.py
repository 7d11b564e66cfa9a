"""The readers of lines against others: pandas, Python's csv and json, and a slow parser of server logs.

Files are generated with their rows; the parser gives the same rows, or refuses a line with file, position and reason.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.logs.parse import BAD, ROW, SUMMARY, parse_ranges
from lockstep.etl.logs.plan import plan_of
from lockstep.etl.logs.server_log import parse_combined, parse_common
from lockstep.storage.errors import DataError

EXAMPLES = 200
NAMES = ("k", "a", "b", "c")
SCHEMA = json.dumps({"fields": [{"name": name, "dtype": "string", "nullable": name != "k"} for name in NAMES]})
Row = tuple[str | None, ...]


def read(folder: Path, data: bytes, log_format: str, **options: Any) -> tuple[list[Row], list[dict[str, Any]], int]:
    """The rows of a file, read in pieces, what is refused, and how many records were counted."""
    path = folder / "in"
    path.write_bytes(data)
    plan = plan_of(
        LogsConfig(
            inputs=(str(path),),
            output=str(folder / "out"),
            log_format=log_format,
            schema=SCHEMA,
            split_bytes=max(40, len(data) // 20),
            **options,
        )
    )
    found = pa.Table.from_batches(list(parse_ranges(plan.work, plan.parser))).to_pylist()
    rows = [(row["_position"], tuple(row[name] for name in NAMES)) for row in found if row["_kind"] == ROW]
    refused = [row for row in found if row["_kind"] == BAD]
    counted = sum(row["_lines"] or 0 for row in found if row["_kind"] == SUMMARY)
    return [row for _, row in sorted(rows, key=lambda row: row[0])], refused, counted


TEXT = st.text(
    st.one_of(
        st.sampled_from(list("ab,\t\"'|;\\ \n\r\x0b\x1c\x85\u2028\ufeff")),
        st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
    ),
    max_size=6,
)
LONG = st.sampled_from([900, 70_000]).map(lambda length: 'x, "' * (length // 4))
CELL = st.one_of(*[TEXT] * 9, st.none(), st.sampled_from(["NA", "null", "", '"', '""']), LONG)


def table(cells: st.SearchStrategy[str | None]) -> st.SearchStrategy[list[Row]]:
    """Rows with a number of their own, so that none is taken for another."""
    rows = st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=8)
    return rows.map(lambda found: [(str(number), *row) for number, row in enumerate(found)])


@given(table(CELL), st.sampled_from(["\n", "\r\n"]), st.sampled_from([b"", b"\xef\xbb\xbf"]), st.booleans(), st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_csv_is_read_as_by_pandas_and_python(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], end: str, bom: bytes, packed: bool, data: st.DataObject
) -> None:
    out = io.StringIO()
    mark = data.draw(st.sampled_from([",", ",", ";", "|", "\t"]))
    plain, full = (
        csv.writer(out, delimiter=mark, lineterminator=end, quoting=quoting)
        for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)
    )
    plain.writerow(NAMES)
    expected: list[Row] = []
    for row in rows:
        # Python 3.11 does not put a carriage return in quotes by itself
        quoted = data.draw(st.booleans()) or any("\r" in (cell or "") for cell in row)
        (full if quoted else plain).writerow(row)
        out.write(data.draw(st.sampled_from(["", "", end])))
        # with quotes nothing is an empty text, without an empty text is nothing
        expected.append(tuple(cell or ("" if quoted else None) for cell in row))
    text = out.getvalue()
    content = bom + text.encode()
    folder = tmp_path_factory.mktemp("csv")
    given_mark = {} if mark == "," else {"delimiter": mark}
    packed_content = gzip.compress(content) if packed else content
    found, refused, _ = read(folder, packed_content, "csv", quoted_newlines=True, **given_mark)
    assert (found, refused) == (expected, [])
    line_end = "\n" if end == "\n" else None
    theirs = pd.read_csv(io.BytesIO(content), sep=mark, dtype=str, keep_default_na=False, lineterminator=line_end)
    mine = [[cell or "" for cell in row] for row in found]
    assert mine == theirs.values.tolist()
    assert mine == [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=mark) if row][1:]
    whole = all("\n" not in (cell or "") for row in rows for cell in row)
    if whole:
        assert read(folder, content, "csv", **given_mark)[:2] == (expected, [])


@given(
    st.lists(st.sampled_from(['"', '""', ",", "\n", "\r\n", "a", "b ", "é", '"x"', '"y\nz"', ',"', '",']), max_size=40),
    st.booleans(),
)
@settings(max_examples=EXAMPLES, deadline=None)
def test_any_csv_gives_the_rows_that_python_reads_or_a_reason(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], quoted_newlines: bool
) -> None:
    """Whatever is kept is a row of Python's reader, at its place; what is not is refused. Nothing is swallowed."""
    body = "".join(pieces)
    text = f"k,a,b,c\n0,x,y,z\n{body}\n9,x,y,z\n"
    try:
        found, refused, _ = read(tmp_path_factory.mktemp("csv"), text.encode(), "csv", quoted_newlines=quoted_newlines)
    except DataError as error:
        assert error.got and error.next_step
        return
    theirs = [tuple(row) for row in _rows(text, quoted_newlines)]
    for row in found:
        cells = tuple(cell or "" for cell in row)
        assert any(cells == other[:4] and not any(other[4:]) for other in theirs), (cells, theirs)
    assert all(row["_reason"] and row["_position"] > 0 for row in refused)
    assert all(row["_raw"].decode() in text for row in refused)
    assert len(found) + len(refused) == len(theirs)


def _rows(text: str, quoted_newlines: bool) -> list[list[str]]:
    """The rows behind the header, by Python's reader."""
    if quoted_newlines:
        return [row for row in csv.reader(io.StringIO(text, newline="")) if row][1:]
    return [row for line in text.split("\n")[1:] for row in csv.reader([line.removesuffix("\r")]) if row]


@given(
    table(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\t\n\r"), max_size=6)), st.booleans()
)
@settings(max_examples=EXAMPLES, deadline=None)
def test_tsv_is_read_as_by_pandas(tmp_path_factory: pytest.TempPathFactory, rows: list[Row], returns: bool) -> None:
    end = "\r\n" if returns else "\n"
    content = end.join("\t".join(map(str, row)) for row in [NAMES, *rows, ()]).encode()
    found, refused, counted = read(tmp_path_factory.mktemp("tsv"), content, "tsv")
    theirs = pd.read_csv(io.BytesIO(content), sep="\t", dtype=str, keep_default_na=False, quoting=csv.QUOTE_NONE)
    assert ([[cell or "" for cell in row] for row in found], refused) == (theirs.values.tolist(), [])
    assert counted == len(rows)


@given(st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_bytes_of_tables_that_are_no_text_are_refused_by_position(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Latin-1, NULs, missing columns and returns inside a line among good rows, which stay; each other is named."""
    log_format = data.draw(st.sampled_from(["csv", "tsv"]))
    mark = "," if log_format == "csv" else "\t"
    good = "1,a,b,c".replace(",", mark).encode()
    bad = [b"1,\xe9,b,c", b"1,a\0,b,c", b"1,a", b"1,a,b,c,d", b"1,a\rb,c,d", b"1,a,b,c\r\r", b"1,a,b\r2,a,b,c"]
    lines = data.draw(
        st.lists(st.sampled_from([good, *(line.replace(b",", mark.encode()) for line in bad)]), min_size=1)
    )
    content = mark.join(NAMES).encode() + b"\n" + b"\n".join(lines) + b"\n"
    found, refused, counted = read(tmp_path_factory.mktemp("bytes"), content, log_format)
    assert len(found) == lines.count(good) and counted == len(lines)
    places, at = [], len(mark.join(NAMES)) + 1
    for line in lines:
        places += [at] if line != good else []
        at += len(line) + 1
    assert sorted(row["_position"] for row in refused) == places and all(row["_reason"] for row in refused)


@pytest.mark.parametrize("log_format", ["csv", "tsv", "json"])
@pytest.mark.parametrize("names", [("nein", "ja"), ("ja", "nein"), ("rot", "gelb, hell", "1")])
def test_texts_of_a_label_are_the_numbers_that_pandas_gives_them(
    tmp_path: Path, log_format: str, names: tuple[str, ...]
) -> None:
    texts = [names[number * 7 % len(names)] for number in range(30)] + ["Ja?"]
    frame = pd.DataFrame({"y": texts})
    path = tmp_path / "in"
    if log_format == "json":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, index=False, sep="," if log_format == "csv" else "\t", quoting=csv.QUOTE_MINIMAL)
    dtype = "bool" if len(names) == 2 else "int64"
    schema = json.dumps({"fields": [{"name": "y", "dtype": dtype, "kind": "label", "class_names": list(names)}]})
    plan = plan_of(LogsConfig(inputs=(str(path),), output=str(tmp_path / "out"), log_format=log_format, schema=schema))
    found = pa.Table.from_batches(list(parse_ranges(plan.work, plan.parser))).to_pylist()
    codes = pd.Categorical(texts, categories=list(names)).codes.tolist()
    assert [int(row["y"]) for row in found if row["_kind"] == ROW] == [code for code in codes if code >= 0]
    (refused,) = [row["_reason"] for row in found if row["_kind"] == BAD]
    assert refused == f'bad_value:y: "Ja?" is none of class_names {", ".join(names)}'


def test_booleans_of_json_stay_such_where_the_label_has_names(tmp_path: Path) -> None:
    path, rows = tmp_path / "in", [{"y": number % 3 == 0} for number in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    schema = json.dumps({"fields": [{"name": "y", "dtype": "bool", "kind": "label", "class_names": ["nein", "ja"]}]})
    plan = plan_of(LogsConfig(inputs=(str(path),), output=str(tmp_path / "out"), log_format="json", schema=schema))
    found = pa.Table.from_batches(list(parse_ranges(plan.work, plan.parser))).to_pylist()
    assert [row["y"] for row in found if row["_kind"] == ROW] == [row["y"] for row in rows]


JSON_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@given(table(st.one_of(JSON_TEXT, st.none())), st.booleans(), st.sampled_from(["\n", "\r\n", "\n\n"]), st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_json_is_read_as_by_python(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], ascii_only: bool, end: str, data: st.DataObject
) -> None:
    lines = []
    for row in rows:
        document: dict[str, Any] = dict(zip(NAMES, row, strict=True))
        document |= data.draw(st.sampled_from([{}, {"z": [1, {"a": None}]}, {"é": 'x"}{'}]))
        lines.append(json.dumps(document, ensure_ascii=ascii_only))
    content = "".join(line + end for line in lines).encode()
    found, refused, _ = read(tmp_path_factory.mktemp("json"), content, "json")
    theirs = [json.loads(line) for line in content.decode().split("\n") if line.strip()]
    good = [document for document in theirs if "\0" not in "".join(filter(None, (document[name] for name in NAMES)))]
    assert found == [tuple(document[name] for name in NAMES) for document in good]
    assert [row["_reason"] for row in refused] == ["not_utf8"] * (len(theirs) - len(good)), "a NUL, however written"


WORD = st.text("abcXYZ019._/:;=%&?+-()é", min_size=1, max_size=8)
HOST = st.one_of(st.just("192.0.2.7"), st.just("2001:db8::1"), st.just("h1.example.org"), st.just("-"))
AGENT_PLAIN = st.lists(WORD, min_size=1, max_size=3).map(" ".join)
AGENT = st.one_of(
    st.just("-"),
    st.just(""),
    AGENT_PLAIN,
    AGENT_PLAIN.map(lambda text: text + r" \"x\" y"),
    AGENT_PLAIN.map(lambda text: text + r"\x22"),
    AGENT_PLAIN.map(lambda text: text + ' "x" y'),  # that nobody escaped
    AGENT_PLAIN.map(lambda text: f'"{text}"'),
    AGENT_PLAIN.map(lambda text: text + "\\"),
)


@st.composite
def log_lines(draw: st.DrawFn) -> dict[str, Any]:
    """A line as a server writes it, with what it says."""
    host = draw(HOST)
    proxies = (
        draw(st.lists(st.sampled_from(["198.51.100.7", "10.0.0.1", "unknown"]), max_size=2)) if host != "-" else []
    )
    vhost = draw(st.sampled_from(["", "", "www.example.org:443 ", "example.org "]))
    user = draw(st.sampled_from(["-", "frank", "Ann Example", r"CORP\Ann van Example", '"J. Doe"', "a@b.c"]))
    method, page, query = draw(st.sampled_from(["GET", "POST"])), "/" + draw(WORD).replace("?", ""), draw(WORD)
    target = page + draw(st.sampled_from(["", f"?{query}"]))
    request = draw(st.sampled_from([f"{method} {target} HTTP/1.1", f"{method} {target}", "-"]))
    status, size = draw(st.sampled_from(["200", "304", "404", "-"])), draw(st.sampled_from(["-", "0", "512"]))
    referrer, agent = draw(st.sampled_from(["-", "http://a.b/?q=x y", r"http://a/\"b\""])), draw(AGENT)
    stamp = draw(st.sampled_from(["03/May/2024:08:07:57 +0000", "29/Feb/2024:23:59:59 -0530"]))
    apart = draw(st.sampled_from([", ", ","]))
    end = draw(st.sampled_from(["", "", " ", ' 0.003 "-"']))
    if end.strip() and ('" ' in agent.replace(r"\" ", "") or agent.endswith("\\")):
        end = ""  # with a field behind, an agent with open quotes may end in several places
    front = f"{vhost}{apart.join([host, *proxies])} - {user} [{stamp}] "
    text = f'{front}"{request}" {status} {size} "{referrer}" "{agent}"{end}'
    asked = request != "-"
    return {
        "text": text,
        "visitor": host,
        "time": int(datetime.strptime(stamp, "%d/%b/%Y:%H:%M:%S %z").timestamp()),
        "method": method if asked else "",
        "page": page if asked else "",
        "query": query if asked and "?" in target else "",
        "status": 0 if status == "-" else int(status),
        "referrer": "" if referrer == "-" else referrer,
        "agent": "" if agent == "-" else agent,
    }


@given(st.lists(log_lines(), min_size=1, max_size=20))
@settings(max_examples=EXAMPLES, deadline=None)
def test_server_logs_say_what_their_writer_wrote(written: list[dict[str, Any]]) -> None:
    lines = [line["text"] for line in written]
    for parse, more in ((parse_combined, ("referrer", "agent")), (parse_common, ())):
        found = parse(pa.array([line.encode() for line in lines]))
        told = dict(zip(lines, found.reasons.tolist(), strict=True))
        if parse is parse_combined:
            no_visitor = {line["text"] for line in written if line["visitor"] == "-"}
            assert told == {line: "not_combined_log" if line in no_visitor else None for line in lines}
        good = found.reasons.good.tolist()
        for name in ("visitor", "time", "method", "page", "query", "status", *more):
            values = getattr(found, name).tolist()
            for text, value, line, fits in zip(lines, values, written, good, strict=True):
                assert not fits or value == line[name], (name, value, text)


def test_what_cannot_be_told_apart_is_refused() -> None:
    lines = [
        'two words - - [03/May/2024:08:07:57 +0000] "GET / HTTP/1.1" 200 5 "-" "a"',
        'h ident Ann Example [03/May/2024:08:07:57 +0000] "GET / HTTP/1.1" 200 5 "-" "a"',
        'www.example.org:80 1.2.3.4 ident - [03/May/2024:08:07:57 +0000] "GET / HTTP/1.1" 200 5 "-" "a"',
        'h - - [03/May/2024:08:07:57 +0000] "GET / HTTP/1.1" 200 5 "-" "cut',
    ]
    found = parse_combined(pa.array([line.encode() for line in lines]))
    assert found.reasons.tolist() == ["not_combined_log"] * len(lines)
