"""An actor's process, `python -m lockstep.training.actors.actor`: it plays with the weights that its learner sends.

Its order, one line of JSON, comes on standard input, which then stays open: its end means that the learner is gone. The
actor answers by one line: the port at which it listens, or an error; by another one if its environment fails later.
Learner and actor then are a mesh of two (`lockstep.training.comm`), so they prove a key to each other, and every frame
has a checksum and a deadline. The actor sends a trajectory, and receives a version and, if that is new, its weights.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import dataclass

import numpy as np

from lockstep.storage.errors import DataError, LockstepError
from lockstep.training.actors.player import Player
from lockstep.training.comm.tcp.communicator import TcpCommunicator, connect_tcp
from lockstep.training.control.protocol import Message, error_to_json

ACTOR, LEARNER = 0, 1
"""The members of a mesh."""
LOOPBACK = "127.0.0.1"
JOIN_S = 60.0
LEARNER_LIMIT_S = 900.0  # for a reply: learners may wait for each other as long as a launch's stall limit
STOP = -1  # in place of a version


@dataclass(frozen=True, kw_only=True)
class ActorOrder(Message):
    """What an actor is asked to play, and where its learner listens."""

    env: str
    envs: int
    unroll: int
    widths: tuple[int, ...]
    seed: list[int]
    """The name of its stream of draws: the seed of the run, its learner, its number, and how often it was replaced."""
    port: int
    key: str
    """The secret of this actor and its learner, in hex."""


def main() -> int:
    """Play until the learner says STOP; returns the exit code."""
    line = sys.stdin.buffer.readline()
    if not line:
        return 1
    threading.Thread(target=_end_with_learner, name="stdin-watch", daemon=True).start()
    try:
        order = ActorOrder.from_json(json.loads(line))
        player = Player(order.env, order.envs, order.unroll, order.widths, seed=order.seed)
    except LockstepError as error:
        _say({"error": error_to_json(error)})
        return error.exit_code

    answers = os.dup(1)

    def exchange(host: str, port: int) -> list[tuple[str, int]]:
        _say({"port": port})
        return [(host, port), (LOOPBACK, order.port)]

    link = connect_tcp(ACTOR, 2, 1, exchange, bytes.fromhex(order.key), JOIN_S, LOOPBACK, LEARNER_LIMIT_S)
    try:
        play(player, link)
    except DataError as error:  # of the environment
        os.write(answers, json.dumps({"error": error_to_json(error)}).encode() + b"\n")
        return error.exit_code
    except LockstepError as error:  # its learner has ended, which is reported there
        print(f"actor {order.seed[2]}: {error.what}", file=sys.stderr)
        return error.exit_code
    finally:
        link.close()
    return 0


def play(player: Player, link: TcpCommunicator) -> None:
    """Receive weights, then play and send trajectories, until the learner says STOP."""
    version, have = np.zeros(1, np.int64), STOP
    while True:
        link.recv(version, LEARNER)
        if version[0] == STOP:
            return
        if version[0] != have:
            link.recv(player.policy.flat, LEARNER)
            have = player.version = int(version[0])
        link.send(player.play().view(np.uint8), LEARNER)


def _say(document: object) -> None:
    """The first line on standard output; what a user's environment prints later goes to standard error."""
    print(json.dumps(document), flush=True)
    os.dup2(2, 1)


def _end_with_learner() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
