"""PyTorch's GPipe or 1F1B on two stages, as a process that benchmarks.pipeline starts.

    PYTHON_WITH_TORCH benchmarks/peers/pipeline_torch.py gpipe|1f1b LAYERS MICRO RANK RANKS

The protocol is that of benchmarks/shared/step_worker.py; the model is that of benchmarks/pipeline.py.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

UNITS, ROWS = 1024, 128
FORWARD_S, BACKWARD_S = 0.2, 0.4


class Slow(torch.autograd.Function):
    """Sleeps in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_S)
        return gradient.clone()


class Sleeps(nn.Linear):
    """A dense layer whose passes take a known time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Slow.apply(super().forward(x))
        return y


def main() -> None:
    """Build, warm up, then answer until stdin ends."""
    how, layers, micro, rank, ranks = sys.argv[1], *map(int, sys.argv[2:6])
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    print(json.dumps(["127.0.0.1", port]), flush=True)
    _, port = json.loads(sys.stdin.readline())[0]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    units, rows = (UNITS, ROWS) if layers else (8, 4 * micro)
    mine = layers // ranks
    parts = (
        [part for _ in range(mine) for part in (nn.Linear(units, units), nn.ReLU())]
        if layers
        else [Sleeps(units, units)]
    )
    model = nn.Sequential(*parts)
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    schedule: Any = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[how](stage, micro, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(rows, units), torch.randn(rows, units)

    def train(steps: int) -> dict[str, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            given = (x,) if rank == 0 else ()
            schedule.step(*given, **({"target": y} if rank == ranks - 1 else {}))
            optimizer.step()
        return {
            "seconds_a_step": (time.perf_counter() - wall) / steps,
            "cpu_s_a_step": (time.process_time() - cpu) / steps,
        }

    train(2)
    print(json.dumps({"ready": how, "held": 0, "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(train(json.loads(line)["steps"])), flush=True)


if __name__ == "__main__":
    main()
