"""A page with each reason for which a record is not written, and its sentence, from etl/reasons.py."""

from __future__ import annotations

from lockstep.etl.reasons import DROPPED, REJECTED

PAGE = "reference/reasons.md"
_HEAD = """# Reasons for which a record is not written

Find here what a reason in the quarantine, or among a job's counts, means. `lockstep describe DATASET` prints the same
sentences next to its counts. [Rejected records](../docs/formats.md#rejected-records) says where they are kept.

## Rejected

These records go to the quarantine and count for `--max-bad`. Capitals stand for what is filled in.

"""
_DROPPED = """
## Dropped

A rule leaves these records out: they are counted and no error.

"""


def reasons_page() -> dict[str, str]:
    """The text of the page by its path."""
    tables = []
    for reasons in (REJECTED, DROPPED):
        rows = (f"| `{one.name}{one.detail}` | {one.sentence} |" for one in reasons.values())
        tables.append("| reason | meaning |\n| --- | --- |\n" + "\n".join(rows) + "\n")
    return {PAGE: _HEAD + tables[0] + _DROPPED + tables[1]}
