"""Every call of lockstep.horovod.torch on two ranks against what NumPy says; at its end the ranks differ on
purpose.

An argument names the device of all tensors, such as cuda.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import torch
from torch import nn

import lockstep.horovod.torch as hvd
from lockstep.storage.errors import ConfigError

torch.set_default_device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
hvd.init()
hvd.init()
hvd.shutdown()
hvd.init()
rank, size = hvd.rank(), hvd.size()
assert (size, hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (2, rank, 2, 0, 1)


def same(got: torch.Tensor, wanted: object) -> None:
    np.testing.assert_allclose(got.detach().double().cpu().numpy(), np.asarray(wanted, np.float64), rtol=1e-3)


# Two ranks hold [1, 4] and [3, 5].
mine = torch.tensor([1 + 2 * rank, 4 + rank])
whole = (torch.uint8, torch.int8, torch.int32, torch.int64)
for dtype in (*whole, torch.float16, torch.bfloat16, torch.float32, torch.float64):
    value = mine.to(dtype)
    for op, wanted in ((hvd.Sum, [4, 9]), (hvd.Min, [1, 4]), (hvd.Max, [3, 5])):
        found = hvd.allreduce(value, op=op)
        assert found.dtype == dtype and found.shape == (2,)
        same(found, wanted)
    same(hvd.allreduce(value), [2, 4] if dtype in whole else [2, 4.5])  # a mean of integers is cut off
    assert value.tolist() == mine.tolist()
same(hvd.allreduce(mine.double(), average=False, name="named"), [4, 9])
same(hvd.allreduce(mine.double(), prescale_factor=0.5, postscale_factor=10.0), [10, 22.5])
same(hvd.allreduce(mine / 3, compression=hvd.Compression.fp16), [2 / 3, 1.5])
in_place = mine.float()
assert hvd.allreduce_(in_place) is in_place
same(in_place, [2, 4.5])
handles = [hvd.allreduce_async(mine * factor, op=hvd.Sum) for factor in (1, 2, 3)]
other = mine.float()
last = hvd.allreduce_async_(other, op=hvd.Max)
assert hvd.synchronize(last) is other and all(map(hvd.poll, handles))
same(other, [3, 5])
for factor, handle in enumerate(handles, 1):
    same(hvd.synchronize(handle), [4 * factor, 9 * factor])
first, second = hvd.grouped_allreduce([torch.tensor(float(rank)), torch.full((2, 3), rank)], op=hvd.Sum)
assert first.item() == 1.0 and second.shape == (2, 3) and int(second.sum()) == 6

same(hvd.allgather(torch.full((rank + 1, 2), float(rank))), [[0, 0], [1, 1], [1, 1]])
same(hvd.synchronize(hvd.allgather_async(torch.tensor(rank))), [0, 1])
assert hvd.allgather(torch.tensor(rank == 0)).tolist() == [True, False]
same(hvd.broadcast(torch.tensor([[rank, 7]]), root_rank=1), [[1, 7]])
own = torch.tensor([rank])
assert hvd.broadcast_(own, 1) is own and own.item() == 1
same(hvd.synchronize(hvd.broadcast_async(torch.tensor(rank, dtype=torch.bfloat16), 1)), 1)

# Rank r sends r rows to rank 0 and 3 - r to rank 1.
sent = torch.tensor([[10.0 * rank + row] for row in range(3)], requires_grad=True)
rows, sources = hvd.alltoall(sent, splits=torch.tensor([rank, 3 - rank]))
same(rows, [[10]] if rank == 0 else [[0], [1], [2], [11], [12]])
assert sources.tolist() == ([0, 1] if rank == 0 else [3, 2])
(rows * (rank + 1.0)).sum().backward()
same(sent.grad, [[2], [2], [2]] if rank == 0 else [[1], [2], [2]])
same(hvd.alltoall(torch.tensor([[rank, 0], [rank, 1]])), [[0, rank], [1, rank]])

# Gradients of calls: each rank weighs what it got by rank + 1.
for call, slopes in (
    (lambda x: hvd.allreduce(x, op=hvd.Sum), [3.0, 3.0]),
    (hvd.allreduce, [1.5, 1.5]),
    (lambda x: hvd.broadcast(x, 1), [0.0, 0.0] if rank == 0 else [3.0, 3.0]),
    (lambda x: hvd.allgather(x)[2 * rank : 2 * rank + 2] + 0 * x, [rank + 1.0, rank + 1.0]),
):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    ((rank + 1.0) * call(x)).sum().backward()
    same(x.grad, slopes)

told = {"epoch": 3, "best": (0.5, None), 7: b"\xff", "state": [torch.arange(3, dtype=torch.bfloat16), torch.tensor(2)]}
heard = hvd.broadcast_object(told if rank == 1 else None, root_rank=1)
assert heard["best"] == (0.5, None) and heard[7] == b"\xff" and heard["state"][0].dtype == torch.bfloat16
assert heard["state"][0].tolist() == [0, 1, 2] and heard["state"][1].shape == ()
assert hvd.allgather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
hvd.barrier()

# Models and optimizers that begin differently are those of rank 0 afterwards.
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
if rank == 0:
    model(torch.randn(8, 3)).sum().backward()
    optimizer.step()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
assert optimizer.param_groups[0]["lr"] == 0.1 and optimizer.state_dict()["state"][0]["step"] == 1
for value in (*model.state_dict().values(), *(s["exp_avg_sq"] for s in optimizer.state_dict()["state"].values())):
    assert torch.equal(hvd.broadcast(value, 0), value)


def train(passes: int, **options: Any) -> list[torch.Tensor]:
    """Three steps of a small model by the optimizer, on this rank's part of the batches; one parameter is unused."""
    torch.manual_seed(7)
    parts = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(9, 9)]).double()
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # before: it wraps `step` of this object
    wrapped = hvd.DistributedOptimizer(optimizer, parts.named_parameters(), backward_passes_per_step=passes, **options)
    assert wrapped is optimizer and isinstance(wrapped, torch.optim.SGD)
    data = torch.randn(3, 2, 2, 5, 3, dtype=torch.float64)  # (steps, passes, ranks, rows, features)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step != 1)
        for number in range(passes):
            (parts[1](torch.tanh(parts[0](data[step, number, rank]))) ** 2).mean().backward()
        if step == 2:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(parts.parameters(), 0.01)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        scheduler.step()
    return [parameter.detach().clone() for parameter in parts.parameters()]


def by_hand(passes: int) -> list[torch.Tensor]:
    """The same on one rank with the rows of both."""
    torch.manual_seed(7)
    parts = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(9, 9)]).double()
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    data = torch.randn(3, 2, 2, 5, 3, dtype=torch.float64)
    for step in range(3):
        optimizer.zero_grad()
        for number in range(passes):
            (parts[1](torch.tanh(parts[0](data[step, number].reshape(10, 3)))) ** 2).mean().backward()
        if step == 2:
            nn.utils.clip_grad_norm_(parts.parameters(), 0.01)
        optimizer.step()
        scheduler.step()
    return [parameter.detach().clone() for parameter in parts.parameters()]


for passes in (1, 2):
    for got, wanted in zip(train(passes), by_hand(passes), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
        assert torch.equal(got, hvd.broadcast(got, 0))
for got, wanted in zip(train(1, compression=hvd.Compression.fp16), by_hand(1), strict=True):
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-3)

layer = nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(layer.parameters(), max_iter=2), op=hvd.Sum)
points = torch.tensor([[1.0, 2.0], [3.0, -1.0]])[rank : rank + 1]
hvd.broadcast_parameters(layer.state_dict(), 0)


def closure() -> torch.Tensor:
    """The loss of this rank's point, with new gradients."""
    optimizer.zero_grad()
    loss = (layer(points) - 1).square().sum()
    loss.backward()
    return loss


optimizer.step(closure)
assert torch.equal(layer.weight, hvd.broadcast(layer.weight, 0))

embedding = nn.Embedding(5, 2, sparse=True)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), 0.1), sparse_as_dense=True)
before = hvd.broadcast_(embedding.weight.data, 0).clone()
embedding(torch.tensor([rank, 4])).sum().backward()
optimizer.step()
same(before - embedding.weight.detach(), [[0.05, 0.05], [0.05, 0.05], [0, 0], [0, 0], [0.1, 0.1]])

# A step's check follows the calls that are still under way, on the rank that waits for the other one too.
time.sleep(0.3 * rank)
waiting = [hvd.allreduce_async(torch.ones(1000) * number, op=hvd.Sum) for number in range(20)]
embedding(torch.tensor([rank, 4])).sum().backward()
optimizer.step()
for number, handle in enumerate(waiting):
    same(hvd.synchronize(handle)[:1], [2 * number])


def refused(function: object, words: str) -> None:
    try:
        function()  # type: ignore[operator]
    except ConfigError as error:
        assert words in str(error), error
    else:
        raise SystemExit(f"not refused: {words}")


linear = nn.Linear(2, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(linear.parameters(), 0.1))
linear(torch.ones(1, 2)).sum().backward()
refused(optimizer.zero_grad, "while gradients are exchanged")
refused(lambda: linear(torch.ones(1, 2)).sum().backward(), "more gradients than its optimizer expects")
optimizer.step()
refused(lambda: hvd.DistributedOptimizer(optimizer), "Wrap each optimizer once")
sizes = torch.optim.SGD(nn.Linear(2, 2 + rank).parameters(), 0.1)
refused(lambda: hvd.DistributedOptimizer(sizes), "rank")

assert not [name for name in ("tensorflow", "keras") if name in sys.modules]
print("every call is right", flush=True)
if rank == 0:
    hvd.allreduce(torch.zeros(3), name="odd")
else:
    hvd.broadcast(torch.zeros(3), 0, name="even")
