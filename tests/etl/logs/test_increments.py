"""etl_logs --increment: each call takes the files that are new; all calls together have the rows of one job."""

from __future__ import annotations

import gzip
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import google_crc32c
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.etl.input.files import find_lines, infos_of
from lockstep.etl.logs import job as logs
from lockstep.etl.write.append import Parent
from lockstep.etl.write.increment import ReadBefore
from lockstep.jobs import etl_logs
from lockstep.storage.dataset.manifest import DatasetManifest, load_chain, load_dataset
from lockstep.storage.dataset.manifest_entries import Counts
from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.reading.open import OpenSplit
from tests.builders.blocks import read_all
from tests.etl.conftest import NASA, ROOT, tree
from tests.etl.logs import weblog_oracle as oracle
from tests.etl.logs.test_appends import check_chain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIRST_LINE = 3000  # 97 minutes: the first call's part is longer than the label's window
LINES = 8000


def arguments(folder: Path) -> list[str]:
    """The command line of each call: always the same."""
    return [
        *("--input", str(folder / "logs" / "*"), "--output", str(folder / "days"), "--increment"),
        *("--format", "parquet", "--split", "group:visitor:80/20", "--master", "local[2]"),
    ]


def call(spark: SparkSession, folder: Path) -> DatasetManifest | None:
    """What a call writes, None for nothing; in the session of the tests."""
    job, argv = etl_logs.parser(), arguments(folder)
    config = etl_logs.config_of(job.parse(argv), job.given(argv))
    plan = logs.check_increment(config)
    return None if plan is None else logs.run(spark, config, plan)


def files_of(lines: Sequence[bytes], chance: random.Random, count: int) -> list[bytes]:
    """The log in `count` parts, cut anywhere after FIRST_LINE."""
    cuts = sorted(chance.sample(range(FIRST_LINE, len(lines)), count - 1))
    return [b"".join(lines[start:stop]) for start, stop in zip([0, *cuts], [*cuts, len(lines)], strict=True)]


def put(folder: Path, number: int, content: bytes) -> None:
    """Write a file of the log; every third one is packed."""
    (folder / "logs").mkdir(exist_ok=True)
    name = f"access-{number:03d}.log"
    if number % 3 == 2:
        (folder / "logs" / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
    else:
        (folder / "logs" / name).write_bytes(content)


def datasets_in(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "days").iterdir() if path.name.isdecimal())


def check(folder: Path, lines: Sequence[bytes]) -> None:
    """Each file is in one dataset, and all rows are those of one pass by plain Python."""
    made = datasets_in(folder)
    manifests = [load_dataset(str(path)) for path in made]
    assert [url for url, _ in load_chain(str(made[-1]))] == [str(path) for path in reversed(made)]
    read = [source.url for manifest in manifests for source in manifest.source]
    assert sorted(read) == sorted(map(str, (folder / "logs").iterdir()))
    check_chain(made, manifests, lines)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 10))])
def test_any_cut_into_files_and_calls_has_the_rows_of_one_pass(spark: SparkSession, tmp_path: Path, seed: int) -> None:
    chance = random.Random(f"increments {seed}")
    lines = oracle.lines_of(NASA)[:LINES]
    parts = files_of(lines, chance, chance.randint(3, 7))
    for number, part in enumerate(parts):
        put(tmp_path, number, part)
        if number in (0, len(parts) - 1) or chance.random() < 0.4:
            assert call(spark, tmp_path) is not None
    check(tmp_path, lines)
    before = tree(tmp_path / "days")
    assert call(spark, tmp_path) is None and tree(tmp_path / "days") == before
    last = load_dataset(str(datasets_in(tmp_path)[-1]))
    waiting = last.created_by["config"]["carried"]["open"]
    written = sum(load_dataset(str(path)).counts.written for path in datasets_in(tmp_path))
    assert waiting == len(oracle.pages_of(lines)[0]) - written > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.soak)])
def test_killed_calls_lose_no_line_and_repeat_none(tmp_path: Path, kills: int) -> None:
    chance = random.Random(f"{kills} kills")
    lines = oracle.lines_of(NASA)[:LINES]
    parts = files_of(lines, chance, kills + 1)
    put(tmp_path, 0, parts[0])
    begun = time.monotonic()
    assert start(tmp_path).wait(timeout=900) == 0
    seconds, killed = time.monotonic() - begun, 0
    for number, part in enumerate(parts[1:], 1):
        put(tmp_path, number, part)
        job = start(tmp_path)
        try:
            job.wait(timeout=seconds * chance.uniform(0.2, 1.1))
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            killed += 1
            job.wait()
        if number % 4 == 0:
            assert start(tmp_path).wait(timeout=900) == 0
    assert start(tmp_path).wait(timeout=900) == 0
    print(f"{killed} of {kills} calls were killed before they ended; {len(datasets_in(tmp_path))} datasets")
    assert killed > 0
    check(tmp_path, lines)


def start(folder: Path) -> subprocess.Popen[bytes]:
    """A call in a process group of its own."""
    command = [sys.executable, "-m", "lockstep.jobs.etl_logs", *arguments(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)


@pytest.mark.slow
def test_an_increment_may_add_a_column_with_a_default(spark: SparkSession, tmp_path: Path) -> None:
    """A log of clicks: the second file has a column more; the third call takes the schema from the second dataset."""
    chance, frames = random.Random("columns"), []
    narrow = (
        '[[fields]]\nname = "price"\ndtype = "float32"\n[[fields]]\nname = "click"\ndtype = "bool"\nkind = "label"\n'
    )
    wide = f'{narrow}[[fields]]\nname = "device"\ndtype = "string"\nnullable = true\ndefault = "desktop"\n'
    wide += 'encoding = {kind = "hash", buckets = 9}\n'
    (tmp_path / "logs").mkdir()
    for number, schema in enumerate([narrow, wide, None]):
        rows = [
            {"visit": f"{number}-{row}", "price": row / 4, "click": chance.choice(["true", "false"]),
             "device": chance.choice(["", "phone", "tv"])}
            for row in range(60)
        ]  # fmt: skip
        frame = pd.DataFrame(rows).drop(columns=["device"] if number == 0 else [])
        frame.to_csv(tmp_path / "logs" / f"{number}.csv", index=False)
        frames.append(frame)
        argv = ["--input", str(tmp_path / "logs"), "--output", str(tmp_path / "days"), "--increment"]
        argv += ["--log-format", "csv", "--id-columns", "visit"]
        if schema is not None:
            (tmp_path / "schema.toml").write_text(schema)
            argv += ["--schema", str(tmp_path / "schema.toml")]
        config = etl_logs.config_of(etl_logs.parser().parse(argv), etl_logs.parser().given(argv))
        plan = logs.check_increment(config)
        assert plan is not None
        logs.run(spark, config, plan)
    urls = [str(path) for path in datasets_in(tmp_path)]
    opened = [OpenSplit.at(urls, split) for split in ("train", "test")]
    found = pd.concat([read_all(split.reader).to_pandas() for split in opened])
    wanted = pd.concat([frames[0].assign(device="desktop"), *frames[1:]])
    wanted = wanted.assign(device=wanted["device"].replace("", None), click=wanted["click"] == "true")
    names = ["price", "click", "device"]
    pd.testing.assert_frame_equal(
        found[names].sort_values(names, ignore_index=True),
        wanted[names].sort_values(names, ignore_index=True),
        check_dtype=False,
    )


class Chain:
    """A folder of logs, and the datasets that have read them: manifests as jobs write them, without records."""

    def __init__(self, folder: Path) -> None:
        self.logs, self.datasets = folder / "logs", folder / "days"
        self.chain: list[tuple[str, DatasetManifest]] = []
        self.logs.mkdir(parents=True)
        self.read: list[bytes] = []
        """The content of each file that was read."""

    def call(self) -> None:
        """Read what is new. Raises what ReadBefore raises."""
        before = ReadBefore(Parent(tuple(self.chain))) if self.chain else None
        find = partial(find_lines, [str(self.logs)], False, None)
        found = find() if before is None else before.new(find)
        if not found:
            return
        rows = []
        for number, source in enumerate(found):
            stored = Path(source.url).read_bytes()
            content = gzip.decompress(stored) if source.url.endswith(".gz") else stored
            self.read.append(content)
            rows.append(digest_row(number, stored, content))
        url = self.datasets / f"{len(self.chain) + 1:06d}"
        url.mkdir(parents=True)
        manifest = DatasetManifest.build(
            format="parquet",
            created_by={"version": "0", "config": {}, "seed": 0},
            schema={},
            splits={},
            files={},
            counts=Counts(read=0, written=0, quarantined=0, dropped={}),
            source=infos_of(found, rows),
        )
        (url / "_manifest.json").write_bytes(manifest.to_bytes())
        self.chain.insert(0, (str(url), manifest))


def digest_row(number: int, stored: bytes, content: bytes) -> dict[str, object]:
    return {
        "number": number,
        "bytes": len(stored),
        "sha256": hashlib.sha256(stored).hexdigest(),
        "content_bytes": len(content),
        "content_crc32c": f"{google_crc32c.value(content):08x}",
    }


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.sampled_from(["write", "write alike", "rotate", "call", "touch", "remove"]), max_size=14))
def test_each_file_is_read_once_through_rotation_and_packing(
    steps: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rotation")
    chain, written = Chain(folder), []
    for number, step in enumerate([*steps, "write", "call"]):
        first = chain.logs / "access.log.1"
        if step in ("write", "write alike"):  # the live log is closed: all others move on, the second one is packed
            rotate(chain.logs)
            # Lines of one length: files of another content are often as long.
            written.append(f"line {number:06d}\n".encode() * (1 if step == "write alike" else number + 1))
            first.write_bytes(written[-1])
        elif step == "rotate" and first.exists():
            rotate(chain.logs)
        elif step == "touch" and first.exists():
            first.touch()
        elif step == "remove":
            chain.call() if any(chain.logs.iterdir()) else None  # what is removed unread cannot be read
            for path in sorted(chain.logs.iterdir())[2:]:
                path.unlink()
        elif step == "call" and any(chain.logs.iterdir()):
            chain.call()
        if step == "write":
            os.utime(first, (time.time() + 1, time.time() + 1))  # written after the last call, whatever the clock
    assert sorted(chain.read) == sorted(written)


def rotate(folder: Path) -> None:
    """As logrotate with delaycompress: the first file stays plain, the others are packed."""
    for path in sorted(folder.iterdir(), key=lambda path: -int(path.name.split(".")[2])):
        number = int(path.name.split(".")[2])
        target = folder / f"access.log.{number + 1}.gz"
        if path.suffix == ".gz":
            path.rename(target)
        else:
            target.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
            path.unlink()


@pytest.fixture
def two(tmp_path: Path) -> Chain:
    chain = Chain(tmp_path)
    (chain.logs / "a.log").write_bytes(b"one\ntwo\n")
    (chain.logs / "b.log").write_bytes(b"three\n")
    chain.call()
    return chain


@pytest.mark.parametrize(
    ("content", "match"),
    [(b"one\ntwo\nthree\n", "a.log has grown"), (b"one\nsix\n", "a.log has changed"), (b"one\n", "a.log has changed")],
)
def test_a_file_that_was_read_and_has_another_content_is_refused(two: Chain, content: bytes, match: str) -> None:
    later = time.time() + 5
    (two.logs / "a.log").write_bytes(content)
    os.utime(two.logs / "a.log", (later, later))
    with pytest.raises(DataError, match=match) as caught:
        two.call()
    assert "only closed files" in caught.value.next_step and len(two.read) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda logs: (logs / "a.log").rename(logs / "c.log"),
        lambda logs: (logs / "a.log").touch(),
        lambda logs: (logs / "empty.log").touch(),
        lambda logs: (logs / "a.log").unlink(),
        lambda logs: rotate_names(logs),
    ],
    ids=["moved", "touched", "an empty file", "removed", "names exchanged"],
)
def test_nothing_is_new_in_files_of_known_content(two: Chain, change: Callable[[Path], object]) -> None:
    change(two.logs)
    two.call()
    assert two.read == [b"one\ntwo\n", b"three\n"]


def rotate_names(folder: Path) -> None:
    (folder / "a.log").rename(folder / "c.log")
    (folder / "b.log").rename(folder / "a.log")
    (folder / "c.log").rename(folder / "b.log")


def test_equal_lines_in_two_files_are_both_read(two: Chain) -> None:
    (two.logs / "c.log").write_bytes(b"three\n")
    two.call()
    assert two.read[2:] == [b"three\n"]


@pytest.mark.parametrize(
    ("name", "more", "match"),
    [("days", ["--append-to", "other"], "--append-to"), ("days/000001", [], "not a folder of increments")],
)
def test_what_does_not_go_with_an_increment_is_refused(two: Chain, name: str, more: list[str], match: str) -> None:
    folder = two.datasets.parent
    argv = ["--input", str(two.logs), "--output", str(folder / name), "--increment", *more]
    with pytest.raises(ConfigError, match=match):
        etl_logs.config_of(etl_logs.parser().parse(argv))
