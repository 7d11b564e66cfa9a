"""Which checkpoints stay: the last, one every so many steps, the best by a metric."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.storage.errors import ConfigError
from lockstep.training.rules import Keep, check_metric
from lockstep.training.run.best import metric_of
from lockstep.training.run.lineage import CheckpointRef as Ref

NONE: dict[int, float] = {}


@pytest.mark.parametrize(
    ("rule", "steps", "values", "kept"),
    [
        (Keep(2), (5, 10, 15), NONE, {10, 15}),
        (Keep(1, every_steps=10), (5, 10, 15, 20, 25), NONE, {10, 20, 25}),
        # None lies on a multiple: the first one after it stays.
        (Keep(1, every_steps=10), (7, 14, 21, 28, 35), NONE, {14, 21, 35}),
        # One checkpoint that is the first after two multiples counts for both.
        (Keep(1, every_steps=10), (25, 28, 31, 32), NONE, {25, 31, 32}),
        (Keep(1, best="auc:max"), (5, 10, 15), {5: 0.7, 10: 0.9}, {10, 15}),
        (Keep(1, best="loss:min"), (5, 10, 15), {5: 0.7, 10: 0.9}, {5, 15}),
        # Of equal ones the earliest: what came after it was no better.
        (Keep(1, best="auc:max"), (5, 10, 15), {5: 0.9, 10: 0.9}, {5, 15}),
        (Keep(1, best="auc:max"), (5, 10), NONE, {10}),
        (Keep(1, every_steps=10, best="auc:max"), (5, 10, 15, 20, 25), {15: 1.0}, {10, 15, 20, 25}),
        (Keep(3), (), NONE, set()),
    ],
)
def test_what_stays(rule: Keep, steps: tuple[int, ...], values: dict[int, float], kept: set[int]) -> None:
    chain = [Ref(step, 1) for step in reversed(steps)]
    assert {ref.step for ref in rule.chosen(chain, lambda ref: values.get(ref.step))} == kept


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=30, unique=True),
    st.integers(1, 4),
    st.integers(1, 50),
    st.data(),
)
def test_what_is_kept_of_what_was_kept_is_what_is_kept_of_all(
    steps: list[int], last: int, every: int, data: st.DataObject
) -> None:
    """A run retires after each commit, so checkpoints go one by one; the end must not depend on when they went."""
    values = {step: data.draw(st.integers(0, 3)) / 2 for step in steps}
    rule = Keep(last, every, "auc:max")
    there: list[Ref] = []
    for step in sorted(steps):
        there.insert(0, Ref(step, 1))
        kept = rule.chosen(there, lambda ref: values[ref.step])
        there = [ref for ref in there if ref in kept]
    everything = [Ref(step, 1) for step in sorted(steps, reverse=True)]
    assert set(there) == rule.chosen(everything, lambda ref: values[ref.step])


@pytest.mark.parametrize(
    ("state", "value"),
    [
        ({"in_epoch": False, "metrics": {"auc": 0.5}}, 0.5),
        ({"in_epoch": True, "metrics": {"auc": 0.5}}, None),  # the epoch before's: another checkpoint has it
        ({"in_epoch": False, "metrics": {}}, None),
        ({"in_epoch": False, "metrics": {"auc": float("nan")}}, None),
        ({"in_epoch": False, "metrics": {"auc": [0.5, 0.6]}}, None),  # one for each class: none is larger
        ({}, None),
    ],
)
def test_metric_of_a_checkpoint(state: dict[str, object], value: float | None) -> None:
    assert metric_of(state, "auc") == value


def test_unknown_metric_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="auc") as caught:
        check_metric("auc:max", {"loss": 0.1, "accuracy": 0.9})
    assert "accuracy:max" in str(caught.value)
    check_metric("accuracy:max", {"loss": 0.1, "accuracy": 0.9})
    check_metric(None, {"loss": 0.1})
