"""DistributedDataParallel over gloo with PyTorch's own communication hooks, as a process of another environment on one
host: `benchmarks.compression links --torch PYTHON` starts it.

    PYTHON_WITH_TORCH benchmarks/peers/hooks_torch.py RANK RANKS ADDRESS PORT

Reads {"steps": n, "method": m} a line, answers [seconds, bytes sent] of each step. A step is forward and backward pass
of the dense model with one row, so that nearly all of its time is the exchange.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from step_torch import DENSE_UNITS, build
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

WARM_UP = 3
ONE_BUCKET_MB = 1000  # the hook's calls wait in gloo's two threads: with two buckets on their way they wait for ever


def model_with(method: str) -> nn.Module:
    """The dense model, whose gradients are exchanged by a method; "" exchanges nothing."""
    torch.manual_seed(1)
    model = build("dense")
    if not method:
        return model
    if method == "powersgd:2":
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
        state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook)
        return model
    model = nn.parallel.DistributedDataParallel(model)
    if method != "none":
        model.register_comm_hook(None, getattr(default_hooks, f"{method}_compress_hook"))
    return model


def sent_bytes() -> int:
    """What this host has sent, headers included."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in line)
    return int(line.split()[9])


def main() -> None:
    """Answer until stdin ends."""
    rank, ranks, address, port = sys.argv[1:]
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "eth0"}
    torch.distributed.init_process_group("gloo", rank=int(rank), world_size=int(ranks))
    x = torch.randn(1, DENSE_UNITS)
    print(json.dumps(torch.__version__), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        model = model_with(asked["method"])
        found: list[tuple[float, int]] = []
        for _ in range(WARM_UP + asked["steps"]):
            model.zero_grad()
            torch.distributed.barrier()
            began, sent = time.monotonic(), sent_bytes()
            model(x).sum().backward()
            found.append((time.monotonic() - began, sent_bytes() - sent))
        print(json.dumps(found[WARM_UP:]), flush=True)


if __name__ == "__main__":
    main()
