"""Fuzz targets: logs, from the bytes of a file to rows, refused lines and counts."""

from __future__ import annotations

import bz2
import gzip
from collections import Counter
from collections.abc import Callable

import pyarrow as pa

from lockstep.etl.input.files import Range, find_sources
from lockstep.etl.input.unpack import PLAIN, codec_of, unpacked
from lockstep.etl.logs.formats import LOG_FORMATS, Form
from lockstep.etl.logs.json_lines import read_objects
from lockstep.etl.logs.parse import BAD, DIGEST, ROW, SUFFIX, SUMMARY, LineParser, Work, parse_ranges
from lockstep.etl.logs.plan import kinds_in, names_asked, names_in
from lockstep.etl.logs.records import RecordLines
from lockstep.etl.logs.server_log import seconds_of_text
from lockstep.etl.logs.values import Column, Reasons, as_text
from lockstep.etl.logs.web import WebLines
from lockstep.etl.split.sampling import Sampling
from lockstep.etl.split.splits import SplitSpec
from tests.fuzz.target import Take, Target, refused, scratch, verdict

MAX_UNPACKED_BYTES = 8 << 20
_CLF = b'host - - [09/Jul/1995:00:00:00 -0400] "GET /a?b HTTP/1.0" 200 6245'
_COMBINED = _CLF + b' "http://from/" "Mozilla/5.0 (a \\"b\\")"'
_ALB = b'http 2024-05-03T08:07:57.1Z app/lb 1.1.1.1:2817 - 0.1 0.1 0.1 200 200 0 57 "GET http://h:80/a?b HTTP/1.1" "x"'
_NAMES = ("host", "time", "method", "url", "status", "n", "u", "x", "t", "on", "raw", "ns", "ss", "when")
_KINDS = {
    "n": pa.int64(),
    "u": pa.uint64(),
    "x": pa.float64(),
    "t": pa.string(),
    "on": pa.bool_(),
    "raw": pa.binary(),
    "when": pa.timestamp("us"),
}
_LISTS = {"ns": pa.list_(pa.field("element", pa.int64())), "ss": pa.list_(pa.field("element", pa.string()))}
_JSON = (
    b'{"host":"h","time":804571200,"method":"GET","url":"/a","status":"200","n":1,"u":18446744073709551615,"x":1.5e3,"t":"\\u00e9","on":true,'
    b'"raw":"ab","ns":[1,2],"ss":["a",""],"when":"2015-05-17T10:05:03Z"}'
)
_FIELDS = (
    b"h",
    b"804571200",
    b"GET",
    b"/a",
    b"200",
    b"1",
    b"18446744073709551615",
    b"1.5",
    b"text",
    b"yes",
    b"ab",
    b"",
    b"",
    b"2015-05-17",
)


def parser_of(take: Take) -> tuple[LineParser, tuple[str, ...]]:
    """A parser of any log format, for web requests or for records, and the names of a line's fields."""
    log_format = ("common", "combined", "tsv", "csv", "json", "w3c", "alb")[take.number(7)]
    odd = take.number(8)
    form = Form(log_format, ("NA", "-") if odd & 1 else (), False, bool(odd & 2) and log_format == "csv")
    if log_format in ("common", "combined", "w3c", "alb") or odd & 4:
        by_role = {"visitor": "host", "time": "time", "status": "status", "method": "method", "target": "url"}
        return WebLines(form, by_role), _NAMES
    kinds = {**_KINDS, **(_LISTS if log_format == "json" else {})}
    columns = [Column(name, kind, nullable=name in ("x", "ns", "ss", "when")) for name, kind in kinds.items()]
    return RecordLines(form, tuple(columns), ("when",)), _NAMES


def web_logs(data: bytes) -> None:
    """Whole, in two ranges and line by line the same rows come out, and each line is a row, refused or dropped."""
    take = Take(data)
    parser, names = parser_of(take)
    cut = take.number(256)
    body = take.rest()
    if not body:
        return
    url = scratch(body)
    whole = _parsed(parser, names, url, [(0, len(body))])
    if parser.form.log_format == "w3c" and b"#" in body:
        return  # a directive decides how later lines are read
    if not parser.form.quoted_newlines and 0 < cut < len(body):
        assert _parsed(parser, names, url, [(0, cut), (cut, len(body) - cut)]) == whole
    lines = body.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if len(lines) > 1 and not parser.form.quoted_newlines:
        alone = Counter[str]()
        for line in lines[:4]:
            if line:
                alone += _parsed(parser, names, scratch(line, "line"), [(0, len(line))])[1]
        if len(lines) <= 4 and all(lines) and not any(line.startswith(b"\xef\xbb\xbf") for line in lines):
            assert alone == whole[1], f"{alone} alone, {whole[1]} together"


def _parsed(
    parser: LineParser, names: tuple[str, ...], url: str, parts: list[tuple[int, int]]
) -> tuple[int, Counter[str]]:
    """How many lines there are, and how often each row, reason and drop comes out, places left out."""
    lines, found = 0, Counter[str]()
    for start, length in parts:
        kept = bad = dropped = 0
        for batch in parse_ranges([Work(Range(0, url, start, length, PLAIN), names)], parser):
            batch.validate(full=True)
            for row in batch.to_pylist():
                if row["_kind"] in (DIGEST, SUFFIX):
                    continue
                if row["_kind"] == SUMMARY:
                    lines += row["_lines"] or 0
                    dropped += row["_dropped_lines"] or 0
                    bad -= row["_bad"] or 0
                    kept -= row["_lines"] or 0
                    if row["_reason"]:
                        found[row["_reason"]] += row["_dropped_lines"]
                elif row["_kind"] == BAD:
                    bad += 1
                    kept += 1
                    found[row["_reason"]] += 1
                else:
                    assert row["_kind"] == ROW
                    kept += 1
                    found[repr([row[name] for name in parser.schema.names])] += 1
        assert bad == 0 and kept + dropped == 0, f"read is not kept + refused + dropped: {kept}, {bad}, {dropped}"
    return lines, found


def log_seeds() -> list[bytes]:
    """A file of each format, with the choices in front."""
    tables = [b",".join(_FIELDS), b"\t".join(_FIELDS)]
    return [
        bytes([0, 0, 9]) + _CLF + b"\n" + _CLF + b' "more"\r\n\n-',
        bytes([1, 0, 40]) + _COMBINED + b"\n" + _COMBINED,
        *(bytes([2, odd, 9]) + tables[1] + b"\n" + tables[1] + b"\t\t" for odd in (0, 4)),
        *(bytes([3, odd, 9]) + tables[0] + b"\n" + tables[0].replace(b"text", b'"a,""b"') for odd in (0, 1, 2, 4)),
        *(bytes([4, odd, 9]) + _JSON + b"\n" + _JSON.replace(b"804571200", b'"09/Jul/1995:00:00:00 -0400"')
          for odd in (0, 4)),
        bytes([5, 0, 9]) + b" ".join(_FIELDS) + b"\n#Fields: host time url method status\n\"a b\" 5 /a GET 200",
        bytes([6, 0, 9]) + _ALB + b"\n" + _ALB[5:],
    ]  # fmt: skip


def packed_inputs(data: bytes) -> None:
    """A packed file unpacks piece by piece, to the same bytes whatever the pieces, or is refused."""
    url = scratch(data)
    codec = codec_of(data[:10])
    if codec == PLAIN:
        return

    def unpack(step: int) -> Callable[[], bytes]:
        def read() -> bytes:
            done = b""
            with open(url, "rb") as file:
                for piece in unpacked(url, file, codec, step):
                    assert 0 < len(piece) <= step
                    done += piece
                    if len(done) > MAX_UNPACKED_BYTES:
                        break
            return done

        return read

    large, small = verdict(unpack(1 << 20)), verdict(unpack(1 << 12))
    if all(not isinstance(found, bytes) or len(found) < MAX_UNPACKED_BYTES for found in (large, small)):
        assert large == small


def packed_seeds() -> list[bytes]:
    text = b"line\n" * 40
    zstd = pa.BufferOutputStream()
    with pa.CompressedOutputStream(zstd, "zstd") as stream:
        stream.write(text)
    packed = [gzip.compress(text, mtime=0), bz2.compress(text), zstd.getvalue().to_pybytes()]
    return [*packed, *(one + one for one in packed), gzip.compress(bytes(1 << 20), mtime=0)]


def json_lines(data: bytes) -> None:
    """A line of JSON gives the same values, or is refused for the same reason, alone and among others."""
    text, broken = as_text(pa.array(data.split(b"\n")[:8], pa.binary()))
    lines = text.filter(pa.array(~broken))
    kinds = {**_KINDS, **_LISTS, "status": pa.decimal128(18, 0), "time": pa.decimal128(38, 12)}
    together = _objects(lines, kinds)
    for place in range(len(lines)):
        assert _objects(lines.slice(place, 1), kinds) == together[place : place + 1], lines[place]


def _objects(lines: pa.Array, kinds: dict[str, pa.DataType]) -> list[tuple[object, ...]]:
    """Each line's reason and its values."""
    reasons = Reasons(len(lines))
    found = read_objects(lines, kinds, reasons)
    for values in found.values():
        values.validate(full=True)
    columns = [values.to_pylist() for values in found.values()]
    return [
        (reason, repr([column[place] for column in columns]) if reason is None else "")
        for place, reason in enumerate(reasons.tolist())
    ]


def headers(data: bytes) -> None:
    """The names in a table's first line and the kinds of its first JSON objects."""
    take = Take(data)
    log_format = ("tsv", "csv", "json")[take.number(3)]
    quoted = bool(take.number(2)) and log_format == "csv"
    url = scratch(take.rest())
    with refused():
        (source,) = find_sources([url])
        assert all(isinstance(name, str) for name in names_in(source, Form(log_format, quoted_newlines=quoted)))
        if LOG_FORMATS[log_format].keyed:
            kinds_in([source], LOG_FORMATS[log_format])


def times(data: bytes) -> None:
    """Times as text: alone and among others each is the same number of seconds, or none."""
    texts = [part.decode("utf-8", errors="ignore") for part in data.split(b"\n")[:32]]
    seconds, good = seconds_of_text(pa.array(texts, pa.string()))
    for text, value, known in zip(texts, seconds.tolist(), good.tolist(), strict=True):
        alone, sure = seconds_of_text(pa.array([text], pa.string()))
        assert (alone.tolist(), sure.tolist()) == ([value], [known]), text


def flags(data: bytes) -> None:
    """What a person writes after --split, --sample and --label."""
    text = data.decode("utf-8", errors="replace")
    names_asked(text)
    for parse in (SplitSpec.parse, Sampling.parse):
        with refused():
            parse(text)
    with refused():
        split = SplitSpec.parse(text)
        assert SplitSpec.parse(split.text) == split


TARGETS = (
    Target("logs", web_logs, log_seeds),
    Target(
        "json_lines", json_lines, lambda: [_JSON, _JSON + b"\n" + _JSON, b'{"n":1}\n{"ns":[1,null]}\n{"x":1e400}\n{}']
    ),
    Target("packed", packed_inputs, packed_seeds, 16384),
    Target(
        "headers",
        headers,
        lambda: [b"\0\0a\tb\t\n1\t2", b'\1\1"a ""b"\nc",d\n', b'\2\0{"a":1,"b":[{}]}\n[1]\n{"a":1.5}'],
    ),
    Target(
        "times",
        times,
        lambda: [
            b"804571200\n1.5\n-0.5\n09/Jul/1995:00:00:00 -0400\n[29/Feb/2016:23:59:60 +2359]\n"
            b"2015-05-17T10:05:03.5Z\n2015-05-17 10:05\n0001-01-01\n9999-12-31T23:59:59+14:00\n\n "
        ],
    ),
    Target(
        "flags",
        flags,
        lambda: [
            b"80/20",
            b"kfold:5:a",
            b"time:t:1/1",
            b"stratified:y:8/1/1",
            b"y=0:1/10,y=1:100%",
            b"`a` > r'b' -- c",
        ],
        512,
    ),
)
