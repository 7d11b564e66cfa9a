"""`python -m tests.training._reveal_keys FILE ARGUMENT ...`: lockstep train, which also writes the secrets that it
makes.

One line of hex in FILE for each: keys of sessions and generations, and the private keys of certificates.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep.jobs import train
from lockstep.jobs._cli import run_job
from lockstep.training.comm.tls import Credentials, issue
from lockstep.training.control.protocol import new_key
from lockstep.training.launch import session

FILE = Path(sys.argv[1])


def _reveal(secret: bytes) -> None:
    with FILE.open("a") as file:
        file.write(secret.hex() + "\n")


def _new_key() -> bytes:
    key = new_key()
    _reveal(key)
    return key


def _issue(generation: int, num_ranks: int) -> list[Credentials]:
    made = issue(generation, num_ranks)
    for one in made:
        _reveal(one.private_key.encode())
    return made


if __name__ == "__main__":
    vars(session).update(new_key=_new_key, issue=_issue)
    run_job(train.main, sys.argv[2:])
