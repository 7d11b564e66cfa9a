"""PyTorch's gloo, as a process of another environment: benchmarks.all_reduce starts two.

PYTHON_WITH_TORCH benchmarks/peers/torch_peer.py RANK PORT
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from all_reduce_turns import Run, repeatedly, serve


def main() -> None:
    """Serve until stdin ends."""
    rank, port = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2)

    def prepare(size: int) -> Run:
        buf = torch.zeros(size // 4)
        return repeatedly(lambda: dist.all_reduce(buf))

    serve(f"PyTorch {torch.__version__}", prepare, dist.barrier)


if __name__ == "__main__":
    main()
