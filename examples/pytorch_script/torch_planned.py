"""The batches of an epoch plan for PyTorch on N ranks, with a checkpoint of the script's own that resumes exactly."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from torch import nn

import lockstep.horovod.torch as hvd
from lockstep.data import PlannedBatches, loader

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--stop", type=int, default=sys.maxsize)
args = parser.parse_args()

hvd.init()
checkpoint = Path(args.out, "checkpoint.pt")
planned = PlannedBatches.open(
    args.dataset, global_batch=20, lanes=5, seed=3, epochs=2, rank=hvd.rank(), num_ranks=hvd.size()
)
torch.manual_seed(1)
model = nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 10)).double()
model(torch.zeros((1, *planned.signature.features["image"].shape), dtype=torch.float64))
# Ranks may have uneven parts of a batch: their sums are added, and divided by the global batch.
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum)
state = None
if checkpoint.exists():
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    state = saved["batches"]

batches = loader(planned, state)
with open(os.path.join(args.out, f"samples-{hvd.rank()}.txt"), "a", encoding="utf-8") as samples:
    for batch in batches:
        optimizer.zero_grad()
        pictures = batch["x"]["image"].double() / 255
        loss = nn.functional.cross_entropy(model(pictures), batch["y"], reduction="sum") / 20
        loss.backward()
        optimizer.step()
        samples.writelines(f"{batch['step']} {number}\n" for number in batch["sample_ids"].tolist())
        if batch["step"] + 1 == args.stop:
            break

if hvd.rank() == 0:
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "batches": batches.state_dict()}
    torch.save(saved, f"{checkpoint}.part")
    os.replace(f"{checkpoint}.part", checkpoint)
