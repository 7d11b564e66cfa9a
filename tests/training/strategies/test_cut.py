"""Cuts of a graph: what crosses, whose variables are where, and stages that compute what the whole model computes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError

pytestmark = pytest.mark.slow


def with_a_skip() -> Any:
    """Two inputs, two outputs, one of them early, a skip connection, and what inputs alone decide."""
    import keras

    layers = keras.layers
    ids, x = keras.Input((6,), dtype="int64", name="ids"), keras.Input((3,), name="x")
    there = keras.ops.expand_dims(keras.ops.cast(ids > 0, "float32"), -1)
    found = layers.Embedding(9, 4, name="table")(ids) * there
    y = layers.Dense(4, activation="relu", name="first")(found)
    y = layers.Dense(4, activation="tanh", name="second")(y) + found
    early = layers.Dense(1, name="early")(layers.Flatten(name="flat")(y))
    y = keras.ops.sum(y * there, axis=1)
    y = layers.Dense(5, name="third")(layers.Concatenate(name="joined")([y, x]))
    late = layers.Dense(2, name="late")(y)
    return keras.Model([ids, x], {"early": early, "late": late}, name="forked")


def chained() -> Any:
    import keras

    return keras.Sequential(
        [keras.Input((4,)), *(keras.layers.Dense(width, name=f"d{width}") for width in (8, 7, 6, 5))], name="chain"
    )


def rows(model: Any) -> list[Any]:
    import keras

    rng = np.random.default_rng(1)
    inputs = model._functional.inputs if isinstance(model, keras.Sequential) else model.inputs
    return [
        rng.integers(0, 9, (5, *one.shape[1:])) if one.dtype == "int64" else rng.normal(size=(5, *one.shape[1:]))
        for one in inputs
    ]


def stages_of(model: Any, count: int, after: tuple[str, ...] = ()) -> list[Any]:
    from lockstep.training.strategies.cut import Graph, cuts_of, reckoned_costs

    graph = Graph(model)
    cuts = cuts_of(graph, count, reckoned_costs(graph), after)
    return [graph.stage(cuts, number) for number in range(count)]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("make", [with_a_skip, chained])
def test_outputs_and_gradients_of_the_stages_are_those_of_the_whole(make: Any, count: int) -> None:
    import keras
    import tensorflow as tf

    model = make()
    stages, given = stages_of(model, count), [tf.constant(one) for one in rows(model)]
    with tf.GradientTape() as tape:
        whole = model(given if len(given) > 1 else given[0])
        loss = sum(tf.reduce_sum(tf.square(one)) for one in keras.tree.flatten(whole))
    expected = tape.gradient(loss, [one.value for one in model.trainable_variables])
    with tf.GradientTape() as tape:
        crossing: list[Any] = []
        found: Any = None
        for stage in stages:
            found = stage.model([*(given[i] for i in stage.inputs), *crossing])
            crossing = keras.tree.flatten(found)
        loss = sum(tf.reduce_sum(tf.square(one)) for one in crossing)
    keras.tree.map_structure(np.testing.assert_array_equal, found, whole)
    for one, other in zip(tape.gradient(loss, [v.value for v in model.trainable_variables]), expected, strict=True):
        np.testing.assert_allclose(tf.convert_to_tensor(one), tf.convert_to_tensor(other), rtol=1e-5, atol=1e-6)
    owned = [id(one) for stage in stages for one in stage.model.weights]
    assert sorted(owned) == sorted(id(one) for one in model.weights), "each weight is in one stage"


def test_what_inputs_alone_decide_does_not_cross() -> None:
    from lockstep.training.strategies.cut import Graph

    graph = Graph(with_a_skip())
    crossing = {
        place.after: [re.sub(r"_\d+$", "", one._keras_history.operation.name) for one in place.tensors]
        for place in graph.places
    }
    assert crossing["first"] == ["multiply", "first"], "the skip connection crosses too"
    assert crossing["third"] == ["add", "third"] and not any(
        "cast" in name for names in crossing.values() for name in names
    )
    (early,) = (place for place in graph.places if place.after == "first")
    assert early.row_bytes == 2 * 6 * 4 * 4


def test_the_longest_stage_is_as_short_as_it_can_be_and_among_such_cuts_fewest_bytes_cross() -> None:
    from lockstep.training.strategies.cut import Graph, costs_of_stages, cuts_of

    graph = Graph(chained())
    cuts = cuts_of(graph, 2, [1.0, 1.0, 1.0, 5.0])
    assert [place.after for place in cuts] == ["d6"] and costs_of_stages(graph, cuts, [1.0, 1.0, 1.0, 5.0]) == [3, 5]
    assert [place.after for place in cuts_of(graph, 2, [4.0, 0.1, 0.0, 4.0])] == ["d6"], "24 bytes, not 32 or 28"
    assert [place.after for place in cuts_of(graph, 3, [1.0] * 4, ("d8", "d6"))] == ["d8", "d6"]
    for wrong in (("d8",), ("d6", "d8"), ("d8", "none")):
        with pytest.raises(ConfigError, match="--cut-after"):
            cuts_of(graph, 3, [1.0] * 4, wrong)


def test_models_that_cannot_be_cut_are_refused_by_name() -> None:
    import keras

    from lockstep.training.strategies.cut import Graph, cuts_of, reckoned_costs

    class Own(keras.Model):
        def call(self, x: Any) -> Any:
            return x

    with pytest.raises(ConfigError, match="no graph of layers"):
        Graph(Own())
    x = keras.Input((4,))
    shared = keras.layers.Dense(4, name="shared")
    twice = keras.Model(x, shared(keras.layers.Dense(4, name="between")(shared(x))), name="twice")
    graph = Graph(twice)
    with pytest.raises(ConfigError, match="cut into 2 stages") as caught:
        cuts_of(graph, 2, reckoned_costs(graph))
    assert "share variables" in caught.value.got
    ends = [keras.layers.Dense(2, name=f"end_{number}")(x) for number in range(5)]
    wide = keras.Model(x, keras.layers.Dense(1)(keras.layers.Concatenate()(ends)))
    graph = Graph(wide)
    with pytest.raises(ConfigError, match="after end_4") as caught:
        cuts_of(graph, 2, reckoned_costs(graph), ("end_4",))
    assert "5 tensors cross: end_0, end_1, end_2, end_3, end_4" in caught.value.got
    ids = keras.Input((3,), dtype="int64")
    masked = keras.layers.Embedding(5, 4, mask_zero=True, name="masked")(ids)
    graph = Graph(keras.Model(ids, keras.layers.Dense(1)(keras.layers.GRU(3, name="gru")(masked))))
    assert "mask" in graph.places[0].fault and not graph.places[1].fault


@pytest.mark.parametrize(("name", "most"), [("resnet8", 2), ("transformer", 3)])
def test_ready_models_can_be_cut(name: str, most: int) -> None:
    """Skip connections of the ResNet and the embedding of the transformer, which its end uses, cross too."""
    from lockstep.features.schema.signature import Signature, TensorSpec
    from lockstep.training.models import ModelOptions, build
    from lockstep.training.strategies.cut import Graph, costs_of_stages, cuts_of, reckoned_costs

    features = {
        "resnet8": {"image": TensorSpec(shape=(8, 8, 3), dtype="uint8")},
        "transformer": {"pages": TensorSpec(shape=(6,), dtype="int64", ids=12)},
    }[name]
    signature = Signature(features=features, label=TensorSpec(shape=(), dtype="int64"), num_classes=12)
    graph = Graph(build(name, signature, ModelOptions(seed=1)).model)
    costs = reckoned_costs(graph)
    for stages in (2, 3):
        cuts = cuts_of(graph, stages, costs)
        assert max(len(place.tensors) for place in cuts) <= most
        assert max(costs_of_stages(graph, cuts, costs)) < sum(costs) * (0.7 if stages == 2 else 0.55)
