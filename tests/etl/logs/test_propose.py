"""A proposed schema: what it declares for what kind of column, and that the log job reads the same table by it."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.logs.parse import BAD, ROW, parse_ranges
from lockstep.etl.logs.plan import plan_of
from lockstep.etl.logs.propose import propose
from lockstep.etl.propose import ROWS
from lockstep.features.schema.declare import load_schema
from lockstep.features.schema.fields import Field
from lockstep.jobs import etl_logs
from lockstep.storage.errors import ConfigError, DataError, ExistsError
from tests.etl.conftest import OPEN_BANDIT


def proposed(folder: Path, data: str | bytes, log_format: str = "csv", **options: Any) -> tuple[dict[str, Field], str]:
    """The fields of the schema proposed for a table, without the id, and its text; the table can be read by it."""
    number = len(list(folder.iterdir()))
    table, output = folder / f"table-{number}", folder / f"schema-{number}.toml"
    table.write_bytes(data.encode() if isinstance(data, str) else data)
    propose(LogsConfig(inputs=(str(table),), output=str(output), log_format=log_format, **options))
    refused, rows = read_by(output, table, folder, log_format, **options)
    assert rows and not refused
    return {field.name: field for field in load_schema(str(output)) if field.kind != "id"}, output.read_text()


def read_by(schema: Path, table: Path, folder: Path, log_format: str, **options: Any) -> tuple[int, int]:
    """How many lines of a table the log job refuses by a schema, and how many it reads."""
    plan = plan_of(
        LogsConfig(
            inputs=(str(table),), output=str(folder / "none"), log_format=log_format, schema=str(schema), **options
        )
    )
    kinds = [kind for batch in parse_ranges(plan.work, plan.parser) for kind in batch.column("_kind").to_pylist()]
    return kinds.count(BAD), kinds.count(ROW)


def table(**columns: list[Any]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return out.getvalue()


def test_each_kind_of_column_has_its_dtype_and_encoding(tmp_path: Path) -> None:
    n = 3000
    fields, text = proposed(
        tmp_path,
        table(
            row=[*range(n)],
            click=[int(i % 7 == 0) for i in range(n)],
            at=[f"2020-01-{1 + i % 28:02}T10:00:00Z" for i in range(n)],
            price=[math.sin(i) for i in range(n)],
            bytes=[int(1.008**i) for i in range(n)],
            zip=[f"{i % 90:05}" for i in range(n)],
            page_id=[i % 40 for i in range(n)],
            page=[f"/page/{i % 30}" if i % 10 else "" for i in range(n)],
            agent=[f"agent {i % 2000}" for i in range(n)],
            ok=["yes" if i % 2 else "No" for i in range(n)],
            load=["NA" if i % 9 == 0 else i % 50 / 7 for i in range(n)],
            nothing=[""] * n,
        ),
    )
    kinds = {name: (field.dtype, (field.encoding or {}).get("kind", field.kind)) for name, field in fields.items()}
    assert kinds == {
        "row": ("int64", "ignore"),  # different in each row
        "click": ("bool", "label"),
        "at": ("string", "ignore"),
        "price": ("float64", "standardise"),
        "bytes": ("int64", "bucketise"),
        "zip": ("string", "vocabulary"),  # 00001 is no number
        "page_id": ("int64", "vocabulary"),
        "page": ("string", "vocabulary"),
        "agent": ("string", "hash"),
        "ok": ("bool", "number"),
        "load": ("string", "vocabulary"),
    }
    assert [field.name for field in fields.values() if field.nullable] == ["page"], "all rows were read"
    for part in (
        'perhaps --id-columns: "row"', "10.0% null, 27 distinct", "40 distinct, 0 to 39",
        'with --null-text "NA"',
        "--time-columns", '"nothing", column 12, is left out: it has no value', "first 0 stay a text",
    ):  # fmt: skip
        assert part in text, part


def test_rows_that_were_not_read_may_have_nulls(tmp_path: Path) -> None:
    for rows, nullable in ((ROWS, False), (ROWS + 1, True)):
        fields, _ = proposed(tmp_path, table(x=[i % 7 for i in range(rows)]))
        assert fields["x"].nullable is nullable
        fields, _ = proposed(tmp_path, '{"x": 1.5}\n{"x": 2}\n' * (rows // 2) + '{"x": 3}\n' * (rows % 2), "json")
        assert fields["x"].nullable is nullable


def test_a_constant_is_no_input_and_a_cut_example_shows_it(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {"one": [4] * 20, "word": ["a" * 31] * 20, "holes": [4] * 19 + [""]}
    fields, text = proposed(tmp_path, table(**columns))
    kinds = {name: (field.encoding or {})["kind"] for name, field in fields.items()}
    assert kinds == {"one": "ignore", "word": "ignore", "holes": "standardise"}
    assert text.count("always the same") == 2 and f'"{"a" * 30}…"' in text


def test_a_time_column_is_proposed_as_the_job_stores_it(tmp_path: Path) -> None:
    rows = table(at=[f"2020-01-{1 + i % 28:02}T10:00:00Z" for i in range(60)], x=[i % 7 for i in range(60)])
    fields, _ = proposed(tmp_path, rows, time_columns=("at",), id_columns=("x",), split="time:at:6/2/2")
    assert fields["at"].dtype == "int64" and not fields["at"].nullable


def test_a_column_that_a_file_lacks_is_left_out_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y,z\n1,2,3\n4,5,6\n")
    (tmp_path / "b.csv").write_text("z,x\n1,2\n")
    where = tmp_path / "schema.toml"
    propose(LogsConfig(inputs=(str(tmp_path / "*.csv"),), output=str(where), log_format="csv"))
    assert [field.name for field in load_schema(str(where)) if field.kind != "id"] == ["x", "z"]
    assert f'"y", column 2, is left out: {tmp_path / "b.csv"} does not have it once' in where.read_text()
    for name in ("a.csv", "b.csv"):
        assert read_by(where, tmp_path / name, tmp_path, "csv")[0] == 0


def test_only_a_column_of_that_name_without_nulls_is_the_label(tmp_path: Path) -> None:
    for name, values, wanted in (
        ("Label", [0, 1, 1, 0], ("bool", None)),
        ("target", [0, 2, 1, 2], ("int64", 3)),
        ("target", [1.5, 2, 3, 4], ("float64", None)),
        ("target", [-1, 1, 1, -1], ("int64", None)),
        ("clicked", ["yes", "no", "no", "no"], ("bool", None)),
    ):
        fields, text = proposed(tmp_path, table(**{"x": [1, 2, 3, 4], name: values}))
        assert (fields[name].kind, fields[name].dtype, fields[name].num_classes) == ("label", *wanted)
        assert "No column is called" not in text
    for name, found in (("label", ["a", "b", "c", "a"]), ("label", [0, 1, "", 1]), ("yes", [0, 1, 1, 1])):
        fields, text = proposed(tmp_path, table(x=[1, 2, 3, 4], **{name: found}))
        assert fields[name].kind == "feature" and "No column is called label" in text


def test_texts_for_null_and_a_label_of_two_texts_are_named(tmp_path: Path) -> None:
    rows = {
        "job": [" ?", " Sales", " Tech", " ?"],
        "sex": ["m", "f", "f", "m"],
        "income": [" <=50K", " >50K", " <=50K", " <=50K"],
    }
    _, text = proposed(tmp_path, table(**rows))
    assert 'with --null-text " ?" null too' in text and text.count("--null-text") == 1
    assert 'label (--label) "income".' in text
    _, text = proposed(tmp_path, table(x=["a", "b", "c"], label=[0, 1, 1]))
    assert "--label" not in text


@pytest.mark.parametrize("log_format", ["csv", "json"])
def test_the_label_that_was_asked_for_is_obeyed(tmp_path: Path, log_format: str) -> None:
    """Its values, read by the schema, are those of pandas; a label that cannot be one is refused."""
    frame = pd.DataFrame({"x": range(20), "bought": ["ja" if n % 3 else "nein" for n in range(20)], "n": [0, 1] * 10})
    path = tmp_path / "t"
    frame.to_csv(path, index=False) if log_format == "csv" else frame.to_json(path, orient="records", lines=True)
    how: dict[str, Any] = {"inputs": (str(path),), "log_format": log_format}
    for label, wanted in (("bought", frame["bought"] == "ja"), ("n", frame["n"])):
        where = str(tmp_path / f"{label}.toml")
        assert f"label {label}" in propose(LogsConfig(output=where, label=label, **how))
        plan = plan_of(LogsConfig(output=str(tmp_path / "out"), schema=where, **how))
        rows = [row for batch in parse_ranges(plan.work, plan.parser) for row in batch.to_pylist()]
        assert [row[label] for row in rows if row["_kind"] == ROW] == wanted.tolist()
    for label in ("bougt", "bought = 'ja'"):
        with pytest.raises(ConfigError, match="cannot be the label"):
            propose(LogsConfig(output=str(tmp_path / "none.toml"), label=label, **how))


def test_flags_of_a_proposal_are_obeyed_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    pd.DataFrame({"user": [n % 5 for n in range(20)], "x": range(20)}).to_csv(path, index=False)
    base = ["--propose-schema", "--input", str(path), "--log-format", "csv", "--output", str(tmp_path / "s.toml")]
    obeyed = {
        "--propose-schema", "--for", "--input", "--output", "--log-format", "--delimiter", "--columns", "--null-text",
        "--quoted-newlines", "--label", "--id-columns", "--time-columns",
    }  # fmt: skip
    of_process = {"--help", "--config", "--debug", "--master", "-h"}
    flags = {option: action for action in etl_logs.parser()._actions for option in action.option_strings}
    for flag in flags.keys() - obeyed - of_process:
        value = "1" if flags[flag].type is int else next(iter(flags[flag].choices or ["x"]))
        with pytest.raises(ConfigError) as caught:
            etl_logs.main([*base, flag, *([] if flags[flag].nargs == 0 else [value])])
        assert "--propose-schema" in f"{caught.value}" and flag in f"{caught.value}", flag
    assert not (tmp_path / "s.toml").exists()
    assert etl_logs.main([*base, "--id-columns", "user"]) == 0
    assert load_schema(str(tmp_path / "s.toml"))["user"].encoding == {"kind": "ignore"}
    with pytest.raises(ConfigError, match="--id-columns"):
        propose(LogsConfig(output=str(tmp_path / "y.toml"), inputs=(str(path),), log_format="csv", id_columns=("z",)))


def test_json_has_types_lists_and_what_no_field_holds(tmp_path: Path) -> None:
    documents = [
        {"a": i, "f": i / 3, "t": True, "s": "x", "tags": ["p", "q"][: i % 3], "nums": [1.5] * (i % 4),
         "label": i % 2, "geo": {"x": 1}, "mixed": i if i % 2 else "s", "holes": [1, None], "big": 2**63 + i,
         "at": "2020-01-01"} for i in range(50)
    ]  # fmt: skip
    fields, text = proposed(tmp_path, "\n".join(map(json.dumps, documents)), "json")
    kinds = {name: (field.dtype, field.is_list, field.kind) for name, field in fields.items()}
    assert kinds == {
        "a": ("int64", False, "feature"), "f": ("float64", False, "feature"), "t": ("bool", False, "feature"),
        "s": ("string", False, "feature"), "tags": ("string", True, "feature"), "nums": ("float64", True, "feature"),
        "label": ("int64", False, "label"), "big": ("uint64", False, "feature"), "at": ("string", False, "feature"),
    }  # fmt: skip
    assert fields["label"].num_classes == 2 and dict(fields["nums"].encoding or {})["length"] == 3
    assert text.count("is left out") == 3


def test_names_that_no_dataset_has_are_comments(tmp_path: Path) -> None:
    fields, text = proposed(tmp_path, 'a,a,B,b,split,_x,sample_id,,"o\x1bk # [[""x"\n1,2,3,4,5,6,7,8,9\n')
    assert list(fields) == ['o\x1bk # [["x'] and text.count("is left out") == 8
    fields, text = proposed(tmp_path, "3\t4.5\n1\t2\n", "tsv")
    assert list(fields) == ["3", "4.5"] and "name the fields by --columns" in text


@pytest.mark.parametrize(
    ("data", "log_format", "got"),
    [
        ("a,b\n", "csv", "no line but a header"),
        ("a,b\n1\n1,2,3\n", "csv", "too_few_fields"),
        (f"a,b\n{'x' * (1 << 20)},1\n", "csv", "1 line_too_long"),
        (f'{{"a": "{"x" * (1 << 20)}"}}\n', "json", "1 line_too_long"),
        ("[1]\nx\n", "json", "2 not_json_object"),
        ("a,b\n,\n", "csv", "no value"),
    ],
)
def test_a_table_without_rows_or_columns_is_refused(tmp_path: Path, data: str, log_format: str, got: str) -> None:
    with pytest.raises(DataError) as caught:
        proposed(tmp_path, data, log_format)
    assert got in caught.value.got
    assert not list(tmp_path.glob("*.toml"))


MARKED = "zeit;kampagne;preis\n" + "".join(f"2026-11-{n:02};{n % 3};{n},5\n" for n in range(1, 29))


@pytest.mark.parametrize("mark", [";", "|", "\t", ","])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC])
def test_a_table_of_another_delimiter_is_read_as_by_pandas(tmp_path: Path, mark: str, quoting: Any) -> None:
    out = io.StringIO()
    frame = pd.read_csv(io.StringIO(MARKED), sep=";")
    frame.to_csv(out, sep=mark, index=False, quoting=quoting)
    flag = r"\t" if mark == "\t" else mark
    fields, text = proposed(tmp_path, out.getvalue(), delimiter=flag)
    assert list(fields) == list(pd.read_csv(io.StringIO(out.getvalue()), sep=mark).columns)
    assert fields["kampagne"].dtype == "int64" and f"# 0.0% null, {frame['preis'].nunique()} distinct" in text


@pytest.mark.parametrize(
    ("data", "options", "flag"),
    [
        (MARKED, {}, "csv --delimiter ';'"),
        (MARKED.replace(",", "."), {}, "csv --delimiter ';'"),
        ('"zeit";"preis"\n"1";2\n', {}, "csv --delimiter ';'"),
        ('"zeit"\t"preis"\n"1"\t2\n', {}, r"csv --delimiter '\t'"),
        (MARKED.replace(";", "|"), {}, "csv --delimiter '|'"),
        (MARKED.partition("\n")[2], {"columns": ("zeit", "kampagne", "preis")}, "csv --delimiter ';'"),
        ("a,b\n1,2\n", {"delimiter": ";"}, "csv, without --delimiter"),
    ],
)
def test_the_error_about_another_delimiter_names_its_flag(
    tmp_path: Path, data: str, options: dict[str, Any], flag: str
) -> None:
    with pytest.raises(DataError) as caught:
        proposed(tmp_path, data, **options)
    assert f"--log-format {flag}" in caught.value.next_step
    assert not list(tmp_path.glob("*.toml"))


def test_a_file_is_not_overwritten_and_a_web_log_has_no_need(tmp_path: Path) -> None:
    where = tmp_path / "schema.toml"
    flags = ["--propose-schema", "--input", str(OPEN_BANDIT), "--output", str(where)]
    assert etl_logs.main([*flags, "--log-format", "csv"]) == 0
    before = where.read_bytes()
    with pytest.raises(ExistsError):
        etl_logs.main([*flags, "--log-format", "csv"])
    assert where.read_bytes() == before
    with pytest.raises(ConfigError, match="--propose-schema"):
        etl_logs.main(flags)
    assert read_by(where, OPEN_BANDIT, tmp_path, "csv") == (0, 2000)
    assert load_schema(str(where))["click"].kind == "label"


CELLS = st.one_of(
    st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), max_size=6),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(str),
    st.sampled_from(["", "NA", "nan", "inf", "0", "1", "yes", "no", "2020-01-01", "2020-01-01 10:00:00+02:00", "007"]),
)


@settings(max_examples=40)
@given(st.data(), st.integers(1, 5), st.integers(1, 12))
def test_any_table_is_read_by_the_schema_proposed_for_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, width: int, height: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    columns = {f"c{i}": data.draw(st.lists(CELLS, min_size=height, max_size=height)) for i in range(width)}
    columns["always"] = ["x"] * height
    fields, _ = proposed(folder, table(**columns))
    assert "always" in fields


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n\0_", exclude_categories=["Cs"]), min_size=1), max_size=4)
)
@settings(max_examples=40, deadline=None)
def test_columns_of_any_name_are_proposed_or_named(
    tmp_path_factory: pytest.TempPathFactory, headers: list[str]
) -> None:
    """Headers of surveys are sentences, in any script: some make a file name of hundreds of characters."""
    folder = tmp_path_factory.mktemp("survey")
    names = [
        "split",
        "_x",
        *headers,
        *(header * 40 for header in headers),
        "Which country? " * 9,
        "Как вы узнали? " * 9,
    ]
    rows = [["red" if number % 2 else "blue"] * len(names) for number in range(20)]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([names, *rows])
    (folder / "t.csv").write_text(out.getvalue())
    said = propose(LogsConfig(inputs=(str(folder / "t.csv"),), output=str(folder / "s.toml"), log_format="csv"))
    fields = {field.name for field in load_schema(str(folder / "s.toml")) if field.kind != "id"}
    assert {"Which country? " * 9, "Как вы узнали? " * 9} <= fields
    shown = said.splitlines()[1]
    assert shown.startswith("left out")
    missing = set(names) - fields
    alike = [name for name in names if [other.lower() for other in names].count(name.lower()) > 1]
    assert missing <= {"split", "_x", *alike}, "all others can be fields"
    assert all(json.dumps(name, ensure_ascii=False) in shown for name in ("split", "_x"))
