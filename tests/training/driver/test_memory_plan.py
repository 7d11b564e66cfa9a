"""The plan of a model's memory against formulas of the papers, brute force, and a count tensor by tensor."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.jobs.plan_memory import main
from lockstep.storage.errors import ConfigError
from lockstep.training.driver.memory_plan import (
    GIB,
    MODES,
    SLOTS,
    Mode,
    Size,
    Transformer,
    advice,
    fewest_ranks,
    held,
    memory_plan,
)

BY_NAME = {mode.name: mode for mode in MODES}
SMALL = Transformer(layers=6, hidden=64, heads=4, sequence=32, rows=2)


@given(st.floats(1, 1e13), st.integers(1, 4096))
def test_bytes_a_parameter_are_those_of_the_zero_paper(parameters: float, num_ranks: int) -> None:
    size = Size.of(parameters, "adam")
    each = {
        "replicated": 16.0,
        "--zero 1": 8 + 8 / num_ranks,
        "--zero 2": 4 + 12 / num_ranks,
        "--zero 3": 16 / num_ranks,
    }
    for name, expected in each.items():
        assert sum(held(size, BY_NAME[name], num_ranks).values()) == pytest.approx(expected * parameters)


def kept_tensor_by_tensor(shape: Transformer) -> int:
    """Counts what one process keeps: numbers of elements of 4 bytes, and masks of 1."""
    s, b, h, a = shape.sequence, shape.rows, shape.hidden, shape.heads
    floats = {
        "input of the first normalisation": s * b * h,
        "input of queries, keys, values": s * b * h,
        "queries and keys": 2 * s * b * h,
        "softmax": a * s * s * b,
        "dropped softmax": a * s * s * b,
        "values": s * b * h,
        "input of the projection": s * b * h,
        "input of the second normalisation": s * b * h,
        "input of the first dense layer": s * b * h,
        "input of gelu": 4 * s * b * h,
        "input of the second dense layer": 4 * s * b * h,
    }
    masks = {"of attention": a * s * s * b, "after attention": s * b * h, "after dense": s * b * h}
    return shape.layers * (4 * sum(floats.values()) + sum(masks.values()))


@given(st.builds(Transformer, **dict.fromkeys(("layers", "hidden", "heads", "sequence", "rows"), st.integers(1, 99))))
def test_what_layers_keep_is_the_sum_of_their_tensors(shape: Transformer) -> None:
    assert shape.kept_bytes() == pytest.approx(kept_tensor_by_tensor(shape))
    assert shape.kept_bytes(2) < shape.kept_bytes()


@given(
    st.floats(1e6, 1e11), st.sampled_from(sorted(SLOTS)), st.sampled_from(MODES), st.floats(1e6, 1e12), st.booleans()
)
def test_the_fewest_ranks_are_those_of_a_search_one_by_one(
    parameters: float, optimizer: str, mode: Mode, limit: float, shaped: bool
) -> None:
    size = Size.of(parameters, optimizer, SMALL if shaped else None)
    most = {"tensor parallel": 4, "pipeline": 6}.get(mode.name, 300) if shaped else 300
    fitting = [n for n in range(1, most + 1) if sum(held(size, mode, n).values()) <= limit]
    found = fewest_ranks(size, mode, limit)
    assert found == fitting[0] if fitting else (found is None or found > most)


def test_ten_billion_parameters_fit_on_two_devices_only_if_all_parts_are_divided() -> None:
    rows = {row["mode"]: row for row in memory_plan(Size.of(1e10, "adam"), [2], 80 * GIB)}
    assert {name for name, row in rows.items() if row["fits"]} == {"--zero 3", "tensor parallel", "pipeline"}
    assert rows["--zero 2"]["sent"] == rows["replicated"]["sent"] == 4e10
    assert rows["--zero 3"]["sent"] == 6e10
    assert advice(list(rows.values()), 80 * GIB) == "fits into 80.0 GiB: --zero 3 on 2 ranks"


def test_a_rank_alone_divides_nothing_and_a_pipeline_has_no_more_stages_than_layers() -> None:
    rows = memory_plan(Size.of(1e6, "sgd", SMALL), [1, 5], GIB)
    assert [(row["mode"], row["ranks"]) for row in rows] == [
        ("replicated", 1),
        *((mode.name, 5) for mode in MODES if mode.name != "tensor parallel"),
    ]


def test_wrong_numbers_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, named in (
        ("--parameters 0", "--parameters"),
        ("--parameters nan", "--parameters"),
        ("--parameters 1e9 --optimizer lamb", "--optimizer"),
        ("--parameters 1e9 --num-ranks 0", "--num-ranks"),
        ("--parameters 1e9 --memory 0", "--memory"),
        ("--parameters 1e9 --hidden 4", "the shape of a transformer"),
        ("--parameters 1e9 --layers 1 --hidden 0 --heads 1 --sequence 1 --rows 1", "--hidden"),
    ):
        with pytest.raises(ConfigError, match=named):
            main(flags.split())
    assert main(["--parameters", "1e9", "--num-ranks", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["held"] == 16e9
