"""DistributedDataParallel over gloo under torchrun's elastic agents: benchmarks.elastic_slots starts and kills these.

    torchrun --nnodes=1:2 ... benchmarks/peers/elastic_torch.py FOLDER EVERY

A small dense model; rank 0 writes a checkpoint each EVERY steps, and after each step adds the line
`SECONDS STEP WORLD_SIZE` (of the monotonic clock) to FOLDER/steps.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    """Train until it is killed."""
    folder, every = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    saved, step = folder / "checkpoint", 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        step = state["step"]
    with open(folder / "steps", "a") as log:
        while True:
            model(torch.ones(8, 8)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            time.sleep(0.05)  # about a step of the other contestant
            if dist.get_rank() == 0:
                log.write(f"{time.monotonic()} {step} {dist.get_world_size()}\n")
                log.flush()
                if step % every == 0:
                    torch.save({"model": model.state_dict(), "step": step}, folder / "checkpoint.part")
                    (folder / "checkpoint.part").rename(saved)


if __name__ == "__main__":
    main()
