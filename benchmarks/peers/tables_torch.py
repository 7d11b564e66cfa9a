"""The step of benchmarks.sharded_tables by PyTorch: EmbeddingBag(sparse=True) whole on every rank, gradients over gloo.

PYTHON_WITH_TORCH benchmarks/peers/tables_torch.py FOLDER RANK NUM_RANKS ROWS STEPS

FOLDER has ids-RANK-STEP.npy, (samples, features) int64. gloo adds no sparse tensors of different sizes, so ranks gather
indices and values, padded to the longest. Prints the seconds of each step as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
import torch.distributed as dist

WIDTH = 16


def gathered(values: torch.Tensor, longest: int, num_ranks: int) -> list[torch.Tensor]:
    """All ranks' (n, ...) tensors."""
    padded = torch.zeros((longest, *values.shape[1:]), dtype=values.dtype)
    padded[: len(values)] = values
    found = [torch.empty_like(padded) for _ in range(num_ranks)]
    dist.all_gather(found, padded)
    return found


def main() -> None:
    """Run the steps."""
    folder, *numbers = sys.argv[1:]
    rank, num_ranks, rows, steps = map(int, numbers)
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    bag = torch.nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=True)
    optimizer = torch.optim.Adagrad(bag.parameters(), lr=0.05)
    seconds = []
    for step in range(steps):
        ids = torch.from_numpy(np.load(f"{folder}/ids-{rank}-{step}.npy")).reshape(-1, 1)
        upstream = torch.ones(len(ids), WIDTH)
        dist.barrier()
        began = time.perf_counter()
        bag(ids).backward(upstream)
        mine = bag.weight.grad.coalesce()
        sizes = gathered(torch.tensor([len(mine.values())]), 1, num_ranks)
        longest = int(max(sizes))
        indices = gathered(mine.indices()[0], longest, num_ranks)
        values = gathered(mine.values(), longest, num_ranks)
        pairs = [(i[: int(n)], v[: int(n)]) for i, v, n in zip(indices, values, sizes, strict=True)]
        bag.weight.grad = torch.sparse_coo_tensor(
            torch.cat([i for i, _ in pairs])[None], torch.cat([v for _, v in pairs]), (rows, WIDTH)
        ).coalesce()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
