"""Requests for pages out of a web server's log, whatever its format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from etl.logs import combined, server_log
from etl.logs.parse import NO_TIME, Found
from etl.logs.server_log import Requests
from etl.logs.table_lines import TABLE_FORMATS, Form
from etl.logs.values import Reasons
from etl.logs.weblog import NOT_A_PAGE, is_page
from etl.logs.webtable import read_requests

_TEXTS = ("visitor", "page", "query")


@dataclass(frozen=True, slots=True)
class WebLines:
    """Keeps the requests for pages; TSV, CSV and JSON hold the columns that etl.logs.webtable knows."""

    form: Form

    @property
    def schema(self) -> pa.Schema:
        """The columns of a request."""
        told = ("referrer", "agent") if self.form.log_format == "combined" else ()
        texts = [(name, pa.string()) for name in (*_TEXTS, *told)]
        return pa.schema([*texts, ("time", pa.int64())])

    def parse(self, lines: pa.Array, names: Sequence[str]) -> Found:
        """Parse lines (n,) binary; `names` are the fields of a line of a table."""
        drops = Reasons(len(lines))
        requests = self._requests(lines, names, drops)
        good = requests.reasons.good & drops.good
        last = int(requests.time[good].max()) if good.any() else NO_TIME
        drops.add(good & ~is_page(requests.method, requests.page, requests.status), NOT_A_PAGE)
        columns = {name: getattr(requests, name) for name in self.schema.names if name != "time"}
        columns["time"] = pa.array(requests.time)
        kept = requests.time[good & drops.good]
        return Found(columns, requests.reasons, drops, last, int(kept.min()) if len(kept) else None)

    def _requests(self, lines: pa.Array, names: Sequence[str], drops: Reasons) -> Requests:
        if self.form.log_format in TABLE_FORMATS:
            return read_requests(lines, self.form, names, drops)
        return combined.parse(lines) if self.form.log_format == "combined" else server_log.parse(lines)
