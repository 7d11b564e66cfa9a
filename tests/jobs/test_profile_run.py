"""lockstep profile_run: its flags are those of lockstep train that change a step, and what is refused before ranks
start.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.jobs.profile_run import NOT_OF_A_STEP, config_of, main, parser
from lockstep.storage.errors import ConfigError, NotFoundError
from lockstep.training.config import flag_of, option_names
from lockstep.training.control.task import CommOrder
from lockstep.training.profiling import profile
from tests.training._tiny import write_table

NEEDED = ("--model", "logistic", "--num-ranks", "2", "--global-batch", "8", "--launcher", "local")


def test_every_field_has_a_flag_or_is_of_no_step() -> None:
    text = parser().format_help()
    flags = {flag_of(name) for name in option_names()} | {"--take-over"}
    assert {flag for flag in flags if f" {flag}" not in text and f"[{flag}" not in text} == set(NOT_OF_A_STEP)


def test_a_flag_is_the_run_s(tmp_path: Path) -> None:
    flags = ["--dataset", str(tmp_path), *NEEDED, "--augment", "flip", "crop:2", "--precision", "mixed_bfloat16"]
    config = config_of(parser().parse([*flags, "--steps", "5"]))
    assert (config.reading.augment, config.step.precision, config.data.epochs) == (
        "flip:horizontal crop:2:zero",
        "mixed_bfloat16",
        1,
    )


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--steps", "1"), "--steps"),  # nothing lies between one step and the next
        (("--rounds", "0"), "--rounds"),
        (("--run", "here"), "--run"),
        (("--epochs", "3"), "--epochs"),
        (("--checkpoint-every", "auto"), "--checkpoint-every"),
        (("--num-ranks", "9"), "9"),  # more than lanes
        (("--global-batch", "1000"), "1000"),  # more than the split
        (("--split", "tests"), "tests"),
    ],
)
def test_what_cannot_be_right_is_told_before_ranks_start(more: tuple[str, ...], named: str, tmp_path: Path) -> None:
    write_table(tmp_path / "data")
    with pytest.raises(ConfigError, match=named):
        main(["--dataset", str(tmp_path / "data"), *NEEDED, *more])


def test_a_missing_dataset_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        main(["--dataset", str(tmp_path / "data"), *NEEDED])


def end_me(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.sigtimedwait([signal.SIGUSR1], 10)  # the handler runs before this returns


def test_sigterm_ends_driver_and_ranks_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank's folder, as large as a cache may be, would lie there for good."""

    class Stub(AbstractContextManager["Stub"]):
        left = False

        def __init__(self, *_: object) -> None:
            """As ProfileRank."""

        run = end_me

        def __exit__(self, *_: object) -> None:
            Stub.left = True

    write_table(tmp_path / "data")
    flags = ["--dataset", str(tmp_path / "data"), *NEEDED]
    config = config_of(parser().parse(flags))
    # In this process a session of other tests may be open, in which two signals at once count as one.
    monkeypatch.setattr("lockstep.process.signals.ONE_SIGNAL_S", 0.0)
    with pytest.raises(SystemExit):
        profile.profile(config, end_me)
    monkeypatch.setattr("lockstep.training.rank.runtime.configure", lambda *_, **__: None)
    monkeypatch.setitem(
        sys.modules, "lockstep.training.profiling.profile_rank", SimpleNamespace(ProfileRank=Stub)
    )  # the real one's Keras
    order = profile.ProfileOrder(config=config, plan={}, comm=CommOrder(), steps=None, rounds=1)
    context: Any = SimpleNamespace(payload=order.to_json(), world=None)
    with pytest.raises(SystemExit):
        profile.main(context)
    assert Stub.left
