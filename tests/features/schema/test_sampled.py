"""Sampled classes: what a dataset says of them, and probabilities corrected for them."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_sample_weight

from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.sampled import Sampled, corrected, sampled_of, shares_of_classes
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError

shares = st.floats(0.001, 1.0)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20), shares, shares)
def test_what_a_model_of_sampled_records_says_is_turned_back(rates: list[float], no: float, yes: float) -> None:
    """The rate of yes among the records that sampling keeps is what a calibrated model would learn."""
    true = np.array(rates)
    seen = true * yes / (true * yes + (1 - true) * no)
    np.testing.assert_allclose(corrected(seen, (no, yes)), true, atol=1e-9)
    np.testing.assert_allclose(corrected(seen.reshape(-1, 1), (no, yes))[:, 0], true, atol=1e-9)
    two = np.stack([1 - seen, seen], axis=1)
    np.testing.assert_allclose(corrected(two, (no, yes))[:, 1], true, atol=1e-9)


@given(st.lists(shares, min_size=3, max_size=6))
def test_of_several_classes(kept: list[float]) -> None:
    true = np.random.default_rng(0).dirichlet(np.ones(len(kept)), 10)
    seen = true * np.array(kept) / (true * np.array(kept)).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(corrected(seen, kept), true, atol=1e-9)


def test_a_click_log_whose_rest_was_thinned_to_a_tenth() -> None:
    found = corrected(np.array([0.0, 0.5, 10 / 11, 1.0], np.float32), (0.1, 1.0))  # odds 0, 1, 10: a tenth of them
    np.testing.assert_allclose(found, [0.0, 1 / 11, 0.5, 1.0], rtol=1e-6)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(corrected([0.25, 0.75], (1.0, 1.0)), [0.25, 0.75])


@pytest.mark.parametrize(
    ("shape", "kept"),
    [
        ((4,), (0.1,)),
        ((4,), (0.1, 0.2, 0.3)),
        ((4, 3), (0.1, 0.2)),
        ((4,), (0.0, 1.0)),
        ((4,), (0.5, 1.5)),
        ((), (1, 1)),
    ],
)
def test_what_cannot_be_corrected(shape: tuple[int, ...], kept: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="cannot be corrected"):
        corrected(np.full(shape, 0.5), kept)


def test_shares_of_classes_are_told_by_the_label() -> None:
    click = Field(name="click", dtype="bool", kind="label")
    digit = Field(name="digit", dtype="int64", kind="label", num_classes=3)
    of_click = Sampled("click", {"false": Fraction(1, 10)}, ("train",))
    assert of_click.of_classes(click) == (0.1, 1.0)
    assert of_click.of_classes(digit) is None, "another column"
    assert Sampled("digit", {"2": Fraction(1, 4)}, ("train",)).of_classes(digit) == (1.0, 1.0, 0.25)
    assert (
        Sampled("y", {"2": Fraction(1, 4)}, ("train",)).of_classes(Field(name="y", dtype="int64", kind="label")) is None
    )
    schema = Schema((sample_id_field(), click), sampled=of_click)
    assert Schema.from_json(schema.to_json()).sampled == of_click
    assert schema == Schema((sample_id_field(), click)), "the same inputs and label, so a model of one fits the other"


@given(no=st.integers(1, 400), yes=st.integers(1, 400), kept=st.sampled_from([None, "1/3"]))
def test_balanced_weights_are_corrected_as_samples_are(no: int, yes: int, kept: str | None) -> None:
    """Against scikit-learn's balanced weights: what a row counts in the loss, by its class."""
    click = Field(name="click", dtype="bool", kind="label")
    sampled = {} if kept is None else {"sampled": {"column": "click", "shares": {"false": kept}, "splits": ["train"]}}
    config = {"weights": "balanced", "class_counts": {"false": no, "true": yes}, **sampled}
    schema = Schema((sample_id_field(), click))
    found = sampled_of(cast(DatasetManifest, SimpleNamespace(created_by={"config": config}, schema=schema.to_json())))
    labels = np.repeat([0, 1], [no, yes])
    balanced = compute_sample_weight("balanced", labels)[[0, -1]]
    weights = balanced * [float(Fraction(kept or 1)), 1]  # of a row before it was sampled
    assert found is not None
    of_no, of_yes = found.of_classes(click) or (1.0, 1.0)
    np.testing.assert_allclose(of_no / of_yes, weights[0] / weights[1], rtol=1e-12)
    assert Sampled.from_json(found.to_json()) == found
    assert found.unweighted().of_classes(click) == (float(Fraction(kept or 1)), 1.0)
    # A model that knows only the classes predicts their weighted share; corrected, it is the share of all rows.
    chance = balanced[1] * yes / (balanced[0] * no + balanced[1] * yes)
    expected = yes / (no * (1 if kept is None else 3) + yes)
    of_classes = shares_of_classes(found, click) or (1.0, 1.0)
    np.testing.assert_allclose(corrected(np.array([chance]), of_classes), [expected], rtol=1e-9)


@pytest.mark.parametrize(
    "wrong",
    [
        {"column": "c", "shares": {}},
        {"column": 1, "shares": {}, "splits": []},
        {"column": "c", "shares": {}, "splits": [1]},
        *(
            {"column": "c", "shares": {"1": share}, "splits": []}
            for share in (0.5, "3/2", "-1", "1/0", "1e99999999", "x")
        ),
    ],
)
def test_what_says_nothing_of_samples(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        Sampled.from_json(wrong)
