"""Messages between driver and ranks: what is sent is what arrives, through JSON too, and what does not fit is named."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.storage.errors import CommunicationError
from lockstep.training.actors.actor import ActorOrder
from lockstep.training.actors.config import AgentConfig, LearnerOrder
from lockstep.training.actors.environment import Shape
from lockstep.training.actors.learner import Progress
from lockstep.training.comm.options import CommOptions
from lockstep.training.config import TrainConfig
from lockstep.training.control.messages import (
    BestCheckpoint,
    CheckpointReport,
    MadePlan,
    MetricRows,
    ModelSize,
    RankMemory,
    RankResult,
    Restore,
    SizeOrder,
    Suspect,
    TrainOrder,
)
from lockstep.training.control.protocol import Message
from lockstep.training.control.task import CommOrder
from lockstep.training.launch.script_rank import ScriptOrder
from lockstep.training.profiling.bench_comm import BenchConfig, Row, RowDone
from lockstep.training.profiling.profile import ProfileOrder, RankProfile, RoundDone
from lockstep.training.results.evaluate import EvaluateOrder, EvaluateRequest
from lockstep.training.results.export_run import ExportOrder, MadeModel
from lockstep.training.results.policy_value import PolicyOrder, PolicyRequest
from lockstep.training.results.predict import PartFile, PredictOrder, PredictRequest, RankPredictions
from lockstep.training.results.stored_model import StoredModel

CONFIG = st.just(
    TrainConfig(datasets=("d",), run="r", model="m", num_ranks=2, global_batch=8, epochs=1, mix=None, extra={"a": 1})
)
TEXT = st.text(max_size=5)
NUMBERS = st.integers(0, 2**53)
COUNTS = st.integers(1, 9)
SECONDS = st.floats(0, 1e9)
FLAGS = st.booleans()
URLS = st.sampled_from(["/a", "/a/b", "hdfs://host/a"])
MAPS: st.SearchStrategy[dict[str, Any]] = st.dictionaries(TEXT, NUMBERS | TEXT, max_size=3)
FILES = st.lists(MAPS, max_size=2)


def several(each: st.SearchStrategy[Any], least: int = 0) -> st.SearchStrategy[Any]:
    return st.lists(each, min_size=least, max_size=3).map(tuple)


COMM = st.builds(
    CommOrder,
    options=st.sampled_from([CommOptions(), CommOptions(backend="tcp", algorithm="ring")]),
    freeze=FLAGS,
)
STORED = st.builds(
    StoredModel, run=URLS, config=CONFIG, model=st.none() | URLS, checkpoint=st.none() | URLS,
    kept=st.none() | several(st.floats(0.1, 1.0)),
)  # fmt: skip
EVALUATION = st.builds(
    EvaluateRequest, several(URLS), URLS, TEXT, num_ranks=COUNTS, batch=COUNTS, baseline=st.none() | TEXT,
    slices=several(TEXT), clusters=st.none() | TEXT, checkpoint=st.none() | NUMBERS | URLS, earlier=FLAGS,
    more=several(URLS), pictures=FLAGS, where=st.none() | st.just("n > 3"),
)  # fmt: skip
POLICY = st.builds(
    PolicyRequest, URLS, URLS, TEXT, reward=TEXT, propensity=TEXT, num_ranks=COUNTS, batch=COUNTS,
    clusters=st.none() | TEXT, checkpoint=st.none() | NUMBERS | st.sampled_from(["last", "best"]),
)  # fmt: skip
PREDICTION = st.builds(
    PredictRequest, several(URLS, 1), URLS, TEXT, URLS, num_ranks=COUNTS, batch=COUNTS,
    checkpoint=st.none() | NUMBERS | st.sampled_from(["last", "best"]), columns=several(TEXT),
)  # fmt: skip
PART = st.builds(
    PartFile, name=TEXT, bytes=NUMBERS, sha256=TEXT, rows=NUMBERS, not_finite=NUMBERS, left_out=NUMBERS,
    first_left_out=st.lists(TEXT, max_size=2),
)  # fmt: skip
ROW = st.builds(
    Row, nbytes=NUMBERS, backend=TEXT, algorithm=TEXT, asked=TEXT, median_s=SECONDS, fastest_s=SECONDS,
    slowest_s=SECONDS, wrong=NUMBERS,
)  # fmt: skip
AGENT = st.builds(
    AgentConfig, env=TEXT, run=URLS, learners=COUNTS, actors=COUNTS, steps=COUNTS, seed=NUMBERS, envs=COUNTS,
    unroll=COUNTS, batch=COUNTS, widths=several(COUNTS, 1), max_lag=NUMBERS, discount=st.floats(0, 0.99),
)  # fmt: skip
MESSAGES: list[st.SearchStrategy[Message]] = [
    COMM,
    AGENT,
    st.builds(
        LearnerOrder, config=AGENT, staging=URLS, checkpoint=st.none() | URLS,
        shape=st.builds(Shape, inputs=COUNTS, actions=COUNTS),
    ),
    st.builds(
        ActorOrder, env=TEXT, envs=COUNTS, unroll=COUNTS, widths=several(COUNTS, 1),
        seed=st.lists(NUMBERS, max_size=4), port=COUNTS, key=TEXT,
    ),
    st.builds(
        Progress, updates=NUMBERS, steps=NUMBERS, episodes=NUMBERS, trajectories=NUMBERS, lag_sum=NUMBERS,
        lag_max=NUMBERS, dropped=NUMBERS, lost=NUMBERS, replaced=NUMBERS, under_way=NUMBERS,
        returns=st.lists(st.lists(SECONDS, min_size=2, max_size=2), max_size=2),
    ),
    st.builds(
        TrainOrder, config=CONFIG, plan=MAPS, comm=COMM, shares=st.none() | several(NUMBERS),
        first_weights=st.none() | TEXT, model_function=st.none() | TEXT, metric=st.none() | TEXT,
        suspect=st.none() | NUMBERS,
    ),
    st.builds(SizeOrder, config=CONFIG, plan=MAPS, rows=NUMBERS),
    st.builds(
        ModelSize, parameters=NUMBERS, weights_bytes=NUMBERS, gradient_bytes=NUMBERS, checkpoint_bytes=NUMBERS,
        rank_bytes=NUMBERS, kept_bytes=st.none() | NUMBERS, metrics=st.lists(TEXT, max_size=2),
    ),
    st.builds(
        Restore, checkpoint=st.none() | TEXT, step=NUMBERS, staging=TEXT, generation=NUMBERS, parent=st.none() | MAPS
    ),
    st.builds(
        CheckpointReport, step=NUMBERS, files=FILES, tensors=MAPS, audit=FILES, state=MAPS, base=st.none() | NUMBERS
    ),
    st.builds(MetricRows, rows=FILES), st.builds(RankMemory, rank_mib=NUMBERS), st.builds(MadePlan, plan=MAPS),
    st.builds(Suspect, step=NUMBERS, samples=st.lists(TEXT, max_size=3)),
    st.builds(BestCheckpoint, checkpoint=st.none() | URLS),
    st.builds(
        RankResult, steps=NUMBERS, left=FLAGS, metrics=MAPS, samples=NUMBERS, seconds=SECONDS,
        first_step_s=st.none() | SECONDS, left_over=st.lists(TEXT, max_size=3),
        class_counts=st.none() | st.lists(NUMBERS, max_size=3),
    ),
    st.builds(
        ScriptOrder, name=TEXT, arguments=several(TEXT), path=st.none() | TEXT, text=st.none() | TEXT,
        start_s=SECONDS, comm=COMM,
    ),
    STORED,
    EVALUATION,
    st.builds(
        EvaluateOrder, request=EVALUATION, members=st.lists(STORED, max_size=2), datasets=several(URLS),
        pooled=st.none() | several(TEXT), selection=st.none() | MAPS,
    ),
    POLICY,
    st.builds(PolicyOrder, request=POLICY, members=st.lists(STORED, max_size=2)),
    PREDICTION,
    st.builds(
        PredictOrder, request=PREDICTION, members=st.lists(STORED, max_size=2), parts=NUMBERS, directory=URLS
    ),
    PART,
    st.builds(RankPredictions, files=st.lists(PART, max_size=2)),
    st.builds(
        ExportOrder, members=st.lists(STORED, max_size=2), directory=URLS, form=st.sampled_from(["keras", "savedmodel"])
    ),
    st.builds(MadeModel, files=FILES, not_raw=st.dictionaries(TEXT, TEXT, max_size=2)),
    st.builds(ProfileOrder, config=CONFIG, plan=MAPS, comm=COMM, steps=st.none() | NUMBERS, rounds=NUMBERS),
    st.builds(RoundDone, done=NUMBERS, total=NUMBERS),
    st.builds(
        RankProfile,
        rounds=st.lists(st.dictionaries(TEXT, st.dictionaries(TEXT, SECONDS, max_size=2), max_size=2), max_size=2),
        steps=NUMBERS, settling=NUMBERS, chunk_steps=NUMBERS, local=FLAGS, repeats=FLAGS, cores=NUMBERS,
        fetched_bytes=NUMBERS, pass_bytes=NUMBERS, split_bytes=NUMBERS,
        ranks_of_host=NUMBERS, state_bytes=NUMBERS, copy_s=SECONDS,
    ),
    st.builds(
        BenchConfig, num_ranks=st.integers(2, 9), sizes=several(st.sampled_from([4, 1024]), 1), rounds=COUNTS,
        backends=several(st.sampled_from(["auto", "tcp"]), 1), round_s=st.floats(0.01, 9.0),
    ),
    ROW,
    st.builds(RowDone, row=ROW, total=NUMBERS),
]  # fmt: skip
ANY = st.one_of(MESSAGES)


def kinds(of: type[Message]) -> set[type[Message]]:
    return {of}.union(*map(kinds, of.__subclasses__()))


def test_every_message_of_the_project_is_tried() -> None:
    tried = set(map(kind_of, MESSAGES))
    ours = {each for each in kinds(Message) - {Message} if each.__module__.startswith("lockstep.")}
    assert ours <= tried, "give MESSAGES a strategy"


def kind_of(strategy: st.SearchStrategy[Message]) -> Any:
    found: list[Any] = []

    @given(strategy)
    def draw(message: Message) -> None:
        found.append(type(message))

    draw()
    return found[0]


@given(ANY)
def test_what_is_sent_is_what_arrives(message: Message) -> None:
    arrived = json.loads(json.dumps(message.to_json()))
    assert type(message).from_json(arrived) == message


@given(ANY, st.data())
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


@given(ANY, st.text("abc", min_size=1).map(lambda name: f"{name}_no_field"))
def test_an_unknown_part_is_named(message: Message, name: str) -> None:
    with pytest.raises(CommunicationError) as caught:
        type(message).from_json({**message.to_json(), name: 1})
    assert caught.value.what == f"a message has the unknown part {name}"
    assert all(each.name in caught.value.allowed for each in fields(message)) and caught.value.next_step


@given(ANY, st.data())
def test_a_part_of_another_type_is_named(message: Message, data: st.DataObject) -> None:
    """No field takes this value: it is a map of lists."""
    name = data.draw(st.sampled_from(sorted(message.to_json())))
    wrong: Any = 2.5j
    with pytest.raises(CommunicationError) as caught:
        type(message).from_json({**message.to_json(), name: wrong})
    assert caught.value.what == f"a message has {name} of another type" and "2.5j" in caught.value.got


@pytest.mark.parametrize(
    ("name", "value", "at"),
    [
        ("steps", True, "steps"),  # JSON's true is no number
        ("steps", 1.0, "steps"),
        ("steps", "1", "steps"),
        ("left", 1, "left"),
        ("seconds", "soon", "seconds"),
        ("metrics", [], "metrics"),
        ("watching", "abc", "watching"),
        ("watching", ["a", 2], "watching[1]"),
        ("class_counts", {"0": 1}, "class_counts"),
    ],
)
def test_a_value_that_nearly_fits_is_refused_with_its_place(name: str, value: Any, at: str) -> None:
    with pytest.raises(CommunicationError) as caught:
        RankResult.from_json({"steps": 1, name: value})
    assert caught.value.what == f"a message has {at} of another type" and caught.value.allowed


@given(st.sampled_from(["nan", "inf", "-inf"]))
def test_a_number_that_json_cannot_hold_arrives(text: str) -> None:
    assert repr(RankResult.from_json({"steps": 1, "seconds": text}).seconds) == text


def test_a_part_of_a_part_is_named() -> None:
    order = {"config": 1, "plan": {}, "rows": 3}
    with pytest.raises(CommunicationError, match="has config of another type"):
        SizeOrder.from_json(order)
    with pytest.raises(CommunicationError, match="has the unknown part more"):
        RankPredictions.from_json(
            {"files": [{"more": 1, **dict.fromkeys((each.name for each in fields(PartFile)), 0)}]}
        )
    with pytest.raises(CommunicationError, match="lacks config"):
        TrainOrder.from_json({"plan": {}})
