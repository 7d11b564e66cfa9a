"""N appends of a web log have the rows of one job over all files: compared with plain Python, at cuts anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from lockstep.etl.logs import job as logs
from lockstep.etl.logs import web
from lockstep.etl.logs.config import DEFAULT_LABEL, LogsConfig
from lockstep.etl.logs.past import hold_of, hold_of_label, text_of, too_late
from lockstep.features.sample_id import sample_id
from lockstep.storage.dataset.manifest import DatasetManifest, load_chain
from lockstep.storage.errors import ConfigError, DataError
from lockstep.storage.verify import verify
from tests.etl.conftest import ELASTIC, NASA, tree
from tests.etl.logs import weblog_oracle as oracle
from tests.etl.logs.weblog_oracle import FEATURES, Request

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.slow

ROW = ["visitor", "page", "query", "time", "occurrence", "stays", *FEATURES]
WITHIN = "count(*) OVER (PARTITION BY visitor ORDER BY time RANGE BETWEEN 1 FOLLOWING AND 60 FOLLOWING) > 0"
MINUTE = f"CASE WHEN time + 60 > log_end THEN NULL ELSE {WITHIN} END"
SOME = f"CASE WHEN time + 60 > log_end THEN NULL ELSE IF(page = '/c', NULL, {WITHIN}) END"
BASE = 805_262_400  # midnight


@dataclass(frozen=True)
class Cut:
    """A log in two parts, whose first part ends at BASE."""

    requests: list[Request]
    at: int


def cuts_of(requests: Sequence[Request]) -> list[Cut]:
    """The log, cut at each place; its times are moved so that all logs are appended to at the same time."""
    found = []
    for at in range(1, len(requests)):
        end = max(one.time for one in requests[:at])
        found.append(Cut([one._replace(time=one.time - end + BASE) for one in requests], at))
    return found


def made_up(seed: int) -> list[Request]:
    """40 requests of 3 visitors with many of one second, equal ones, and now and then one that comes late."""
    chance, time, found = random.Random(seed), 0, []
    for _ in range(40):
        time += chance.choice([0, 0, 1, 5, 20, 61])
        late = chance.choice([0, 0, 0, 0, 0, 0, 3, 70, 150])
        found.append(Request(chance.choice("uvw"), chance.choice(["/a", "/b", "/c"]), "", max(0, time - late)))
    return found


def elastic() -> list[Request]:
    """Four hours of a server that logs a request when it ends, with the time at which it began."""
    common = [line.rsplit(b' "', 2)[0] + b"\n" for line in oracle.lines_of(ELASTIC)[600:1000]]
    return oracle.pages_of(common)[0]


def frame(spark: SparkSession, cuts: Sequence[Cut], part: Callable[[Cut, int], bool]) -> DataFrame:
    """The requests of a part of all logs; a visitor's name begins with the number of the log."""
    rows = [
        (f"{number}|{one.visitor}", one.page, one.query, one.time, "", f"agent {place}", 0, place)
        for number, cut in enumerate(cuts)
        for place, one in enumerate(cut.requests)
        if part(cut, place)
    ]
    columns = "visitor string, page string, query string, time bigint, referrer string, agent string"
    columns += ", _source int, _position bigint"
    return spark.createDataFrame(pd.DataFrame(rows, columns=[name.split()[0] for name in columns.split(", ")]), columns)


def by_log(rows: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """The rows of each log, sorted."""
    rows = rows.rename(columns={"_occurrence": "occurrence"})[ROW]
    rows = rows.astype({"seconds_since_prev": "Int64", "mean_gap_s": "Int64", "stays": bool})
    rows = rows.assign(log=rows["visitor"].str.split("|").str[0].astype(int), prev_page=rows["prev_page"].fillna("-"))
    rows = rows.sort_values(ROW, ignore_index=True)
    return {
        number: rows[rows["log"] == number].drop(columns="log").reset_index(drop=True)
        for number in rows["log"].unique().tolist()
    }


def same(one: pd.DataFrame | None, other: pd.DataFrame | None) -> bool:
    if one is None or other is None:
        return one is other
    return len(one) == len(other) and one.compare(other).empty


@pytest.mark.parametrize(
    ("name", "label", "window_s", "judge"),
    [
        ("elastic", DEFAULT_LABEL, 1800, lambda _, stays: stays),
        ("made up", DEFAULT_LABEL, 1800, lambda _, stays: stays),
        ("made up", SOME, 60, lambda one, stays: None if one.page == "/c" else stays),
        ("made up", "page <> '/b'", 0, lambda one, _: one.page != "/b"),
    ],
)
def test_two_parts_cut_anywhere_have_the_rows_of_one_job(
    spark: SparkSession, name: str, label: str, window_s: int, judge: Callable[[Request, bool], bool | None]
) -> None:
    stretch = 30 if name == "made up" and window_s == 1800 else 1
    own = [[one._replace(time=one.time * stretch) for one in made_up(seed)] for seed in range(5)]
    cuts = [cut for requests in ([elastic()] if name == "elastic" else own) for cut in cuts_of(requests)]
    hold_s = hold_of_label(spark, label)
    assert hold_s == window_s
    log_end, combined = max(one.time for cut in cuts for one in cut.requests), name == "elastic"
    wanted = by_log(
        pd.concat(
            oracle.rows_of([one._replace(visitor=f"{number}|{one.visitor}") for one in cut.requests], log_end,
                           window_s, judge)
            for number, cut in enumerate(cuts)
        )
    )  # fmt: skip
    first, second = (frame(spark, cuts, part) for part in (lambda c, i: i < c.at, lambda c, i: i >= c.at))
    whole = web.rows_of(frame(spark, cuts, lambda *_: True), label, log_end, combined)
    begun = web.rows_of(first, label, BASE, combined, hold_s=hold_s).persist()
    past = begun.where("_carried IS NOT NULL").select("_carried.*").persist()
    ended = web.rows_of(second, label, log_end, combined, past=past, part=1, hold_s=hold_s)
    columns = [*ROW[:4], "_occurrence", *ROW[5:]]
    one = by_log(whole.where("_dropped IS NULL").select(*columns).toPandas())
    assert [n for n in range(len(cuts)) if not same(one.get(n), wanted.get(n))] == []
    more = ["agent_tokens", "_position"] if combined else []
    parts = (rows.where("_dropped IS NULL").select(*columns, *more).toPandas() for rows in (begun, ended))
    chain = pd.concat(parts, ignore_index=True)
    both = by_log(chain)
    if combined:
        assert [words[1] for words in chain["agent_tokens"]] == [str(place) for place in chain["_position"]]
    late = {int(row["visitor"].split("|")[0]) for row in too_late(second, past, BASE, hold_s, label).collect()}
    wrong = {n for n in range(len(cuts)) if not same(both.get(n), wanted.get(n))}
    print(f"{name}: {len(cuts)} cuts, {len(late)} refused, {len(wrong)} of them would have been wrong")
    assert wrong <= late
    # A label that waits for nothing settles each request at once, so much of a log out of order comes too late for it.
    assert late == set() if name == "elastic" else len(wrong) > 0
    assert len(late) < len(cuts) / (2 if hold_s else 1)
    kept = past.groupBy("open").count().collect()
    visitors = sum(len({one.visitor for one in cut.requests}) for cut in cuts)
    assert sum(row["count"] for row in kept if not row["open"]) <= visitors * (1 if hold_s else 2)
    for data in (begun, past):
        data.unpersist()


@pytest.mark.parametrize(
    ("label", "hold_s"),
    [
        (None, 1800),
        (DEFAULT_LABEL, 1800),
        ("page LIKE '%x'", 0),
        ("case when TIME + 300 > `log_end` then null else count(*) over (partition by visitor order by time"
         " range between current row and 299 following) > 1 end", 300),
        ("CASE WHEN time + 300L > log_end THEN CAST(NULL AS BOOLEAN) ELSE page = '/' END", None),  # not the form
        ("CASE WHEN time + 300 > log_end THEN CAST(NULL AS BOOLEAN) ELSE page = '/' END", 300),
        (MINUTE, 60),
        (MINUTE.replace("time + 60", "time + 59"), None),  # the window is longer
        (MINUTE.replace("time + 60 >", "time + 60 >="), None),
        (MINUTE.replace("THEN NULL", "THEN false"), None),
        (MINUTE.replace("visitor", "page"), None),
        (MINUTE.replace("1 FOLLOWING", "1 PRECEDING"), None),
        (MINUTE.replace("RANGE", "ROWS"), None),
        (MINUTE.replace("ORDER BY time", "ORDER BY time DESC"), None),
        (MINUTE.replace(" > 0", " > log_end % 2"), None),
        (WITHIN, None),  # not NULL where the window is not over
        ("time < log_end", None),
        ("lead(page) OVER (PARTITION BY visitor ORDER BY time) = page", None),
        ("count(*) OVER (PARTITION BY visitor) > 1", None),
    ],
)  # fmt: skip
def test_which_labels_an_append_can_continue(spark: SparkSession, label: str | None, hold_s: int | None) -> None:
    found = hold_of_label(spark, label)
    if label is not None and "300L" in label:
        assert found == hold_of(text_of(spark, label))
        return
    assert found == hold_s


def config(source: Path, output: Path, **more: Any) -> LogsConfig:
    return LogsConfig(
        **{"inputs": (str(source),), "output": str(output), "split": "group:visitor:80/20", "fmt": "parquet", **more}
    )


def parts_of(folder: Path, lines: Sequence[bytes], cuts: Sequence[int]) -> list[Path]:
    """The log as a file for each part, cut before these lines."""
    paths = []
    for number, (start, stop) in enumerate(zip((0, *cuts), (*cuts, len(lines)), strict=True)):
        paths.append(folder / f"part-{number}.log")
        paths[-1].write_bytes(b"".join(lines[start:stop]))
    return paths


def appended(spark: SparkSession, folder: Path, paths: Sequence[Path], **more: Any) -> list[DatasetManifest]:
    """Each part as an append to the one before."""
    found: list[DatasetManifest] = []
    for number, path in enumerate(paths):
        above = str(folder / str(number - 1)) if number else None
        found.append(logs.run(spark, config(path, folder / str(number), append_to=above, **more)))
    return found


def rows_in(folders: Sequence[Path]) -> pd.DataFrame:
    """The rows of datasets by their sample ids, with the split of each."""
    files = [path for folder in folders for path in sorted(folder.glob("split=*/*.parquet"))]
    found = pd.concat([pq.read_table(path).to_pandas().assign(split=path.parent.name) for path in files])
    found = found.astype({"seconds_since_prev": "Int64", "mean_gap_s": "Int64", "stays": bool})
    return found.assign(prev_page=found["prev_page"].fillna("-")).set_index("sample_id").sort_index()


def wanted_rows(lines: Sequence[bytes]) -> pd.DataFrame:
    """The rows by plain Python, by their sample ids."""
    rows = oracle.rows_of(*oracle.pages_of(lines))
    ids = [
        sample_id([one["visitor"].encode(), one["page"].encode(), str(one["time"]).encode(), one["query"].encode()],
                  one["occurrence"])
        for one in rows.to_dict("records")
    ]  # fmt: skip
    return rows.assign(sample_id=ids, prev_page=rows["prev_page"].fillna("-")).set_index("sample_id").sort_index()


def check_chain(folders: Sequence[Path], made: Sequence[DatasetManifest], lines: Sequence[bytes]) -> None:
    """Compare a chain of appends with plain Python, row for row, and its counts with one another."""
    found, wanted = rows_in(folders), wanted_rows(lines)
    assert found.index.is_unique and len(found) == len(wanted)
    columns = ["page", "stays", *FEATURES]
    pd.testing.assert_frame_equal(found[columns], wanted[columns], check_dtype=False)
    splits = found.groupby(wanted["visitor"])["split"].nunique()
    assert set(splits) == {1}  # a visitor is in one split of the whole chain
    pages, _ = oracle.pages_of(lines)
    carried = [manifest.created_by["config"]["carried"] for manifest in made]
    assert [one["reopened"] for one in carried] == [0, *(one["open"] for one in carried[:-1])]
    assert [one["open"] for one in carried] == [manifest.counts.dropped["censored"] for manifest in made]
    assert sum(manifest.counts.read for manifest in made) - sum(one["reopened"] for one in carried) == len(lines)
    assert sum(manifest.counts.written for manifest in made) == len(pages) - carried[-1]["open"]
    assert carried[-1]["past"] <= len({one.visitor for one in pages})


def test_three_parts_of_a_day_have_the_rows_of_one_job(spark: SparkSession, tmp_path: Path) -> None:
    """The NASA day. The second append is killed in the middle, leaves nothing, and is run again to the same bytes."""
    lines = oracle.lines_of(NASA)
    cuts = sorted(random.Random(11).sample(range(3000, len(lines)), 2))
    paths = parts_of(tmp_path, lines, cuts)
    made = appended(spark, tmp_path, paths)
    check_chain([tmp_path / str(number) for number in range(len(made))], made, lines)
    assert not list(verify(str(tmp_path / "2"))) and len(load_chain(str(tmp_path / "2"))) == 3
    before = tree(tmp_path / "1")

    def refused(kind: type[Exception], match: str, *path: Path, **more: Any) -> None:
        with pytest.raises(kind, match=match):
            inputs = tuple(map(str, path))
            logs.run(spark, config(path[0], tmp_path / "no", **{"inputs": inputs, "append_to": str(tmp_path / "0"),
                                                               **more}))  # fmt: skip
        assert not (tmp_path / "no").exists() and not list(tmp_path.glob("_staging*"))

    refused(DataError, "has the same content", paths[0])
    earlier = tmp_path / "earlier.log"  # a day in the middle, of other bytes, at the end
    earlier.write_bytes(b"".join(lines[cuts[0] + 1 : cuts[1]]))
    refused(DataError, "come too late", earlier, append_to=str(tmp_path / "2"))
    refused(ConfigError, "its label is another one", paths[1], label=MINUTE)
    one_line = tmp_path / "one.log"
    one_line.write_bytes(lines[cuts[0]])
    little = logs.run(spark, config(one_line, tmp_path / "little", append_to=str(tmp_path / "0")))
    assert little.counts.read - little.created_by["config"]["carried"]["reopened"] == 1
    assert not list(verify(str(tmp_path / "little")))
    assert tree(tmp_path / "1") == before
