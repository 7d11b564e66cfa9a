"""Messages between driver and ranks: what is sent is what arrives, through JSON too, and a missing part is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.storage.errors import CommunicationError
from lockstep.training.config import TrainConfig
from lockstep.training.control.messages import CheckpointReport, Message, RankResult, Restore, TrainOrder

CONFIG = TrainConfig(
    datasets=("d",), run="r", model="m", num_ranks=2, global_batch=8, epochs=1, mix=None, extra={"a": 1}
)
TEXT = st.text(max_size=5)
NUMBERS = st.integers(0, 2**53)
MAPS: st.SearchStrategy[dict[str, Any]] = st.dictionaries(TEXT, NUMBERS | TEXT, max_size=3)
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        TrainOrder, config=st.just(CONFIG), plan=MAPS, comm=MAPS, shares=st.none() | st.lists(NUMBERS).map(tuple),
        first_weights=st.none() | TEXT, model_function=st.none() | TEXT, metric=st.none() | TEXT,
        suspect=st.none() | NUMBERS,
    ),
    st.builds(
        Restore, checkpoint=st.none() | TEXT, step=NUMBERS, staging=TEXT, generation=NUMBERS, parent=st.none() | MAPS
    ),
    st.builds(
        CheckpointReport, step=NUMBERS, files=st.lists(MAPS, max_size=2), tensors=MAPS,
        audit=st.lists(MAPS, max_size=2), state=MAPS, base=st.none() | NUMBERS,
    ),
    st.builds(
        RankResult, steps=NUMBERS, left=st.booleans(), metrics=MAPS, samples=NUMBERS, seconds=st.floats(0, 1e9),
        first_step_s=st.none() | st.floats(0, 1e9), left_over=st.lists(TEXT, max_size=3),
        class_counts=st.none() | st.lists(NUMBERS, max_size=3),
    ),
)  # fmt: skip


@given(MESSAGES)
def test_what_is_sent_is_what_arrives(message: Message) -> None:
    arrived = json.loads(json.dumps(message.to_json()))
    assert type(message).from_json({**arrived, "rows": 3}) == message  # a launcher may add keys


@given(MESSAGES, st.data())
def test_a_missing_part_is_named_unless_it_has_a_default(message: Message, data: st.DataObject) -> None:
    document = message.to_json()
    name = data.draw(st.sampled_from(sorted(document)))
    del document[name]
    try:
        found = type(message).from_json(document)
    except CommunicationError as error:
        assert error.what == f"a message lacks {name}" and name in error.allowed
    else:
        assert {**found.to_json(), name: None} == {**message.to_json(), name: None}


def test_an_order_without_a_configuration_is_refused() -> None:
    with pytest.raises(CommunicationError, match="lacks config"):
        TrainOrder.from_json({"plan": {}})
