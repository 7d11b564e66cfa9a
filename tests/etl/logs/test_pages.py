"""What counts as a page: the suffix of a target, however it is written; against plain Python."""

from __future__ import annotations

import re
from collections import Counter
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.etl.logs.pages import ASSET_SUFFIXES, Suffixes, most_frequent
from lockstep.etl.logs.parse import SUFFIX
from tests.etl.logs.web_rows import CASES, kept, parsed, plan, stays


def suffixes_of(pages: list[str]) -> list[str]:
    """The suffix of each page."""
    found = Suffixes.of(pa.array(pages, pa.string()))
    return [found.names[code].as_py() for code in found.codes.tolist()]


COMBINED = re.compile(r'(\S+) \S+ \S+ \[([^\]]+)\] "(\S+) ([^ ?]+)\S* [^"]*" (\d+) ')


def test_pictures_fonts_and_data_of_today_are_no_pages() -> None:
    path = CASES / "modern-assets.log"
    rows = [match.groups() for line in path.read_text().splitlines() if (match := COMBINED.match(line))]
    table = pd.DataFrame(rows, columns=["visitor", "time", "method", "page", "status"])
    seconds = pd.to_datetime(table["time"], format="%d/%b/%Y:%H:%M:%S %z", utc=True)
    table["time"] = seconds.map(lambda at: int(at.timestamp()))
    wanted = table[~table["page"].str.contains(r"\.(?:webp|avif|ttf)$")]
    found = kept(plan("combined", path))
    assert found["page"].tolist() == wanted["page"].tolist() and len(wanted) < len(table)
    labels = stays(found, int(table["time"].max()))
    assert (len(labels), round(float(np.mean(labels)), 4)) == (27, 0.6667)


@pytest.mark.parametrize(
    ("page", "suffix"),
    [
        ("/a.GIF", "gif"),
        ("/a.gif;jsessionid=0A1B.worker", "gif"),
        ("/a.html;jsessionid=0A1B.gif", "html"),  # the parameter's suffix says nothing
        ("/a.do;v=1.5/b", ""),  # parameters of a folder
        ("/a%2Egif", "gif"),
        ("/a%2egif%3bv=1", "gif"),
        ("/a.gif.", "gif"),  # which some servers answer as /a.gif
        ("/a.gif%20", "gif"),
        ("/a.gif#top", "gif"),
        ("/a.png%3Fv=2", "png"),
        ("/manual.html.gz", "gz"),
        ("/jquery.min.js", "js"),
        ("/a.woff2", "woff2"),
        ("/", ""),
        ("", ""),
        ("/v1.2/list", ""),
        ("/.well-known/x", ""),
        ("/a." + "b" * 40, ""),
        ("/über.pdf", "pdf"),
        ("http://host.example/a", ""),
    ],
)
def test_the_suffix_of_a_page(page: str, suffix: str) -> None:
    assert suffixes_of([page, "/other.css", page]) == [suffix, "css", suffix]


def by_hand(page: str) -> str:
    """The suffix by decoding and cutting."""
    name = re.sub(r"[;#?].*", "", unquote(page.rsplit("/", 1)[-1])).rstrip(". ")
    found = re.fullmatch(r".*\.([a-zA-Z0-9]{1,16})", name)
    return found[1].lower() if found else ""


PARTS = st.sampled_from([*ASSET_SUFFIXES, "html", "HTM", "JpEg", "php5", ".", "%2E", "%2e", ";v=1", "%3Bx", "%20", "a"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(PARTS, max_size=6).map("".join), max_size=5))
def test_any_spelling_has_the_suffix_that_decoding_gives(names: list[str]) -> None:
    pages = [f"/folder.d/{name}" for name in names]
    assert suffixes_of(pages) == [by_hand(page) for page in pages]


def test_flags_move_suffixes_and_the_counts_are_those_of_pages() -> None:
    path = CASES / "modern-assets.log"
    found = plan("combined", path, page_suffixes=(".WEBP",), asset_suffixes=("pdf",))
    assert "webp" not in found.parser.assets and {"pdf", "avif"} <= set(found.parser.assets)  # type: ignore[attr-defined]
    pages = kept(found)["page"]
    assert pages.str.endswith(".webp").any() and not pages.str.endswith(".avif").any()
    told = {row["_reason"]: row["_lines"] for row in parsed(found) if row["_kind"] == SUFFIX}
    assert told == dict(Counter(by_hand(page) for page in pages))
    assert list(most_frequent({"b": 1, "": 5, "a": 1, "c": 2}, 3).items()) == [("", 5), ("c", 2), ("a", 1)]
