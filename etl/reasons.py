"""The reasons for which a record is not written, each with its sentence, which `lockstep describe` prints.

A rejected record goes to the quarantine and counts for --max-bad. A dropped one is left out by a rule: no error, only a
count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.features.images import decode as d

REJECTED: dict[str, Reason] = {}
DROPPED: dict[str, Reason] = {}


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a record is not written: the name in the quarantine or among the counts, and the sentence that explains it.
    `detail` is what follows the name, with the variable words in capitals.
    """

    name: str
    sentence: str
    detail: str = ""


def sentence_of(reasons: Mapping[str, Reason], reason: str) -> str:
    """Return the sentence that explains `reason`, which may have a detail, among REJECTED or DROPPED; else no text."""
    known = reasons.get(reason.partition(":")[0])
    return "" if known is None else known.sentence


def _rejected(name: str, sentence: str, detail: str = "") -> str:
    REJECTED[name] = Reason(name, sentence, detail)
    return name


def _dropped(name: str, sentence: str) -> str:
    DROPPED[name] = Reason(name, sentence)
    return name


# Lines of logs and tables
NOT_COMMON_LOG = _rejected("not_common_log", "The line is not in the Common Log Format.")
NOT_COMBINED_LOG = _rejected("not_combined_log", "The line is not in the Combined Log Format.")
NOT_ALB_LOG = _rejected("not_alb_log", "The line is not from the log of an AWS load balancer.")
BAD_TIME = _rejected("bad_time", "There is no such time, or it is outside the years 1 to 9999 (often milliseconds).")
NOT_UTF8 = _rejected("not_utf8", "The line is not UTF-8, or it or one of its texts holds a NUL.")
LINE_TOO_LONG = _rejected("line_too_long", "The line has more than 1 MiB.")
TOO_FEW_FIELDS = _rejected("too_few_fields", "The line has fewer fields than there are names for.")
TOO_MANY_FIELDS = _rejected(
    "too_many_fields", "The line has more fields than there are names for, besides empty last ones."
)
OPEN_QUOTE = _rejected("open_quote", "A quote has no end.")
BAD_QUOTES = _rejected(
    "bad_quotes", "A quote is inside a field that does not begin with one, or a text follows the end."
)
CARRIAGE_RETURN = _rejected(
    "carriage_return",
    "A carriage return is inside a line of CSV or TSV, outside quotes, where other readers begin a new line.",
)
NOT_JSON = _rejected("not_json_object", "The line is not JSON, is not one object, or holds NaN or Infinity.")
DUPLICATE_KEY = _rejected("duplicate_key", "A used field is there twice.", ":NAME")
MISSING_VALUE = _rejected("missing_value", "A required field is absent or empty.", ":NAME")
BAD_VALUE = _rejected(
    "bad_value", "The field has no value of its type; VALUE shows 60 characters at most.", ":NAME: VALUE is no TYPE"
)

# Images
NO_CLASS = _rejected("no_class", "The image is in no folder of a class.")
NO_IMAGE = _rejected("no_image", "The row of a Parquet file has no image.")
NO_LABEL = _rejected("no_label", "The row of a Parquet file has no label.")
LABEL_OUT_OF_RANGE = _rejected("label_out_of_range", "The label is negative, or not below `--num-classes`.")
LABEL_TOO_LONG = _rejected("label_too_long", "The label has more than 4096 characters.")
NOT_A_FILE = _rejected(
    "not_a_regular_file", "A member of the archive or an entry of the folder is neither a file nor a link to one."
)
UNSAFE_NAME = _rejected("unsafe_name", "A member of the archive has no name, or one that leads out of the archive.")
UNKNOWN_FORMAT = _rejected(d.UNKNOWN_FORMAT, f"The file is not {d.FORMATS}.")
BROKEN_IMAGE = _rejected(d.BROKEN, "The file is damaged or cut.")
UNSUPPORTED_PIXELS = _rejected(
    d.UNSUPPORTED, "The pixels have 32 bits, or are 16-bit PNG colours of which one is transparent."
)
TOO_MANY_BYTES = _rejected(d.TOO_LONG, "The file has more than 64 MiB.")
TOO_MANY_PIXELS = _rejected(d.TOO_MANY_PIXELS, "The image has more pixels than `--max-pixels`.")
SIDES_TOO_UNEQUAL = _rejected(d.ODD_SIDES, "One side is more than 256 times the other.")
EXPANDS_TOO_MUCH = _rejected(
    d.TOO_DENSE, "The file is too small for its pixels: it may be made to exhaust the decoder."
)

# Left out by a rule
EMPTY_LINE = _dropped("empty_line", "The line of a table is empty.")
NOT_A_PAGE = _dropped("not_a_page", "The request is not for a page.")
CENSORED = _dropped("censored", "The label of the web request is NULL: the log ends too soon after it.")
UNLABELLED = _dropped("no_label", "The `--label` of the record is NULL.")
SAMPLED_OUT = _dropped("sampled_out", "`--sample` leaves the record out.")
CENSORED_AT_BORDER = _dropped(
    "censored_at_border", "The label looks into the next split: 1,800 s for the default label, else `--label-window`."
)
NOT_AN_IMAGE = _dropped("not_an_image", "The file has a name of another type, or a hidden one.")
REPLACED = _dropped("replaced", "A later member of the archive has the same name.")
