"""The communicator that a script asks for: of its launch, or of one rank alone."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.control import context


def test_a_script_that_was_started_by_itself_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(context.NUM_RANKS, raising=False)
    comm = context.communicator()
    assert comm is context.communicator(), "distribute tells by the object whether it needs a group of its own"
    assert (comm.rank, comm.num_ranks) == (0, 1)
    numbers = np.arange(3.0)
    comm.all_reduce(numbers, "mean")
    assert numbers.tolist() == [0.0, 1.0, 2.0]


def test_a_child_of_a_rank_is_not_taken_for_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would train on by itself on a part of the rows."""
    monkeypatch.setenv(context.NUM_RANKS, "2")
    with pytest.raises(ConfigError, match="not a rank, but a child of one"):
        context.communicator()
