"""PyTorch's tensor parallel on two ranks, as a process that benchmarks.tensor starts.

    PYTHON_WITH_TORCH benchmarks/peers/tensor_torch.py PAIRS RANK RANKS

The protocol is that of benchmarks/shared/step_worker.py; the model is that of benchmarks/tensor.py.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

UNITS, ROWS, CLASSES = 1024, 128, 10


def main() -> None:
    """Build, warm up, then answer until stdin ends."""
    pairs, rank, ranks = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    print(json.dumps(["127.0.0.1", port]), flush=True)
    _, port = json.loads(sys.stdin.readline())[0]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, UNITS), torch.randint(0, CLASSES, (ROWS,))
    layers: list[nn.Module] = []
    plan = {}
    for _ in range(pairs):
        plan |= {str(len(layers)): ColwiseParallel(), str(len(layers) + 2): RowwiseParallel()}
        layers += [nn.Linear(UNITS, 4 * UNITS), nn.ReLU(), nn.Linear(4 * UNITS, UNITS)]
    model = parallelize_module(nn.Sequential(*layers, nn.Linear(UNITS, CLASSES)), mesh, plan)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

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
    print(json.dumps({"ready": pairs, "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(train(json.loads(line)["steps"])), flush=True)


if __name__ == "__main__":
    main()
