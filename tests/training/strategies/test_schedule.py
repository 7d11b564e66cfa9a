"""Schedules of a pipeline, as lists: they end, with messages that wait for their receivers, and hold what they may."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.training.strategies.schedule import Pass, most_held, passes_of

SIZES = [(stages, micro) for stages in range(1, 7) for micro in (1, 2, 3, 4, 7, 12)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro"), SIZES)
def test_each_pass_is_once_and_few_micro_batches_are_held(schedule: Any, stages: int, micro: int) -> None:
    for stage in range(stages):
        passes = passes_of(schedule, stage, stages, micro)
        for forward in (True, False):
            assert [one.micro for one in passes if one.forward is forward] == list(range(micro))
        places = {one: place for place, one in enumerate(passes)}
        assert all(places[Pass(True, m)] < places[Pass(False, m)] for m in range(micro))
        assert most_held(passes) == (micro if schedule == "gpipe" else min(micro, stages - stage))


def run(schedule: Any, stages: int, micro: int, forward_s: float = 1.0, backward_s: float = 2.0) -> list[float]:
    """When each stage ends, with one sender a stage whose messages wait, one after another, for their receivers.

    Raises AssertionError if no stage and no sender can continue.
    """
    todo = [passes_of(schedule, stage, stages, micro) for stage in range(stages)]
    queues: list[list[tuple[int, Pass, float]]] = [[] for _ in range(stages)]  # to whom, what, and since when
    now = [0.0] * stages
    while any(todo) or any(queues):
        moved = False
        for stage in range(stages):
            if not todo[stage]:
                continue
            one = todo[stage][0]
            source = stage - 1 if one.forward else stage + 1
            if 0 <= source < stages:
                if not queues[source] or queues[source][0][:2] != (stage, one):
                    continue  # it has not come, or waits behind another message
                _, _, since = queues[source].pop(0)
                now[stage] = max(now[stage], since)
            now[stage] += forward_s if one.forward else backward_s
            to = stage + 1 if one.forward else stage - 1
            if 0 <= to < stages:
                queues[stage].append((to, one, now[stage]))
            todo[stage].pop(0)
            moved = True
        assert moved, "all wait for each other"
    return now


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro"), SIZES)
def test_messages_that_wait_for_their_receivers_end_and_the_bubble_is_that_of_the_papers(
    schedule: Any, stages: int, micro: int
) -> None:
    ends = run(schedule, stages, micro)
    assert 1 - micro * 3 / max(ends) == pytest.approx((stages - 1) / (micro + stages - 1))
