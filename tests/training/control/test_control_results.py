"""What a rank's entry returns may be larger than a frame of the control channel."""

from __future__ import annotations

import json

import pytest

from lockstep.training.control.client import ControlClient, open_channel
from lockstep.training.control.protocol import MAX_BODY_BYTES, RESULT_PART_CHARS, Role, result_parts
from lockstep.training.control.server import ControlServer
from lockstep.training.control.task import Limits

KEY = bytes(range(32))
PATIENCE_S = 120.0  # only against a hang


def test_the_samples_that_a_large_global_batch_leaves_over_reach_the_driver() -> None:
    server = ControlServer(KEY, 7, 1, Limits(lost_s=0.1, grace_s=0.1), None, "127.0.0.1")
    rank = ControlClient(open_channel(("127.0.0.1", server.port), KEY, 7, Role.RANK, 0, PATIENCE_S), "here")
    samples = [f"{number:016x}" for number in range(300_000)]
    rank.give_result({"left_over": samples, "loss": float("nan")})
    assert server.wait() == [{"left_over": samples, "loss": "nan"}]
    rank.close()
    server._listener.close()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", 1),
        ("\x00" * (2 * RESULT_PART_CHARS), 13),  # six characters each, of which one is a backslash, then doubled
        ('"\\' * RESULT_PART_CHARS, 5),
    ],
)
def test_each_part_fits_into_a_frame(text: str, parts: int) -> None:
    found = list(result_parts({"a": text}))
    assert json.loads("".join(part["part"] for part in found)) == {"a": text}
    assert [part["more"] for part in found] == [True] * (len(found) - 1) + [False] and len(found) == parts
    assert max(len(json.dumps(part)) for part in found) < MAX_BODY_BYTES
