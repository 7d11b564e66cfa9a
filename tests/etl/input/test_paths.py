"""Records without an id of their own are known by file and position: what other files do never moves them."""

from __future__ import annotations

import bz2
import gzip
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.etl.input.files import find_sources, path_below
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.logs.parse import ROW, parse_ranges
from lockstep.etl.logs.plan import plan_of
from lockstep.etl.write.sources import check_contents
from lockstep.features.sample_id import sample_id
from lockstep.storage.dataset.manifest_entries import SourceInfo
from lockstep.storage.errors import ConfigError, DataError

SCHEMA = """
[[fields]]
name = "row"
dtype = "string"
encoding = { kind = "ignore" }

[[fields]]
name = "paid"
dtype = "bool"
kind = "label"
"""
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}
Files = Mapping[str, Sequence[str]]  # the rows of each file, by its path without a codec's suffix


def write(root: Path, files: Files, packed: Mapping[str, str]) -> None:
    for path, rows in files.items():
        place = root / (path + packed.get(path, ""))
        place.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"row": row, "paid": True}) + "\n" for row in rows]
        place.write_bytes(PACK[packed.get(path, "")]("".join(lines).encode()))


def ids(folder: Path, inputs: Sequence[str], **more: Any) -> dict[str, int]:
    """The sample id of each row, by its text, as the job makes it."""
    (folder / "schema.toml").write_text(SCHEMA)
    told: dict[str, Any] = {"schema": str(folder / "schema.toml"), "output": str(folder / "out"), **more}
    plan = plan_of(LogsConfig(log_format="json", inputs=tuple(inputs), split_bytes=50, **told))
    rows = pa.Table.from_batches(list(parse_ranges(plan.work, plan.parser))).to_pylist()
    assert plan.by_place
    return {
        row["row"]: sample_id([row["_file"].encode(), str(row["_position"]).encode()], 0)
        for row in rows
        if row["_kind"] == ROW
    }


def expected(files: Files) -> dict[str, int]:
    found = {}
    for path, rows in files.items():
        position = 0
        for row in rows:
            found[row] = sample_id([path.encode(), str(position).encode()], 0)
            position += len(json.dumps({"row": row, "paid": True})) + 1
    return found


names = st.sampled_from(["0", "a", "b", "day-1", "é", "x.log"])
paths = st.builds(lambda folders, name: "/".join([*folders, f"{name}.json"]), st.lists(names, max_size=3), names)


@st.composite
def trees(draw: st.DrawFn) -> dict[str, list[str]]:
    """Some files, whose rows differ from each other by file and number."""
    found = draw(st.lists(paths, min_size=1, max_size=6, unique=True))
    return {path: [f"{path} {number}" for number in range(draw(st.integers(1, 4)))] for path in found}


@settings(max_examples=25, deadline=None)
@given(trees(), st.data())
def test_other_files_their_order_the_folders_name_and_packing_move_nothing(files: Files, data: st.DataObject) -> None:
    packed = {path: data.draw(st.sampled_from(list(PACK))) for path in files}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write(folder / "logs", files, {})
        write(folder / "renamed" / "logs-2", files, packed)
        some = data.draw(st.sets(st.sampled_from(sorted(files)), min_size=1))
        write(folder / "fewer", {path: files[path] for path in some}, packed)
        whole = expected(files)
        assert ids(folder, [f"{folder}/logs"]) == whole
        assert ids(folder, [f"{folder}/renamed/logs-2/"]) == whole
        assert ids(folder, [f"{folder}/fewer"]) == {row: whole[row] for path in some for row in files[path]}
        given_apart = data.draw(st.permutations([f"{folder}/logs/{path}" for path in files]))
        assert ids(folder, given_apart, input_root=f"{folder}/logs") == whole


@settings(max_examples=20, deadline=None)
@given(trees(), st.data())
def test_a_file_that_is_cut_in_two_moves_only_its_own_records(files: Files, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(files)))
    at = data.draw(st.integers(0, len(files[path]) - 1))
    cut = {**files, path: files[path][: at + 1], f"{path}.2": files[path][at + 1 :]}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write(folder / "in", {path: rows for path, rows in cut.items() if rows}, {})
        found, before = ids(folder, [f"{folder}/in"]), expected(files)
    moved = {row for row in before if found[row] != before[row]}
    assert moved == set(files[path][at + 1 :])


@pytest.mark.parametrize(
    ("inputs", "root", "found"),
    [
        (["days"], None, ["a/o.csv", "b/o.csv", "b/p.csv"]),
        (["days/"], None, ["a/o.csv", "b/o.csv", "b/p.csv"]),
        (["./days/../days"], None, ["a/o.csv", "b/o.csv", "b/p.csv"]),
        (["days/*"], None, ["a/o.csv", "b/o.csv", "b/p.csv"]),
        (["da*/[ab]/o*"], None, ["days/a/o.csv", "days/b/o.csv"]),
        (["days/b/*"], None, ["o.csv", "p.csv"]),  # the pattern's fixed part is the folder
        (["days/b/p.csv.gz"], None, ["p.csv"]),
        (["days/b/p.csv.gz", "days/a"], "days", ["b/p.csv", "a/o.csv"]),
        (["days/b/p.csv.gz"], ".", ["days/b/p.csv"]),
    ],
)
def test_a_path_is_below_what_input_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: list[str], root: str | None, found: list[str]
) -> None:
    for name in ("a/o.csv", "b/o.csv", "b/p.csv.gz"):
        (tmp_path / "days" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "days" / name).write_bytes(gzip.compress(b"x") if name.endswith(".gz") else b"x")
    monkeypatch.chdir(tmp_path)
    assert [source.path for source in find_sources(inputs, root=root)] == found
    whole = [f"{tmp_path}/{url}" for url in inputs]
    assert [source.path for source in find_sources(whole, root=root and f"{tmp_path}/{root}")] == found


def test_an_input_outside_the_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs-2").mkdir()
    (tmp_path / "logs-2" / "a").write_text("x")
    with pytest.raises(ConfigError, match="is not below"):
        find_sources([str(tmp_path / "logs-2")], root=str(tmp_path / "logs"))
    assert path_below("hdfs://nn/logs/day/a.gz", "hdfs://nn/logs") == "day/a"
    with pytest.raises(ConfigError):
        path_below("hdfs://other/logs/a", "hdfs://nn/logs")


def test_two_files_of_one_path_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "days", {"a/o.json": ["1"], "b/o.json": ["2"]}, {})
    with pytest.raises(ConfigError, match="same ids") as caught:
        ids(tmp_path, [f"{tmp_path}/days/a", f"{tmp_path}/days/b"])
    for word in (f"{tmp_path}/days/a/o.json", f"{tmp_path}/days/b/o.json", "--input-root", "--id-columns"):
        assert word in str(caught.value)
    assert len(ids(tmp_path, [f"{tmp_path}/days/a", f"{tmp_path}/days/b"], input_root=f"{tmp_path}/days")) == 2
    write(tmp_path / "days", {"a/o.json": ["1"]}, {"a/o.json": ".gz"})
    with pytest.raises(ConfigError, match="same ids") as caught:
        ids(tmp_path, [f"{tmp_path}/days/a"])
    assert "packed" in caught.value.next_step


def test_ids_that_name_no_file_take_no_root() -> None:
    apart: list[dict[str, Any]] = [{}, {"schema": "s.toml", "id_columns": ("row",)}]
    for more in apart:
        with pytest.raises(ConfigError, match="--input-root"):
            LogsConfig(log_format="json", inputs=("in",), output="out", input_root="in", **more)


def info(name: str, sha256: str, size: int, content: tuple[int, str] | None) -> SourceInfo:
    return SourceInfo(name, size, sha256 * 64, None, *(content or (None, None)))


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        (("a", 9, (9, "00")), ("a", 9, (9, "00")), True),
        (("a", 9, None), ("a", 9, None), True),  # such as two archives
        (("a", 9, (9, "00")), ("b", 5, (9, "00")), True),  # plain and packed
        (("a", 9, (9, "00")), ("b", 9, (9, "00")), False),  # plain files: SHA-256 decides
        (("a", 5, (9, "00")), ("b", 5, (9, "01")), False),
        (("a", 5, (9, "00")), ("b", 5, (8, "00")), False),
        (("a", 9, None), ("b", 9, None), False),
        (("a", 0, (0, "00")), ("a", 0, (0, "00")), False),  # empty files
    ],
)
def test_which_files_have_the_same_content(one: Any, two: Any, same: bool) -> None:
    found = [info("one", *one), info("other", "f", 7, (3, "33")), info("two", *two)]
    if not same:
        return check_contents(found, {}, None)
    with pytest.raises(DataError, match="two has the same content as one"):
        check_contents(found, {}, None)
    check_contents(found, {0: 9, 2: 9}, None)  # so few records may be equal
    return None
