"""Rank 0 has 3 batches, rank 1 has 2, and then calls all_reduce (`mean`), ends (`end`) or is killed (`killed`)."""

import os
import signal
import sys

import torch

import lockstep.horovod.torch as hvd

hvd.init()
weight = torch.nn.Parameter(torch.zeros(2))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1))
for _ in range(3 - hvd.rank()):
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if sys.argv[1] == "killed" and hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "mean":
    hvd.allreduce(torch.zeros(1), name="loss")
