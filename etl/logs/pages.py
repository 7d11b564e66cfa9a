"""What counts as a page: what a visitor asks for, not what a browser or a program fetches by itself.

Decision record: docs/decisions/012-web-log.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

# Pictures, styles, scripts, data of scripts, feeds, fonts, sound and film: a browser, a player or a reader of feeds
# fetches them by itself. Archives and programs are downloads. Text, HTML, PDF, scripts on the server (.pl, no suffix)
# and mistyped suffixes are pages: a visitor asked for them.
ASSET_SUFFIXES = (
    "gif", "jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "avif", "jxl", "heic", "heif", "bmp", "ico", "cur",
    "svg", "svgz", "tif", "tiff", "xbm",
    "css", "js", "mjs", "cjs", "map", "wasm", "class", "swf",
    "json", "xml", "xsl", "rss", "atom", "webmanifest", "manifest", "appcache",
    "woff", "woff2", "ttf", "ttc", "otf", "eot",
    "wav", "au", "mp3", "m4a", "aac", "ogg", "oga", "opus", "flac", "mid", "midi",
    "mpg", "mpeg", "mp4", "m4v", "avi", "mov", "ogv", "webm", "mkv", "wmv", "flv", "m3u8", "m4s", "ts", "mpd",
    "vtt",
    "zip", "gz", "tgz", "z", "bz2", "xz", "zst", "7z", "rar", "tar", "exe", "msi", "dmg", "iso", "apk", "deb",
    "rpm", "jar", "bin",
)  # fmt: skip
MAX_SUFFIX = 16
MAX_LISTED = 1000  # suffixes that one task counts
# What may follow a suffix: dots and blanks that servers ignore, then parameters (`;jsessionid=...`) or a fragment.
_SUFFIX = rf"(?i)(?:\.|%2e)(?P<suffix>[a-z0-9]{{1,{MAX_SUFFIX}}})(?:\.|%2e|%20)*(?:(?:[;#?]|%3b|%23|%3f)[^/]*)?$"


@dataclass(frozen=True, slots=True)
class Suffixes:
    """The suffixes of pages (n,), in small letters and without the dot, "" for none: `names` (d,) are those of distinct
    pages, `codes` (n,) say which of them each page has.
    """

    names: pa.Array
    codes: NDArray[np.int32]

    @classmethod
    def of(cls, pages: pa.Array) -> Suffixes:
        """The suffixes of strings (n,)."""
        coded = pc.dictionary_encode(pages)
        found = pc.struct_field(pc.extract_regex(coded.dictionary, _SUFFIX), "suffix")
        return cls(pc.fill_null(pc.ascii_lower(found), ""), np.asarray(coded.indices))

    def among(self, suffixes: Collection[str]) -> NDArray[np.bool_]:
        """Which pages have one of `suffixes`: (n,) bool."""
        return np.asarray(pc.is_in(self.names, pa.array(suffixes, pa.string())), dtype=bool)[self.codes]

    def counts(self, where: NDArray[np.bool_]) -> dict[str, int]:
        """How many of the pages `where` (n,) have each suffix."""
        found = Counter[str]()
        times = np.bincount(self.codes[where], minlength=len(self.names)).tolist()
        for name, count in zip(self.names.to_pylist(), times, strict=True):
            found[name] += count
        return dict(+found)


def assets(page_suffixes: Collection[str] = (), asset_suffixes: Collection[str] = ()) -> tuple[str, ...]:
    """ASSET_SUFFIXES and `asset_suffixes`, without `page_suffixes`."""
    return tuple(suffix for suffix in dict.fromkeys((*ASSET_SUFFIXES, *asset_suffixes)) if suffix not in page_suffixes)


def is_page(method: pa.Array, page: pa.Array, asset: NDArray[np.bool_], status: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which requests are for a page: GET, answered with 2xx or 304, no `asset`. (n,) bool."""
    got = np.asarray(pc.equal(method, "GET"), dtype=bool)
    named = np.asarray(pc.not_equal(page, ""), dtype=bool)
    return np.asarray(got & named & ~asset & (((status >= 200) & (status < 300)) | (status == 304)))


def most_frequent(counts: Mapping[str, int], most: int) -> dict[str, int]:
    """The `most` most frequent suffixes, the first of the alphabet where counts are equal."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most])
