"""PyTorch's Adam on two ranks: whole, in parts or with fully_shard, as a process that benchmarks.zero starts.

    PYTHON_WITH_TORCH benchmarks/peers/zero_torch.py Adam|ZeRO|fully_shard LAYERS RANK RANKS

The protocol is that of benchmarks/shared/step_worker.py; the model is that of benchmarks/zero.py.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

UNITS, ROWS, CLASSES = 1024, 128, 10


def main() -> None:
    """Build, warm up, then answer until stdin ends."""
    how, layers, rank, ranks = sys.argv[1], *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    print(json.dumps(["127.0.0.1", port]), flush=True)
    _, port = json.loads(sys.stdin.readline())[0]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(rank)
    x, y = torch.randn(ROWS, UNITS), torch.randint(0, CLASSES, (ROWS,))
    hidden = [part for _ in range(layers) for part in (nn.Linear(UNITS, UNITS), nn.ReLU())]
    torch.manual_seed(0)
    model = nn.Sequential(*hidden, nn.Linear(UNITS, CLASSES))
    if how == "fully_shard":
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    if how == "ZeRO":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-4)
    else:
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
    inner = optimizer.optim if how == "ZeRO" else optimizer
    held = [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
    held = [value.to_local() if hasattr(value, "to_local") else value for value in held]
    state = sum(value.numel() * value.element_size() for value in held)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"ready": how, "parameters": parameters, "state": state, "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(train(json.loads(line)["steps"])), flush=True)


if __name__ == "__main__":
    main()
