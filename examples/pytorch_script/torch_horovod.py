"""Horovod with PyTorch as its examples write it, on lockstep.horovod.torch: the training of torch_ddp.py."""

from __future__ import annotations

import argparse
import gzip
import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep.horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--rows", type=int, default=512)
args = parser.parse_args()

hvd.init()

with gzip.open(os.path.join(args.data, "train-images-idx3-ubyte.gz")) as file:
    pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)[: args.rows]
with gzip.open(os.path.join(args.data, "train-labels-idx1-ubyte.gz")) as file:
    kinds = np.frombuffer(file.read(), np.uint8, offset=8)[: args.rows]
dataset = TensorDataset(torch.from_numpy(pixels / np.float32(255)), torch.from_numpy(kinds.astype(np.int64)))
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), seed=3)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)

torch.manual_seed(1 + hvd.rank())
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
    nn.Flatten(), nn.Linear(576, 10),
)  # fmt: skip
loss_of = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for images, labels in loader:
        optimizer.zero_grad()
        loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    total = hvd.allreduce(total, name="loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {total.item() / len(loader):.4f}")

if hvd.rank() == 0:
    with gzip.open(os.path.join(args.data, "t10k-images-idx3-ubyte.gz")) as file:
        unseen = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28) / np.float32(255)
    with gzip.open(os.path.join(args.data, "t10k-labels-idx1-ubyte.gz")) as file:
        kinds = np.frombuffer(file.read(), np.uint8, offset=8)
    with torch.no_grad():
        right = model(torch.from_numpy(unseen)).argmax(1).numpy() == kinds
    print(f"accuracy {right.mean():.4f}, of the most frequent class alone {np.bincount(kinds).max() / len(kinds):.4f}")
torch.save(model.state_dict(), os.path.join(args.out, f"horovod-{hvd.rank()}.pt"))
