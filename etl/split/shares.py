"""Shares of a whole, read exactly: "1%", "0.01", "1/100"."""

from __future__ import annotations

import re
from fractions import Fraction

from lockstep.storage.flags import check_flag

_SHARE = re.compile(r"(?P<number>[0-9]{1,20}([.][0-9]{0,20}|/[0-9]{1,20})?|[.][0-9]{1,20})(?P<percent>%?)")


def parse_share(text: str, flag: str = "--max-bad") -> Fraction:
    """Read "1%" or "0.01" exactly. Raises ConfigError, naming `flag`, outside 0 to 1."""
    # Fraction reads more forms than these; 1e99999999 it would work out digit by digit.
    found = _SHARE.fullmatch(text)
    try:
        share = Fraction(found["number"]) / (100 if found["percent"] else 1) if found else Fraction(-1)
    except ZeroDivisionError:
        share = Fraction(-1)
    check_flag(0 <= share <= 1, flag, text, "0% to 100%, or 0 to 1")
    return share
