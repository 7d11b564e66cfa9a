"""The epochs of a run, counted by its steps, against samples that are counted one by one."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.training.rank.metrics import StepClock
from lockstep.training.run.epochs import epochs_trained, epochs_words


@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 12), st.data())
def test_epochs_are_the_samples_over_those_of_an_epoch(total: int, batch: int, asked: int, data: st.DataObject) -> None:
    """A batch whose last sample ends an epoch, or that leaves too few of it to fill another, ends it."""
    samples = itertools.chain.from_iterable(itertools.repeat(range(total)))
    last_step = [0]  # after each epoch: the full batches so far
    for step in itertools.count(1):
        if len(last_step) > asked:
            break
        for sample in itertools.islice(samples, batch):
            if sample == total - 1:
                last_step.append(step if (len(last_step) * total) % batch == 0 else step - 1)
    whole = dict(zip(last_step[: asked + 1], range(asked + 1), strict=True))  # the most epochs that end at a step
    steps = data.draw(st.integers(0, last_step[asked]))
    found = epochs_trained(steps, Fraction(total, batch), asked)
    if steps == last_step[asked]:
        assert found == asked
    elif batch <= total and steps in whole:
        assert found == whole[steps]
    elif steps in whole:  # less than a batch an epoch: several end at one step
        assert found in [epoch for epoch, step in enumerate(last_step) if step == steps]
    else:
        assert found == pytest.approx(steps * batch / total) and found < asked
    words = epochs_words(found, asked)
    assert words == f"{asked}" if found == asked else words.endswith(f" of {asked}") and words != f"{asked} of {asked}"
    assert abs(found - float(words.split()[0])) < 0.01


@pytest.mark.parametrize(
    ("trained", "asked", "words"),
    [
        (5, 5, "5"),
        (3.0, 6, "3 of 6"),
        (0.5443, 5, "0.54 of 5"),
        (2.5, 5, "2.50 of 5"),
        (4.9999, 5, "4.99 of 5"),  # not all of them
        (0.0034, 5, "0.003 of 5"),
        (0.0, 5, "0 of 5"),
        (7, 5, "7 of 5"),  # a later call asked for fewer
    ],
)
def test_words(trained: float, asked: int, words: str) -> None:
    assert epochs_words(trained, asked) == words


class Sink:
    """A driver that keeps nothing, and an exchange without a network."""

    waited_s, sent_bytes = 0.0, 0

    def notify(self, kind: str, **fields: object) -> None:
        pass

    def links(self) -> dict[int, object]:
        return {}


def test_the_rate_is_that_of_the_steps_after_the_first() -> None:
    """Compilation of 30 s, a validation of 7 s and a stall of 2 s for a checkpoint: ten steps of 0.1 s remain."""
    now = [100.0]
    clock = StepClock(Sink(), 0, Sink(), now=lambda: now[0])  # type: ignore[arg-type]
    assert clock.first_step_s(100.0) is None and clock.steady() == (None, 0.0)
    for step in range(41, 52):
        clock.begins()
        now[0] += 30.0 if step == 41 else 0.1
        clock.ends(step)
        if step == 45:
            with clock.validation():
                now[0] += 7.0
        if step in (41, 46, 51):
            with clock.checkpoint():
                now[0] += 2.0
    assert clock.first_step_s(99.0) == 31.0
    first, seconds = clock.steady()
    assert first == 41 and seconds == pytest.approx(1.0), "stalls, or the seconds of the compilation, are counted"
