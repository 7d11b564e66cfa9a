"""What the driver's error advises after a crash of native code and after silence, and the limit that it names."""

from __future__ import annotations

import signal

import pytest

from lockstep.training.config import TrainConfig
from lockstep.training.control.failures import RankFailedError, RankState, failure_of
from lockstep.training.control.protocol import SCRIPT
from lockstep.training.control.task import Limits
from lockstep.training.driver.train import limits_of


def told(state: RankState, now: float = 0.0) -> RankFailedError:
    failure = failure_of(state, now, 0.0, Limits(start_s=1.0))
    assert failure is not None
    return RankFailedError(failure, 8)


@pytest.mark.parametrize(
    ("code", "phase", "advised"),
    [
        (-signal.SIGABRT, "open the dataset", True),  # as Arrow does over a forged footer
        (-signal.SIGSEGV, "train", True),
        (-signal.SIGKILL, "train", False),  # from outside: the memory's end, or somebody
        (-signal.SIGABRT, SCRIPT, False),  # a script of a user's has no dataset of ours
        (1, "train", False),
    ],
)
def test_a_crash_of_native_code_sends_to_the_dataset(code: int, phase: str, advised: bool) -> None:
    error = told(RankState(3, "node-4", step=7, phase=phase, exit_code=code, tail=["last words"]))
    assert ("`lockstep verify DATASET`" in error.next_step) is advised
    where = "in its script" if phase == SCRIPT else f"at step 7, phase {phase}"
    assert error.what == f"rank 3 of 8 on node-4 failed {where}"
    assert code > 0 or f"killed by {signal.Signals(-code).name}" in error.got


def test_silence_names_the_flag_that_gives_more_time() -> None:
    error = told(RankState(0, phase="train", joined_at=0.0), now=11.0)
    assert error.got == "no heartbeat for 10 s" and "--heartbeat-limit" in error.next_step


def test_the_heartbeat_limit_reaches_the_driver() -> None:
    plain = TrainConfig(datasets=("d",), run="r", model="logistic", num_ranks=2, global_batch=8, epochs=1)
    longer = limits_of(plain.but(heartbeat_limit_s=60.0), Limits(silent_s=3.0))
    assert (limits_of(plain, Limits(silent_s=3.0)).silent_s, longer.silent_s) == (3.0, 60.0)
    assert failure_of(RankState(0, phase="train", joined_at=0.0), 59.0, -1000.0, longer) is None
