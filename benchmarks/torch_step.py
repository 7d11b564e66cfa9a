"""Steps of PyTorch on two ranks: hvd.torch against DistributedDataParallel over gloo, in the same processes, in turns.

    .venv-torch/bin/python -m lockstep launch --num-ranks 2 --launcher local benchmarks/torch_step.py
        [--model dense] [--device cuda]

One thread and one core a rank. The ceiling trains the same model at the same time without an exchange. A figure is that
of the slower rank, the result its ratio in the same round: median (lowest to highest). CPU time is printed too: other
work on a shared machine disturbs it less.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import lockstep.horovod.torch as hvd
from benchmarks.peers.step_torch import BATCH_ROWS, DENSE_UNITS, build

CEILING, DDP, OURS = "no exchange", "DDP over gloo", "hvd.torch"


def contestant(name: str, how: str) -> Callable[[int], tuple[float, float]]:
    """A function that makes steps, and returns seconds and CPU seconds a step."""
    torch.manual_seed(1)
    model = build(name)
    if how == DDP:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    if how == OURS:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    shape = (3, 32, 32) if name == "resnet20" else (DENSE_UNITS,)
    x, y = torch.randn(BATCH_ROWS[name], *shape), torch.randint(0, 10, (BATCH_ROWS[name],))

    def train(steps: int) -> tuple[float, float]:
        hvd.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if torch.get_default_device().type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps

    return train


def main() -> None:
    """Warm up, run the rounds, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["resnet20", "dense"], default="resnet20")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="of model and batches (default cpu); ranks may share a GPU")
    args = parser.parse_args()
    torch.set_default_device(args.device)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})  # first: threads inherit it
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hvd.init()
    contestants = {how: contestant(args.model, how) for how in (CEILING, DDP, OURS)}
    for train in contestants.values():
        train(3)
    times: dict[str, list[list[float]]] = {how: [] for how in contestants}
    for number in range(args.rounds):
        order = list(contestants)
        for how in order[number % 3 :] + order[: number % 3]:
            mine = torch.tensor(contestants[how](args.steps), dtype=torch.float64, device="cpu")
            times[how].append(hvd.allreduce(mine, op=hvd.Max).tolist())
    if hvd.rank() == 0:
        processor = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
        print(f"{args.model}, {hvd.size()} ranks, torch {torch.__version__}, {processor}, {len(cores)} cores")
        print(f"{args.rounds} rounds of {args.steps} steps, batch {BATCH_ROWS[args.model]} a rank")
        for how, found in times.items():
            rate = BATCH_ROWS[args.model] * hvd.size() / statistics.median(wall for wall, _ in found)
            text = [f"{how:14} {rate:8.0f} samples/s"]
            for other in (CEILING, DDP):
                for part, label in enumerate(("", "CPU ")):
                    ratios = [a[part] / b[part] for a, b in zip(times[other], found, strict=True)]
                    span = f"{min(ratios):.2f} to {max(ratios):.2f}"
                    text.append(f"{label}{statistics.median(ratios):.3f} ({span}) of {other}")
            print("; ".join(text))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
