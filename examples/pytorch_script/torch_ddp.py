"""DistributedDataParallel over gloo, as PyTorch's tutorials write it: nothing here knows Lockstep."""

from __future__ import annotations

import argparse
import gzip
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--rows", type=int, default=512)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
assert (rank, dist.get_world_size()) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
assert dist.is_torchelastic_launched() and local_rank < int(os.environ["LOCAL_WORLD_SIZE"])

with gzip.open(os.path.join(args.data, "train-images-idx3-ubyte.gz")) as file:
    pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)[: args.rows]
with gzip.open(os.path.join(args.data, "train-labels-idx1-ubyte.gz")) as file:
    kinds = np.frombuffer(file.read(), np.uint8, offset=8)[: args.rows]
dataset = TensorDataset(torch.from_numpy(pixels / np.float32(255)), torch.from_numpy(kinds.astype(np.int64)))
sampler = DistributedSampler(dataset, seed=3)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)

torch.manual_seed(1 + rank)  # DistributedDataParallel sends rank 0's parameters to all
model = DistributedDataParallel(
    nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(576, 10),
    )
)  # fmt: skip
loss_of = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for images, labels in loader:
        optimizer.zero_grad()
        loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch}: loss {total.item() / len(loader) / dist.get_world_size():.4f}")

if rank == 0:
    with gzip.open(os.path.join(args.data, "t10k-images-idx3-ubyte.gz")) as file:
        unseen = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28) / np.float32(255)
    with gzip.open(os.path.join(args.data, "t10k-labels-idx1-ubyte.gz")) as file:
        kinds = np.frombuffer(file.read(), np.uint8, offset=8)
    with torch.no_grad():
        right = model.module(torch.from_numpy(unseen)).argmax(1).numpy() == kinds
    print(f"accuracy {right.mean():.4f}, of the most frequent class alone {np.bincount(kinds).max() / len(kinds):.4f}")
torch.save(model.module.state_dict(), os.path.join(args.out, f"ddp-{rank}.pt"))
dist.destroy_process_group()
