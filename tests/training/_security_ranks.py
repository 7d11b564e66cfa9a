"""Entries for ranks that are attacked or killed; `_ranks.rank_path` lets ranks import this module."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from cryptography import x509

from lockstep.storage.errors import CommunicationError
from lockstep.training.comm import CommOptions, connect
from lockstep.training.control.context import RankContext


def reduce_by_proxy(context: RankContext) -> dict[str, Any]:
    """Rank 1 tells the others an address that the driver made for it."""
    control = context.control
    straight = control.rendezvous

    def round_about(host: str, port: int, deadline_s: float = 120.0) -> list[tuple[str, int]]:
        if context.world.rank == 1:
            reply = control.request("proxy", 60.0, host=host, port=port)
            host, port = reply["host"], reply["port"]
        return straight(host, port, deadline_s)

    control.rendezvous = round_about  # type: ignore[method-assign] # what stands between is what is tried
    comm = connect(context.world, control, context._key, 120.0, 120.0, CommOptions(backend="tcp"))
    buf = np.full(300_000, context.world.rank + 1, np.float32)
    comm.all_reduce(buf)
    comm.close()
    return {"total": float(buf.max())}


def one_killed_in_a_collective(context: RankContext) -> dict[str, Any]:
    """All ranks reduce without a pause; rank 1 is killed; the others write when they noticed, and what."""
    comm, rank, folder = context.communicator(), context.world.rank, Path(context.payload["folder"])
    buf = np.ones(1 << 20, np.float32)
    try:
        for step in range(1_000_000):
            context.control.beat(step, "train")
            if rank == 1 and step == 20:
                (folder / "killed").write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            comm.all_reduce(buf, "max")
    except CommunicationError as error:
        (folder / f"rank-{rank}").write_text(f"{time.monotonic()} {error}")
        raise
    return {}


def certificate(context: RankContext) -> dict[str, Any]:
    """The name in this rank's certificate, its authority, and whether others could see the private key."""
    tls = context._tls
    assert tls is not None
    shown = x509.load_pem_x509_certificate(tls.certificate.encode())
    secret = tls.private_key.splitlines()[1]
    seen = [*sys.argv, *os.environ.values(), json.dumps(context.payload), repr(tls)]
    return {
        "name": shown.subject.rfc4514_string(),
        "authority": tls.authority,
        "seen": any(secret in text for text in seen),
    }
