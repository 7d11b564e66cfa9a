"""Split kinds: what --split may say, and that hash splits, borders in time and shares of classes are exact."""

from __future__ import annotations

import bisect
import datetime as dt
import tracemalloc
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.model_selection import GroupKFold

from lockstep.etl.fit.statistics import counts_of
from lockstep.etl.split.assign import Assign
from lockstep.etl.split.counted import Histogram, at_rank, cuts_of, deal, ends_of
from lockstep.etl.split.sampling import Sampling, balanced
from lockstep.etl.split.splits import SplitSpec, shares_of, span_of, texts_of, times_of
from lockstep.etl.split.warnings import far_from_shares, label_lines
from lockstep.features.sample_id import shard_keys
from lockstep.features.schema.fields import sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, DataError
from tests.features.split_hashes import share_of, unit_hash

IDS = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 5000, dtype=np.int64)
SCHEMA = Schema((sample_id_field(),))
EMPTY = pa.RecordBatch.from_pydict({})


@pytest.mark.parametrize(
    ("text", "kind", "names", "weights", "column"),
    [
        ("80/20", "random", "train test", (80, 20), None),
        ("1/1", "random", "train test", (1, 1), None),
        ("8/1/1", "random", "train validation test", (8, 1, 1), None),
        ("0.7/0.15/0.15", "random", "train validation test", (70, 15, 15), None),  # to whole numbers, exactly
        ("group:user:9/1", "group", "train test", (9, 1), "user"),
        ("group:a:b:9/1", "group", "train test", (9, 1), "a:b"),  # a column's name may hold a colon
        ("stratified:click:8/1/1", "stratified", "train validation test", (8, 1, 1), "click"),
        ("time:80/20", "time", "train test", (80, 20), "time"),
        ("time:at:80/20", "time", "train test", (80, 20), "at"),
        ("kfold:3", "kfold", "fold-0 fold-1 fold-2", (1, 1, 1), None),
        ("kfold:2:user", "kfold", "fold-0 fold-1", (1, 1), "user"),
        ("given", "given", "", (), None),
    ],
)
def test_what_split_may_say(text: str, kind: str, names: str, weights: tuple[int, ...], column: str | None) -> None:
    spec = SplitSpec.parse(text)
    assert spec == SplitSpec(kind=kind, names=tuple(names.split()), weights=weights, column=column)
    assert SplitSpec.parse(spec.text) == spec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        (
            "kfold:2:user:balanced",
            SplitSpec(kind="kfold", names=("fold-0", "fold-1"), weights=(1, 1), column="user", balanced=True),
        ),
        ("subset:region=north", SplitSpec(kind="subset", names=("train", "test"), column="region", values=("north",))),
        ("subset:a:b=1,x=y", SplitSpec(kind="subset", names=("train", "test"), column="a:b", values=("1", "x=y"))),
    ],
)
def test_splits_by_the_sizes_and_the_values_of_groups(text: str, spec: SplitSpec) -> None:
    assert SplitSpec.parse(text) == spec and spec.text == text
    assert spec.counted and spec.grouped and spec.trained == (("fold-0", "fold-1") if spec.balanced else ("train",))


@pytest.mark.parametrize(
    ("column", "text", "numbers"),
    [
        (pa.array(["a", "b", "", "c", "b"]), "subset:g=b,c", ["", "0", "", "1", "0"]),
        (pa.array([7, 70, 700], pa.int32()), "subset:g=70,07", ["", "0", ""]),  # by their text
        (pa.array([True, False]), "subset:g=false", ["", "0"]),
    ],
)
def test_a_subset_has_the_rows_of_its_values(column: pa.Array, text: str, numbers: list[str]) -> None:
    batch = pa.RecordBatch.from_pydict({"g": column})
    assert SplitSpec.parse(text).assign(batch, IDS[: len(column)], 0).to_pylist() == numbers
    with pytest.raises(DataError, match="cannot decide"):
        SplitSpec.parse(text).assign(pa.RecordBatch.from_pydict({"g": pa.array([0.5])}), IDS[:1], 0)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=40), st.data())
def test_dealt_folds_are_as_large_as_those_of_scikit_learn(sizes: list[int], data: st.DataObject) -> None:
    folds = data.draw(st.integers(2, min(len(sizes), 9)))
    sizes.sort(reverse=True)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    theirs = [len(test) for _, test in GroupKFold(folds).split(groups, groups=groups)]
    mine = np.bincount(deal(sizes, folds), weights=sizes, minlength=folds)
    assert mine.tolist() == theirs


@pytest.mark.parametrize(
    "text",
    ["", "80", "80/0", "80/20/10/5", "-8/2", "8/", "²/1", "8e1/2", "kfold", "kfold:1", "kfold:101", "kfold:3:",
     "stratified:80/20", "group::80/20", "time::80/20", "given:x", "9" * 5000 + "/1", "time:",
     "kfold:3::balanced", "subset", "subset:region", "subset:region=", "subset:=a", "subset:r=a,,b", "subset:r=a,a"],
)  # fmt: skip
def test_what_split_may_not_say(text: str) -> None:
    with pytest.raises(ConfigError, match="--split cannot be read"):
        SplitSpec.parse(text)


@pytest.mark.parametrize(
    ("text", "example"),
    [("80", "80/20"), ("given:x", "80/20"), ("time:seen", "time:seen:80/20"), ("time::80", "time:80/20"),
     ("group", "group:COLUMN:80/20"), ("stratified:c:8", "stratified:c:80/20"),
     ("kfold", "kfold:5"), ("kfold:user", "kfold:5:user"), ("kfold:1:user", "kfold:5:user"),
     ("subset:region", "subset:region=VALUE"), ("subset:region=", "subset:region=VALUE"),
     ("subset", "subset:COLUMN=VALUE"),
     ("group:a:b", "group:COLUMN:80/20"), ("group:" + "x" * 300, "group:COLUMN:80/20")],
)  # fmt: skip
def test_the_example_is_of_the_kind_that_was_asked_for(text: str, example: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SplitSpec.parse(text)
    assert caught.value.next_step == f"Write for example --split {example}."
    SplitSpec.parse(example)


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=5), st.integers(0, 2**64 - 1))
def test_borders_are_those_of_share_of(weights: list[int], value: int) -> None:
    """Also beside each border, where one unit decides."""
    ends = [-(-(below << 64) // sum(weights)) for below in accumulate(weights[:-1])]
    values = np.array([value, *(end + step for end in ends for step in (-1, 0))], dtype=np.uint64)
    assert shares_of(values, weights).tolist() == [share_of(int(number), weights) for number in values]


def test_hash_splits_look_at_the_record_alone() -> None:
    spec = SplitSpec.parse("8/1/1")
    whole = spec.assign(EMPTY, IDS, 7).to_pylist()
    assert spec.assign(EMPTY, IDS[::-3], 7).to_pylist() == whole[::-3]
    assert whole[0] == spec.names[share_of(unit_hash(IDS[:1].tobytes(), 7), spec.weights)]
    counts = Counter(whole)
    assert abs(counts["train"] - 4000) < 150 and abs(counts["test"] - 500) < 100 and len(counts) == 3
    folds = SplitSpec.parse("kfold:5:user")
    users = pa.RecordBatch.from_pydict({"user": pa.array([n % 40 for n in range(5000)])})
    found = folds.assign(users, IDS, 7).to_pylist()
    assert len(set(zip(users["user"].to_pylist(), found, strict=True))) == 40 and set(found) == set(folds.names)
    assert folds.assign(users.slice(100, 9), IDS[:9], 7).to_pylist() == found[100:109]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (pa.array(["", "ü", "x" * 200]), [b"", "ü".encode(), b"x" * 200]),
        (pa.array([b"\xff", b"\0"]), [b"\xff", b"\0"]),
        (pa.array([-1, 2**63 - 1]), [b"-1", b"9223372036854775807"]),
        (pa.array([True, False]), [b"true", b"false"]),
        (pa.array([0.0, -0.0, 1.5, float("nan")]), [b"0", b"0", b"1.5", b"nan"]),  # equal numbers are one group
        (pa.array([dt.date(2026, 1, 2)]), [b"2026-01-02"]),
        (pa.array([Decimal("1.50")]), [b"1.50"]),
    ],
)
def test_a_group_is_hashed_by_its_text(values: pa.Array, names: list[bytes]) -> None:
    spec = SplitSpec.parse("kfold:97:g")
    wanted = [spec.names[share_of(unit_hash(name, 5), spec.weights)] for name in names]
    twice = pa.RecordBatch.from_pydict({"g": pa.concat_arrays([values, values])}).slice(len(values))
    assert spec.assign(twice, IDS[: len(values)], 5).to_pylist() == wanted


def test_groups_are_not_remembered() -> None:
    """A task's memory must not grow with its groups."""
    spec, held = SplitSpec.parse("group:g:1/1"), list[int]()
    assign = Assign(SCHEMA, ("g",), spec, 5, "parquet")
    for part in range(4):
        rows = {"g": [f"{part}-{n}" for n in range(5000)], "_occurrence": [0] * 5000, "_leak": [0] * 5000}
        batch = pa.RecordBatch.from_pydict({**rows, "_source": [0] * 5000, "_position": [0] * 5000})
        assert set(assign.rows(batch).column("_split").to_pylist()) == set(spec.names)
        if part == 0:
            tracemalloc.start()
        held.append(tracemalloc.get_traced_memory()[0])  # with the part's own rows
    tracemalloc.stop()
    assert held[3] - held[1] < 100_000, "10,000 groups take more than a million bytes"


def test_what_decides_a_split_is_never_null_or_vague() -> None:
    null = pa.RecordBatch.from_pydict({"time": pa.array([1, None])})
    for text in (
        "time:80/20", "stratified:time:80/20", "group:time:80/20", "kfold:2:time", "kfold:2:time:balanced",
        "subset:time=1",
    ):  # fmt: skip
        with pytest.raises(DataError, match="is null"):
            SplitSpec.parse(text).assign(null, IDS[:2], 0)
    with pytest.raises(DataError, match="cannot decide"):
        texts_of("x", pa.array([0.5]))
    with pytest.raises(DataError, match="cannot decide"):
        times_of("x", pa.array(["1995-07-09"]))
    days = [dt.date(1970, 1, 2), dt.date(1969, 12, 31)]
    assert times_of("x", pa.array(days)).to_pylist() == [1, -1]
    moments = pa.array([1_000_000_000], pa.timestamp("ns", "UTC"))
    assert times_of("x", moments).to_pylist() == [1_000_000]


def histogram_of(values: list[int]) -> Histogram:
    def histogram(where: tuple[int, int] | None, shift: int) -> Counter[int]:
        return Counter(v >> shift for v in values if where is None or v >> where[1] == where[0])

    return histogram


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3), min_size=1, max_size=60), st.data())
def test_borders_in_time_are_the_nearest_that_leave_no_side_empty(values: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=2)))
    histogram, low, high, ordered = histogram_of(values), min(values), max(values), sorted(values)
    value, less, equal = at_rank(cuts[0], low, high, histogram)
    assert (value, less, equal) == (ordered[cuts[0]], bisect.bisect_left(ordered, value), values.count(value))
    ends = ends_of(cuts, len(values), low, high, histogram)
    places = [0, *(bisect.bisect_right(ordered, end) for end in ends), len(values)]
    inner = list(accumulate(count for _, count in sorted(Counter(values).items())))[:-1]
    if len(inner) >= len(cuts):
        assert places == sorted(set(places)), "a side is empty, though there are times enough"
    if len(cuts) == 1 and inner:
        assert abs(places[1] - cuts[0]) == min(abs(place - cuts[0]) for place in inner)


@pytest.mark.parametrize(
    ("counts", "shares", "sides"),
    [
        ((90, 10), "30/70", (90, 10)),  # the border before all times is nearer to 30, and leaves nothing
        ((10, 90), "70/30", (10, 90)),
        ((98, 1, 1), "8/1/1", (98, 1, 1)),
        ((1, 1, 98), "1/1/8", (1, 1, 98)),
        ((5, 90, 5), "1/1/1", (5, 90, 5)),
        ((90, 10), "8/1/1", (90, 10)),  # two times make no three sides
        ((10, 10, 10, 10, 60), "1/1/1", (30, 10, 60)),
    ],
)
def test_few_times_are_shared_out_so_that_no_side_is_empty(
    counts: tuple[int, ...], shares: str, sides: tuple[int, ...]
) -> None:
    values = [time for time, count in enumerate(counts) for _ in range(count)]
    cuts = cuts_of(len(values), SplitSpec.parse(shares).weights)
    ends = ends_of(cuts, len(values), 0, len(counts) - 1, histogram_of(values))
    found = Counter(bisect.bisect_left(ends, value) for value in values)
    assert tuple(found[side] for side in sorted(found)) == sides


def test_a_span_is_counted_as_the_times_are() -> None:
    assert [span_of(kind, 1800) for kind in ("bigint", "timestamp", "date")] == [1800, 1_800_000_000, 1]
    assert span_of("date", 86_401) == 2


@pytest.mark.parametrize(
    ("split", "records", "line"),
    [
        ("group:g:80/20", (92, 8), "test has 8.0 % of the records where --split group:g:80/20 asks for 20.0 %"),
        ("group:g:80/20", (84, 16), None),
        ("kfold:4:g", (60, 14, 13, 13), "fold-0 has 60.0 % of the records where --split kfold:4:g asks for 25.0 %"),
        ("kfold:4", (60, 14, 13, 13), None),  # by the record: chance alone
        ("subset:g=a", (1, 99), None),  # asks for no share
        ("time:80/20", (60, 40), None),
    ],
)
def test_shares_far_from_those_asked_for(split: str, records: tuple[int, ...], line: str | None) -> None:
    spec = SplitSpec.parse(split)
    assert far_from_shares(spec, dict(zip(spec.names, records, strict=True))) == line


@pytest.mark.parametrize(
    ("classes", "lines"),
    [
        ({"train": {"true": 700, "false": 300}, "test": {"true": 140, "false": 60}}, []),
        ({"train": {"true": 7, "false": 3}, "test": {"true": 2}}, ["all 2 records of test have `y` = true, so"]),
        (
            {"train": {"true": 7000, "false": 3000}, "test": {"true": 1000, "false": 1000}},
            ["50.0 % of test have `y` = false, of train 30.0 %"],
        ),
        ({"train": {"true": 70, "false": 30}, "test": {"true": 10, "false": 10}}, []),  # chance, z below 2
        ({"train": {"1": 500_000, "0": 500_000}, "test": {"1": 252_000, "0": 248_000}}, []),  # z = 4.6 and 1 %
        ({"train": {"1": 50_000_000, "0": 50_000_000}, "test": {"1": 252_000, "0": 248_000}}, []),  # sure, and 1 %
        (
            {"fold-0": {"a": 90, "b": 10}, "fold-1": {"a": 90, "b": 10}, "fold-2": {"a": 50, "b": 50}},
            ["50.0 % of fold-2 have `y` = a, of all other splits 90.0 %"],
        ),
        ({"train": {"0": 7}, "test": {"0": 2}}, ["all records have `y` = 0, so there is nothing to learn"]),
        ({"train": {}, "test": {}}, []),  # labels without number
        ({}, []),
    ],
)
def test_what_is_said_of_labels(classes: dict[str, dict[str, int]], lines: list[str]) -> None:
    found = label_lines("y", classes, sampled=False)
    assert len(found) == len(lines), found
    assert all(text.startswith(f"label: {line}") for text, line in zip(found, lines, strict=True))
    assert label_lines("y", classes, sampled=True) == [text for text in found if "label: all " in text]


@given(st.integers(0, 10**12), st.lists(st.integers(1, 1000), min_size=2, max_size=3))
def test_shares_of_a_class_are_as_exact_as_whole_numbers_are(total: int, weights: list[int]) -> None:
    cuts = cuts_of(total, weights)
    for cut, below in zip(cuts, accumulate(weights), strict=False):
        assert abs(cut - Fraction(total * below, sum(weights))) <= Fraction(1, 2)
    assert [0, *cuts] == sorted([0, *cuts]) and (not cuts or cuts[-1] <= total)


def test_sampling_keeps_the_share_of_the_classes_that_it_names() -> None:
    batch = pa.RecordBatch.from_pydict({"click": pa.array([n % 10 == 0 for n in range(5000)])})
    clicks = np.asarray(batch["click"])
    kept = Sampling.parse("click=0:10%").keeps(batch, IDS, 3)  # 0 and 1 are false and true
    assert kept[clicks].all() and 380 < kept[~clicks].sum() < 520
    more = Sampling.parse("click=false:0.2,click=true:1/2").keeps(batch, IDS, 3)
    assert not (kept & ~more)[~clicks].any()  # a larger share keeps what a smaller one kept
    assert 200 < more[clicks].sum() < 300
    assert Sampling.parse("click=0:0").keeps(batch, IDS, 3).tolist() == clicks.tolist()
    split = np.array(SplitSpec.parse("50/50").assign(EMPTY, IDS, 3).to_pylist())
    assert 0.4 < (split[kept & ~clicks] == "train").mean() < 0.6  # what is kept does not follow from the split
    late = shard_keys(IDS, 3) >> np.uint64(63) == 1
    assert 0.4 < late[kept & ~clicks].mean() < 0.6  # nor from the order in the shards
    for wrong in ("click", "click=0", "click=0:2", "=0:1%", "a=0:1%,b=1:1%", "a=0:1%,a=0:2%", "click=:1%"):
        with pytest.raises(ConfigError, match=r"--sample (is invalid|cannot be read)"):
            Sampling.parse(wrong)


def test_balanced_classes_weigh_alike() -> None:
    found = balanced("y", {"true": 1, "false": 9})
    batch = pa.RecordBatch.from_pydict({"y": pa.array([True] + [False] * 9)})
    weights = np.asarray(found.of(batch))
    assert weights[0] == 5.0 and np.isclose(weights[1:].sum(), 5.0) and weights.dtype == np.float32
    rare = balanced("y", {"true": 1, "other": 3}).of(batch)  # training has no false: only validation or test
    assert rare.to_pylist() == [2.0] + [1.0] * 9


def test_classes_are_counted_on_the_training_split_if_there_is_one() -> None:
    given = [(True, "a", 5), (True, "b", 1), (False, "a", 100), (False, "c", 7)]
    assert counts_of(given) == {"a": 5, "b": 1}
    assert counts_of(given[2:]) == {"a": 100, "c": 7}
