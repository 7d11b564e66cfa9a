"""A layer whose inputs are divided over two ranks, in the form `all_gather, then sum`, and in the right one.

Each rank has half of a weight's rows and half of the inputs; the layer's output is the sum of their products, and one
bias. The form that older texts show adds the bias on each rank, and PyTorch's all_gather has no gradient, so no rank's
weight would learn. `lockstep train --tensor-parallel 2` adds the bias once and passes gradients: model_parallel.py.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
whole, bias, x = torch.randn(8, 3), torch.randn(3), torch.randn(5, 8)
wanted = x @ whole + bias

rows = slice(rank * 8 // size, (rank + 1) * 8 // size)
weight = whole[rows].clone().requires_grad_()
part = x[:, rows] @ weight

gathered = [torch.zeros(5, 3) for _ in range(size)]
dist.all_gather(gathered, (part + bias).detach())
as_written = sum(gathered)
print(
    "bias counted", round(float(((as_written - x @ whole) / bias).mean())), "times; gradient:", as_written.requires_grad
)


class SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' tensors; each rank's gradient is that of the sum (Megatron-LM, 2019: g)."""

    @staticmethod
    def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks."""
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        """Pass the gradient on."""
        return gradient


output = SumOverRanks.apply(part) + bias
output.square().sum().backward()
by_hand = x[:, rows].T @ (2 * wanted)
print(
    "mended: output",
    torch.allclose(output, wanted, atol=1e-5),
    "gradient",
    torch.allclose(weight.grad, by_hand, atol=1e-4),
)
dist.destroy_process_group()
