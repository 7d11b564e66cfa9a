"""PyTorch's DistributedDataParallel over gloo, as a process of another environment: benchmarks.train_step starts it.

    PYTHON_WITH_TORCH benchmarks/peers/step_torch.py MODEL RANK RANKS

The talk is that of benchmarks/shared/step_worker.py; the models are those of benchmarks/shared/step_models.py.
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

DENSE_UNITS, DENSE_LAYERS, CLASSES = 2048, 6, 10
BATCH_ROWS = {"resnet20": 64, "dense": 128}


class Block(nn.Module):
    """Two convolutions and a shortcut, by projection where the shape changes."""

    def __init__(self, before: int, filters: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = conv(before, filters, stride), conv(filters, filters, 1)
        self.shortcut = nn.Identity() if stride == 1 else conv(before, filters, stride, 1)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.two(torch.relu(self.one(x))) + self.shortcut(x))


def conv(before: int, filters: int, stride: int, size: int = 3) -> nn.Module:
    """Convolution and batch normalisation."""
    return nn.Sequential(
        nn.Conv2d(before, filters, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(filters)
    )


def build(name: str) -> nn.Module:
    """The model `name`."""
    if name == "dense":
        layers: list[nn.Module] = []
        for _ in range(DENSE_LAYERS):
            layers += [nn.Linear(DENSE_UNITS, DENSE_UNITS), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(DENSE_UNITS, CLASSES))
    blocks: list[nn.Module] = [conv(3, 16, 1), nn.ReLU()]
    before = 16
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(3):
            blocks.append(Block(before, filters, 2 if stage and not block else 1))
            before = filters
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def main() -> None:
    """Build, warm up, then answer until stdin ends."""
    name, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    print(json.dumps(["127.0.0.1", port]), flush=True)
    _, port = json.loads(sys.stdin.readline())[0]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(rank)
    shape = (3, 32, 32) if name == "resnet20" else (DENSE_UNITS,)
    x, y = torch.randn(BATCH_ROWS[name], *shape), torch.randint(0, CLASSES, (BATCH_ROWS[name],))
    model = nn.parallel.DistributedDataParallel(build(name))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def train(steps: int) -> dict[str, float]:
        first = cpu = 0.0
        for step in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step == 0:
                first, cpu = time.perf_counter(), time.process_time()
        wall, cpu = time.perf_counter() - first, time.process_time() - cpu
        return {"seconds_a_step": wall / max(1, steps - 1), "cpu_s_a_step": cpu / max(1, steps - 1)}

    train(3)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"ready": "ddp", "parameters": parameters, "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(train(json.loads(line)["steps"])), flush=True)


if __name__ == "__main__":
    main()
