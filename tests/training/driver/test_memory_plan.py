"""The plan of a model's memory against formulas of the papers, brute force, and a count tensor by tensor."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.jobs.plan_memory import main
from lockstep.storage.errors import ConfigError
from lockstep.training import ways
from lockstep.training.comm.cost import LinkCosts
from lockstep.training.driver import memory_plan as plan
from lockstep.training.driver.memory_plan import (
    GIB,
    MIB,
    SLOTS,
    Mode,
    Size,
    Transformer,
    advice,
    fewest_ranks,
    fits,
    held,
    memory_plan,
    modes,
    smaller,
    step_s,
)

SMALL = Transformer(layers=6, hidden=64, heads=4, sequence=32, rows=2)
LINKS = LinkCosts(alpha_s=1e-4, beta_s_per_byte=1e-9, gamma_s_per_byte=0.0)


def of_model(size: Size, mode: Mode) -> float:
    parts = held(size, mode)
    return parts["weights"] + parts["gradients"] + parts["state"]


@given(st.floats(1, 1e13), st.integers(2, 4096))
def test_bytes_a_parameter_are_those_of_the_zero_paper(parameters: float, ranks: int) -> None:
    size = Size.of(parameters, "adam")
    each = {0: 16.0, 1: 8 + 8 / ranks, 2: 4 + 12 / ranks, 3: 16 / ranks}
    for stage, expected in each.items():
        mode = Mode(ranks=ranks, zero=stage)
        assert of_model(size, mode) == pytest.approx(expected * parameters)
        assert plan.sent(size, mode) == pytest.approx((3 if stage == 3 else 2) * 4 * parameters * (ranks - 1) / ranks)
    for mode in (Mode(ranks=ranks, stages=ranks), Mode(ranks=ranks, tensor=ranks)):
        assert of_model(size, mode) == pytest.approx(16 / ranks * parameters)
    hybrid = Mode(ranks=8, zero=1, stages=2, tensor=2)
    assert hybrid.copies == 2 and of_model(size, hybrid) == pytest.approx((8 + 8 / 2) / 4 * parameters)


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


@settings(max_examples=25, deadline=None)
@given(st.floats(1e6, 1e11), st.sampled_from(sorted(SLOTS)), st.integers(1, 6), st.floats(1e6, 1e12), st.booleans())
def test_the_fewest_ranks_are_those_of_a_search_one_by_one(
    parameters: float, optimizer: str, number: int, limit: float, shaped: bool
) -> None:
    size = Size.of(parameters, optimizer, SMALL if shaped else None)
    kind = [*modes(4, size.transformer)][number]
    found = fewest_ranks(size, kind, limit)
    alike = [(one.zero, one.stages > 1, one.tensor > 1) for one in (kind,)]
    like = [
        (n, one)
        for n in range(2, 65)
        for one in modes(n, size.transformer)
        if (one.zero, one.stages > 1, one.tensor > 1) in alike
    ]
    fitting = [1] * fits(size, Mode(ranks=1), limit) + [n for n, one in like if fits(size, one, limit)]
    assert found == fitting[0] if fitting else (found is None or found > 64)


def test_ten_billion_parameters_fit_on_two_devices_only_if_all_parts_are_divided() -> None:
    rows = {row["mode"]: row for row in memory_plan(Size.of(1e10, "adam"), [2], 80 * GIB)}
    assert {name for name, row in rows.items() if row["fits"]} == {
        "--zero 3",
        "--pipeline-stages 2",
        "--tensor-parallel 2",
    }
    assert rows["--zero 2"]["sent"] == rows["plain"]["sent"] == 4e10
    assert rows["--zero 3"]["sent"] == 6e10
    halved = [name for name, row in rows.items() if row["weights"] == 2e10]
    assert halved == ["--zero 3", "--pipeline-stages 2", "--tensor-parallel 2"]
    words = advice([row for row in rows.values() if row["mode"] in ("plain", "--zero 2")], 80 * GIB)
    assert words == "does not fit into 80.0 GiB: `--zero 2` on 3 ranks would"


def test_a_rank_alone_divides_nothing_and_a_pipeline_has_no_more_stages_than_layers() -> None:
    def names(*ranks: int) -> list[str]:
        return [row["mode"] for row in memory_plan(Size.of(1e6, "sgd", SMALL), ranks, GIB)]

    zero = ["--zero 1", "--zero 2", "--zero 3"]
    assert names(1, 5) == ["plain", "plain", *zero, "--pipeline-stages 5"]
    hybrid = "--pipeline-stages 2 --tensor-parallel 2"
    assert names(4) == ["plain", *zero, "--pipeline-stages 4", "--tensor-parallel 4", hybrid]
    assert names(8) == ["plain", *zero, "--pipeline-stages 2 --tensor-parallel 4"]
    large = Transformer(layers=118, hidden=64, heads=96, sequence=32, rows=2)
    (one,) = [mode for mode in modes(1024, large) if mode.stages > 1]
    assert (one.stages, one.tensor, one.copies) == (64, 8, 2)


def test_the_time_of_a_step_is_that_of_its_parts() -> None:
    """Links of 1 ns a byte and 0.1 ms a message; a rank computes its rows in 1 s."""
    size = replace(Size.of(1e8, "adam", SMALL), step_s=1.0)
    ring_s = 2e-4 + 4e8 * 1e-9  # two messages, each of half of the gradients
    assert step_s(size, Mode(ranks=1), None) == 1.0
    assert step_s(size, Mode(ranks=2), None) is None
    assert step_s(size, Mode(ranks=2, zero=1), LINKS) == pytest.approx(1 + ring_s, rel=1e-3)
    assert step_s(size, Mode(ranks=2, zero=3), LINKS) == pytest.approx(1 + 1.5 * ring_s, rel=1e-3)
    # The bubble: (p - 1) / (m + p - 1) of the step, with p = m = 2.
    pipeline = step_s(size, Mode(ranks=2, stages=2), LINKS)
    assert pipeline == pytest.approx(1.5 + 6 * (1e-4 + SMALL.output_bytes * 1e-9))
    tensor = step_s(size, Mode(ranks=2, tensor=2), LINKS)
    assert tensor is not None and tensor == pytest.approx(1 + 2 * 4 * 6 * 1e-4, rel=0.01)
    assert step_s(replace(size, transformer=None), Mode(ranks=2, tensor=2), LINKS) is None


def test_only_modes_that_a_run_can_have_are_called_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Mode(ranks=2).runs and Mode(ranks=2, zero=2).runs
    monkeypatch.setattr(ways, "WAYS", (ways.EveryStep,))
    assert [mode.runs for mode in modes(4, None)] == [True] + [False] * 6


def test_a_run_that_does_not_fit_is_shown_the_first_stage_that_would() -> None:
    size = Size.of(100 * MIB / 4, "adam")  # 100 MiB of weights: 400 in all, and 600 for the rest
    assert smaller(size, 2, 1000 * MIB, 1000 * MIB) is None
    assert smaller(size, 2, 1000 * MIB, 900 * MIB) == "`--zero 1` on 2 ranks would (900.0 MiB a rank)"
    assert smaller(size, 2, 1000 * MIB, 870 * MIB) == "`--zero 2` on 2 ranks would (862.0 MiB a rank)"
    assert smaller(size, 2, 1000 * MIB, 800 * MIB) in (
        "`--zero 2` on 4 ranks would (787.0 MiB a rank)",
        "`--zero 3` on 4 ranks would (716.0 MiB a rank)",
    )
    assert smaller(size, 2, 1000 * MIB, 100 * MIB) is None


def test_wrong_numbers_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, named in (
        ("--parameters 0", "--parameters"),
        ("--parameters nan", "--parameters"),
        ("--parameters 1e9 --optimizer lamb", "--optimizer"),
        ("--parameters 1e9 --num-ranks 0", "--num-ranks"),
        ("--parameters 1e9 --memory 0", "--memory"),
        ("--parameters 1e9 --hidden 4", "the shape of a transformer"),
        ("--parameters 1e9 --layers 1 --hidden 0 --heads 1 --sequence 1 --rows 1", "--hidden"),
        ("--parameters 1e9 --lora-rank 2", "--lora-rank"),
        ("--parameters 1e9 --bandwidth 0", "--bandwidth"),
        ("", "the size of a model"),
        ("--model mlp", "--dataset"),
        ("--model transformer --dataset d --heads 2", "--heads"),
        ("--model mlp --dataset d --set with=2", "no setting"),
    ):
        with pytest.raises(ConfigError, match=named):
            main(flags.split())
    assert main(["--parameters", "1e9", "--num-ranks", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["held"] == 16e9
