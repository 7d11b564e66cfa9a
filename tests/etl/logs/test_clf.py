"""The Common Log Format, line by line, with the reason for each case."""

from __future__ import annotations

from datetime import UTC, datetime
from ipaddress import ip_address

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.etl.logs import server_log
from lockstep.etl.logs.pages import ASSET_SUFFIXES, Suffixes, is_page
from lockstep.etl.logs.server_log import parse_common
from lockstep.etl.reasons import BAD_TIME, NOT_COMBINED_LOG, NOT_COMMON_LOG, NOT_UTF8

STAMP = "09/Jul/1995:00:00:07 -0400"
SECONDS = int(datetime(1995, 7, 9, 4, 0, 7, tzinfo=UTC).timestamp())


def line(
    host: str = "h", stamp: str = STAMP, request: str = "GET /a HTTP/1.0", status: str = "200", size: str = "5"
) -> bytes:
    return f'{host} - - [{stamp}] "{request}" {status} {size}'.encode()


def parsed(*lines: bytes):
    return parse_common(pa.array(list(lines), type=pa.binary()))


@pytest.mark.parametrize(
    ("request_line", "method", "page", "query"),
    [
        ("GET /a/b.html HTTP/1.0", "GET", "/a/b.html", ""),
        ("GET /a/b.html", "GET", "/a/b.html", ""),  # HTTP/0.9 names no protocol
        ("GET /cgi?99,1?2 HTTP/1.0", "GET", "/cgi", "99,1?2"),  # only the first ? parts
        ("HEAD / HTTP/1.1", "HEAD", "/", ""),
        ("GET /a.html HTTP/V1.0", "GET", "/a.html", ""),  # as a browser of 1995 has it
        ("GET /a?b http/1.0", "GET", "/a", "b"),
        ("GET /a b HTTP/", "GET", "/a b", ""),
        ("GET /HTTP/1.0 HTTP/1.0", "GET", "/HTTP/1.0", ""),
        ("GET /HTTP/1.0", "GET", "/HTTP/1.0", ""),
        ("GET /a b.html HTTP/1.0", "GET", "/a b.html", ""),  # real clients sent blanks
        ('GET /a" HTTP/1.0', "GET", '/a"', ""),  # and quotes
        ("GET  /a  HTTP/1.0 ", "GET", "/a", ""),
        ("-", "", "", ""),  # a connection without a request
        ("", "", "", ""),
        ("GET /ü HTTP/1.0", "GET", "/ü", ""),
    ],
)
def test_requests(request_line: str, method: str, page: str, query: str) -> None:
    found = parsed(line(request=request_line))
    assert found.reasons.tolist() == [None]
    assert [found.method[0].as_py(), found.page[0].as_py(), found.query[0].as_py()] == [method, page, query]


@pytest.mark.parametrize(
    ("stamp", "seconds"),
    [
        (STAMP, SECONDS),
        ("09/Jul/1995:04:00:07 +0000", SECONDS),
        ("09/Jul/1995:09:30:07 +0530", SECONDS),
        ("29/Feb/1996:00:00:00 +0000", 825552000),  # a leap day
        ("31/Dec/1995:23:59:60 +0000", 820454400),  # a leap second counts as the next
        ("31/Dec/1969:23:59:59 +0000", -1),
    ],
)
def test_times(stamp: str, seconds: int) -> None:
    found = parsed(line(stamp=stamp))
    assert found.reasons.tolist() == [None] and found.time.tolist() == [seconds]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", NOT_COMMON_LOG),
        (b"noise", NOT_COMMON_LOG),
        (line() + b' "Mozilla', NOT_COMMON_LOG),  # a string behind it that does not end
        (line() + b"  x", NOT_COMMON_LOG),  # two blanks
        (line(status="2000"), NOT_COMMON_LOG),
        (line(size="x"), NOT_COMMON_LOG),
        (line(host="two words"), NOT_COMMON_LOG),
        (line(host="-"), NOT_COMMON_LOG),
        (line(host="-, 10.0.0.1"), NOT_COMMON_LOG),
        (line(stamp="9/Jul/1995:00:00:07 -0400"), NOT_COMMON_LOG),
        (line(stamp="29/Feb/1995:00:00:00 +0000"), BAD_TIME),
        (line(stamp="00/Jul/1995:00:00:00 +0000"), BAD_TIME),
        (line(stamp="09/Jux/1995:00:00:00 +0000"), BAD_TIME),
        (line(stamp="09/Jul/1995:24:00:00 +0000"), BAD_TIME),
        (line(stamp="09/Jul/1995:00:60:00 +0000"), BAD_TIME),
        (line(stamp="09/Jul/1995:00:00:00 +0060"), BAD_TIME),
        (line(stamp="09/Jul/0000:00:00:00 +0000"), BAD_TIME),
        (b"\xff" + line(), NOT_UTF8),
        (line(host="a\0b"), NOT_UTF8),
    ],
)
def test_refused_lines_leave_their_neighbours_alone(text: bytes, reason: str) -> None:
    found = parsed(line(), text, line(host="other"))
    assert found.reasons.tolist() == [None, reason, None]
    assert found.visitor[2].as_py() == "other" and found.time[2] == SECONDS


@pytest.mark.parametrize(
    ("request_line", "status", "page"),
    [
        ("GET /a.html HTTP/1.0", "200", True),
        ("GET /a HTTP/1.0", "206", True),
        ("GET /a.html HTTP/1.0", "304", True),
        ("GET /cgi.pl?a.gif HTTP/1.0", "200", True),  # the suffix of a query says nothing
        ("GET /a.txt HTTP/1.0", "200", True),  # text is read
        ("GET /a.html HTTP/1.0", "302", False),
        ("GET /a.html HTTP/1.0", "404", False),
        ("POST /a.html HTTP/1.0", "200", False),
        ("get /a.html HTTP/1.0", "200", False),  # methods have one case
        ("GET /a.GIF HTTP/1.0", "200", False),
        ("GET /a.mpeg HTTP/1.0", "200", False),
        ("-", "200", False),
    ],
)
def test_what_is_a_page(request_line: str, status: str, page: bool) -> None:
    found = parsed(line(request=request_line, status=status))
    asset = Suffixes.of(found.page).among(ASSET_SUFFIXES)
    assert is_page(found.method, found.page, asset, found.status).tolist() == [page]


def test_no_lines() -> None:
    found = parsed()
    assert len(found.reasons) == 0 and found.time.dtype == np.int64


@pytest.mark.parametrize(
    ("text", "host", "page", "status"),
    [
        (line() + b' "-" "Mozilla" 0.003 "a \\" b"', "h", "/a", 200),  # Nginx adds what it is told to
        (line(host="2001:db8::1%eth0"), "2001:db8::1%eth0", "/a", 200),
        (line(request='GET /a\\"b HTTP/1.0'), "h", '/a\\"b', 200),  # escapes stay as they stand in the log
        (line(request="GET /a\\"), "h", "/a\\", 200),  # old servers escaped nothing
        (line(request='GET /x" 200 5'), "h", '/x" 200 5', 200),  # the last quote that can end the request does
        (line(status="-", size="-"), "h", "/a", 0),  # nothing was answered
        (line().replace(b" - - ", b' - "J. Doe" '), "h", "/a", 200),
    ],
)
def test_odd_lines(text: bytes, host: str, page: str, status: int) -> None:
    found = parsed(text)
    assert found.reasons.tolist() == [None]
    assert (found.visitor[0].as_py(), found.page[0].as_py(), found.status.tolist()) == (host, page, [status])


@pytest.mark.parametrize(
    ("behind", "referrer", "agent"),
    [
        (b'"http://from/?q=a b" "Mozilla/5.0 (X11; \\"x\\")"', "http://from/?q=a b", 'Mozilla/5.0 (X11; \\"x\\")'),
        (b'"-" "-"', "", ""),
        (b'"" ""', "", ""),
        (b'"-" "a" "1.2.3.4, 5.6.7.8" 0.1 -', "", "a"),
        (b'"-" "Mozilla', None, None),  # cut off
        (b'"-"', None, None),
        (b'"a"b" "c"', 'a"b', "c"),  # an unescaped quote
        (b'"-" "a" "b', None, None),
    ],
)
def test_combined_lines(behind: bytes, referrer: str | None, agent: str | None) -> None:
    found = server_log.parse_combined(pa.array([line() + b" " + behind, line() + b' "r" "a"'], type=pa.binary()))
    assert found.reasons.tolist() == [NOT_COMBINED_LOG if agent is None else None, None]
    assert found.referrer is not None and found.agent is not None
    assert (found.referrer.to_pylist(), found.agent.to_pylist()) == ([referrer, "r"], [agent, "a"])
    assert found.page.to_pylist()[1] == "/a"


ADDRESSES = st.ip_addresses().map(str)
SERVERS = ("www.example.com", "example.com:80", "localhost:8080", "127.0.1.1:80", "[2001:db8::1]:443")
WORDS = st.one_of(ADDRESSES, st.sampled_from((*SERVERS, "localhost", "bob", "-")))
HOSTS = st.lists(ADDRESSES | st.just("unknown"), max_size=2).flatmap(
    lambda more: st.tuples(WORDS, st.sampled_from((",", ", "))).map(lambda host: host[1].join([host[0], *more]))
)


def is_address(word: str) -> bool:
    try:
        ip_address(word)
    except ValueError:
        return False
    return True


def visitor_of(front: str) -> str | None:
    """The visitor by the words in front of the time, the last two of which are ident and user."""
    parts = front.replace(", ", ",").split(" ")
    words, listed = [part.split(",")[0] for part in parts], ["," in part for part in parts]
    visitor = words[0] if len(words) == 3 else None
    if len(words) == 4:
        if (is_address(words[0]) and is_address(words[1]) and not listed[1]) or (words[1] == "-" and words[2] != "-"):
            visitor = words[0]
        elif words[0] in SERVERS and not listed[0] and words[2] == "-":
            visitor = words[1]
    return None if visitor == "-" else visitor


@given(st.lists(HOSTS, min_size=1, max_size=2), st.sampled_from(("- -", "- bob")))
def test_an_address_is_no_virtual_host_and_a_dash_no_visitor(hosts: list[str], behind: str) -> None:
    front = f"{' '.join(hosts)} {behind}"
    found = parsed(line().replace(b"h - -", front.encode(), 1))
    visitor = found.visitor[0].as_py() if found.reasons.good[0] else None
    assert visitor == visitor_of(front), front
